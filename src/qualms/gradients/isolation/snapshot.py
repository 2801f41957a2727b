"""Copies of what a model's modules hold, and checksums of its weights.

Forward passes replace attributes and buffers (caches, counters, hook-based weight_norm), add
entries to dictionaries and lists, and write to tensors, also through their `.data`. All of it is
restored from shallow copies, except for writes to parameters. Parameters are not copied: exact
checksums show whether any of them has changed.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DICTS = (dict, OrderedDict, defaultdict)
OTHER_CONTAINERS = (list, set, deque)
ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# `sum_bits` lays a tensor's bits out in a grid: the number of 8-byte words in a row of it.
GRID_COLUMNS = 64
# Up to this many bytes Python's `hash` is faster than sums on tensors.
MAX_HASHED_BYTES = 2**14
BYTES_OF_WORD = 8

# Pairs of a container and a shallow copy of it.
Contents = list[tuple[Any, Any]]


class ModuleContainers:
    """The dictionaries, lists, sets and tensors that the modules of a model hold.

    Args:
        modules: all modules of a model.

    Attributes:
        dicts: each module's `__dict__`, its dictionaries of parameters and buffers, and the
            dictionaries among the attributes that not every module has.
        other_containers: the lists, sets and deques among the attributes.
        tensors: the tensors among the attributes that are neither parameters nor buffers.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.dicts: list[Any] = []
        attributes: list[Any] = []
        for m in modules:
            if isinstance(m, torch.jit.ScriptModule):
                # Its attributes are not Python objects. Its buffers are copied by the caller.
                continue
            self.dicts += [vars(m), m._parameters, m._buffers]
            for name, value in vars(m).items():
                if name not in ATTRIBUTES_OF_EVERY_MODULE:
                    attributes.append(value)
        self.dicts += [value for value in attributes if type(value) in DICTS]
        self.other_containers = [value for value in attributes if type(value) in OTHER_CONTAINERS]
        self.tensors = [value for value in attributes if isinstance(value, Tensor)]

    def copy_all(self) -> Contents:
        """Copy all dictionaries, lists and sets, for `restore_contents`."""
        containers = (*self.dicts, *self.other_containers)
        return [(container, container.copy()) for container in containers]

    def copy_dicts(self) -> Contents:
        """Copy the dictionaries alone, where modules keep caches, for `restore_contents`.

        As this is done in every forward pass, lists are left out, which may be long.
        """
        return [(container, container.copy()) for container in self.dicts]


def restore_contents(contents: Contents) -> None:
    """Restore in place the containers whose contents have changed since they were copied."""
    for container, copy in contents:
        if _holds_same_objects(container, copy):
            continue
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(copy)
        else:
            container.update(copy)


def _holds_same_objects(container: Any, copy: Any) -> bool:
    """Whether a container holds the same objects, in the same order, as a copy of it."""
    # Iterating over a dictionary gives its keys; its values are compared below.
    if len(container) != len(copy) or not all(map(is_, container, copy)):
        return False
    if type(container) not in DICTS:
        return True
    return all(map(is_, container.values(), copy.values()))


class TensorCopy(NamedTuple):
    """A tensor with its version counter and value at some moment."""

    tensor: Tensor
    version: int
    value: Tensor


def copy_tensors(tensors: Iterable[Tensor]) -> list[TensorCopy]:
    """Copy the values of tensors, without those on the meta device, which have none."""
    # The same object may be in the list several times.
    distinct = {id(t): t for t in tensors if not t.is_meta}
    return [TensorCopy(t, _version_counter(t), t.detach().clone()) for t in distinct.values()]


@torch.no_grad()
def restore_tensors(copies: Iterable[TensorCopy]) -> None:
    """Write back the values of tensors that have changed.

    Values are compared, not version counters, which a write to `.data` does not change.
    """
    for copy in copies:
        if _has_changed(copy):
            copy.tensor.copy_(copy.value)


