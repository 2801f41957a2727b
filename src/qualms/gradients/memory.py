"""Free memory, the memory that a pass takes, and how many rows of a batch fit a budget."""

import ctypes
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, batch_tensors, shapes_of, take_samples, tensors_in
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.settings import Settings

log = logging.getLogger("qualms")
# The share of free memory that one chunk may take: larger chunks are not faster on a CPU, and leave
# no room for the user.
FREE_SHARE = 1 / 16
# The smallest default budget, in bytes, however little memory is free.
MIN_BUDGET = 2**28
# Copies of the largest result that kernels hold beside it.
RESULT_COPIES = 6
# Copies of the logits, in float64, that a score computes with.
LOGIT_COPIES = 16
DOUBLE = 8  # bytes of a float64
# A pass over inputs with fewer bytes is not measured.
SMALL_INPUT_BYTES = 2**17
# Before a pass with more bytes, free memory is released.
LARGE_ROW_BYTES = 2**26
FEWER_PARAMETERS = "select fewer parameters with `params`, or use smaller inputs"


def default_budget(device: torch.device) -> int:
    """Bytes that the work on one chunk of samples may take by default: a share of the free memory."""
    return max(MIN_BUDGET, int(free_bytes(device) * FREE_SHARE))


def budget_of_rows(given: int | None, device: torch.device) -> int:
    """Return the bytes that the rows of one pass may take together.

    On a CPU the default is a constant and not a share of free memory, which varies from run to run:
    the last digits of scores depend on how many rows run at once. More rows are not faster there.

    Args:
        given: the user's `budget`; None for the default.
        device: the device on which the rows run.
    """
    if given:
        return given
    return MIN_BUDGET if device.type == "cpu" else default_budget(device)


def require_room(
    needed: int,
    limit: int,
    what: str,
    instead: str = FEWER_PARAMETERS,
) -> None:
    """Raise an error if the smallest part of the work takes more memory than there is.

    Args:
        needed: the bytes that the smallest part of the work takes.
        limit: the bytes that are available.
        what: what this part of the work is, in the plural, for the message.
        instead: the advice other than to pass a larger `budget`, for the message.
    """
    if needed > limit:
        raise QualmsError(
            f"{what} need about {in_mebibytes(needed)}, more than the {in_mebibytes(limit)} "
            f"available; pass a larger `budget`, {instead}."
        )


def in_mebibytes(number: int) -> str:
    """Format a number of bytes for a message, in MiB."""
    return f"{number / 2**20:,.1f} MiB"


def free_bytes(device: torch.device) -> int:
    """Estimate the bytes that are free on the device.

    Exact for CUDA; for other devices, the available main memory. Where the system does not tell,
    half of the main memory, or else so little that the default budget becomes `MIN_BUDGET`.
    """
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
    """Return freed memory that the C library still holds to the system (glibc only).

    The C library keeps freed memory in pieces that tensors of another size do not fit into, so the
    memory of different kinds of work would add up.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Find the C function `malloc_trim`, which returns free memory; None if there is none."""
    if sys.platform != "linux":
        return None
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


@contextmanager
def saved_bytes(constants: set[int]) -> Iterator[list[int]]:
    """Count the bytes of tensors that autograd saves for backward passes inside the `with` block.

    A storage that is saved several times counts once.

    Args:
        constants: the addresses of storages that are not counted, such as parameters.

    Yields:
        A list with one entry, the number of bytes so far; it is final when the block ends.
    """
    seen = set(constants)
    total = [0]

    def pack(t: Tensor) -> Tensor:
        """Count a tensor that autograd saves; autograd keeps what is returned instead of it."""
        with (
            torch._C.DisableTorchFunction()
        ):  # so that function modes do not take this for a call by the model
            storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        # Returning `t` itself would make a reference cycle, and it would never be freed.
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield total


