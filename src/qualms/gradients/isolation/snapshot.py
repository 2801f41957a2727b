"""What is remembered of a model: what its modules hold, and checksums of its weights.

Forward passes replace attributes and buffers (caches, counters, hook-based weight_norm), add
entries to dictionaries and lists, and write to tensors, also through their `.data`. All of it is
put back from shallow copies, except for writes to parameters. There is no copy of those:
checksums tell, exactly, whether any of them has changed.
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
GRID_COLUMNS = 64  # words in a row of the grid whose rows and columns are summed
MAX_HASHED_BYTES = 2**14  # up to this size Python's own hash is quicker than a few sums
BYTES_OF_WORD = 8

Contents = list[tuple[Any, Any]]  # containers, each with a shallow copy of what is in it


class ModuleContainers:
    """The dictionaries, lists, sets and tensors in which modules keep things.

    Args:
        modules: all modules of a model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.dicts: list[Any] = []
        attributes: list[Any] = []
        for m in modules:
            if isinstance(m, torch.jit.ScriptModule):
                continue  # its attributes are not Python's; its buffers are restored like all
            self.dicts += [d for d in (vars(m), m._parameters, m._buffers) if d]
            for name, value in vars(m).items():
                if name not in ATTRIBUTES_OF_EVERY_MODULE:
                    attributes.append(value)
        self.dicts += [value for value in attributes if type(value) in DICTS]
        self.others = [value for value in attributes if type(value) in OTHER_CONTAINERS]
        self.tensors = [value for value in attributes if isinstance(value, Tensor)]

    def copy_all(self) -> Contents:
        """The contents of all containers."""
        return [(container, container.copy()) for container in (*self.dicts, *self.others)]

    def copy_dicts(self) -> Contents:
        """The contents of attributes and dictionaries only, where modules keep caches.

        This is for every single pass: lists may be long, and passes are many.
        """
        return [(container, container.copy()) for container in self.dicts]


def restore_contents(contents: Contents) -> None:
    """Put back what has changed in the containers."""
    for container, before in contents:
        if _holds_same(container, before):
            continue
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(before)
        else:
            container.update(before)


def _holds_same(container: Any, before: Any) -> bool:
    if len(container) != len(before) or not all(map(is_, container, before)):
        return False
    if type(container) not in DICTS:
        return True
    return all(map(is_, container.values(), before.values()))


class TensorCopy(NamedTuple):
    """A tensor with its version counter and value at some moment."""

    tensor: Tensor
    version: int
    value: Tensor


def copy_tensors(tensors: Iterable[Tensor]) -> list[TensorCopy]:
    """Copies of tensors, one for each object; those on the meta device have no values."""
    distinct = {id(t): t for t in tensors if not t.is_meta}
    return [TensorCopy(t, _version(t), t.detach().clone()) for t in distinct.values()]


@torch.no_grad()
def restore_tensors(copies: Iterable[TensorCopy]) -> None:
    """Write back the values of tensors that have changed.

    Values are compared, not versions: a write to `.data` leaves the version as it was.
    """
    for copy in copies:
        if _differs(copy):
            copy.tensor.copy_(copy.value)


def _differs(copy: TensorCopy) -> bool:
    t, version, value = copy
    if t.layout == torch.strided:
        return not torch.equal(t, value)
    return _version(t) != version


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


# Fingerprints.


class TensorChecksum(NamedTuple):
    """Where a tensor is stored, its shape and type, and a checksum of its bits."""

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int


class ModelFingerprint(NamedTuple):
    """Equal for two moments at which a model computes the same function in the same way.

    Attributes:
        modules: the identity and the plain attributes of every module.
        tensors: the checksums of all parameters, then of all buffers.
    """

    modules: tuple[tuple[int, tuple[tuple[str, object], ...]], ...]
    tensors: tuple[TensorChecksum, ...]


def model_fingerprint(model: nn.Module) -> ModelFingerprint:
    """Fingerprint a model.

    It changes when the model is trained, reloaded or moved, and when a module or a setting is
    replaced. The bits of all weights are summed, because optimizers and `.data` may change them
    without torch counting it.
    """
    modules = tuple((id(m), _plain_attributes(m)) for m in model.modules())
    tensors = (*model.parameters(), *model.buffers())
    return ModelFingerprint(modules, tuple(map(tensor_checksum, tensors)))


def _plain_attributes(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """The numbers, switches and strings among a module's attributes.

    Its mode is left out, since that is set for every call.
    """
    found = []
    for name, value in vars(module).items():
        if isinstance(value, (bool, int, float, str)) and name != "training":
            found.append((name, value))
    return tuple(found)


def tensor_checksum(t: Tensor) -> TensorChecksum:
    """Where a tensor is, its shape and type, and the checksum of its bits."""
    address = t.data_ptr() if t.layout == torch.strided else id(t)
    return TensorChecksum(address, tuple(t.shape), t.dtype, sum_bits(t))


def sum_bits(t: Tensor) -> int:
    """A checksum of the bits of a tensor; 0 for tensors without storage of their own.

    The sum is exact, so no change is too small to see. It is taken over the rows and columns of a
    grid, so entries cannot trade places unseen. A small tensor is hashed, which sees both as well.
    """
    if t.is_meta or t.is_quantized or t.layout != torch.strided or t.numel() == 0:
        return 0
    flat = t.detach().contiguous().reshape(-1)
    offset = flat.storage_offset() * flat.element_size()
    if offset % BYTES_OF_WORD:  # words begin at multiples of eight bytes
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    if len(octets) <= MAX_HASHED_BYTES and octets.device.type == "cpu":
        return hash(octets.numpy().tobytes())
    row = BYTES_OF_WORD * GRID_COLUMNS
    whole = len(octets) // row * row
    grid = octets[:whole].view(torch.int64).view(-1, GRID_COLUMNS)
    rest = octets[whole:].long()
    return sum(map(_position_weighted_sum, (grid.sum(0), grid.sum(1), rest)))


def _position_weighted_sum(v: Tensor) -> int:
    """Σ_i i v_i, modulo 2⁶⁴."""
    positions = torch.arange(1, len(v) + 1, device=v.device)
    return int((v * positions).sum())
