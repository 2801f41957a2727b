"""Batches, the inputs that a model is called with.

A batch is a tensor, a tuple of tensors (positional arguments) or a dict of tensors (keyword
arguments, as Hugging Face tokenizers return them). The first axis of every tensor counts the
samples. The first tensor is the main input: the one that smoothing perturbs.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
# Reasons of `NotBatchable` that users see in a `SlowWarning`.
SAMPLES_INFLUENCE = "the samples of a batch influence each other"
SAMPLES_MIXED = "the model mixes samples within a batch"


class NotBatchable(Exception):
    """Raised if the results for a batch cannot be attributed to its samples.

    The samples then have to run one at a time.
    """


def batch_tensors(batch: Batch) -> list[Tensor]:
    """List the tensors of a batch; the main input comes first."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch)


def with_tensors(batch: Batch, new: Iterable[Tensor]) -> Batch:
    """Build a batch with the structure of another one (tensor, tuple or dict) and new tensors.

    Args:
        batch: the batch whose structure is kept.
        new: the new tensors, one for each of `batch_tensors(batch)`.
    """
    tensors = list(new)
    if isinstance(batch, Tensor):
        return tensors[0]
    if isinstance(batch, dict):
        return dict(zip(batch, tensors, strict=True))
    return tuple(tensors)


def take_samples(batch: Batch, index: slice | list[int]) -> Batch:
    """Select some of the samples of a batch."""
    return with_tensors(batch, (t[index] for t in batch_tensors(batch)))


def split_batch(batch: Batch, size: int) -> Iterator[Batch]:
    """Split a batch into consecutive batches of at most `size` samples."""
    for part in slices(num_samples(batch), size):
        yield take_samples(batch, part)


def slices(count: int, size: int) -> list[slice]:
    """Split `count` samples into consecutive slices of `size`; the last may be smaller."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def strided_groups(
    count: int,
    groups: int,
    period: int | None = None,
) -> list[list[int]]:
    """Deal samples into n groups of every n-th sample, so that neighbors are in different groups.

    Args:
        count: the number of samples.
        groups: n, the number of groups.
        period: dealing starts again at the first group after this many samples; None for never.

    Returns:
        For each group the indices of its samples.
    """
    period = period or count
    indices: list[list[int]] = [[] for _ in range(groups)]
    for i in range(count):
        group = i % period % groups
        indices[group].append(i)
    return indices


def restore_order(results: list[Tensor], groups: list[list[int]]) -> Tensor:
    """Concatenate the results of groups of samples, in the order of the samples.

    Args:
        results: the result of each group; the first axis counts its samples.
        groups: the indices of the samples in each group, from `strided_groups`.
    """
    sample_indices = torch.tensor([i for group in groups for i in group])
    in_groups = torch.cat(results)
    order = sample_indices.argsort().to(in_groups.device)
    return in_groups[order]


def shapes_of(batch: Batch) -> tuple[Hashable, ...]:
    """Return the names, shapes without sample axis and dtypes of a batch's tensors, as a cache key."""
    names = tuple(batch) if isinstance(batch, dict) else type(batch).__name__
    shapes = [(tuple(t.shape[1:]), t.dtype) for t in batch_tensors(batch)]
    return (names, *shapes)


def num_samples(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return batch_tensors(batch)[0].shape[0]


# Tensors inside nested arguments and results.


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Yield all tensors in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to every tensor in nested tuples, lists and dicts, and return the same structure.

    Anything else is returned unchanged.
    """
    if isinstance(value, Tensor):
        return change(value)
    # A named tuple takes its fields as separate arguments.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(v, change) for v in value))
    # The named results of torch's functions have no `_fields`, and become plain tuples.
    if isinstance(value, tuple):
        return tuple(map_tensors(v, change) for v in value)
    if isinstance(value, list):
        return [map_tensors(v, change) for v in value]
    if isinstance(value, dict):
        return {k: map_tensors(v, change) for k, v in value.items()}
    return value
