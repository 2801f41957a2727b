"""The reference engine: one sample, one class, one backward pass. Slow and obviously right."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples, slices
from qualms.gradients.directions import scale_to_unit
from qualms.gradients.engines.autograd import add_unused_parameters
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import NO_PATH, gradients_of
from qualms.gradients.tracing.param_use import UseOrder
from qualms.gradients.tracing.traced_forward import use_order


class ReferenceEngine:
    """Computes the gradients as the paper states them, one backward pass for each sample and class.

    Args:
        cache: the plans of the model; unused, all engines are created with it.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> UseOrder:
        """Find the order in which a forward pass over the first sample uses the parameters."""
        return use_order(request.model, request.make_rows(slice(0, 1)), request.selected)

    def run(self, plan: UseOrder, request: GradientRequest) -> ClassNorms:
        """Compute ‖g‖ (l2) or Σ|g| (l1) for each sample, direction and parameter.

        Args:
            plan: the order of the parameters, from `plan`.
            request: what to compute.
        """
        parts: list[ClassNorms] = []
        with all_parameters_differentiable(request.model):
            for sample in slices(request.num_samples, 1):
                parts.append(_measure_sample(request, request.make_rows(sample)))
        norms = add_unused_parameters(ClassNorms.concatenate(parts), request, plan)
        norms.without_rule = set(norms.values)  # no fast rules are used here
        return norms


def _measure_sample(request: GradientRequest, rows: ModelInput) -> ClassNorms:
    """Compute the norms of one sample's gradients.

    Args:
        request: the model, the parameters, the directions and the kind of norm.
        rows: the rows of the sample: x_0, the sample itself, and perturbed copies x_1, …, x_N.
    """
    gradients, logits = _mean_gradients(request, rows)
    values: dict[str, Tensor] = {}
    for c, g_c in enumerate(gradients):
        for name, g in g_c.items():
            if name not in values:
                values[name] = g.new_zeros(1, len(gradients))
            values[name][0, c] = (
                g.abs().sum() if request.kind == "l1" else norm_without_underflow(g)
            )
    return ClassNorms(values, logits, set())


def _mean_gradients(
    request: GradientRequest,
    rows: ModelInput,
) -> tuple[list[dict[str, Tensor]], Float[Tensor, "1 c"]]:
    """Compute the mean of a sample's gradients over its rows, for each direction and parameter.

    For the directions of classes, g_c = mean over x_0..x_N of ∇θ log p_c(x_i).

    Args:
        request: the model, the parameters and the directions.
        rows: the rows x_0, …, x_N of one sample.

    Returns:
        For each direction the gradients by the parameter's name, in double precision, without
        parameters that the logits do not depend on; and the logits of x_0.
    """
    count = num_samples(rows.batch)
    mean: list[dict[str, Tensor]] = []
    first: Tensor | None = None
    for i in range(count):
        logits = forward_logits(request.model, rows.take(slice(i, i + 1)))
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        if first is None:
            first = logits.detach()
        p = first[0].double().softmax(dim=0)  # of x_0, for every row
        # A leaf without the model's graph.
        z = logits[0].detach().double().requires_grad_()
        for c, target in enumerate(_targets(request, z, p)):
            if i == 0:
                mean.append({})
            # The chain rule in two steps, v = ∂target/∂z and then Jᵀv, with v scaled to unit size:
            # otherwise the squares of small gradients underflow to 0 in float32.
            (v,) = torch.autograd.grad(target, z)
            (scaled,), scale = scale_to_unit(v[None, None], samples=1)
            parameters = list(request.selected.values())
            gradients = gradients_of(logits, parameters, scaled.to(logits.dtype))
            for name, g in zip(request.selected, gradients, strict=True):
                if g is not None:
                    share = float(scale) / count * g.double()
                    mean[c][name] = mean[c][name] + share if name in mean[c] else share
    assert first is not None
    return mean, first


def _targets(request: GradientRequest, z: Tensor, p: Tensor) -> Iterator[Tensor]:
    """Yield the scalar to differentiate for each direction of a request (`TARGETS`).

    Args:
        request: the request with the directions.
        z: the logits [c] of one row, with respect to which the scalar is differentiated.
        p: the probabilities [c] of the sample itself, the weights in `expectation`.
    """
    for name in request.directions.names:
        yield from TARGETS[name](z, p)


def norm_without_underflow(g: Tensor) -> Tensor:
    """Compute ‖g‖ from g divided by its largest entry: the square of 1e-170 is 0 even in float64."""
    largest = g.abs().max() if g.numel() else g.new_zeros(())
    return largest * (g / largest).square().sum().sqrt() if largest > 0 else largest


def log_probabilities(z: Float[Tensor, " c"]) -> Iterator[Tensor]:
    """Yield log p_c for each class, as log σ(z_c - log Σ_{k≠c} exp z_k).

    In this form the derivative does not cancel where p_c is nearly 1.
    """
    for c in range(len(z)):
        yield F.logsigmoid(z[c] - torch.cat([z[:c], z[c + 1 :]]).logsumexp(0))


def expectation(
    z: Float[Tensor, " c"],
    p: Float[Tensor, " c"],
) -> Float[Tensor, ""]:
    """Compute Σ_c p_c log q_c, whose gradient is the mean of class gradients weighted by p.

    q = softmax(z). Σ_c q_c log q_c is subtracted, with its weights q_c held constant: its
    derivative is zero in exact arithmetic, and it cancels rounding errors of the first sum.

    Args:
        z: the logits of one row.
        p: the probabilities of the sample itself.
    """
    weights = p - z.detach().softmax(0)
    total = z.new_zeros(())
    for w, log_q in zip(weights, log_probabilities(z), strict=True):
        total = total + w * log_q
    return total


# The scalars that are differentiated: functions of the logits of x_i and the probabilities of x_0.
TARGETS: dict[str, Callable[[Tensor, Tensor], Iterable[Tensor]]] = {
    "classes": lambda z, p: log_probabilities(z),
    "uniform": lambda z, p: [z.log_softmax(0).mean()],
    "expected": lambda z, p: [expectation(z, p)],
    "confounding": lambda z, p: [F.binary_cross_entropy_with_logits(z, torch.ones_like(z))],
}
