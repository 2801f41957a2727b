"""The reference engine: one sample, one class, one backward pass. Slow and obviously right."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import num_samples, slices
from qualms.gradients.directions import scale_to_unit
from qualms.gradients.engines.autograd import add_unused_parameters
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import gradients_of, require_differentiable
from qualms.gradients.tracing.param_use import UseOrder
from qualms.gradients.tracing.traced_forward import use_order


class ReferenceEngine:
    """Computes the gradients as the paper states them, one backward pass for each sample and class."""

    def plan(self, request: GradientRequest) -> UseOrder:
        """Find the order in which the first sample uses the parameters: `run` sorts norms by it."""
        return use_order(request.model, request.make_rows(slice(0, 1)), request.selected)

    def run(self, plan: UseOrder, request: GradientRequest) -> ClassNorms:
        """Compute ‖g‖ (l2) or Σ|g| (l1) for each sample, direction and parameter.

        Args:
            plan: the order of the parameters, from `plan`.
            request: the samples, and which of their gradients to compute.
        """
        norms_of_samples: list[ClassNorms] = []
        with all_parameters_differentiable(request.model):
            for one_sample in slices(request.num_samples, 1):
                norms_of_samples.append(_measure_sample(request, request.make_rows(one_sample)))
        norms = add_unused_parameters(ClassNorms.concatenate(norms_of_samples), request, plan)
        # This engine uses no fast gradient rule for any parameter.
        norms.without_rule = set(norms.values)
        return norms


def _measure_sample(request: GradientRequest, rows: ModelInput) -> ClassNorms:
    """Compute ‖g‖ (l2) or Σ|g| (l1) of one sample's gradients g, along each direction.

    Args:
        request: the model, the parameters, the directions and the kind of norm.
        rows: the rows of the sample: x_0, the sample itself, and perturbed copies x_1, …, x_N.

    Returns:
        Norms [1, m], with m directions, for each parameter that the logits depend on;
        `without_rule` is left empty.
    """
    gradients, logits = _compute_mean_gradients(request, rows)
    values: dict[str, Tensor] = {}
    for j, gradient_by_name in enumerate(gradients):
        for name, g in gradient_by_name.items():
            if name not in values:
                values[name] = g.new_zeros(1, len(gradients))
            norm = g.abs().sum() if request.kind == "l1" else norm_without_underflow(g)
            values[name][0, j] = norm
    return ClassNorms(values, logits, without_rule=set())


def _compute_mean_gradients(
    request: GradientRequest,
    rows: ModelInput,
) -> tuple[list[dict[str, Tensor]], Float[Tensor, "1 c"]]:
    """Compute the mean of a sample's gradients over its rows, for each direction and parameter.

    For the directions of classes, g_c = mean over x_0..x_N of ∇θ log p_c(x_i).

    Args:
        request: the model, the parameters θ and the directions.
        rows: the rows of one sample: x_0, the sample itself, and perturbed copies x_1, …, x_N.

    Returns:
        For each direction a dict from parameter names to mean gradients in double precision,
        without parameters that the logits do not depend on; and the logits of x_0.
    """
    num_rows = num_samples(rows.batch)
    parameters = list(request.selected.values())
    mean: list[dict[str, Tensor]] = []
    first_logits: Tensor | None = None
    for i in range(num_rows):
        logits = forward_logits(request.model, rows.take(slice(i, i + 1)))
        require_differentiable(logits)
        if first_logits is None:
            first_logits = logits.detach()
        # Classes are weighted by the probabilities of x_0 in every row.
        p = first_logits[0].double().softmax(dim=0)
        # A leaf, so that ∂target/∂z does not run through the model.
        z = logits[0].detach().double().requires_grad_()
        for j, target in enumerate(_compute_targets(request, z, p)):
            if i == 0:
                mean.append({})
            # The chain rule in two steps, v = ∂target/∂z and then Jᵀv, with v scaled to unit size:
            # otherwise the squares of small gradients underflow to 0 in float32.
            (v,) = torch.autograd.grad(target, z)
            # `scale_to_unit` takes cotangents [directions, rows, classes].
            (scaled_v,), scale = scale_to_unit(v[None, None], samples=1)
            gradients = gradients_of(logits, parameters, scaled_v.to(logits.dtype))
            for name, g in zip(request.selected, gradients, strict=True):
                # None: the logits do not depend on this parameter.
                if g is not None:
                    term = float(scale) / num_rows * g.double()
                    mean[j][name] = mean[j][name] + term if name in mean[j] else term
    assert first_logits is not None
    return mean, first_logits


def _compute_targets(request: GradientRequest, z: Tensor, p: Tensor) -> Iterator[Tensor]:
    """Yield the scalar to differentiate for each direction of a request.

    `TARGETS` has a function for each name of a set of directions.

    Args:
        request: the request with the directions.
        z: the logits [c] of one row, with respect to which the caller differentiates the scalar.
        p: the probabilities [c] of the sample itself, the weights of the classes in `expectation`.
    """
    for name in request.directions.names:
        yield from TARGETS[name](z, p)


def norm_without_underflow(g: Tensor) -> Tensor:
    """Compute ‖g‖ as max|g| · ‖g / max|g|‖: the square of 1e-170 is 0 even in float64."""
    largest = g.abs().max() if g.numel() else g.new_zeros(())
    if not largest > 0:
        return largest
    return largest * (g / largest).square().sum().sqrt()


def log_probabilities(z: Float[Tensor, " c"]) -> Iterator[Tensor]:
    """Yield log p_c of each class c, with p = softmax(z), as log σ(z_c - log Σ_{k≠c} exp z_k).

    In this form, digits of the derivative do not cancel where p_c is nearly 1.
    """
    for c in range(len(z)):
        other_logits = torch.cat([z[:c], z[c + 1 :]])
        yield F.logsigmoid(z[c] - other_logits.logsumexp(0))


def expectation(
    z: Float[Tensor, " c"],
    p: Float[Tensor, " c"],
) -> Float[Tensor, ""]:
    """Compute Σ_c (p_c - q_c) log q_c with q = softmax(z) and the weights p_c - q_c held constant.

    Its gradient in z is that of Σ_c p_c log q_c, the mean of the classes' gradients weighted by p:
    the terms -q_c log q_c add zero to it in exact arithmetic, and cancel rounding errors.

    Args:
        z: the logits of one row.
        p: the probabilities of the sample itself.
    """
    weights = p - z.detach().softmax(0)  # `detach`: held constant
    total = z.new_zeros(())
    for w, log_q in zip(weights, log_probabilities(z), strict=True):
        total = total + w * log_q
    return total


# For each set of directions, by name, the scalars that are differentiated: functions of a row's
# logits z and of the probabilities p of the sample itself.
TARGETS: dict[str, Callable[[Tensor, Tensor], Iterable[Tensor]]] = {
    "classes": lambda z, p: log_probabilities(z),
    "uniform": lambda z, p: [z.log_softmax(0).mean()],
    "expected": lambda z, p: [expectation(z, p)],
    "confounding": lambda z, p: [F.binary_cross_entropy_with_logits(z, torch.ones_like(z))],
}
