"""Scores of one batch by a model that gives one output for each input."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Estimate, Method, estimate_scores, to_finite
from qualms.result import Scored


def score_samples(
    context: BatchContext,
    methods: Mapping[str, Method],
    numbers: Sequence[int],
) -> Scored:
    """Compute the scores of one batch by all methods.

    Args:
        context: the model with the batch; the methods share its passes.
        methods: the methods by name. Methods that are equal are computed once.
        numbers: a number for each input, which becomes its id, and by which `NotFinite` names it.
    """
    estimates: dict[Method, Estimate] = {}
    for method in methods.values():
        if method not in estimates:
            estimates[method] = estimate_scores(method, context)
    scores: dict[str, Tensor] = {}
    errors: dict[str, Tensor] = {}
    notes: dict[str, str] = {}
    estimated: list[str] = []
    for name, method in methods.items():
        estimate = estimates[method]
        scores[name] = to_finite(estimate.values, context.dtype, name, numbers)
        errors[name] = estimate.errors_as(scores[name])
        note = method.note(context)
        if note is not None:
            notes[name] = note
        if isinstance(method, GradientScore) and method.is_estimate(context):
            estimated.append(name)
    probs = context.probs.detach()
    return Scored(scores, errors, probs, numbers, sketched=tuple(estimated), notes=notes)