# The memory of one row.


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the results that exist at the same time, without what existed before.

    A dispatch mode sees every result of a pass, in scripts and backward passes as well, and when it
    is freed. It does not see what kernels hold beside their results (copies in another memory
    format, gaps of the allocator): on a CPU the process took up to six times the largest result
    more than all results together (`RESULT_COPIES`).

    Attributes:
        now: the bytes of the results that exist now.
        most: the largest value that `now` has had.
        largest: the bytes of the largest single result.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.most = 0
        self.largest = 0
        # Weak references to storages, by their address.
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the bytes of its new results, not of views or in-place results.

        Args:
            func: the operation.
            types: the classes of the operation's tensors; not used.
            args: the positional arguments.
            kwargs: the keyword arguments.
        """
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # Storages of arguments, which views and in-place results share.
        inputs: set[int] = set()
        for t in tensors_in((args, kwargs)):
            if t.layout == torch.strided:
                inputs.add(t.untyped_storage()._cdata)
        for t in tensors_in(out):
            if t.layout == torch.strided and t.untyped_storage()._cdata not in inputs:
                self._add(t.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        """Count a new result's storage until it is freed; one that is known already is skipped."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def on_free(_: Any) -> None:
            """Subtract the bytes again; called when the storage is freed."""
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, on_free)
        self.now += size
        self.most = max(self.most, self.now)
        self.largest = max(self.largest, size)


@dataclass(frozen=True)
class PassMemory:
    """A kind of pass over a batch of rows, such as a forward pass, and the memory it takes.

    Args:
        what: the kind of pass, for messages and as a key of the cache.
        run: runs the pass on some rows, and returns the logits [rows, c].
        most: the largest number of rows at once, however much memory there is.
        extra_bytes: the bytes of what is held in memory beside the pass.
        factor: the memory of the pass, as a multiple of the memory that `run` takes.
    """

    what: str
    run: Callable[[Batch], Tensor]
    most: int
    extra_bytes: int = 0
    factor: int = 1

    def rows_at_once(
        self,
        batch: Batch,
        rows: int,
        settings: Settings,
        cache: PlanCache,
    ) -> int:
        """How many rows to run at once: as many as fit the budget, by the memory of the first row.

        The user's batch size, if any, is the upper limit instead of `most`. Nothing is measured
        without a `budget` if there is a single row, or if inputs are so small that results
        thousands of times their size would fit.

        Args:
            batch: rows of the same shape.
            rows: the number of rows to run.
            settings: the settings with the budget and the batch size.
            cache: the plans of the model, which keep the measurement.

        Raises:
            QualmsError: if a single row does not fit.
        """
        most = min(rows, settings.batch_size or self.most)
        first = batch_tensors(batch)[0]
        is_small = first.is_floating_point() and first[:1].nbytes * most < SMALL_INPUT_BYTES
        if settings.budget is None and (most == 1 or is_small):
            return most
        row = self.bytes_of_row(batch, cache)
        if row is None:
            return most
        require_room(
            row + self.extra_bytes,
            settings.budget or free_bytes(first.device),
            f"the results of {self.what} for one input",
            "or use smaller inputs",
        )
        room = budget_of_rows(settings.budget, first.device) - self.extra_bytes
        size = max(1, min(most, room // row))
        if first.device.type == "cpu" and size * row > LARGE_ROW_BYTES:
            # Memory used by other kinds of work and by the measurement.
            release_free_memory()
        return size

    def bytes_of_row(self, batch: Batch, cache: PlanCache) -> int | None:
        """Bytes that one row takes, `factor` included; None if the model fails on a single row.

        Measured once for inputs of these shapes, then read from the cache.

        Args:
            batch: rows, of which the first is run.
            cache: the plans of the model, which keep the measurement.
        """
        key = ("memory of a row", self.what, shapes_of(batch))
        row = cache.once(key, lambda: self._measure(take_samples(batch, slice(0, 1))))
        return None if row is None else max(1, self.factor * row)

    def _measure(self, row: Batch) -> int | None:
        """Run one row and count its bytes; None if the model fails on a single row."""
        counter = _LiveBytes()
        try:
            with torch.random.fork_rng(devices=[]), counter:
                logits = self.run(row)
        except QualmsError as error:
            log.info("the memory of a single row is unknown: %s", error)
            return None
        logit_bytes = LOGIT_COPIES * DOUBLE * logits.shape[-1]
        return counter.most + RESULT_COPIES * counter.largest + logit_bytes
