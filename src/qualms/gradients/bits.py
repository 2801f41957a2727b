"""Sums of the bits of weights: whether any of them has changed, exactly, without a copy of them."""

import torch
from torch import Tensor, nn

GRID = 64  # words in a row, when bits are added up
SMALL = 2**14  # bytes up to which Python's own hash is quicker than a few sums
Sum = tuple[int, tuple[int, ...], torch.dtype, int]


State = tuple[tuple[tuple[int, tuple[tuple[str, object], ...]], ...], tuple[Sum, ...]]


def state_of(model: nn.Module) -> State:
    """A fingerprint that changes when the model is trained, reloaded, moved, or has a module or a
    setting replaced.

    The bits of all weights are added up: optimizers and `.data` may change them without torch
    counting it.
    """
    modules = tuple((id(m), _settings(m)) for m in model.modules())
    return modules, tuple(map(sum_of, (*model.parameters(), *model.buffers())))


def _settings(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """The numbers, switches and words among a module's attributes; not its mode, which is set for
    every call.
    """
    plain = (bool, int, float, str)
    return tuple(
        (name, v) for name, v in vars(module).items() if isinstance(v, plain) and name != "training"
    )


def sum_of(t: Tensor) -> Sum:
    """Where a tensor is, its shape and kind, and the sum of its bits."""
    return (
        t.data_ptr() if t.layout == torch.strided else id(t),
        tuple(t.shape),
        t.dtype,
        _sum_of_bits(t),
    )


def _sum_of_bits(t: Tensor) -> int:
    """Exact, so that no change is too small; by rows and columns of a grid, so that no entries
    change places unseen.

    Of a small tensor, its hash, which sees both as well.
    """
    if t.is_meta or t.is_quantized or t.layout != torch.strided or t.numel() == 0:
        return 0
    flat = t.detach().contiguous().reshape(-1)
    odd = (
        flat.storage_offset() * flat.element_size() % 8 != 0
    )  # words begin at multiples of eight bytes
    bits = (flat.clone() if odd else flat).view(torch.uint8)
    if len(bits) <= SMALL and bits.device.type == "cpu":
        return hash(bits.numpy().tobytes())
    whole = len(bits) // (8 * GRID) * (8 * GRID)
    grid, rest = bits[:whole].view(torch.int64).view(-1, GRID), bits[whole:].long()
    return sum(
        int((v * torch.arange(1, len(v) + 1, device=v.device)).sum())
        for v in (grid.sum(0), grid.sum(1), rest)
    )
