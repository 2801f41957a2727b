"""What a model runs on, samples with their perturbed copies, and forward passes over it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError, explain_failure, reason
from qualms.gradients.batch import (
    Batch,
    NotBatchable,
    batch_tensors,
    num_samples,
    slices,
    take_samples,
    with_tensors,
)
from qualms.gradients.fallback import runs_user_code
from qualms.gradients.function_modes import (
    ContiguousBatchNormGrad,
    ContiguousGroupNorm,
    NoisyEmbedding,
)
from qualms.gradients.isolation import isolate_forward
from qualms.gradients.settings import Smoothing


@dataclass(frozen=True)
class ModelInput:
    """What one forward pass runs on: for each sample a group of rows, the sample itself first.

    Attributes:
        batch: all rows, those of a sample one after the other.
        rows_per_sample: the sample and its perturbed copies.
        embedding_noise: for discrete inputs, which cannot be perturbed: maps the shape of an
            embedded row to noise [rows, *shape].
    """

    batch: Batch
    rows_per_sample: int = 1
    embedding_noise: Callable[[tuple[int, ...]], Tensor] | None = None

    def take(self, index: slice | list[int]) -> "ModelInput":
        """Some of the rows, each as a sample of its own."""
        part = take_samples(self.batch, index)
        noise = self.embedding_noise
        if noise is None:
            return ModelInput(part)

        def noise_of_part(shape: tuple[int, ...]) -> Tensor:
            return noise(shape)[index]

        return ModelInput(part, 1, noise_of_part)


def some_alone(rows: int) -> list[int]:
    """The rows that are also run on their own as a check: a few, spread over all of them."""
    return sorted({rows // 2, rows - 1}) if rows > 1 else []


def make_model_input(
    batch: Batch,
    smoothing: Smoothing | None,
    numbers: Sequence[int],
    seed: int,
) -> ModelInput:
    """The rows of a batch: its samples, each followed by its perturbed copies.

    Discrete inputs (token ids) cannot be perturbed; their rows repeat, and the noise is added to
    the output of their embedding.

    Args:
        batch: b samples.
        smoothing: how they are perturbed; None for the samples alone.
        numbers: of the samples, which decide their noise together with the seed.
        seed: of the noise.
    """
    if smoothing is None:
        return ModelInput(batch)
    rows = smoothing.draws + 1

    def noise(shape: tuple[int, ...]) -> Tensor:
        return torch.cat([smoothing.noise(shape, number, seed) for number in numbers])

    repeated = [t.repeat_interleave(rows, dim=0) for t in batch_tensors(batch)]
    first = repeated[0]
    if not first.is_floating_point():
        return ModelInput(with_tensors(batch, repeated), rows, noise)
    perturbed = first + noise(tuple(first.shape[1:])).to(first)
    return ModelInput(with_tensors(batch, [perturbed, *repeated[1:]]), rows)


def perturbed_in_parts(
    batch: Batch,
    smoothing: Smoothing,
    numbers: Sequence[int],
    seed: int,
    size: int,
) -> Iterator[ModelInput]:
    """The same rows; those of a single sample come in parts if they are more than `size`.

    Args:
        batch: the samples.
        smoothing: how they are perturbed.
        numbers: of the samples, which decide their noise together with the seed.
        seed: of the noise.
        size: the most rows of a part.
    """
    rows = smoothing.draws + 1
    if num_samples(batch) > 1 or rows <= size:
        yield make_model_input(batch, smoothing, numbers, seed)
        return
    x, *others = batch_tensors(batch)
    if not x.is_floating_point():
        whole = make_model_input(batch, smoothing, numbers, seed)
        for part in slices(rows, size):
            yield whole.take(part)
        return
    for noise in smoothing.noise(tuple(x.shape[1:]), numbers[0], seed).split(size):
        repeated = [t.repeat_interleave(len(noise), dim=0) for t in others]
        yield ModelInput(with_tensors(batch, [x + noise.to(x), *repeated]))


def wants_channels_last(model_input: ModelInput) -> bool:
    """Whether these are images that convolutions run faster on in channels-last format.

    With a single channel both formats look alike, and torch would convert back and forth.
    """
    x = batch_tensors(model_input.batch)[0]
    return x.ndim == 4 and x.shape[1] > 1 and x.is_floating_point()


def in_channels_last(model_input: ModelInput) -> ModelInput:
    """The same rows in the memory format in which convolutions are fastest."""
    first, *others = batch_tensors(model_input.batch)
    first = first.contiguous(memory_format=torch.channels_last)
    return replace(model_input, batch=with_tensors(model_input.batch, [first, *others]))


def forward_logits(
    model: nn.Module,
    model_input: ModelInput,
    *modes: TorchFunctionMode,
) -> Float[Tensor, "rows classes"]:
    """One forward pass.

    The model gets copies, which it may change: the rows serve other passes too, and may be the
    user's own tensors.

    Args:
        model: inside `preserve_state`.
        model_input: the rows.
        modes: further function modes for the pass; the last one sees each call first.

    Raises:
        QualmsError: if the model fails, or returns something else than finite logits.
    """
    rows = num_samples(model_input.batch)
    noisy = None
    with ExitStack() as stack:
        if model_input.embedding_noise is not None:
            noisy = stack.enter_context(NoisyEmbedding(model_input.embedding_noise))
        stack.enter_context(ContiguousGroupNorm())
        if rows == 1 and torch.is_grad_enabled():
            stack.enter_context(ContiguousBatchNormGrad())
        for mode in modes:
            stack.enter_context(mode)
        # Inside the modes, which see where the copies come from.
        copies = [t.clone() for t in batch_tensors(model_input.batch)]
        if noisy is not None:
            noisy.ids = copies[0]
        output = call_model(model, with_tensors(model_input.batch, copies))
    if noisy is not None and not noisy.done:
        raise QualmsError(
            "x is discrete and no embedding of the model reads it, so it cannot be perturbed; use "
            "regrad+layers, entropy or perturb-theta, or pass the embedded input."
        )
    return validate_logits(output, rows)


@runs_user_code
def call_model(model: nn.Module, batch: Batch) -> Any:
    """The model's raw output for a batch.

    Raises:
        QualmsError: if the batch is on another device than the model, or the model raises.
    """
    parameter = next(model.parameters(), None)
    device = batch_tensors(batch)[0].device
    if parameter is not None and parameter.device != device:
        raise QualmsError(
            f"the model's parameters are on {parameter.device}, but x is on {device}; move both to "
            "one device."
        )

    def explain(error: Exception) -> QualmsError:
        kinds = [f"{tuple(t.shape)} {t.dtype}" for t in batch_tensors(batch)]
        shapes = ", ".join(kinds).replace("torch.", "")
        return QualmsError(f"the model does not accept x of {shapes}: {reason(error)}.")

    with explain_failure(explain, let_through=(NotBatchable,)), isolate_forward(model):
        if isinstance(batch, Tensor):
            return model(batch)
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch)


def logits_in(output: Any) -> Tensor:
    """The logits in a model's output.

    They are the output itself, its `.logits`, or the first element of a tuple.

    Raises:
        QualmsError: if there is no float tensor in any of these places.
    """
    logits = getattr(output, "logits", output)
    if isinstance(logits, dict):
        logits = logits.get("logits")
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise QualmsError(
            f"the model returns a {type(output).__name__} without logits; it must return a float "
            "tensor, an object with `.logits`, or a tuple that starts with them."
        )
    return logits


def validate_logits(output: Any, rows: int) -> Float[Tensor, "rows classes"]:
    """The logits in a model's output, one row for each sample.

    Raises:
        QualmsError: if their shape is another one, or some are NaN or infinite.
    """
    logits = logits_in(output)
    shape = tuple(logits.shape)
    if logits.ndim > 2 and shape[0] == rows:
        raise QualmsError(
            f"the model returns logits of shape {shape}, so it predicts at many positions; pass "
            "class_dim= to qualms.Scorer, the axis of the classes: -1 for language models, 1 for "
            "segmentation."
        )
    if logits.ndim != 2 or shape[0] != rows or shape[1] < 2:
        raise QualmsError(
            f"the model returns logits of shape {shape} for a batch of {rows}; it must return "
            f"({rows}, classes) with two or more classes (inputs are also run one at a time)."
        )
    finite = torch.isfinite(logits.detach()).all(dim=1)
    if not bool(finite.all()):
        raise QualmsError(
            f"the logits of input {int((~finite).nonzero()[0])} of the batch contain NaN or "
            "infinity; check the model's weights and the input's scaling."
        )
    return logits
