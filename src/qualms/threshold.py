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
        sorted_scores = _as_scores(scores).sort().values
        if not 0 < coverage <= 1:
            raise QualmsError(
                f"coverage={coverage} is invalid; pass a fraction of the inputs, above 0 and at "
                "most 1."
            )
        # The least number of scores that are at least a share `coverage` of all.
        num_accepted = max(1, math.ceil(coverage * len(sorted_scores) - _ROUNDING))
        return cls(
            value=float(sorted_scores[num_accepted - 1]),
            samples=len(sorted_scores),
            rule=f"coverage {coverage:g}",
            provenance=provenance,
            reference=_thin_out(sorted_scores),
        )

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
        flat_scores = _as_scores(scores)
        right = torch.as_tensor(correct).detach().cpu().flatten().to(torch.bool)
        if len(right) != len(flat_scores):
            raise QualmsError(
                f"there are {len(flat_scores)} scores and {len(right)} outcomes; pass one outcome "
                "per score."
            )
        if not 0 <= risk < 1:
            raise QualmsError(
                f"risk={risk} is invalid; pass a fraction of the accepted inputs, from 0 to below "
                "1."
            )
        order = flat_scores.argsort()
        sorted_scores = flat_scores[order]
        # How many predictions are wrong among the i lowest scores, i = 1..n.
        mistakes = (~right[order]).double().cumsum(0)
        rule = f"risk {risk:g}"
        if confidence is None:
            value = _find_highest_within_risk(sorted_scores, mistakes, risk)
        else:
            rule += f" at confidence {confidence:g}"
            limit = _find_certified_limit(
                sorted_scores,
                mistakes,
                risk=risk,
                confidence=confidence,
            )
            # The limit itself has no guarantee, only the scores below it.
            value = _next_below(limit, torch.as_tensor(scores).dtype)
        return cls(
            value=value,
            samples=len(sorted_scores),
            rule=rule,
            provenance=provenance,
            reference=_thin_out(sorted_scores),
        )

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
        flat_scores = torch.as_tensor(scores).detach().cpu().flatten().double()
        reference = torch.tensor(self.reference, dtype=torch.double)
        # In a sorted tensor, the insertion point is the number of lower entries.
        num_lower = torch.searchsorted(reference, flat_scores)
        return 100 * num_lower.double() / len(reference)

    def save(self, path: str | Path) -> None:
        """Write the threshold to a JSON file for `Threshold.load`, completely or not at all."""
        with explain_write_failure(path), atomic_write(Path(path)) as part:
            part.write_text(self.to_json() + "\n")

    def fingerprint(self) -> str:
        """Hash all fields of the threshold to sixteen hex digits."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Format all fields as a JSON object; a value of minus infinity becomes null."""
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
        """Create a threshold from the fields that `to_json` wrote.

        Args:
            values: the parsed JSON, which may come from a damaged or unrelated file.

        Raises:
            Exception: if it is not a threshold: any of the errors that `load` catches.
        """
        # JSON has no infinity: null stands for minus infinity.
        value = -math.inf
        if values["value"] is not None:
            value = finite_float(values["value"])
        samples, rule = values["samples"], values["rule"]
        # Not isinstance: True would count as an int. Counts fit into 64 bits.
        if type(samples) is not int or not 0 <= samples < 2**63:
            raise ValueError("samples is not a count")
        # The rule is printed as a part of one line.
        if not isinstance(rule, str) or not rule.isprintable() or not rule.split():
            raise ValueError("rule is not a string")
        reference = tuple(finite_float(score) for score in values.get("reference", ()))
        if list(reference) != sorted(reference):
            raise ValueError("reference is not sorted")
        # Earlier versions wrote the provenance as `made_by`.
        origin = values.get("provenance") or values.get("made_by")
        provenance = Provenance.from_dict(origin) if origin else None
        return cls(value, samples, rule, provenance, reference)


