"""Function modes for forward passes: noise on embeddings, and mends of torch's normalizations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode


class NoisyEmbedding(TorchFunctionMode):
    """Adds noise to the output of the first embedding that reads the model's own input.

    Set `ids` to the tensor that the model is called with before the pass; `done` says afterwards
    whether an embedding has read it.

    Args:
        noise: maps the shape of the embedded samples, without the axis that counts them, to noise
            [rows, *shape].
    """

    def __init__(self, noise: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.noise = noise
        self.done = False
        self.ids: Tensor | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and add the noise to what an embedding of the input returns.

        Args:
            func: a function of torch.
            types: unused.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.done or not getattr(func, "__name__", "").startswith("embedding"):
            return out
        for index in (*args, *kwargs.values()):
            axis = self._sample_axis(index)
            if axis is not None:
                self.done = True
                return self._add_noise(out, axis)
        return out

    def _add_noise(self, embedded: Tensor, axis: int) -> Tensor:
        shape = list(embedded.shape)
        del shape[axis]
        return embedded + self.noise(tuple(shape)).to(embedded).movedim(0, axis)

    def _sample_axis(self, index: Any) -> int | None:
        """The axis of `index` that counts the samples.

        It is None unless `index` is the model's input itself, whole or a view of it.
        """
        if not isinstance(index, Tensor) or index.is_floating_point() or self.ids is None:
            return None
        index, ids = _unwrap_functorch(index), _unwrap_functorch(self.ids)
        if index.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
            return None
        for axis in range(index.ndim):
            same_size = index.shape[axis] == ids.shape[0]
            if same_size and index.stride(axis) == ids.stride(0):
                return axis
        return None


def _unwrap_functorch(t: Tensor) -> Tensor:
    """The tensor inside the wrappers of forward-mode differentiation and vmap."""
    while is_functorch_wrapped_tensor(t):
        t = get_unwrapped(t)
    return t


class ContiguousBatchNormGrad(TorchFunctionMode):
    """Gives the backward pass of batch and instance normalization a contiguous gradient.

    torch's derivatives on the CPU are wrong for a single image whose incoming gradient has the
    strides of a [position, channel] matrix, (C, 1, …): they are read as contiguous.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, and hook the gradient of what a normalization returns.

        Args:
            func: a function of torch.
            types: unused.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        out = func(*args, **(kwargs or {}))
        normalizes = getattr(func, "__name__", "") in ("batch_norm", "instance_norm")
        if normalizes and isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(_contiguous)
        return out


def _contiguous(gradient: Tensor) -> Tensor:
    return gradient.clone(memory_format=torch.contiguous_format)


class ContiguousGroupNorm(TorchFunctionMode):
    """Gives group normalization a contiguous input.

    In channels-last format torch's derivative on the CPU ends the process if that of the input is
    not asked for, and the forward-mode derivative takes a view that does not exist.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `func`, with a contiguous input if it is group normalization.

        Args:
            func: a function of torch.
            types: unused.
            args: its positional arguments, the input first.
            kwargs: its keyword arguments.
        """
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") != "group_norm":
            return func(*args, **kwargs)
        if args:
            args = (args[0].contiguous(), *args[1:])
        else:
            kwargs["input"] = kwargs["input"].contiguous()
        return func(*args, **kwargs)