def _has_changed(copy: TensorCopy) -> bool:
    """Whether a tensor has changed since it was copied."""
    t, version, value = copy
    # `torch.equal` does not compare sparse tensors.
    if t.layout == torch.strided:
        return not torch.equal(t, value)
    return _version_counter(t) != version


def _version_counter(t: Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 for inference tensors, which have none."""
    return 0 if t.is_inference() else t._version


# Fingerprints.


class TensorChecksum(NamedTuple):
    """A tensor's address, shape, dtype and checksum of its bits; equal if nothing was changed."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int


class ModelFingerprint(NamedTuple):
    """A model's state: two fingerprints are equal if the model computes the same function.

    Attributes:
        modules: for each module its `id`, and the names and values of those attributes that are
            numbers, flags or strings.
        tensors: the checksums of all parameters, then of all buffers.
    """

    modules: tuple[tuple[int, tuple[tuple[str, object], ...]], ...]
    tensors: tuple[TensorChecksum, ...]


def model_fingerprint(model: nn.Module) -> ModelFingerprint:
    """Compute the fingerprint of a model.

    The fingerprint changes when the model is trained, reloaded or moved, and when a module or a
    setting is replaced. The bits of all weights are summed, because optimizers and `.data` may
    change weights without a change of their version counters.
    """
    modules = tuple((id(m), _plain_attributes(m)) for m in model.modules())
    tensors = (*model.parameters(), *model.buffers())
    return ModelFingerprint(modules, tuple(map(tensor_checksum, tensors)))


def _plain_attributes(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """Return the names and values of a module's attributes that are numbers, flags or strings.

    `training` is left out, since models are always run in evaluation mode.
    """
    attributes = []
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, float, str)) and name != "training":
            attributes.append((name, value))
    return tuple(attributes)


def tensor_checksum(t: Tensor) -> TensorChecksum:
    """Compute the checksum of a tensor, with its address (`id` if sparse), shape and dtype."""
    address = t.data_ptr() if t.layout == torch.strided else id(t)
    return TensorChecksum(address, tuple(t.shape), t.dtype, sum_bits(t))


def sum_bits(t: Tensor) -> int:
    """Compute a checksum of a tensor's bits; 0 for meta, quantized, sparse and empty tensors.

    The bits are summed as integers, so that the smallest change of a value changes the sum. They
    are laid out in a grid, and the sums of its rows and columns are weighted by their positions, so
    that swapped entries show as well. Small tensors on the CPU are hashed instead. As Python's
    hashes differ between processes, checksums are only comparable within a process.
    """
    if t.is_meta or t.is_quantized or t.layout != torch.strided or t.numel() == 0:
        return 0
    flat = t.detach().contiguous().reshape(-1)
    offset = flat.storage_offset() * flat.element_size()
    # A view as words must begin at a multiple of eight bytes.
    if offset % BYTES_OF_WORD:
        flat = flat.clone()
    tensor_bytes = flat.view(torch.uint8)
    if len(tensor_bytes) <= MAX_HASHED_BYTES and tensor_bytes.device.type == "cpu":
        return hash(tensor_bytes.numpy().tobytes())
    row_bytes = BYTES_OF_WORD * GRID_COLUMNS
    num_in_full_rows = len(tensor_bytes) // row_bytes * row_bytes
    grid = tensor_bytes[:num_in_full_rows].view(torch.int64).view(-1, GRID_COLUMNS)
    remainder = tensor_bytes[num_in_full_rows:].long()
    return sum(map(_position_weighted_sum, (grid.sum(0), grid.sum(1), remainder)))


def _position_weighted_sum(v: Tensor) -> int:
    """Compute Σ_i i v_i for i = 1, 2, … and int64 v, modulo 2⁶⁴ as int64 wraps around."""
    positions = torch.arange(1, len(v) + 1, device=v.device)
    return int((v * positions).sum())
