"""Tensors inside the nested arguments and results of operations."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterable[Tensor]:
    """All tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from tensors_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tensors_in(v)


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested structure with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each_tensor(v, change) for v in value))
    if isinstance(value, tuple):  # torch's own named results included
        return tuple(each_tensor(v, change) for v in value)
    if isinstance(value, list):
        return [each_tensor(v, change) for v in value]
    if isinstance(value, dict):
        return {k: each_tensor(v, change) for k, v in value.items()}
    return value
