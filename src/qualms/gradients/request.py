"""What is asked of an engine: a batch, directions, and how their gradients are computed."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from qualms.gradients.batch import Batch, batch_tensors, num_samples, shapes_of, take_samples
from qualms.gradients.directions import Directions
from qualms.gradients.layers import selected_parameters
from qualms.gradients.memory import default_budget, free_bytes
from qualms.gradients.model_input import ModelInput, make_model_input
from qualms.gradients.settings import Kind, Settings, Sketch, Smoothing


@dataclass(frozen=True)
class GradientRequest:
    """A batch whose gradients along some directions are wanted.

    Args:
        model: the model, inside `preserve_state`.
        batch: the samples.
        numbers: of the samples, which decide their random draws.
        settings: how gradients are computed.
        directions: v of each gradient Jᵀv.
        smoothing: the perturbed copies that gradients are averaged over; None for the plain
            gradient.
        gram: inner products between the directions in place of norms.
        known_logits: the logits [b, c] of the samples from batches of other samples, if they are
            known: an engine compares its own with them.
        smallest_lambda: the least λ by which any score of these gradients weights early layers
            down; None if one of them takes all layers alike.
    """

    model: nn.Module
    batch: Batch
    numbers: Sequence[int]
    settings: Settings
    directions: Directions
    smoothing: Smoothing | None = None
    gram: bool = False
    known_logits: Tensor | None = None
    smallest_lambda: float | None = None

    @cached_property
    def selected(self) -> dict[str, Tensor]:
        """The parameters that count, by name."""
        return selected_parameters(self.model, self.settings.params)

    @property
    def sketch(self) -> Sketch:
        """The options of a sketch, the default ones if none were given."""
        return self.settings.sketch or Sketch()

    @property
    def kind(self) -> Kind:
        """Of the values: ‖g‖, Σ|g|, or inner products."""
        return "gram" if self.gram else self.settings.norm

    @property
    def num_samples(self) -> int:
        """The number of samples."""
        return num_samples(self.batch)

    @property
    def rows_per_sample(self) -> int:
        """How many rows run for each sample: itself and its perturbed copies."""
        return self.smoothing.draws + 1 if self.smoothing else 1

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """What samples of one kind share: the names, shapes and types of their tensors."""
        return shapes_of(self.batch)

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return batch_tensors(self.batch)[0].device

    @cached_property
    def budget(self) -> int:
        """Bytes that the work on one chunk of samples may take."""
        return self.settings.budget or default_budget(self.device)

    @cached_property
    def limit(self) -> int:
        """Bytes that the smallest part of the work must fit: the budget, else all that is free."""
        return self.settings.budget or free_bytes(self.device)

    def take(self, some: slice | list[int]) -> "GradientRequest":
        """The same request for some of the samples; its directions are those of these samples.

        Args:
            some: the samples, by place. Directions that differ from sample to sample can be taken
                by a slice only.
        """
        numbers = self.numbers[some] if isinstance(some, slice) else [self.numbers[i] for i in some]
        known = None if self.known_logits is None else self.known_logits[some]
        directions = self.directions
        if isinstance(some, slice):
            directions = directions.of_samples(some)
        return replace(
            self,
            batch=take_samples(self.batch, some),
            numbers=numbers,
            known_logits=known,
            directions=directions,
        )

    def with_directions_of(self, part: slice) -> "GradientRequest":
        """The same request with the directions of some of the samples; its batch stays."""
        directions = self.directions.of_samples(part)
        return self if directions is self.directions else replace(self, directions=directions)

    def rows(self, part: slice) -> ModelInput:
        """The rows of some of the samples."""
        samples = take_samples(self.batch, part)
        return make_model_input(samples, self.smoothing, self.numbers[part], self.settings.seed)
