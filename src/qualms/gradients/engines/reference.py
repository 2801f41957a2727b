"""The reference engine: the paper's way, one input, one class, one backward pass. Slow and
obviously right.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.directions import scale_to_unit
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.layers import Norm
from qualms.gradients.model_input import forward_logits
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import NO_PATH, gradients_of
from qualms.gradients.tracing.traced_forward import use_order


def reference(job: GradientRequest, norm: Norm) -> ClassNorms:
    """‖g‖ (l2) or Σ|g| (l1) of every parameter's gradient, for each input and direction (classes
    first).
    """
    model, selected = job.model, job.selected
    on = job.rows(slice(0, job.inputs))
    parameters = list(selected.values())
    used: set[str] = set()
    values: list[list[list[float]]] = []
    all_logits: list[Tensor] = []
    with all_parameters_differentiable(model):
        for b in range(job.inputs):
            # g_c = mean over x_0..x_N of ∇θ log p_c(x_i)
            mean: list[list[Tensor]] = []
            for i in range(on.rows_per_sample):
                row = b * on.rows_per_sample + i
                logits = forward_logits(model, on.take(slice(row, row + 1)))
                if not logits.requires_grad:
                    raise QualmsError(NO_PATH)
                if i == 0:
                    all_logits.append(logits.detach())
                    p = logits[0].detach().double().softmax(dim=0)
                apart = logits[0].detach().double().requires_grad_()
                targets = (
                    target for name in job.directions.names for target in TARGETS[name](apart, p)
                )
                for c, target in enumerate(targets):
                    # In two steps, with the first scaled: the squares of small gradients are zero
                    # in 32 bits.
                    (toward,) = torch.autograd.grad(target, apart)
                    (scaled,), size = scale_to_unit(toward[None, None], 1)
                    found = gradients_of(logits, parameters, scaled.to(logits.dtype))
                    used |= {name for name, g in zip(selected, found, strict=True) if g is not None}
                    pairs = zip(parameters, found, strict=True)
                    unit = float(size) / on.rows_per_sample
                    g_c = [
                        unit * (torch.zeros_like(t) if g is None else g).double() for t, g in pairs
                    ]
                    if i == 0:
                        mean.append(g_c)
                    else:
                        mean[c] = [m + g for m, g in zip(mean[c], g_c, strict=True)]
            values.append(
                [[float(g.abs().sum() if norm == "l1" else length(g)) for g in g_c] for g_c in mean]
            )
    table = torch.tensor(
        values, dtype=torch.double, device=all_logits[0].device
    )  # [b, c, parameter]
    by_name = {name: table[:, :, i] for i, name in enumerate(selected)}
    names = use_order(model, on, selected).relevant(used, selected)
    return ClassNorms({name: by_name[name] for name in names}, torch.cat(all_logits), set(names))


def length(g: Tensor) -> Tensor:
    """‖g‖, from g divided by its largest entry: the square of 1e-162 is zero even in 64 bits."""
    largest = g.abs().max() if g.numel() else g.new_zeros(())
    return largest * (g / largest).square().sum().sqrt() if largest > 0 else largest


def log_probabilities(z: Float[Tensor, " c"]) -> Iterator[Tensor]:
    """log p_c = log σ(z_c - log Σ_{k≠c} exp z_k), whose derivative does not cancel where p_c is
    nearly 1.
    """
    for c in range(len(z)):
        yield F.logsigmoid(z[c] - torch.cat([z[:c], z[c + 1 :]]).logsumexp(0))


def expected(z: Float[Tensor, " c"], p: Float[Tensor, " c"]) -> Float[Tensor, ""]:
    """Σ_c p_c log q_c, q = softmax(z), less Σ_c q_c log q_c at fixed weights, whose derivative is
    zero: no rounding.
    """
    weights = p - z.detach().softmax(0)
    return sum(
        (w * log_q for w, log_q in zip(weights, log_probabilities(z), strict=True)), z.new_zeros(())
    )


# What is differentiated, from the logits of x_i and the probabilities of x_0.
TARGETS: dict[str, Callable[[Tensor, Tensor], Iterable[Tensor]]] = {
    "classes": lambda z, p: log_probabilities(z),
    "uniform": lambda z, p: [z.log_softmax(0).mean()],
    "expected": lambda z, p: [expected(z, p)],
    "confounding": lambda z, p: [F.binary_cross_entropy_with_logits(z, torch.ones_like(z))],
}