def _as_scores(scores: Any) -> Float[Tensor, " n"]:
    """Convert scores to a flat tensor of doubles on the CPU.

    Doubles hold float32 scores exactly, so a threshold that equals a score accepts it.

    Args:
        scores: what torch converts to a tensor, of any shape.

    Raises:
        QualmsError: if there are no scores, or if some are NaN or infinite.
    """
    flat_scores = torch.as_tensor(scores).detach().cpu().flatten().double()
    if len(flat_scores) == 0 or not bool(torch.isfinite(flat_scores).all()):
        raise QualmsError(
            "the scores are empty, or some are NaN or infinite; "
            "pass finite scores, without masked positions."
        )
    return flat_scores


def _thin_out(sorted_scores: Float[Tensor, " n"]) -> tuple[float, ...]:
    """Select at most 1001 of n sorted scores, at equal distances of rank.

    The lowest and the highest score are always among them.
    """
    count = min(REFERENCE_SCORES, len(sorted_scores))
    last = len(sorted_scores) - 1
    # In double precision, as float32 does not hold each rank above 2**24.
    ranks = torch.linspace(0, last, count, dtype=torch.double)
    return tuple(sorted_scores[ranks.round().long()].tolist())


def _next_below(limit: float, dtype: torch.dtype) -> float:
    """Return the largest floating-point number below a limit.

    As the value of a threshold, it rejects scores that equal the limit.

    Args:
        limit: the limit.
        dtype: the dtype of the scores. The next lower float32 is farther away than the next lower
            double, so for float32 scores the result is a float32 number.
    """
    precision = torch.float32 if dtype == torch.float32 else torch.double
    lowest = torch.tensor(-math.inf, dtype=precision)
    return float(torch.tensor(limit, dtype=precision).nextafter(lowest))


def _find_highest_within_risk(
    sorted_scores: Float[Tensor, " n"],
    mistakes: Float[Tensor, " n"],
    risk: float,
) -> float:
    """Find the highest score such that at most a share `risk` of the inputs up to it is wrong.

    Args:
        sorted_scores: the scores of n inputs, in ascending order.
        mistakes: how many predictions are wrong among the i lowest scores, i = 1..n.
        risk: the error rate to allow.

    Returns:
        The score; minus infinity if there is none.
    """
    error_rates = mistakes / torch.arange(1, len(sorted_scores) + 1)
    # A threshold accepts all equal scores or none, so only the last of equal scores is a choice.
    is_last_of_equal = torch.ones(len(sorted_scores), dtype=torch.bool)
    is_last_of_equal[:-1] = sorted_scores[1:] != sorted_scores[:-1]
    # 1e-12 allows for rounding.
    allowed = (is_last_of_equal & (error_rates <= risk + 1e-12)).nonzero()
    return float(sorted_scores[allowed[-1]]) if len(allowed) else -math.inf


class _Candidate(NamedTuple):
    """A limit that is tried: a threshold there would accept the inputs with scores below it.

    Attributes:
        limit: the score at the limit.
        accepted: the number of labeled inputs with scores below the limit.
        wrong: how many of these inputs the model predicts wrongly.
    """

    limit: float
    accepted: int
    wrong: int


