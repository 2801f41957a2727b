"""The rows that a model runs on, inputs with their perturbed copies, and forward passes over them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.batch import (
    Batch,
    batch_tensors,
    call_model,
    checked_logits,
    num_samples,
    take_samples,
    with_tensors,
)
from qualms.gradients.smoothing import Smoothing


@dataclass(frozen=True)
class ModelInput:
    """What the model runs on: for each input a group of rows, the first of them the input itself."""

    batch: Batch
    rows_per_sample: int = 1
    embedding_noise: Callable[[tuple[int, ...]], Tensor] | None = None

    def take(self, index: slice | list[int]) -> "ModelInput":
        """Some of the rows, each on its own."""
        noise = self.embedding_noise
        return ModelInput(
            take_samples(self.batch, index),
            1,
            None if noise is None else lambda shape: noise(shape)[index],
        )


def some_alone(rows: int) -> list[int]:
    """The numbers of rows that are run by themselves, too: a few, spread over all of them."""
    return sorted({rows // 2, rows - 1}) if rows > 1 else []


def make_model_input(
    batch: Batch, smoothing: Smoothing | None, numbers: Sequence[int], seed: int
) -> ModelInput:
    """The rows of a batch whose inputs have these numbers, which decide their draws.

    Discrete inputs (token ids) cannot be perturbed; their rows repeat, and the noise goes to the
    embeddings' output.
    """
    if smoothing is None:
        return ModelInput(batch)
    x = batch_tensors(batch)[0]
    rows_per_sample = smoothing.draws + 1

    def noise(shape: tuple[int, ...]) -> Tensor:
        return torch.cat([smoothing.noise(shape, number, seed) for number in numbers])

    repeated = with_tensors(
        batch, (t.repeat_interleave(rows_per_sample, dim=0) for t in batch_tensors(batch))
    )
    if not x.is_floating_point():
        return ModelInput(repeated, rows_per_sample, noise)
    first, *others = batch_tensors(repeated)
    return ModelInput(
        with_tensors(batch, [first + noise(tuple(x.shape[1:])).to(first), *others]), rows_per_sample
    )


def perturbed_in_parts(
    batch: Batch, smoothing: Smoothing, numbers: Sequence[int], seed: int, size: int
) -> Iterator[ModelInput]:
    """The same rows; those of a single input, if they are too many, so many at a time, each on its
    own.

    Args:
        batch: the inputs.
        smoothing: how they are perturbed.
        numbers: of the inputs, which decide their draws.
        seed: decides the draws, too.
        size: rows at a time.
    """
    rows_per_sample = smoothing.draws + 1
    if num_samples(batch) > 1 or rows_per_sample <= size:
        yield make_model_input(batch, smoothing, numbers, seed)
        return
    x, *others = batch_tensors(batch)
    if not x.is_floating_point():
        whole = make_model_input(batch, smoothing, numbers, seed)
        yield from (
            whole.take(slice(start, start + size)) for start in range(0, rows_per_sample, size)
        )
        return
    for noise in smoothing.noise(tuple(x.shape[1:]), numbers[0], seed).split(size):
        beside = (t.repeat_interleave(len(noise), dim=0) for t in others)
        yield ModelInput(with_tensors(batch, [x + noise.to(x), *beside]))


def wants_channels_last(on: ModelInput) -> bool:
    """Images; with a single channel both formats look alike, and torch would go back and forth
    between them.
    """
    x = batch_tensors(on.batch)[0]
    return x.ndim == 4 and x.shape[1] > 1 and x.is_floating_point()


def in_channels_last(on: ModelInput) -> ModelInput:
    """The same rows in the memory format in which convolutions are fastest."""
    first, *others = batch_tensors(on.batch)
    first = first.contiguous(memory_format=torch.channels_last)
    return replace(on, batch=with_tensors(on.batch, [first, *others]))


def forward_logits(
    model: nn.Module, on: ModelInput, *modes: TorchFunctionMode
) -> Float[Tensor, "rows classes"]:
    """One forward pass over the rows, under further function modes (the last one given sees each
    call first).

    The model gets copies, which it may change: the rows serve other passes too, and may be the
    user's own tensors.
    """
    with ExitStack() as stack:
        noisy = None
        if on.embedding_noise is not None:
            noisy = stack.enter_context(NoisyEmbedding(on.embedding_noise))
        stack.enter_context(PlainGroupNorm())
        if num_samples(on.batch) == 1 and torch.is_grad_enabled():
            stack.enter_context(SoundBatchNorm())
        for mode in modes:
            stack.enter_context(mode)
        batch = with_tensors(
            on.batch, [t.clone() for t in batch_tensors(on.batch)]
        )  # modes see where these come from
        if noisy is not None:
            noisy.ids = batch_tensors(batch)[0]
        output = call_model(model, batch)
    if noisy is not None and not noisy.done:
        raise QualmsError(
            "x is discrete and no embedding of the model reads it, so there is nothing to perturb; "
            "use regrad+layers, entropy or perturb-theta, or pass the embedded input."
        )
    return checked_logits(output, num_samples(on.batch))


class NoisyEmbedding(TorchFunctionMode):
    """Adds noise to the output of the first embedding that reads the input itself."""

    def __init__(self, noise: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.noise, self.done = noise, False
        self.ids: Tensor | None = None  # what the model is called with

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.done or not getattr(func, "__name__", "").startswith("embedding"):
            return out
        for index in (*args, *(kwargs or {}).values()):
            axis = self._rows_axis(index)
            if axis is not None:
                self.done = True
                shape = tuple(n for i, n in enumerate(out.shape) if i != axis)
                return out + self.noise(shape).to(out).movedim(0, axis)
        return out

    def _rows_axis(self, index: Any) -> int | None:
        """The axis of `index` that counts the rows, if `index` is the input itself, whole or a view
        of it.
        """
        if not isinstance(index, Tensor) or index.is_floating_point() or self.ids is None:
            return None
        index, ids = _unwrapped(index), _unwrapped(self.ids)
        if index.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
            return None
        axes = zip(index.shape, index.stride(), strict=True)
        return next(
            (i for i, axis in enumerate(axes) if axis == (ids.shape[0], ids.stride(0))), None
        )


def _unwrapped(t: Tensor) -> Tensor:
    """The tensor under the wrappers of forward-mode differentiation."""
    while is_functorch_wrapped_tensor(t):
        t = get_unwrapped(t)
    return t


class SoundBatchNorm(TorchFunctionMode):
    """Hands batch normalization, and instance normalization, which is made of it, their cotangent
    in plain order.

    torch's derivatives on the CPU are wrong for a single image whose cotangent has the strides of a
    [position, channel] matrix, (C, 1, …): it takes them for those of the plain order.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        normalized = getattr(func, "__name__", "") in ("batch_norm", "instance_norm")
        if normalized and isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(_in_plain_order)
        return out


class PlainGroupNorm(TorchFunctionMode):
    """Hands group normalization its input in plain order.

    In channels-last order torch's derivative on the CPU ends the process if that of the input is
    not asked for, and the one in forward mode takes a view that there is not.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "group_norm":
            args = (*(a.contiguous() for a in args[:1]), *args[1:])
            kwargs = {key: a.contiguous() if key == "input" else a for key, a in kwargs.items()}
        return func(*args, **kwargs)


def _in_plain_order(cotangent: Tensor) -> Tensor:
    return cotangent.clone(memory_format=torch.contiguous_format)
