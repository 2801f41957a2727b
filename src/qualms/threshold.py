"""Selective prediction: accept the inputs that the model knows, and defer the others."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from qualms.deprecated import RenamedAttribute, renamed_arguments, renamed_in
from qualms.disk import atomic_write, explain_write_failure
from qualms.errors import QualmsError
from qualms.metrics.binomial import binomial_cdf, least_inputs
from qualms.provenance import Provenance, finite_float

# Scores that a threshold keeps, for percentiles to a tenth of a percent.
REFERENCE_SCORES = 1001
# Coverages that are tried for a risk with a confidence, from all inputs to a tenth of them.
COVERAGES = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_ROUNDING = 1e-9  # keeps 0.95 * 100 from asking for 96 of 100


@dataclass(frozen=True)
class Threshold:
    """Accepts inputs whose score is at most `value`.

    Args:
        value: the highest score that is accepted.
        samples: the number of scores that it was calibrated on.
        rule: how the threshold was calibrated, in words.
        provenance: how the calibration scores were computed (`Scorer.provenance`). A `Scorer`
            refuses a threshold whose provenance differs from that of its scores.
        reference: the calibration scores, sorted; if there are more than 1001, that many of them at
            equal distances of rank.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        scorer = qualms.Scorer(torch.nn.Linear(4, 3), "regrad")
        # of inputs like those that the model was trained on:
        known = scorer(torch.rand(20, 4)).scores["regrad"]
        threshold = qualms.Threshold.from_scores(known, 0.9, provenance=scorer.provenance)
        strange = scorer(10 * torch.rand(5, 4)).scores["regrad"]
        print(threshold.accept(strange), threshold.percentile(strange))
        ```
    """

    value: float
    samples: int
    rule: str
    provenance: Provenance | None = None
    reference: tuple[float, ...] = field(default=(), repr=False)

    made_by = RenamedAttribute("provenance")

    @classmethod
    @renamed_arguments(made_by="provenance")
    def from_scores(
        cls,
        scores: Any,
        coverage: float = 0.95,
        *,
        provenance: Provenance | None = None,
    ) -> "Threshold":
        """Calibrate the smallest threshold that accepts at least a share `coverage` of the scores.

        Args:
            scores: the scores of inputs that the model knows, such as a validation set.
            coverage: the share to accept, above 0 and at most 1.
            provenance: how the scores were computed, for a `Scorer` to compare.
        """
        s = _as_scores(scores).sort().values
        if not 0 < coverage <= 1:
            raise QualmsError(
                f"coverage={coverage} is invalid; pass a fraction of the inputs, above 0 and at "
                "most 1."
            )
        accepted = max(1, math.ceil(coverage * len(s) - _ROUNDING))
        value, rule = float(s[accepted - 1]), f"coverage {coverage:g}"
        return cls(value, len(s), rule, provenance, _thin_out(s))

    @classmethod
    @renamed_arguments(made_by="provenance")
    def from_labels(
        cls,
        scores: Any,
        correct: Any,
        risk: float = 0.01,
        confidence: float | None = None,
        *,
        provenance: Provenance | None = None,
    ) -> "Threshold":
        """Calibrate the largest threshold at which at most a share `risk` of the accepted inputs is
        wrong.

        Inputs of equal score are accepted or rejected together. Without a `confidence` the share is
        that of these very inputs; if even the most certain ones are wrong too often, nothing is
        accepted, and the value is minus infinity.

        With a `confidence` of 0.95, the error rate among accepted future inputs is at most `risk`,
        with probability 0.95 over the draw of this sample. If the sample is too small for that, an
        error says how many inputs it would take.

        Args:
            scores: the scores of labeled inputs.
            correct: whether the model's prediction is right, one outcome for each score.
            risk: the error rate to allow among the accepted inputs, from 0 to below 1.
            confidence: the probability that the error rate of future inputs is at most `risk`; None
                to look at the given inputs alone.
            provenance: how the scores were computed, for a `Scorer` to compare.
        """
        s = _as_scores(scores)
        right = torch.as_tensor(correct).detach().cpu().flatten().to(torch.bool)
        if len(right) != len(s):
            raise QualmsError(
                f"there are {len(s)} scores and {len(right)} outcomes; pass one outcome per score."
            )
        if not 0 <= risk < 1:
            raise QualmsError(
                f"risk={risk} is invalid; pass a fraction of the accepted inputs, from 0 to below "
                "1."
            )
        order = s.argsort()
        s, mistakes = s[order], (~right[order]).double().cumsum(0)
        rule = f"risk {risk:g}"
        if confidence is None:
            value = _highest_within(s, mistakes, risk)
        else:
            rule += f" at confidence {confidence:g}"
            limit = _certified_limit(s, mistakes, risk, confidence)
            value = _next_below(limit, torch.as_tensor(scores).dtype)
        return cls(value, len(s), rule, provenance, _thin_out(s))

    def accept(self, scores: Any) -> Bool[Tensor, "..."]:
        """Decide which inputs the model can be trusted with.

        Args:
            scores: scores in a tensor of any shape; NaN is not accepted.

        Returns:
            True where the score is at most `value`, in the shape of `scores`.
        """
        return torch.as_tensor(scores) <= self.value

    def percentile(self, scores: Any) -> Float[Tensor, " n"]:
        """Compute what percentage of the calibration scores is lower than each given score.

        Args:
            scores: scores in a tensor of any shape.

        Returns:
            Numbers from 0 to 100, flat.
        """
        if not self.reference:
            raise QualmsError(
                "the threshold does not include the scores that it was calibrated on; "
                "create it with Threshold.from_scores or Threshold.from_labels."
            )
        s = torch.as_tensor(scores).detach().cpu().flatten().double()
        lower = torch.searchsorted(torch.tensor(self.reference, dtype=torch.double), s)
        return 100 * lower.double() / len(self.reference)

    def save(self, path: str | Path) -> None:
        """Write the threshold to a JSON file, which `load` reads."""
        with explain_write_failure(path), atomic_write(Path(path)) as part:
            part.write_text(self.to_json() + "\n")

    def fingerprint(self) -> str:
        """Hash all fields to sixteen hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Write all fields as a JSON object; a value of minus infinity is null."""
        values = asdict(self)
        if not math.isfinite(self.value):
            values["value"] = None
        return json.dumps(values)

    @classmethod
    def load(cls, path: str | Path) -> "Threshold":
        """Read a threshold that `save` wrote.

        Raises:
            QualmsError: if the file is missing, unreadable, or not a threshold.
        """
        try:
            return cls._from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise QualmsError(
                f"there is no threshold file at {path}; write one with `qualms threshold`."
            ) from None
        except OSError as error:
            raise QualmsError(
                f"{path} cannot be read ({error.strerror}); check that it is a readable file."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise QualmsError(
                f"{path} is not a threshold file; write one with `qualms threshold`."
            ) from None

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "Threshold":
        """Create a threshold from what `to_json` wrote.

        A wrong file raises errors of many types, which `load` turns into one.
        """
        value = -math.inf
        if values["value"] is not None:
            value = finite_float(values["value"])
        samples, rule = values["samples"], values["rule"]
        if type(samples) is not int or not 0 <= samples < 2**63:
            raise ValueError("samples is not a count")
        if not isinstance(rule, str) or not rule.isprintable() or not rule.split():
            raise ValueError("rule is not a string")
        reference = tuple(finite_float(score) for score in values.get("reference", ()))
        if list(reference) != sorted(reference):
            raise ValueError("reference is not sorted")
        # Files of an earlier version have made_by.
        origin = values.get("provenance") or values.get("made_by")
        provenance = Provenance.from_dict(origin) if origin else None
        return cls(value, samples, rule, provenance, reference)


def _as_scores(scores: Any) -> Float[Tensor, " n"]:
    """Convert scores to a flat tensor of doubles, and check that they are finite.

    Doubles hold float32 scores exactly, so a threshold accepts the scores that it was made from.
    """
    s = torch.as_tensor(scores).detach().cpu().flatten().double()
    if len(s) == 0 or not bool(torch.isfinite(s).all()):
        raise QualmsError(
            "the scores are empty, or some are NaN or infinite; "
            "pass finite scores, without masked positions."
        )
    return s


def _thin_out(s: Float[Tensor, " n"]) -> tuple[float, ...]:
    """Select sorted scores for `Threshold.reference`: at most 1001, at equal distances of rank.

    The lowest and the highest score are always among them.
    """
    count = min(REFERENCE_SCORES, len(s))
    ranks = torch.linspace(0, len(s) - 1, count, dtype=torch.double).round().long()
    return tuple(s.sort().values[ranks].tolist())


def _next_below(limit: float, dtype: torch.dtype) -> float:
    """Return the largest number below a limit, so that scores equal to the limit are rejected.

    Args:
        limit: a score.
        dtype: the dtype of the scores, as the next float32 is farther away than the next double.
    """
    precision = torch.float32 if dtype == torch.float32 else torch.double
    lowest = torch.tensor(-math.inf, dtype=precision)
    return float(torch.tensor(limit, dtype=precision).nextafter(lowest))


def _highest_within(s: Float[Tensor, " n"], mistakes: Float[Tensor, " n"], risk: float) -> float:
    """Find the highest score up to which at most a share `risk` of these inputs is wrong.

    Args:
        s: the scores, sorted.
        mistakes: how many predictions are wrong up to each score.
        risk: the error rate to allow.

    Returns:
        The score; minus infinity if there is none.
    """
    rates = mistakes / torch.arange(1, len(s) + 1)
    # A threshold accepts all equal scores or none.
    is_last_of_equal = torch.cat([s[1:] != s[:-1], torch.tensor([True])])
    allowed = (is_last_of_equal & (rates <= risk + 1e-12)).nonzero()
    return float(s[allowed[-1]]) if len(allowed) else -math.inf


class _Candidate(NamedTuple):
    """A threshold that is tried: inputs with scores below `limit` are accepted.

    Attributes:
        limit: the score.
        accepted: the number of labeled inputs below it.
        wrong: how many of these the model predicts wrongly.
    """

    limit: float
    accepted: int
    wrong: int


def _certified_limit(
    s: Float[Tensor, " n"], mistakes: Float[Tensor, " n"], risk: float, confidence: float
) -> float:
    """Find the highest score below which future inputs are wrong at most at a rate of `risk`, with
    the given confidence.

    Up to eleven coverages are tried, chosen by the number of inputs alone, and 1 - confidence is
    shared between them. For each, given the score t at that rank, the inputs below t are
    independent draws of those with scores below t, so their mistakes are binomial, and the limit of
    Clopper & Pearson (1934) is exact. (Geifman & El-Yaniv, Selective Classification for Deep Neural
    Networks, NeurIPS 2017, search the coverage by halves in place of a fixed list.)

    Args:
        s: the scores, sorted.
        mistakes: how many predictions are wrong up to each score.
        risk: the error rate to allow.
        confidence: the probability that the error rate is at most `risk`.

    Raises:
        QualmsError: if no score has this guarantee.
    """
    if not 0 < risk < 1 or not 0 < confidence < 1:
        raise QualmsError(
            f"risk={risk} with confidence={confidence} is invalid; both must be above 0 and below "
            "1."
        )
    promise = (
        f"an error rate of at most {100 * risk:g} % among accepted inputs, with "
        f"{100 * confidence:g} % confidence,"
    )
    n, needed = len(s), least_inputs(risk, confidence) + 1
    if n < needed:
        raise QualmsError(
            f"{promise} requires {needed} labeled inputs, even if none of them is wrong, "
            f"but there are only {n}; add {needed - n}, or allow more risk."
        )
    ranks = _ranks_to_try(n, risk, confidence)
    # The probability of a false guarantee, for each rank.
    chance = (1 - confidence) / len(ranks)
    candidates = []
    for rank in ranks:
        accepted = int((s < s[rank - 1]).sum())
        wrong = int(mistakes[accepted - 1]) if accepted else 0
        candidates.append(_Candidate(float(s[rank - 1]), accepted, wrong))
    for candidate in candidates:
        if binomial_cdf(candidate.wrong, candidate.accepted, risk) <= chance:
            return candidate.limit
    raise QualmsError(f"{promise} {_explain_missing_labels(candidates, n, risk, chance)}")


def _ranks_to_try(n: int, risk: float, confidence: float) -> list[int]:
    """Choose the ranks to try, one for each of the highest `COVERAGES`, as n inputs suffice for.

    The more ranks are tried, the more confidence each needs, and the more inputs without a mistake.
    The labels play no part in the choice, which the guarantee requires.

    Args:
        n: the number of labeled inputs.
        risk: the error rate to allow.
        confidence: the probability that the error rate is at most `risk`.
    """
    ranks = [math.floor(share * n + _ROUNDING) for share in COVERAGES]
    count = 0
    for tried, rank in enumerate(ranks, 1):
        if rank > least_inputs(risk, 1 - (1 - confidence) / tried):
            count = tried
    return ranks[:count]


def _explain_missing_labels(
    candidates: list[_Candidate], n: int, risk: float, chance: float
) -> str:
    """Explain why no candidate has the guarantee, and about how many labels that would take.

    Args:
        candidates: all limits that were tried.
        n: the number of labeled inputs.
        risk: the error rate to allow.
        chance: the probability of a false guarantee that each candidate may have.
    """
    best = min(
        (c for c in candidates if c.accepted),
        key=lambda c: (c.wrong / c.accepted, -c.accepted),
        default=None,
    )
    if best is None:
        return (
            "cannot be guaranteed: the most certain inputs all have the same score; "
            "use another method."
        )
    rate = best.wrong / best.accepted
    if rate >= risk:
        return (
            f"cannot be guaranteed: of the {best.accepted} most certain of {n} labeled inputs "
            f"{best.wrong} are wrong; allow more risk, or use a method or a network that "
            "separates its mistakes better."
        )
    # By the normal approximation, which is all that "about" promises.
    deviations = -float(torch.special.ndtri(torch.tensor(chance, dtype=torch.double)))
    variance = risk * (1 - risk)
    more = max(1.2, deviations**2 * variance / (risk - rate) ** 2 / best.accepted)
    return (
        f"requires about {float(f'{n * more:.1e}'):.0f} labeled inputs, as {best.wrong} of the "
        f"{best.accepted} most certain are wrong, but there are only {n}; add more, or "
        "allow more risk."
    )


__getattr__ = renamed_in(__name__, MadeBy=Provenance)
