"""Function modes for forward passes: noise on embeddings, workarounds for torch's normalizations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from qualms.gradients.fallback import runs_user_code


class CallMode(TorchFunctionMode):
    """A function mode that intercepts every torch function; subclasses implement `call`."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func`, possibly with other arguments, and return its result, possibly changed."""
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass a call of a torch function on to `call`; torch calls this in place of `func`.

        Args:
            func: the torch function.
            types: the types of the arguments, unused.
            args: the positional arguments.
            kwargs: the keyword arguments.
        """
        return self.call(func, args, kwargs or {})


@runs_user_code
def run_function(
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a torch function on behalf of the model; an error in it counts as the model's error."""
    return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """The name of a torch function, without the overload suffix of an ATen operation."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def bind_arguments(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Combine positional and keyword arguments into a dict by name, as far as `names` goes."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


class NoisyEmbedding(CallMode):
    """Adds noise to the output of the first embedding that reads the model's input.

    Set `ids` to the input tensor before the pass; `done` is true once an embedding has read it.

    Args:
        noise: maps the shape of the embedded samples, without the axis that counts them, to noise
            [rows, *shape].
    """

    def __init__(self, noise: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.noise = noise
        self.done = False
        self.ids: Tensor | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, and add the noise to what an embedding of the input returns."""
        out = run_function(func, args, kwargs)
        if self.done or not name_of(func).startswith("embedding"):
            return out
        for index in (*args, *kwargs.values()):
            axis = self._sample_axis(index)
            if axis is not None:
                self.done = True
                return self._add_noise(out, axis)
        return out

    def _add_noise(self, embedded: Tensor, axis: int) -> Tensor:
        """Add noise to the output of an embedding, whose samples are counted by `axis`."""
        shape = list(embedded.shape)
        del shape[axis]
        return embedded + self.noise(tuple(shape)).to(embedded).movedim(0, axis)

    def _sample_axis(self, index: Any) -> int | None:
        """The axis of `index` that counts the samples; None unless `index` is the model's input.

        A view of the input counts as the input.
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


class ContiguousBatchNormGrad(CallMode):
    """Gives the backward pass of batch and instance normalization a contiguous gradient.

    torch's derivatives on the CPU are wrong for a single image if the incoming gradient has the
    strides of a [position, channel] matrix, (C, 1, …): torch reads it as if it were contiguous.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`; if it is a normalization, make the gradient of its result contiguous."""
        out = run_function(func, args, kwargs)
        normalizes = name_of(func) in ("batch_norm", "instance_norm")
        if normalizes and isinstance(out, Tensor) and out.requires_grad:
            out.register_hook(_contiguous)
        return out


def _contiguous(gradient: Tensor) -> Tensor:
    return gradient.clone(memory_format=torch.contiguous_format)


class ContiguousGroupNorm(CallMode):
    """Gives group normalization a contiguous input.

    For a channels-last input, torch's CPU backward crashes the process if the gradient of the input
    is not wanted, and the forward-mode derivative fails on a view that is not possible.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, with a contiguous input if it is group normalization."""
        if name_of(func) != "group_norm":
            return run_function(func, args, kwargs)
        if args:
            args = (args[0].contiguous(), *args[1:])
        elif "input" in kwargs:
            kwargs = {**kwargs, "input": kwargs["input"].contiguous()}
        return run_function(func, args, kwargs)
