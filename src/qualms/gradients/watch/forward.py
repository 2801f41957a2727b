"""One forward pass over rows, watched by a recorder."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.autograd import NO_PATH
from qualms.gradients.guard import all_parameters_differentiable
from qualms.gradients.inputs import Unclear, count, tensors
from qualms.gradients.rows import Rows, logits_of
from qualms.gradients.watch.meetings import TwinPasses
from qualms.gradients.watch.owners import settled
from qualms.gradients.watch.record import Recorder
from qualms.gradients.watch.slices import joined
from qualms.gradients.watch.weights import Reach, UseOrder, Weights, nodes_behind


def recorded(model: nn.Module, on: Rows, weights: Weights, twins: TwinPasses | None) -> tuple[Tensor, Recorder]:
    """One watched forward pass, in which every parameter is known by its stand-in."""
    recorder = Recorder(weights, tensors(on.batch), count(on.batch), on.per_input, twins)
    recorder.reads_values = any(map(_has_script, model.modules()))
    with all_parameters_differentiable(model):
        logits = logits_of(model, on, recorder)
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        require_no_bypass(logits, [*model.parameters(), *weights.leaves.values()], recorder.reach)
    recorder.pieces += settled(recorder.scattered, logits, recorder.rows // recorder.per_input)
    recorder.pieces = joined(recorder.pieces, weights)
    return logits, recorder


def _has_script(module: nn.Module) -> bool:
    """What a script reads is not seen."""
    held = (module, *vars(module).values())
    return any(isinstance(one, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for one in held)


def require_no_bypass(logits: Tensor, parameters: Iterable[Tensor], reach: Reach) -> None:
    """No gradient may reach a parameter, or its stand-in, but through an operation that a rule has seen.

    What function modes do not see (a script, an autograd function, a gradient inside the forward pass) is in the graph.
    """
    forbidden, behind = set(map(id, parameters)), nodes_behind([logits.grad_fn])
    if any(id(node.variable) in forbidden for node in behind if hasattr(node, "variable")):
        raise Unclear("a parameter is used where it cannot be watched")
    if any(reach.entered_aside(node, follower) for node in behind for follower, _ in node.next_functions):
        raise Unclear("the forward pass takes gradients of its own")


def require_uses_that_vary(model: nn.Module, on: Rows) -> None:
    """An error if rows that use none of the selected parameters show that no row does."""
    if use_order(model, on, dict(model.named_parameters())).fixed:
        raise QualmsError("none of the selected parameters takes part in the forward pass; widen `params`.")


def use_order(model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> UseOrder:
    """The order in which a forward pass over the first row uses the selected parameters."""
    try:
        _, recorder = recorded(model, on.take(slice(0, 1)), Weights.of(selected, model.parameters()), None)
    except Exception:  # a model that cannot be watched does not tell
        return UseOrder([], False)
    return recorder.use_order
