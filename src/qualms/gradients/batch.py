"""A batch: what a model is called with.

A batch is a tensor, a tuple of tensors (positional arguments) or a dict of tensors (keyword
arguments, as Hugging Face tokenizers return them). The first axis of every tensor counts the
samples. The first tensor is the input proper: the one that smoothing perturbs.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


class NotBatchable(Exception):
    """The samples of a batch cannot be separated inside the model.

    Each of them has to run on its own.
    """


def batch_tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, the input proper first."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch)


def with_tensors(batch: Batch, new: Iterable[Tensor]) -> Batch:
    """The same structure as `batch` with other tensors.

    Args:
        batch: the structure.
        new: its tensors, in the order of `batch_tensors`.
    """
    tensors = list(new)
    if isinstance(batch, Tensor):
        return tensors[0]
    if isinstance(batch, dict):
        return dict(zip(batch, tensors, strict=True))
    return tuple(tensors)


def take_samples(batch: Batch, index: slice | list[int]) -> Batch:
    """Some of the samples of a batch."""
    return with_tensors(batch, (t[index] for t in batch_tensors(batch)))


def parts_of(batch: Batch, size: int) -> Iterator[Batch]:
    """The samples of a batch, at most `size` at a time."""
    for part in slices(num_samples(batch), size):
        yield take_samples(batch, part)


def slices(count: int, size: int) -> list[slice]:
    """Split a number of samples into consecutive slices of `size`; the last may be smaller."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def strided_groups(
    count: int,
    groups: int,
    period: int | None = None,
) -> list[list[int]]:
    """Deal samples into groups of every n-th one: neighbors are in different groups.

    Args:
        count: how many samples there are.
        groups: n.
        period: dealing starts anew after so many samples; None for all of them.
    """
    period = period or count
    dealt: list[list[int]] = [[] for _ in range(groups)]
    for i in range(count):
        dealt[i % period % groups].append(i)
    return dealt


def restore_order(parts: list[Tensor], groups: list[list[int]]) -> Tensor:
    """Put the results of groups of samples back into the order of the samples.

    Args:
        parts: the result of each group, its first axis that of the samples.
        groups: the numbers of the samples in each group.
    """
    dealt = torch.tensor([i for group in groups for i in group])
    whole = torch.cat(parts)
    return whole[dealt.argsort().to(whole.device)]


def shapes_of(batch: Batch) -> tuple[Hashable, ...]:
    """What samples of one kind have in common: the names, shapes and types of their tensors."""
    names = tuple(batch) if isinstance(batch, dict) else type(batch).__name__
    shapes = [(tuple(t.shape[1:]), t.dtype) for t in batch_tensors(batch)]
    return (names, *shapes)


def num_samples(batch: Batch) -> int:
    """The number of samples in a batch."""
    return batch_tensors(batch)[0].shape[0]


# Tensors inside nested arguments and results.


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
