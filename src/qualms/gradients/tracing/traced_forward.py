"""Runs the forward pass of a model under a recorder."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import NotBatchable, batch_tensors, num_samples
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.single_sample import require_differentiable
from qualms.gradients.tracing.factors import merge_slices
from qualms.gradients.tracing.param_use import (
    InnerNodes,
    TracePair,
    UseOrder,
    Weights,
    nodes_behind,
)
from qualms.gradients.tracing.recorder import Recorder
from qualms.gradients.tracing.sample_ids import resolve_sample_ids


def trace_forward(
    model: nn.Module,
    model_input: ModelInput,
    weights: Weights,
    trace_pair: TracePair | None,
) -> tuple[Tensor, Recorder]:
    """Run a model's forward pass under a recorder, with leaves in place of its parameters.

    Args:
        model: the model to run.
        model_input: the batch to run the model on.
        weights: the leaves that replace the parameters.
        trace_pair: the same pass traced on one row and on two; None for a single row, and while
            these two are traced.

    Returns:
        The logits [rows, classes], and the recorder with the gradient factors of all parameters.

    Raises:
        QualmsError: if the logits do not depend on any parameter.
        NotBatchable: if the rows cannot be separated, or a parameter is used where the recorder
            does not see it.
    """
    # The batch has perturbed copies of the samples too, as rows of their own.
    num_rows = num_samples(model_input.batch)
    recorder = Recorder(
        weights,
        inputs=batch_tensors(model_input.batch),
        num_rows=num_rows,
        rows_per_sample=model_input.rows_per_sample,
        trace_pair=trace_pair,
    )
    # TorchScript may read values, and branch on them, where the recorder does not see it.
    recorder.reads_values = any(map(_has_script, model.modules()))
    with all_parameters_differentiable(model):
        logits = forward_logits(model, model_input, recorder)
        require_differentiable(logits)
        require_no_bypass(
            logits, [*model.parameters(), *weights.leaves.values()], recorder.inner_nodes
        )
    samples_in_batch = num_rows // model_input.rows_per_sample
    recorder.factors += resolve_sample_ids(recorder.unbatched_ops, logits, samples_in_batch)
    recorder.factors = merge_slices(recorder.factors, weights)
    return logits, recorder


def record_forward(
    model: nn.Module, model_input: ModelInput, selected: dict[str, Tensor]
) -> Recorder:
    """Trace a forward pass on one row or two, with new leaves in place of the parameters.

    Args:
        model: the model to run.
        model_input: a batch of one row, or two.
        selected: the parameters whose gradients are computed, by name; leaves replace them.

    Returns:
        The recorder, with all uses of the parameters, shapes of results and gradient factors.
    """
    weights = Weights.of(selected, model.parameters())
    _, recorder = trace_forward(model, model_input, weights, trace_pair=None)
    return recorder


def _has_script(module: nn.Module) -> bool:
    """Whether a module or one of its attributes is TorchScript, whose inside cannot be traced."""
    scripts = (torch.jit.ScriptModule, torch.jit.ScriptFunction)
    return any(isinstance(value, scripts) for value in (module, *vars(module).values()))


def require_no_bypass(
    logits: Tensor, parameters: Iterable[Tensor], inner_nodes: InnerNodes
) -> None:
    """Raise NotBatchable if the logits depend on a parameter by more than traced operations.

    The recorder, a function mode, does not see inside TorchScript, an autograd function, or a
    gradient taken in the forward pass, but all of these show in the autograd graph.

    Args:
        logits: the logits, with their graph.
        parameters: the parameters, and the leaves that replaced them.
        inner_nodes: which nodes of the graph may only be entered through an operation's result.
    """
    # Recorded uses take detached copies, so no path from the logits may end at a parameter.
    parameter_ids = {id(parameter) for parameter in parameters}
    nodes = nodes_behind([logits.grad_fn])
    for node in nodes:
        # Only the nodes of leaves have a `variable`.
        if id(getattr(node, "variable", None)) in parameter_ids:
            raise NotBatchable("a parameter is used where it cannot be traced")
    for node in nodes:
        for next_node, _ in node.next_functions:
            if inner_nodes.bypasses_result(node, next_node):
                raise NotBatchable("the forward pass computes gradients itself")


def require_uses_that_vary(model: nn.Module, model_input: ModelInput) -> None:
    """Raise QualmsError unless the parameters that a forward pass uses may depend on the input.

    The caller has seen rows that use none of the selected parameters. If every pass uses the same
    parameters, other rows use none of them either.

    Args:
        model: the model to run.
        model_input: a batch, of which the first row is traced.
    """
    if use_order(model, model_input, dict(model.named_parameters())).fixed:
        raise QualmsError(
            "the forward pass uses none of the selected parameters; select more with `params`."
        )


def use_order(model: nn.Module, model_input: ModelInput, selected: dict[str, Tensor]) -> UseOrder:
    """Find the order in which a forward pass over the first row uses the selected parameters.

    Args:
        model: the model to run.
        model_input: a batch, of which the first row is run.
        selected: the selected parameters, by name.

    Returns:
        The order; empty and not fixed if the model cannot be traced, or the first row uses none of
        the selected parameters.
    """
    first_row = model_input.take(slice(0, 1))
    unknown = UseOrder([], fixed=False)
    try:
        recorder = attempt(
            "trace the first sample", partial(record_forward, model, first_row, selected)
        )
    # The first row uses none of the selected parameters.
    except QualmsError:
        return unknown
    return unknown if isinstance(recorder, Fallback) else recorder.use_order
