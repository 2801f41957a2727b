"""The input of a forward pass (samples with their perturbed copies), and the pass itself."""

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
    """The input of one forward pass: each sample, followed by its perturbed copies, one row each.

    Attributes:
        batch: all rows; the rows of one sample are consecutive.
        rows_per_sample: the number of rows of a sample: 1 plus the number of perturbed copies.
        embedding_noise: for discrete inputs (token ids), whose embeddings are perturbed instead, a
            function from the shape of an embedded row to noise [rows, *shape]; None for other
            inputs, whose rows already contain the noise.
    """

    batch: Batch
    rows_per_sample: int = 1
    embedding_noise: Callable[[tuple[int, ...]], Tensor] | None = None

    def take(self, index: slice | list[int]) -> "ModelInput":
        """Select some of the rows, with their noise.

        In the result each row counts as a separate sample.
        """
        part = take_samples(self.batch, index)
        noise = self.embedding_noise
        if noise is None:
            return ModelInput(part)

        def noise_of_part(shape: tuple[int, ...]) -> Tensor:
            """Draw the noise of all rows, as always, and select that of the chosen rows."""
            return noise(shape)[index]

        return ModelInput(part, rows_per_sample=1, embedding_noise=noise_of_part)


def rows_to_run_alone(rows: int) -> list[int]:
    """Choose which rows of a batch also run alone, to check that their logits do not change.

    Returns the indices of the middle and the last row; an empty list for a single row.
    """
    if rows < 2:
        return []
    # A set, as the two are equal for two rows.
    return sorted({rows // 2, rows - 1})


def make_model_input(
    batch: Batch,
    smoothing: Smoothing | None,
    numbers: Sequence[int],
    seed: int,
) -> ModelInput:
    """Build the rows of a batch: its samples, each followed by its perturbed copies.

    Discrete inputs (token ids) cannot be perturbed; they are repeated, and the noise is added to
    the output of their embedding.

    Args:
        batch: b samples.
        smoothing: how the samples are perturbed; None for the samples without copies.
        numbers: the number of each sample in the whole data, [b]; its noise follows from this number
            and `seed`.
        seed: the random seed that all samples share.
    """
    if smoothing is None:
        return ModelInput(batch)
    rows_per_sample = smoothing.draws + 1

    def draw_noise(shape: tuple[int, ...]) -> Tensor:
        """Draw the noise of all rows, each of the given shape; zero for the samples themselves."""
        return torch.cat([smoothing.noise(shape, number, seed) for number in numbers])

    # The main input is the first tensor.
    tensors = batch_tensors(batch)
    x, *other_inputs = [t.repeat_interleave(rows_per_sample, dim=0) for t in tensors]
    if not x.is_floating_point():
        return ModelInput(with_tensors(batch, [x, *other_inputs]), rows_per_sample, draw_noise)
    perturbed = x + draw_noise(tuple(x.shape[1:])).to(x)
    return ModelInput(with_tensors(batch, [perturbed, *other_inputs]), rows_per_sample)


def perturbed_in_parts(
    batch: Batch,
    smoothing: Smoothing,
    numbers: Sequence[int],
    seed: int,
    size: int,
) -> Iterator[ModelInput]:
    """Yield what `make_model_input` returns for a batch, but a single sample's rows in parts.

    This is for a sample whose perturbed copies may not all fit into memory; several samples are
    yielded together. The rows of a part count as separate samples.

    Args:
        batch: the samples.
        smoothing: how the samples are perturbed.
        numbers: the number of each sample in the whole data; its noise follows from this number
            and `seed`.
        seed: the random seed that all samples share.
        size: the largest number of rows in a part.
    """
    rows = smoothing.draws + 1
    if num_samples(batch) > 1 or rows <= size:
        yield make_model_input(batch, smoothing, numbers, seed)
        return
    x, *other_inputs = batch_tensors(batch)
    # Token ids are only repeated, which takes little memory, so all rows are made and sliced.
    if not x.is_floating_point():
        all_rows = make_model_input(batch, smoothing, numbers, seed)
        for part in slices(rows, size):
            yield all_rows.take(part)
        return
    # Floats are perturbed part by part.
    for noise in smoothing.noise(tuple(x.shape[1:]), numbers[0], seed).split(size):
        repeated = [t.repeat_interleave(len(noise), dim=0) for t in other_inputs]
        yield ModelInput(with_tensors(batch, [x + noise.to(x), *repeated]))


def wants_channels_last(model_input: ModelInput) -> bool:
    """Whether the input is a batch of images, on which convolutions are faster in channels-last.

    False for a single channel: both memory formats then look alike, and torch would convert back
    and forth.
    """
    x = batch_tensors(model_input.batch)[0]
    return x.ndim == 4 and x.shape[1] > 1 and x.is_floating_point()


def in_channels_last(model_input: ModelInput) -> ModelInput:
    """Convert the rows to channels-last, the memory format in which convolutions are fastest."""
    main_input, *other_inputs = batch_tensors(model_input.batch)
    main_input = main_input.contiguous(memory_format=torch.channels_last)
    batch = with_tensors(model_input.batch, [main_input, *other_inputs])
    return replace(model_input, batch=batch)


def forward_logits(
    model: nn.Module,
    model_input: ModelInput,
    *modes: TorchFunctionMode,
) -> Float[Tensor, "rows classes"]:
    """Run one forward pass and return validated logits.

    The model gets copies of the rows, which it may change in place: the rows are used by other
    passes too, and may be tensors that the user passed.

    Args:
        model: the model, inside `preserve_state`.
        model_input: the rows to run.
        modes: further function modes (torch's hooks on every function call) for the pass; the last
            mode sees each call first.

    Raises:
        QualmsError: if the model fails, or returns anything but finite logits [rows, classes].
    """
    rows = num_samples(model_input.batch)
    noisy_embedding = None
    with ExitStack() as stack:
        if model_input.embedding_noise is not None:
            noisy_embedding = NoisyEmbedding(model_input.embedding_noise)
            stack.enter_context(noisy_embedding)
        stack.enter_context(ContiguousGroupNorm())
        # Without this, torch's derivatives may be wrong for a single image.
        if rows == 1 and torch.is_grad_enabled():
            stack.enter_context(ContiguousBatchNormGrad())
        for mode in modes:
            stack.enter_context(mode)
        # Copied inside the modes, so that a mode sees which tensors are the input.
        copies = [t.clone() for t in batch_tensors(model_input.batch)]
        if noisy_embedding is not None:
            noisy_embedding.ids = copies[0]
        output = call_model(model, with_tensors(model_input.batch, copies))
    if noisy_embedding is not None and not noisy_embedding.done:
        raise QualmsError(
            "x is discrete and no embedding of the model reads it, so it cannot be perturbed; use "
            "regrad+layers, entropy or perturb-theta, or pass the embedded input."
        )
    return validate_logits(output, rows)


@runs_user_code
def call_model(model: nn.Module, batch: Batch) -> Any:
    """Call the model on a batch and return its raw output.

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
        """Make an error that names the shapes and dtypes that the model did not accept."""
        tensor_kinds = [f"{tuple(t.shape)} {t.dtype}" for t in batch_tensors(batch)]
        shapes = ", ".join(tensor_kinds).replace("torch.", "")
        return QualmsError(f"the model does not accept x of {shapes}: {reason(error)}.")

    with explain_failure(explain, let_through=(NotBatchable,)), isolate_forward(model):
        if isinstance(batch, Tensor):
            return model(batch)
        if isinstance(batch, dict):
            return model(**batch)
        return model(*batch)


def logits_in(output: Any) -> Tensor:
    """Find the logits in a model's output.

    They are the output itself, its attribute or key `logits`, or the first item of a tuple or list.

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
    """Find the logits in a model's output and check that they are finite and [rows, classes].

    Args:
        output: what the model returned.
        rows: the number of rows that it was called with.

    Raises:
        QualmsError: if their shape differs, or some are NaN or infinite.
    """
    logits = logits_in(output)
    shape = tuple(logits.shape)
    if logits.ndim > 2 and shape[0] == rows:
        raise QualmsError(
            f"the model returns logits of shape {shape}, so it predicts at many positions; pass "
            "the axis of the classes to qualms.Scorer as class_dim=: -1 for language models, 1 for "
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
