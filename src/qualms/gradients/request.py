"""The request to an engine: samples, directions, and how their gradients are computed."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from qualms.gradients.batch import Batch, batch_tensors, num_samples, shapes_of, take_samples
from qualms.gradients.directions import Directions
from qualms.gradients.layers import select_parameters
from qualms.gradients.memory import default_budget, free_bytes
from qualms.gradients.model_input import ModelInput, make_model_input
from qualms.gradients.settings import Kind, Settings, Sketch, Smoothing


@dataclass(frozen=True)
class GradientRequest:
    """A batch of samples, and the gradients Jᵀv that are wanted of them.

    Args:
        model: the model, inside `preserve_state`.
        batch: the samples.
        numbers: the number of each sample in the whole data, [b]; its noise follows from this number
            and `settings.seed`.
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
        return select_parameters(self.model, self.settings.params)

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
        """The number of rows that run for each sample: 1 plus the number of perturbed copies."""
        return self.smoothing.draws + 1 if self.smoothing else 1

    @property
    def shapes(self) -> tuple[Hashable, ...]:
        """The names, shapes without sample axis and dtypes of the batch's tensors, as a cache key."""
        return shapes_of(self.batch)

    @property
    def device(self) -> torch.device:
        """The device of the samples."""
        return batch_tensors(self.batch)[0].device

    @cached_property
    def budget(self) -> int:
        """The bytes that the work on one chunk of samples may take."""
        return self.settings.budget or default_budget(self.device)

    @cached_property
    def limit(self) -> int:
        """The bytes that the smallest part of the work may take: the user's budget, or all free ones."""
        return self.settings.budget or free_bytes(self.device)

    def take(self, some: slice | list[int]) -> "GradientRequest":
        """Make the same request for some of the samples, with the directions of these samples.

        Args:
            some: the indices of the samples. Must be a slice if directions differ from sample to
                sample.
        """
        known_logits = None if self.known_logits is None else self.known_logits[some]
        numbers: Sequence[int]
        if isinstance(some, slice):
            numbers = self.numbers[some]
            directions = self.directions.of_samples(some)
        else:
            numbers = [self.numbers[i] for i in some]
            directions = self.directions
        return replace(
            self,
            batch=take_samples(self.batch, some),
            numbers=numbers,
            known_logits=known_logits,
            directions=directions,
        )

    def with_directions_of(self, part: slice) -> "GradientRequest":
        """Narrow the directions to those of some of the samples; the batch stays whole.

        For engines that are given the rows of these samples apart from the request.

        Args:
            part: the indices of the samples.
        """
        directions = self.directions.of_samples(part)
        return self if directions is self.directions else replace(self, directions=directions)

    def make_rows(self, part: slice) -> ModelInput:
        """Build the rows of some of the samples: each sample followed by its perturbed copies."""
        samples = take_samples(self.batch, part)
        return make_model_input(samples, self.smoothing, self.numbers[part], self.settings.seed)
