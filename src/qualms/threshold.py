"""Selective prediction: accept what the model knows, hand the rest to somebody else."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from qualms.errors import QualmsError


@dataclass(frozen=True)
class Threshold:
    """Inputs whose score is at most `value` are accepted.

    `samples` is the number of scores that it was set on; `rule` says how.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        known = qualms.score(model, torch.rand(20, 4))  # of inputs like those that the model was trained on
        threshold = qualms.Threshold.from_scores(known, coverage=0.9)
        strange = qualms.score(model, 10 * torch.rand(5, 4))
        print(threshold.accept(strange))
        ```
    """

    value: float
    samples: int
    rule: str

    @classmethod
    def from_scores(cls, scores: Any, coverage: float = 0.95) -> "Threshold":
        """The smallest threshold that accepts at least this share of the scores, such as those of a validation set."""
        s = _scores(scores).sort().values
        if not 0 < coverage <= 1:
            raise QualmsError(f"coverage is {coverage}; it is a share of the inputs, above 0 and at most 1.")
        # The rounding guard keeps 0.95 * 100 from asking for 96 of 100.
        needed = max(1, math.ceil(coverage * len(s) - 1e-9))
        return cls(float(s[needed - 1]), len(s), f"coverage {coverage:g}")

    @classmethod
    def from_labels(cls, scores: Any, correct: Any, risk: float = 0.01) -> "Threshold":
        """The largest threshold whose accepted inputs are wrong at most this often.

        Inputs of equal score are accepted or rejected together. If even the most certain ones are wrong too often,
        nothing is accepted, and the value is minus infinity.
        """
        s, right = _scores(scores), torch.as_tensor(correct).detach().cpu().flatten().to(torch.bool)
        if len(right) != len(s):
            raise QualmsError(f"there are {len(s)} scores and {len(right)} outcomes; give one outcome for each score.")
        if not 0 <= risk < 1:
            raise QualmsError(f"risk is {risk}; it is a share of the accepted inputs, from 0 to below 1.")
        order = s.argsort()
        s, wrong = s[order], (~right[order]).double()
        rates = wrong.cumsum(0) / torch.arange(1, len(s) + 1)
        ends = torch.cat([s[1:] != s[:-1], torch.tensor([True])])  # a threshold takes all equal scores or none
        allowed = (ends & (rates <= risk + 1e-12)).nonzero()
        return cls(float(s[allowed[-1]]) if len(allowed) else -math.inf, len(s), f"risk {risk:g}")

    def accept(self, scores: Any) -> Bool[Tensor, " n"]:
        """Which inputs to trust the model with."""
        return torch.as_tensor(scores) <= self.value

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        value = asdict(self) | {"value": self.value if math.isfinite(self.value) else None}
        Path(path).write_text(json.dumps(value) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Threshold":
        """Read what `save` wrote."""
        try:
            found = json.loads(Path(path).read_text())
            value = -math.inf if found["value"] is None else float(found["value"])
            return cls(value, int(found["samples"]), str(found["rule"]))
        except FileNotFoundError:
            raise QualmsError(f"there is no threshold file at {path}; write one with Threshold.save.") from None
        except (ValueError, KeyError, TypeError):
            raise QualmsError(f"{path} is not a threshold file; write one with Threshold.save.") from None


def _scores(scores: Any) -> Tensor:
    # Scores keep their precision: a threshold set on float32 scores must accept those very scores.
    s = torch.as_tensor(scores).detach().cpu().flatten().double()
    if len(s) == 0 or not bool(torch.isfinite(s).all()):
        raise QualmsError("the scores are empty, or some are NaN or infinite; pass one finite score for each input.")
    return s
