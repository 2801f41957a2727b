"""A model at other weights than its own, which it has back afterwards."""

import torch
from torch import Tensor, nn

from qualms.gradients.model_input import ModelInput, forward_logits


class LogitsAt:
    """The checked logits of a model at other parameters and buffers, given by name.

    Tied ones are put in all their places here, each place once: torch, where it ties them, goes by
    names, and leaves other weights in a module that has two names.
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        self.inner, self.places = _Logits(model), list[tuple[str, str]]()
        for owner, m in self.inner.named_modules():
            for every in (m.named_parameters, m.named_buffers):
                held = every(owner, recurse=False, remove_duplicate=False)
                self.places += [(place, names[id(t)]) for place, t in held]

    def __call__(self, values: dict[str, Tensor], on: ModelInput) -> Tensor:
        """The logits of these rows; what has no value here keeps its own."""
        there = {place: values[name] for place, name in self.places if name in values}
        logits: Tensor = torch.func.functional_call(self.inner, there, (on,), tie_weights=False)
        return logits


class _Logits(nn.Module):
    """A model that takes rows and returns checked logits, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = False

    def forward(self, on: ModelInput) -> Tensor:
        """The logits of these rows."""
        return forward_logits(self.model, on)
