"""One forward pass over rows, watched by a recorder."""

from collections.abc import Iterable

from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.autograd import NO_PATH
from qualms.gradients.guard import all_parameters_differentiable
from qualms.gradients.inputs import Unclear, count, tensors
from qualms.gradients.rows import Rows, logits_of
from qualms.gradients.watch.meetings import TwinPasses
from qualms.gradients.watch.record import Recorder
from qualms.gradients.watch.weights import Weights, leaves_behind


def recorded(model: nn.Module, on: Rows, weights: Weights, twins: TwinPasses | None) -> tuple[Tensor, Recorder]:
    """One watched forward pass, in which every parameter is known by its stand-in."""
    recorder = Recorder(weights, tensors(on.batch), count(on.batch), on.per_input, twins)
    with all_parameters_differentiable(model):
        logits = logits_of(model, on, recorder)
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        require_no_bypass(logits, model.parameters())
    return logits, recorder


def require_no_bypass(logits: Tensor, parameters: Iterable[Tensor]) -> None:
    """A parameter that is used where function modes do not look (a script, an autograd function) is in the graph."""
    if not leaves_behind([logits.grad_fn]).isdisjoint(map(id, parameters)):
        raise Unclear("a parameter is used where it cannot be watched")


def first_use(model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> list[str]:
    """The names of the selected parameters in the order in which a forward pass first uses them."""
    try:
        _, recorder = recorded(model, on.take(slice(0, 1)), Weights.of(selected, model.parameters()), None)
    except Exception:  # a model that cannot be watched has its parameters in the order of registration
        return []
    return recorder.first_use
