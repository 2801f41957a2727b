"""The reference engine: one sample, one class, one backward pass. Slow and obviously right."""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples
from qualms.gradients.directions import scale_to_unit
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import NO_PATH, gradients_of
from qualms.gradients.tracing.param_use import UseOrder
from qualms.gradients.tracing.traced_forward import use_order


class ReferenceEngine:
    """Computes the gradients as the paper states them.

    Args:
        cache: of the model; nothing is kept in it.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> UseOrder:
        """The order in which the forward pass uses the parameters."""
        return use_order(request.model, request.rows(slice(0, 1)), request.selected)

    def run(self, plan: UseOrder, request: GradientRequest) -> ClassNorms:
        """‖g‖ (l2) or Σ|g| (l1) of every parameter's gradient."""
        model_input = request.rows(slice(0, request.num_samples))
        rows = model_input.rows_per_sample
        values: list[list[list[float]]] = []
        logits: list[Tensor] = []
        used: set[str] = set()
        with all_parameters_differentiable(request.model):
            for b in range(num_samples(model_input.batch) // rows):
                sample = model_input.take(slice(b * rows, (b + 1) * rows))
                gradients, z = _mean_gradients(request, sample, used)
                values.append([[_size(g, request.kind) for g in g_c] for g_c in gradients])
                logits.append(z)
        # [b, c, parameter]
        table = torch.tensor(values, dtype=torch.double, device=logits[0].device)
        by_name = {name: table[:, :, i] for i, name in enumerate(request.selected)}
        names = plan.relevant(used, request.selected)
        norms = {name: by_name[name] for name in names}
        return ClassNorms(norms, torch.cat(logits), set(names))


def _mean_gradients(
    request: GradientRequest,
    rows: ModelInput,
    used: set[str],
) -> tuple[list[list[Tensor]], Float[Tensor, "1 c"]]:
    """g_c = mean over x_0..x_N of ∇θ log p_c(x_i), for each direction c and parameter.

    Args:
        request: what is computed.
        rows: x_0, …, x_N of one sample.
        used: the names of the parameters that the logits depend on, which are added to it.

    Returns:
        The gradients by direction and parameter, and the logits of x_0.
    """
    count = num_samples(rows.batch)
    mean: list[list[Tensor]] = []
    first: Tensor | None = None
    for i in range(count):
        logits = forward_logits(request.model, rows.take(slice(i, i + 1)))
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        if first is None:
            first = logits.detach()
        p = first[0].double().softmax(dim=0)
        apart = logits[0].detach().double().requires_grad_()
        for c, target in enumerate(_targets(request, apart, p)):
            # In two steps, with the first scaled: the squares of small gradients are zero in 32
            # bits.
            (toward,) = torch.autograd.grad(target, apart)
            (scaled,), scale = scale_to_unit(toward[None, None], 1)
            g_c = _gradient(request, logits, scaled.to(logits.dtype), used)
            g_c = [float(scale) / count * g for g in g_c]
            if i == 0:
                mean.append(g_c)
            else:
                mean[c] = [m + g for m, g in zip(mean[c], g_c, strict=True)]
    assert first is not None
    return mean, first


def _targets(request: GradientRequest, z: Tensor, p: Tensor) -> Iterator[Tensor]:
    for name in request.directions.names:
        yield from TARGETS[name](z, p)


def _gradient(
    request: GradientRequest,
    logits: Tensor,
    cotangent: Tensor,
    used: set[str],
) -> list[Tensor]:
    """Jᵀv of one row for each parameter, in double precision.

    Args:
        request: whose parameters count.
        logits: of the row, with their graph.
        cotangent: v.
        used: the names of the parameters that the logits depend on, which are added to it.
    """
    parameters = list(request.selected.values())
    found = gradients_of(logits, parameters, cotangent)
    gradients: list[Tensor] = []
    for name, g in zip(request.selected, found, strict=True):
        if g is not None:
            used.add(name)
        dense = torch.zeros_like(request.selected[name]) if g is None else g
        gradients.append(dense.double())
    return gradients


def _size(g: Tensor, kind: str) -> float:
    """Σ|g| (l1) or ‖g‖ (l2)."""
    return float(g.abs().sum() if kind == "l1" else length(g))


def length(g: Tensor) -> Tensor:
    """‖g‖, from g divided by its largest entry: the square of 1e-162 is zero even in 64 bits."""
    largest = g.abs().max() if g.numel() else g.new_zeros(())
    return largest * (g / largest).square().sum().sqrt() if largest > 0 else largest


def log_probabilities(z: Float[Tensor, " c"]) -> Iterator[Tensor]:
    """log p_c = log σ(z_c - log Σ_{k≠c} exp z_k).

    Its derivative does not cancel where p_c is nearly 1.
    """
    for c in range(len(z)):
        yield F.logsigmoid(z[c] - torch.cat([z[:c], z[c + 1 :]]).logsumexp(0))


def expectation(z: Float[Tensor, " c"], p: Float[Tensor, " c"]) -> Float[Tensor, ""]:
    """Σ_c p_c log q_c, q = softmax(z), less Σ_c q_c log q_c at fixed weights.

    The derivative of the second sum is zero: it takes the rounding of the first away.
    """
    weights = p - z.detach().softmax(0)
    total = z.new_zeros(())
    for w, log_q in zip(weights, log_probabilities(z), strict=True):
        total = total + w * log_q
    return total


# What is differentiated, from the logits of x_i and the probabilities of x_0.
TARGETS: dict[str, Callable[[Tensor, Tensor], Iterable[Tensor]]] = {
    "classes": lambda z, p: log_probabilities(z),
    "uniform": lambda z, p: [z.log_softmax(0).mean()],
    "expected": lambda z, p: [expectation(z, p)],
    "confounding": lambda z, p: [F.binary_cross_entropy_with_logits(z, torch.ones_like(z))],
}