def _find_certified_limit(
    sorted_scores: Float[Tensor, " n"],
    mistakes: Float[Tensor, " n"],
    risk: float,
    confidence: float,
) -> float:
    """Find the highest score below which the error rate of future inputs is at most `risk`, with
    the given confidence.

    Up to eleven coverages (`COVERAGES`) are tried, and each may fail with an equal share of the
    probability 1 - confidence. A coverage accepts the labeled inputs whose scores are below the
    score t at its rank. Given t, these inputs are independent draws of all inputs with scores below
    t, so the number of mistakes among them is binomial, and the confidence limit of Clopper &
    Pearson (1934) is exact. (Geifman & El-Yaniv, Selective Classification for Deep Neural Networks,
    NeurIPS 2017, search the coverage by bisection instead of in a fixed list.)

    Args:
        sorted_scores: the scores of n labeled inputs, in ascending order.
        mistakes: how many predictions are wrong among the i lowest scores, i = 1..n.
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
    n = len(sorted_scores)
    # One more than must be right: the input at the limit itself is not accepted.
    needed = least_inputs(risk, confidence) + 1
    if n < needed:
        raise QualmsError(
            f"{promise} requires {needed} labeled inputs, even if none of them is wrong, "
            f"but there are only {n}; add {needed - n}, or allow more risk."
        )
    ranks = _choose_ranks(n, risk, confidence)
    # The probability with which the guarantee of each rank may be false.
    failure_probability = (1 - confidence) / len(ranks)
    candidates = []
    for rank in ranks:
        limit = sorted_scores[rank - 1]
        # Fewer than `rank - 1` if scores are equal to the limit.
        accepted = int((sorted_scores < limit).sum())
        wrong = int(mistakes[accepted - 1]) if accepted else 0
        candidates.append(_Candidate(float(limit), accepted, wrong))
    # From the highest limit down.
    for candidate in candidates:
        p_value = binomial_cdf(candidate.wrong, candidate.accepted, risk)
        if p_value <= failure_probability:
            return candidate.limit
    reason = _explain_missing_labels(candidates, n, risk, failure_probability)
    raise QualmsError(f"{promise} {reason}")


def _choose_ranks(n: int, risk: float, confidence: float) -> list[int]:
    """Choose the ranks whose scores are tried as limits, one for each of the highest `COVERAGES`.

    There are as many ranks as n inputs suffice for: the more ranks are tried, the higher is the
    confidence that each needs, and the more inputs without a mistake this takes. The choice does
    not depend on the labels, as the guarantee requires.

    Args:
        n: the number of labeled inputs.
        risk: the error rate to allow.
        confidence: the probability that the error rate is at most `risk`.
    """
    ranks = [math.floor(coverage * n + _ROUNDING) for coverage in COVERAGES]
    num_tried = 0
    for count, rank in enumerate(ranks, 1):
        # If `count` ranks are tried, each may fail with this share of the probability.
        failure_probability = (1 - confidence) / count
        # Not equal: the input at the rank is not accepted itself.
        if rank > least_inputs(risk, 1 - failure_probability):
            num_tried = count
    return ranks[:num_tried]


def _explain_missing_labels(
    candidates: list[_Candidate],
    n: int,
    risk: float,
    failure_probability: float,
) -> str:
    """Explain why no limit has the guarantee, and about how many labels it would take.

    Args:
        candidates: all limits that were tried; the error rate below each was too high, or too
            uncertain.
        n: the number of labeled inputs.
        risk: the error rate to allow.
        failure_probability: the probability with which the guarantee of each limit may be false.

    Returns:
        The end of a sentence that begins with the guarantee.
    """
    # The lowest error rate; of equal rates the one of the most inputs.
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
    # By the normal approximation: with m inputs of a true error rate `risk`, a rate as low as
    # `rate` is sqrt(m) (risk - rate) / sqrt(variance) standard deviations away, which must reach the
    # quantile of `failure_probability`.
    probability = torch.tensor(failure_probability, dtype=torch.double)
    deviations = -float(torch.special.ndtri(probability))
    variance = risk * (1 - risk)
    accepted_needed = deviations**2 * variance / (risk - rate) ** 2
    # At least a fifth more labels, as the present ones do not suffice.
    factor = max(1.2, accepted_needed / best.accepted)
    # Rounded to two digits.
    labels_needed = float(f"{n * factor:.1e}")
    return (
        f"requires about {labels_needed:.0f} labeled inputs, as {best.wrong} of the "
        f"{best.accepted} most certain are wrong, but there are only {n}; add more, or "
        "allow more risk."
    )


__getattr__ = renamed_in(__name__, MadeBy=Provenance)
