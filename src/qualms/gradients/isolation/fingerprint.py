"""Checksums of weights: whether any of them has changed, exactly, without a copy of them."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

GRID_COLUMNS = 64  # words in a row of the grid whose rows and columns are summed
MAX_HASHED_BYTES = 2**14  # up to this size Python's own hash is quicker than a few sums
BYTES_OF_WORD = 8


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
