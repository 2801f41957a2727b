"""What an operation does beside computing its result, by its name: reads values, or writes them."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_WRITING = (Tensor.__setitem__, torch.ops.aten.copy_.default)
_READING = {
    "allclose",
    "array",
    "bool",
    "complex",
    "contains",
    "dlpack",
    "equal",
    "float",
    "format",
    "index",
    "int",
    "is_nonzero",
    "item",
    "numpy",
    "reduce_ex",
    "repr",
    "tensor_split",
    "tolist",
    "untyped_storage",
}
_COUNTING = {
    "argwhere",
    "bincount",
    "masked_select",
    "nonzero",
    "pack_padded_sequence",
    "to_sparse",
    "unique",
    "unique_consecutive",
}
_TYPE_OR_DEVICE = {
    "get",
    "new_empty",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
    "to",
    "type_as",
}


def full_name(func: Any) -> str:
    """The name of an operation without its overload: `add_` for `add_.Tensor`."""
    return str(getattr(func, "__name__", func)).split(".")[0]


def bare_name(func: Any) -> str:
    """The name of an operation: `add` for `add_`, `__add__` and `add.Tensor`."""
    return full_name(func).strip("_")


def writes(func: Any) -> bool:
    """Whether the operation changes its first argument in place."""
    name = getattr(func, "__name__", "")
    return func in _WRITING or (name.endswith("_") and not name.endswith("__"))


def reads_values(name: str) -> bool:
    """Whether an operation turns a tensor into something that is not traced: a number, an array."""
    return name in _READING


def ignores_shape(name: str) -> bool:
    """Whether the result depends on what the operation reads by its type or device alone."""
    return name in _TYPE_OR_DEVICE


def shape_depends_on_values(name: str, args: tuple[Any, ...], active: list[Tensor]) -> bool:
    """Whether values decide the result's shape: how many entries are picked, or how often.

    Args:
        name: of the operation, as `bare_name` gives it.
        args: its arguments.
        active: those tensors among its arguments that depend on the input.
    """
    if name in ("getitem", "index"):
        return any(t.dtype in (torch.bool, torch.uint8) for t in active)
    if name == "repeat_interleave":
        return any(not t.is_floating_point() for t in active)
    return name in _COUNTING or (name == "where" and len(args) == 1)


def _never(*_: Any) -> bool:
    return False


def without_override_checks(func: types.FunctionType) -> Callable[..., Any]:
    """A copy of a Python function of torch that does not ask function modes what to do.

    torch's Python functions hand over to a mode before they do anything. The copy's body runs with
    globals in which those checks say no, so that its inner calls reach the mode one by one.
    """
    checks = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never
    )
    inner = types.FunctionType(
        func.__code__,
        {**func.__globals__, **checks},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner
