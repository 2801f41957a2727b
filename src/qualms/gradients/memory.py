"""How much memory there is, and how much a forward pass keeps for its backward pass."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from qualms.errors import QualmsError

SHARE = 16  # a sixteenth of what is free: larger chunks are not faster on a CPU, and leave no room for the user
FLOOR = 2**28


def default_budget(device: torch.device) -> int:
    """Bytes that the work on one chunk may take."""
    return max(FLOOR, free_bytes(device) // SHARE)


def require_room(needed: int, limit: int, what: str) -> None:
    """An error if the smallest part of the work takes more bytes than the limit."""
    if needed > limit:
        raise QualmsError(
            f"{what} take about {in_mebibytes(needed)}, more than the {in_mebibytes(limit)} available; pass a larger "
            "`budget`, select fewer parameters by `params`, or use smaller inputs."
        )


def in_mebibytes(number: int) -> str:
    """Bytes, for people."""
    return f"{number / 2**20:,.1f} MiB"


def free_bytes(device: torch.device) -> int:
    """Bytes that are free on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return FLOOR * SHARE


@contextmanager
def saved_bytes(constants: set[int]) -> Iterator[list[int]]:
    """Counts, in the list's one entry, the bytes that autograd saves; storages in `constants` do not count."""
    seen = set(constants)
    total = [0]

    def pack(t: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # it is not the model that asks
            storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return t.detach()  # the tensor itself, kept by the operation that made it, would never be let go

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield total
