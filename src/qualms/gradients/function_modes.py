"""Function modes, which see every call of a torch function, for forward passes of a model."""

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
        """Let `call` handle a call of a torch function; torch calls this method instead of it.

        Args:
            func: the torch function.
            types: the classes of the arguments; not used.
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
    """Return the name of a torch function without its overload: `add_` for `add_.Tensor`."""
    return str(getattr(func, "__name__", func)).partition(".")[0]


def bind_arguments(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> dict[str, Any]:
    """Combine positional and keyword arguments into a dict by name.

    Args:
        names: the names of the positional arguments; arguments beyond them are dropped.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    return {**dict(zip(names, args, strict=False)), **kwargs}


class NoisyEmbedding(CallMode):
    """Adds noise to the output of the first embedding that reads the model's input.

    Args:
        noise: maps the shape of an embedded sample to noise [samples, *shape].

    Attributes:
        ids: the input tensor, such as token ids, set before the model is called.
        done: whether an embedding has read the input.
    """

    def __init__(self, noise: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.noise = noise
        self.done = False
        self.ids: Tensor | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`; if it is the first embedding of the input, add the noise to its result."""
        result = run_function(func, args, kwargs)
        if self.done or not name_of(func).startswith("embedding"):
            return result
        for argument in (*args, *kwargs.values()):
            axis = self._sample_axis(argument)
            if axis is not None:
                self.done = True
                return self._add_noise(result, axis)
        return result

    def _add_noise(self, embedded: Tensor, axis: int) -> Tensor:
        """Add noise to the output of an embedding, whose samples are counted by `axis`."""
        sample_shape = list(embedded.shape)
        del sample_shape[axis]
        noise = self.noise(tuple(sample_shape)).to(embedded)
        return embedded + noise.movedim(0, axis)

    def _sample_axis(self, argument: Any) -> int | None:
        """Find the axis that counts the samples, if an argument of an embedding is the model's input.

        Returns None if it is anything else. A view of the input counts as the input.
        """
        if not isinstance(argument, Tensor) or argument.is_floating_point() or self.ids is None:
            return None
        indices, ids = _unwrap_functorch(argument), _unwrap_functorch(self.ids)
        if indices.untyped_storage().data_ptr() != ids.untyped_storage().data_ptr():
            return None
        # Samples are on axis 0 of the input. A view may have moved this axis, but keeps its size
        # and stride.
        for axis in range(indices.ndim):
            has_same_size = indices.shape[axis] == ids.shape[0]
            if has_same_size and indices.stride(axis) == ids.stride(0):
                return axis
        return None


def _unwrap_functorch(t: Tensor) -> Tensor:
    """Remove the wrappers that forward-mode differentiation and vmap put around a tensor."""
    while is_functorch_wrapped_tensor(t):
        t = get_unwrapped(t)
    return t


class ContiguousBatchNormGrad(CallMode):
    """Gives the backward pass of batch and instance normalization a contiguous gradient.

    torch's derivatives on the CPU are wrong for a single image if the incoming gradient has the
    strides of a [position, channel] matrix, (C, 1, …): torch reads it as if it were contiguous.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`; make the gradient of a normalization's result contiguous for torch."""
        result = run_function(func, args, kwargs)
        is_normalization = name_of(func) in ("batch_norm", "instance_norm")
        if is_normalization and isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(_copy_contiguously)
        return result


def _copy_contiguously(gradient: Tensor) -> Tensor:
    """Copy a gradient into contiguous memory, as a tensor hook."""
    # `contiguous` would return tensors with an axis of size 1 unchanged, whatever its stride.
    return gradient.clone(memory_format=torch.contiguous_format)


class ContiguousGroupNorm(CallMode):
    """Gives group normalization a contiguous input.

    With a channels-last input, torch's backward pass on the CPU crashes the process if no gradient
    of the input is needed, and the forward-mode derivative fails on a view that is not possible.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, with a contiguous input if it is group normalization, which needs one."""
        if name_of(func) != "group_norm":
            return run_function(func, args, kwargs)
        if args:
            args = (args[0].contiguous(), *args[1:])
        elif "input" in kwargs:
            kwargs = {**kwargs, "input": kwargs["input"].contiguous()}
        return run_function(func, args, kwargs)
