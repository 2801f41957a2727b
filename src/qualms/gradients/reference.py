"""The reference engine: the paper's way, one input, one class, one backward pass. Slow and obviously right."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.autograd import NO_PATH, gradients_of
from qualms.gradients.guard import all_parameters_differentiable
from qualms.gradients.job import Job
from qualms.gradients.layers import Norm
from qualms.gradients.measured import Measured
from qualms.gradients.rows import logits_of
from qualms.gradients.watch.forward import use_order


def reference(job: Job, norm: Norm) -> Measured:
    """Σg² (l2) or Σ|g| (l1) of every parameter's gradient, for each input and direction (classes first)."""
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
            for i in range(on.per_input):
                row = b * on.per_input + i
                logits = logits_of(model, on.take(slice(row, row + 1)))
                if not logits.requires_grad:
                    raise QualmsError(NO_PATH)
                if i == 0:
                    all_logits.append(logits.detach())
                    p = logits[0].detach().softmax(dim=0)
                log_p = logits[0].log_softmax(dim=0)
                targets = [target for name in job.directions.names for target in TARGETS[name](log_p, logits[0], p)]
                for c, target in enumerate(targets):
                    found = gradients_of(target, parameters)
                    used |= {name for name, g in zip(selected, found, strict=True) if g is not None}
                    pairs = zip(parameters, found, strict=True)
                    g_c = [torch.zeros_like(p) if g is None else g / on.per_input for p, g in pairs]
                    if i == 0:
                        mean.append(g_c)
                    else:
                        mean[c] = [m + g for m, g in zip(mean[c], g_c, strict=True)]
            values.append([[float((g.abs() if norm == "l1" else g**2).sum()) for g in g_c] for g_c in mean])
    table = torch.tensor(values, dtype=all_logits[0].dtype, device=all_logits[0].device)  # [b, c, parameter]
    by_name = {name: table[:, :, i] for i, name in enumerate(selected)}
    names = use_order(model, on, selected).counted(used, selected)
    return Measured({name: by_name[name] for name in names}, torch.cat(all_logits), set(names))


# What is differentiated, from log p(x_i), the logits of x_i and the probabilities of x_0.
TARGETS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "classes": lambda log_p, z, p: list(log_p),
    "uniform": lambda log_p, z, p: [log_p.mean()],
    "expected": lambda log_p, z, p: [(p * log_p).sum()],
    "confounding": lambda log_p, z, p: [F.binary_cross_entropy_with_logits(z, torch.ones_like(z))],
}
