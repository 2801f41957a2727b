"""One batch whose gradients are wanted, as every engine takes it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from qualms.gradients.batch import Batch, batch_tensors, num_samples, shapes_of, take_samples
from qualms.gradients.directions import Directions
from qualms.gradients.layers import selected_parameters
from qualms.gradients.memory import default_budget, free_bytes
from qualms.gradients.model_input import ModelInput, make_model_input
from qualms.gradients.settings import Settings
from qualms.gradients.smoothing import Smoothing


@dataclass(frozen=True)
class GradientRequest:
    """A batch, the directions along which its gradients are taken, and the perturbations they are
    averaged over.

    `numbers` are the inputs' own, which decide their draws. The model is under `untouched`.
    """

    model: nn.Module
    batch: Batch
    numbers: Sequence[int]
    settings: Settings
    directions: Directions
    smoothing: Smoothing | None = None

    @cached_property
    def selected(self) -> dict[str, Tensor]:
        """The parameters that count."""
        return selected_parameters(self.model, self.settings.params)

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        return num_samples(self.batch)

    @property
    def rows_per_sample(self) -> int:
        """How many rows run for each input: itself and its perturbed copies."""
        return self.smoothing.draws + 1 if self.smoothing else 1

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """What inputs of the same kind have in common: the names, shapes and types of their
        tensors.
        """
        return shapes_of(self.batch)

    @cached_property
    def budget(self) -> int:
        """Bytes that the work on one chunk of inputs may take."""
        return self.settings.budget or default_budget(batch_tensors(self.batch)[0].device)

    @cached_property
    def limit(self) -> int:
        """Bytes that the smallest part of the work must fit: the budget if one was given, else all
        that is free.
        """
        return self.settings.budget or free_bytes(batch_tensors(self.batch)[0].device)

    def along_own(self, part: slice) -> "GradientRequest":
        """The same job for some of the inputs, whose rows are at hand, with the directions of these
        inputs alone.
        """
        directions = self.directions.of_inputs(part)
        return self if directions is self.directions else replace(self, directions=directions)

    def rows(self, part: slice) -> ModelInput:
        """The rows of some of the inputs."""
        return make_model_input(
            take_samples(self.batch, part), self.smoothing, self.numbers[part], self.settings.seed
        )
