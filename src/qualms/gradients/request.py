"""The request to an engine: samples, directions, and how their gradients are computed."""

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
    """A batch of samples, and the gradients Jᵀv that are wanted of them.

    Args:
        model: the model, inside `preserve_state`.
        batch: the samples.
        numbers: the number of each sample in the whole data, [b]: with `settings.seed`, the random
            seed of its noise.
        settings: how gradients are computed.
        directions: the directions v in logit space.
        smoothing: the perturbed copies that gradients are averaged over; None for the plain
            gradient.
        gram: whether to compute inner products of the gradients in place of norms.
        known_logits: the logits [b, c] of the samples from other batches, with which an engine
            compares the logits that it computes; None if there are none.
        smallest_lambda: the smallest λ among the scores that use these gradients; None if a score
            weights all layers equally.
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
        """The parameters whose gradients are wanted, by name."""
        return selected_parameters(self.model, self.settings.params)

    @property
    def sketch(self) -> Sketch:
        """The options of a sketch, the default ones if none were given."""
        return self.settings.sketch or Sketch()

    @property
    def kind(self) -> Kind:
        """What is measured: ‖g‖ (`l2`), Σ|g| (`l1`), or inner products (`gram`)."""
        return "gram" if self.gram else self.settings.norm

    @property
    def num_samples(self) -> int:
        """The number of samples in the batch."""
        return num_samples(self.batch)

    @property
    def rows_per_sample(self) -> int:
        """The number of rows that run for each sample: the sample itself and its perturbed copies."""
        return self.smoothing.draws + 1 if self.smoothing else 1

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """The names, shapes (without the sample axis) and types of the tensors, as a cache key."""
        return shapes_of(self.batch)

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return batch_tensors(self.batch)[0].device

    @cached_property
    def budget(self) -> int:
        """Bytes that the work on one chunk of samples may take."""
        return self.settings.budget or default_budget(self.device)

    @cached_property
    def limit(self) -> int:
        """Bytes that the smallest part of the work must fit: the user's budget, else all free memory."""
        return self.settings.budget or free_bytes(self.device)

    def take(self, some: slice | list[int]) -> "GradientRequest":
        """The same request for some of the samples, with the directions of these samples.

        Args:
            some: the indices of the samples. Must be a slice if directions differ from sample to
                sample.
        """
        numbers = self.numbers[some] if isinstance(some, slice) else [self.numbers[i] for i in some]
        known_logits = None if self.known_logits is None else self.known_logits[some]
        directions = self.directions
        if isinstance(some, slice):
            directions = directions.of_samples(some)
        return replace(
            self,
            batch=take_samples(self.batch, some),
            numbers=numbers,
            known_logits=known_logits,
            directions=directions,
        )

    def with_directions_of(self, part: slice) -> "GradientRequest":
        """The same request and batch, but with the directions of some of the samples."""
        directions = self.directions.of_samples(part)
        return self if directions is self.directions else replace(self, directions=directions)

    def rows(self, part: slice) -> ModelInput:
        """The rows of some of the samples: each sample followed by its perturbed copies."""
        samples = take_samples(self.batch, part)
        return make_model_input(samples, self.smoothing, self.numbers[part], self.settings.seed)
