"""Selective prediction: accept what the model knows, and pass the rest on to a person or a better
model.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qualms.disk import atomic_write, explain_write_failure
from qualms.errors import QualmsError
from qualms.metrics.binomial import few_or_fewer, least_inputs

KEPT = 1001  # scores of the reference, for percentiles to a tenth of a percent
COVERAGES = (
    1.0,
    0.95,
    0.9,
    0.8,
    0.7,
    0.6,
    0.5,
    0.4,
    0.3,
    0.2,
    0.1,
)  # that are tried for a risk with a confidence


@dataclass(frozen=True)
class Provenance:
    """What made the scores that a threshold was set on. Scores made otherwise are on another scale.

    `method` has its parameters, noise in the units of the model's input; `network` is a digest of
    the weights. The rest is None for a method that reads the logits alone.
    """

    method: str
    network: str
    engine: str | None = None
    layers: str | None = None
    norm: str | None = None
    params: str | None = None
    tolerance: float | None = None
    seed: int | None = None

    def require_kinds(self) -> None:
        """A ValueError if a file has something else in a place of these."""
        for f in fields(self):
            value, wanted = (
                getattr(self, f.name),
                {"tolerance": (int, float), "seed": (int,)}.get(f.name, (str,)),
            )
            if not (type(value) in wanted or (value is None and f.default is None)):
                raise ValueError(f"{f.name} is a {type(value).__name__}")
        if self.tolerance is not None:
            _finite(self.tolerance)

    def require_same(self, other: "Provenance") -> None:
        """An error that says what differs in `other`."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        differ = [f"{name} {theirs}, not {ours}" for name, theirs, ours in pairs if theirs != ours]
        if differ:
            raise QualmsError(
                f"the threshold was set on scores that were made otherwise: {'; '.join(differ)}; score as it was, or "
                "set another threshold."
            )


