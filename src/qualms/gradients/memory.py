"""How much memory there is, and how much a forward pass keeps for its backward pass."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from qualms.errors import QualmsError

# The share of free memory that one chunk may take: larger chunks are not faster on a CPU, and leave
# no room for the user.
FREE_SHARE = 1 / 16
MIN_BUDGET = 2**28
FEWER_PARAMETERS = "select fewer parameters by `params`, or use smaller inputs"


def default_budget(device: torch.device) -> int:
    """Bytes that the work on one chunk may take."""
    return max(MIN_BUDGET, int(free_bytes(device) * FREE_SHARE))


def budget_of_rows(given: int | None, device: torch.device) -> int:
    """Bytes that rows which run at once may take.

    On a CPU the amount does not vary from run to run, as free memory does, so that the last digits
    of scores do not vary either. Larger parts are not faster there.

    Args:
        given: the user's `budget`, if there is one.
        device: where the rows run.
    """
    if given:
        return given
    return MIN_BUDGET if device.type == "cpu" else default_budget(device)


def require_room(needed: int, limit: int, what: str, instead: str = FEWER_PARAMETERS) -> None:
    """Raise an error if the smallest part of the work takes more memory than there is.

    Args:
        needed: bytes that it takes.
        limit: bytes that there are.
        what: the part of the work, in the plural.
        instead: what to do other than to pass a larger `budget`.
    """
    if needed > limit:
        raise QualmsError(
            f"{what} take about {in_mebibytes(needed)}, more than the {in_mebibytes(limit)} "
            f"available; pass a larger `budget`, {instead}."
        )


def in_mebibytes(number: int) -> str:
    """Bytes for people to read."""
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
        return int(MIN_BUDGET / FREE_SHARE)


def release_free_memory() -> None:
    """Return memory that the C library holds for later to the system, where it can (glibc).

    It keeps what is freed in pieces that tensors of another size do not fit, so that different
    kinds of work would add up.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return found


@contextmanager
def saved_bytes(constants: set[int]) -> Iterator[list[int]]:
    """Count the bytes that autograd saves inside the block, in the one entry of the list.

    Args:
        constants: addresses of storages that do not count.
    """
    seen = set(constants)
    total = [0]

    def pack(t: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():  # it is not the model that asks
            storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        # The tensor itself, kept by the operation that made it, would never be freed.
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield total
