"""The reference engine: the paper's way, one input, one class, one backward pass. Slow and obviously right."""

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.guard import all_parameters_differentiable
from qualms.gradients.inputs import Batch, count
from qualms.gradients.measured import Measured
from qualms.gradients.plain import NO_PATH
from qualms.gradients.probe import recorded
from qualms.gradients.record import Weights
from qualms.gradients.smoothing import Rows, Smoothing, logits_of, rows


def reference(
    model: nn.Module,
    batch: Batch,
    selected: dict[str, Tensor],
    *,
    kind: str,
    smoothing: Smoothing | None,
    first_index: int,
    seed: int,
) -> Measured:
    """Σg² (l2) or Σ|g| (l1) of every parameter's class gradient g_c, for each input and class."""
    on = rows(batch, smoothing, first_index, seed)
    parameters = list(selected.values())
    used: set[str] = set()
    values: list[list[list[float]]] = []
    all_logits: list[Tensor] = []
    with all_parameters_differentiable(model):
        for b in range(count(batch)):
            # g_c = mean over x_0..x_N of ∇θ log p_c(x_i)
            mean: list[list[Tensor]] = []
            for i in range(on.per_input):
                row = b * on.per_input + i
                logits = logits_of(model, on.take(slice(row, row + 1)))
                if not logits.requires_grad:
                    raise QualmsError(NO_PATH)
                if i == 0:
                    all_logits.append(logits.detach())
                log_p = logits[0].log_softmax(dim=0)
                for c in range(len(log_p)):
                    found = torch.autograd.grad(log_p[c], parameters, retain_graph=True, allow_unused=True)
                    used |= {name for name, g in zip(selected, found, strict=True) if g is not None}
                    pairs = zip(parameters, found, strict=True)
                    g_c = [torch.zeros_like(p) if g is None else g / on.per_input for p, g in pairs]
                    if i == 0:
                        mean.append(g_c)
                    else:
                        mean[c] = [m + g for m, g in zip(mean[c], g_c, strict=True)]
            values.append([[float((g.abs() if kind == "l1" else g**2).sum()) for g in g_c] for g_c in mean])
    table = torch.tensor(values, dtype=all_logits[0].dtype, device=all_logits[0].device)  # [b, c, parameter]
    by_name = {name: table[:, :, i] for i, name in enumerate(selected)}
    order = _first_use(model, on, selected)
    names = [n for n in order if n in used] + [n for n in selected if n in used and n not in order]
    return Measured({name: by_name[name] for name in names}, torch.cat(all_logits), set(names))


def _first_use(model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> list[str]:
    _, recorder = recorded(model, on.take(slice(0, 1)), Weights.of(selected, model.parameters()), None)
    return recorder.first_use