@dataclass(frozen=True)
class Threshold:
    """Inputs whose score is at most `value` are accepted.

    Args:
        value: the highest score that is accepted.
        samples: the number of scores that it was set on.
        rule: how it was set.
        made_by: what made those scores (`Scorer.made_by`). A `Scorer` refuses a threshold that was
            made by any other.
        reference: those scores, sorted; of many, 1001 at equal distances of rank.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        scorer = qualms.Scorer(torch.nn.Linear(4, 3), "regrad")
        # of inputs like those that the model was trained on:
        known = scorer(torch.rand(20, 4)).scores["regrad"]
        threshold = qualms.Threshold.from_scores(known, coverage=0.9, made_by=scorer.made_by)
        strange = scorer(10 * torch.rand(5, 4)).scores["regrad"]
        print(threshold.accept(strange), threshold.percentile(strange))
        ```
    """

    value: float
    samples: int
    rule: str
    made_by: Provenance | None = None
    reference: tuple[float, ...] = field(default=(), repr=False)

    @classmethod
    def from_scores(
        cls, scores: Any, coverage: float = 0.95, *, made_by: Provenance | None = None
    ) -> "Threshold":
        """The smallest threshold that accepts at least this share of the scores, such as those of a
        validation set.
        """
        s = _scores(scores).sort().values
        if not 0 < coverage <= 1:
            raise QualmsError(
                f"coverage is {coverage}; it is a share of the inputs, above 0 and at most 1."
            )
        # The rounding guard keeps 0.95 * 100 from asking for 96 of 100.
        needed = max(1, math.ceil(coverage * len(s) - 1e-9))
        return cls(float(s[needed - 1]), len(s), f"coverage {coverage:g}", made_by, _some(s))

    @classmethod
    def from_labels(
        cls,
        scores: Any,
        correct: Any,
        risk: float = 0.01,
        confidence: float | None = None,
        *,
        made_by: Provenance | None = None,
    ) -> "Threshold":
        """The largest threshold whose accepted inputs are wrong at most this often.

        Inputs of equal score are accepted or rejected together. Without a `confidence` the rate is
        that of these very inputs; if even the most certain ones are wrong too often, nothing is
        accepted, and the value is minus infinity.

        With a confidence, such as 0.95, at most that share of further inputs like these will be
        wrong among the accepted, unless the sample was an unlucky one, which happens with
        probability 1 - confidence at most; where the sample is too small for that, an error says
        how many inputs it would take. Up to eleven coverages are tried, chosen by the number of
        inputs alone, and 1 - confidence is shared between them. For each, given the score t at that
        rank, the inputs below t are independent draws of those with scores below t, so their
        mistakes are binomial, and the limit of Clopper & Pearson (1934) is exact. (Geifman &
        El-Yaniv, Selective Classification for Deep Neural Networks, NeurIPS 2017, search the
        coverage by halves in place of a fixed list.)
        """
        s, right = _scores(scores), torch.as_tensor(correct).detach().cpu().flatten().to(torch.bool)
        if len(right) != len(s):
            raise QualmsError(
                f"there are {len(s)} scores and {len(right)} outcomes; give one outcome for each score."
            )
        if not 0 <= risk < 1:
            raise QualmsError(
                f"risk is {risk}; it is a share of the accepted inputs, from 0 to below 1."
            )
        order = s.argsort()
        s, wrong = s[order], (~right[order]).double().cumsum(0)
        if confidence is not None:
            limit = _certain(s, wrong, risk, confidence)
            # Inputs below the limit are accepted: those at most as high as the next number below
            # it.
            kind = torch.float32 if torch.as_tensor(scores).dtype == torch.float32 else torch.double
            value = float(
                torch.tensor(limit, dtype=kind).nextafter(torch.tensor(-math.inf, dtype=kind))
            )
            return cls(
                value, len(s), f"risk {risk:g} at confidence {confidence:g}", made_by, _some(s)
            )
        rates = wrong / torch.arange(1, len(s) + 1)
        ends = torch.cat(
            [s[1:] != s[:-1], torch.tensor([True])]
        )  # a threshold takes all equal scores or none
        allowed = (ends & (rates <= risk + 1e-12)).nonzero()
        value = float(s[allowed[-1]]) if len(allowed) else -math.inf
        return cls(value, len(s), f"risk {risk:g}", made_by, _some(s))

    def accept(self, scores: Any) -> Bool[Tensor, "..."]:
        """Which inputs to trust the model with."""
        return torch.as_tensor(scores) <= self.value

    def percentile(self, scores: Any) -> Float[Tensor, " n"]:
        """How many percent of the scores that it was set on are lower than each of these."""
        if not self.reference:
            raise QualmsError(
                "the threshold does not hold the scores that it was set on; set it by from_scores."
            )
        s = torch.as_tensor(scores).detach().cpu().flatten().double()
        below = torch.searchsorted(torch.tensor(self.reference, dtype=torch.double), s)
        return 100 * below.double() / len(self.reference)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        with explain_write_failure(path), atomic_write(Path(path)) as part:
            part.write_text(self.to_json() + "\n")

    def fingerprint(self) -> str:
        """Sixteen hex digits that change with anything in it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(
            asdict(self) | {"value": self.value if math.isfinite(self.value) else None}
        )

    @classmethod
    def load(cls, path: str | Path) -> "Threshold":
        """Read what `save` wrote."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            value = -math.inf if found["value"] is None else _finite(found["value"])
            made_by = Provenance(**found["made_by"]) if found.get("made_by") else None
            reference = tuple(map(_finite, found.get("reference", ())))
            samples, rule = found["samples"], found["rule"]
            if (
                list(reference) != sorted(reference)
                or type(samples) is not int
                or not 0 <= samples < 2**63
            ):
                raise ValueError("not as `save` writes it")
            if not isinstance(rule, str) or not rule.isprintable() or not rule.split():
                raise ValueError("a rule that is no text")
            if made_by is not None:
                made_by.require_kinds()
            return cls(value, samples, rule, made_by, reference)
        except FileNotFoundError:
            raise QualmsError(
                f"there is no threshold file at {path}; write one with `qualms threshold`."
            ) from None
        except OSError as error:
            raise QualmsError(
                f"{path} cannot be read ({error.strerror}); check that it is a file you may read."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise QualmsError(
                f"{path} is not a threshold file; write one with `qualms threshold`."
            ) from None


def _finite(number: Any) -> float:
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError("no finite number")
    return float(number)


def _scores(scores: Any) -> Float[Tensor, " n"]:
    # Scores keep their precision: a threshold set on float32 scores must accept those very scores.
    s = torch.as_tensor(scores).detach().cpu().flatten().double()
    if len(s) == 0 or not bool(torch.isfinite(s).all()):
        raise QualmsError(
            "the scores are empty, or some are NaN or infinite; pass finite ones, without masked positions."
        )
    return s


def _some(s: Float[Tensor, " n"]) -> tuple[float, ...]:
    """The sorted scores, or of many some at equal distances."""
    ranks = torch.linspace(0, len(s) - 1, min(KEPT, len(s)), dtype=torch.double).round().long()
    return tuple(s.sort().values[ranks].tolist())


def _certain(
    s: Float[Tensor, " n"], wrong: Float[Tensor, " n"], risk: float, confidence: float
) -> float:
    """The highest of some scores below which inputs are certain to be wrong at most at a rate of
    `risk`.

    `s` is sorted, and `wrong` counts the mistakes up to each score.
    """
    if not 0 < risk < 1 or not 0 < confidence < 1:
        raise QualmsError(
            f"risk is {risk} and confidence {confidence}; with a confidence, both are above 0 and below 1."
        )
    least, n = least_inputs(risk, confidence), len(s)
    asked = (
        f"at most {100 * risk:g} % wrong among the accepted at confidence {100 * confidence:g} %"
    )
    if n < least + 1:
        raise QualmsError(
            f"{asked} takes {least + 1} labeled inputs, even if none of them is wrong, and there are {n}; add "
            f"{least + 1 - n}, or allow more risk."
        )
    # As many coverages as can be told anything about, which the number of inputs decides and not
    # the labels.
    ranks = [math.floor(share * n + 1e-9) for share in COVERAGES]
    shares = [
        j for j, rank in enumerate(ranks, 1) if rank > least_inputs(risk, 1 - (1 - confidence) / j)
    ]
    each = (1 - confidence) / max(shares)
    below = [int((s < s[rank - 1]).sum()) for rank in ranks[: max(shares)]]
    mistakes = [int(wrong[b - 1]) if b else 0 for b in below]
    for rank, b, k in zip(ranks, below, mistakes, strict=False):
        if few_or_fewer(k, b, risk) <= each:
            return float(s[rank - 1])
    told = [(k / b, -b, k) for b, k in zip(below, mistakes, strict=True) if b]
    if not told:
        raise QualmsError(
            f"{asked} cannot be had: the most certain inputs all have one score; use another method."
        )
    rate, b, k = min(told)
    if rate >= risk:
        raise QualmsError(
            f"{asked} cannot be had: of the {-b} most certain of {n} labeled inputs {k} are wrong; allow more "
            "risk, or use a method or a network that tells its mistakes better."
        )
    # By the normal approximation, which is all that "about" promises.
    deviations = -float(torch.special.ndtri(torch.tensor(each, dtype=torch.double)))
    more = max(1.2, deviations**2 * risk * (1 - risk) / (risk - rate) ** 2 / -b)
    raise QualmsError(
        f"{asked} takes about {float(f'{n * more:.1e}'):.0f} labeled inputs, as {k} of the {-b} most certain are "
        f"wrong, and there are {n}; add more, or allow more risk."
    )
