"""One forward pass over rows, watched by a recorder."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import NotBatchable, batch_tensors, num_samples
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.single_sample import NO_PATH
from qualms.gradients.tracing.op_trace import TracePair
from qualms.gradients.tracing.param_use import Reach, UseOrder, Weights, nodes_behind
from qualms.gradients.tracing.recorder import Recorder
from qualms.gradients.tracing.sample_ids import resolve_sample_ids
from qualms.gradients.tracing.sample_slices import joined


def trace_forward(
    model: nn.Module, on: ModelInput, weights: Weights, twins: TracePair | None
) -> tuple[Tensor, Recorder]:
    """One watched forward pass, in which every parameter is known by its stand-in."""
    recorder = Recorder(
        weights, batch_tensors(on.batch), num_samples(on.batch), on.rows_per_sample, twins
    )
    recorder.reads_values = any(map(_has_script, model.modules()))
    with all_parameters_differentiable(model):
        logits = forward_logits(model, on, recorder)
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        require_no_bypass(logits, [*model.parameters(), *weights.leaves.values()], recorder.reach)
    recorder.pieces += resolve_sample_ids(
        recorder.scattered, logits, recorder.rows // recorder.rows_per_sample
    )
    recorder.pieces = joined(recorder.pieces, weights)
    return logits, recorder


def _has_script(module: nn.Module) -> bool:
    """What a script reads is not seen."""
    held = (module, *vars(module).values())
    return any(isinstance(one, (torch.jit.ScriptModule, torch.jit.ScriptFunction)) for one in held)


def require_no_bypass(logits: Tensor, parameters: Iterable[Tensor], reach: Reach) -> None:
    """No gradient may reach a parameter, or its stand-in, but through an operation that a rule has
    seen.

    What function modes do not see (a script, an autograd function, a gradient inside the forward
    pass) is in the graph.
    """
    forbidden, behind = set(map(id, parameters)), nodes_behind([logits.grad_fn])
    if any(id(node.variable) in forbidden for node in behind if hasattr(node, "variable")):
        raise NotBatchable("a parameter is used where it cannot be watched")
    if any(
        reach.entered_aside(node, follower)
        for node in behind
        for follower, _ in node.next_functions
    ):
        raise NotBatchable("the forward pass takes gradients of its own")


def require_uses_that_vary(model: nn.Module, on: ModelInput) -> None:
    """An error if rows that use none of the selected parameters show that no row does."""
    if use_order(model, on, dict(model.named_parameters())).fixed:
        raise QualmsError(
            "none of the selected parameters takes part in the forward pass; widen `params`."
        )


def use_order(model: nn.Module, on: ModelInput, selected: dict[str, Tensor]) -> UseOrder:
    """The order in which a forward pass over the first row uses the selected parameters."""
    try:
        _, recorder = trace_forward(
            model, on.take(slice(0, 1)), Weights.of(selected, model.parameters()), None
        )
    except Exception:  # a model that cannot be watched does not tell
        return UseOrder([], False)
    return recorder.use_order
