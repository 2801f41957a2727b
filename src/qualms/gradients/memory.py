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
# Copies of the largest result that kernels may hold in addition to it.
RESULT_COPIES = 6
# Copies of the logits, in float64, that the computation of a score holds.
LOGIT_COPIES = 16
DOUBLE = 8  # bytes of a float64
# The memory of a pass over inputs with fewer bytes is not measured.
SMALL_INPUT_BYTES = 2**17
# Before a pass that takes more bytes, free memory is released.
LARGE_PASS_BYTES = 2**26
FEWER_PARAMETERS = "select fewer parameters with `params`, or use smaller inputs"


def default_budget(device: torch.device) -> int:
    """Return the default for the bytes that the work on one chunk of samples may take.

    It is a share of the memory that is free on the device.
    """
    return max(MIN_BUDGET, int(free_bytes(device) * FREE_SHARE))


def budget_of_rows(given: int | None, device: torch.device) -> int:
    """Return the bytes that the rows of one pass may take together.

    On a CPU the default is a constant and not a share of free memory, which varies from run to run:
    the last digits of scores depend on how many rows run at once. More rows are not faster there.

    Args:
        given: the user's `budget` in bytes; None for the default.
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
        what: for the message: this part of the work, a noun in the plural.
        instead: for the message: what to do instead of passing a larger `budget`.
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
    """Estimate the bytes that are free on a device.

    The number is exact for CUDA. For other devices it is the available main memory as Linux reports
    it; on other systems half of all main memory, or if that is unknown so little that the default
    budget becomes `MIN_BUDGET`.
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
    """Give memory that the C library holds although it was freed back to the system (glibc only).

    The C library keeps freed memory in pieces that tensors of another size do not fit into, so the
    memory of different kinds of work would add up.
    """
    malloc_trim = _find_malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@cache
def _find_malloc_trim() -> Callable[[int], int] | None:
    """Find the C function that gives freed memory back to the system; None if there is none."""
    if sys.platform != "linux":
        return None
    # `CDLL(None)` has the functions of the running process, those of its C library among them.
    malloc_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim


@contextmanager
def saved_bytes(constants: set[int]) -> Iterator[list[int]]:
    """Count the bytes of the tensors that autograd saves for backward passes inside the `with` block.

    A storage that is saved several times counts once.

    Args:
        constants: the addresses of storages that are not counted, such as parameters.

    Yields:
        A list with one entry, the number of bytes so far; it is final when the block ends.
    """
    seen = set(constants)
    total = [0]

    def pack(t: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and return the tensor that it keeps instead."""
        # Without this, function modes would take the call for one by the model.
        with torch._C.DisableTorchFunction():
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
    """Counts the bytes of the results of operations that exist at the same time inside the block.

    As a dispatch mode it sees every result, also those of scripts and backward passes; weak
    references show when a result is freed. It does not see what kernels hold in addition to their
    results (copies in another memory format, gaps of the allocator): on a CPU the process took up
    to six times the largest result more than all results together (`RESULT_COPIES`).

    Attributes:
        current: the bytes of the results that exist now.
        peak: the largest value that `current` has had.
        largest_result: the bytes of the largest single result.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self.largest_result = 0
        # Weak references to the storages that are counted in `current`, by address.
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and count the bytes of its results, except views and in-place results.

        Args:
            func: the operation.
            types: the classes of the operation's tensors; not used.
            args: the positional arguments.
            kwargs: the keyword arguments.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # Views and in-place results share the storages of arguments.
        argument_storages: set[int] = set()
        for t in tensors_in((args, kwargs)):
            if t.layout == torch.strided:
                argument_storages.add(t.untyped_storage()._cdata)
        for t in tensors_in(result):
            if t.layout == torch.strided and t.untyped_storage()._cdata not in argument_storages:
                self._count_storage(t.untyped_storage())
        return result

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a storage until it is freed, unless it is counted already."""
        # The address of torch's C++ object, which identifies the storage.
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._known:
            return

        def on_free(_: Any) -> None:
            """Subtract the bytes again; called when the storage is freed."""
            self.current -= num_bytes
            self._known.pop(address, None)

        self._known[address] = weakref.ref(storage, on_free)
        self.current += num_bytes
        self.peak = max(self.peak, self.current)
        self.largest_result = max(self.largest_result, num_bytes)


@dataclass(frozen=True)
class PassMemory:
    """A kind of pass over a batch of rows, such as a forward pass, and the memory it takes.

    Args:
        pass_kind: the kind of pass, for messages and as a key of the cache.
        run: runs the pass on some rows, and returns the logits [rows, c].
        max_rows: the largest number of rows at once, however much memory there is.
        extra_bytes: the bytes of what is held in memory during the pass, but not by it.
        safety_factor: the memory of the pass, as a multiple of the memory that `run` takes.
    """

    pass_kind: str
    run: Callable[[Batch], Tensor]
    max_rows: int
    extra_bytes: int = 0
    safety_factor: int = 1

    def rows_at_once(
        self,
        batch: Batch,
        rows: int,
        settings: Settings,
        cache: PlanCache,
    ) -> int:
        """Return how many rows to run at once: as many as fit the budget.

        The memory of a row is measured on the first one. Without a budget by the user it is not
        measured if there is a single row, or if inputs are so small that results thousands of times
        their size would fit. The user's batch size, if any, is the upper limit instead of `max_rows`.

        Args:
            batch: rows of the same shape.
            rows: the number of rows to run.
            settings: the settings with the budget and the batch size.
            cache: the plans of the model, which keep the measurement.

        Raises:
            QualmsError: if a single row does not fit.
        """
        limit = min(rows, settings.batch_size or self.max_rows)
        main_input = batch_tensors(batch)[0]
        input_bytes = main_input[:1].nbytes * limit
        # Integers are token ids, which are small whatever a model computes from them.
        is_small = main_input.is_floating_point() and input_bytes < SMALL_INPUT_BYTES
        if settings.budget is None and (limit == 1 or is_small):
            return limit
        row_bytes = self.bytes_of_row(batch, cache)
        # None if the model fails on a single row, so that nothing is known of its memory.
        if row_bytes is None:
            return limit
        # A single row may take all memory that is free, several only the default budget.
        require_room(
            row_bytes + self.extra_bytes,
            settings.budget or free_bytes(main_input.device),
            f"the results of {self.pass_kind} for one input",
            "or use smaller inputs",
        )
        available = budget_of_rows(settings.budget, main_input.device) - self.extra_bytes
        rows_at_once = max(1, min(limit, available // row_bytes))
        if main_input.device.type == "cpu" and rows_at_once * row_bytes > LARGE_PASS_BYTES:
            # The measurement and other kinds of work have left freed memory behind.
            release_free_memory()
        return rows_at_once

    def bytes_of_row(self, batch: Batch, cache: PlanCache) -> int | None:
        """Return the bytes that one row takes, multiplied by `safety_factor`.

        They are measured once for inputs of the same shapes, then read from the cache.

        Args:
            batch: rows, of which the first is run.
            cache: the plans of the model, which keep the measurement.

        Returns:
            The bytes; None if the model fails on a single row.
        """
        key = ("memory of a row", self.pass_kind, shapes_of(batch))
        first_row = take_samples(batch, slice(0, 1))
        row_bytes = cache.get_or_compute(key, lambda: self._measure(first_row))
        return None if row_bytes is None else max(1, self.safety_factor * row_bytes)

    def _measure(self, row: Batch) -> int | None:
        """Run one row and estimate the bytes that the pass takes; None if the model fails on it."""
        counter = _LiveBytes()
        try:
            # The trial must not advance the user's random generator.
            with torch.random.fork_rng(devices=[]), counter:
                logits = self.run(row)
        except QualmsError as error:
            log.info("the memory of a single row is unknown: %s", error)
            return None
        # What the counter does not see: copies that kernels make of the largest result, and the
        # copies of the logits that a score computes with.
        kernel_bytes = RESULT_COPIES * counter.largest_result
        logit_bytes = LOGIT_COPIES * DOUBLE * logits.shape[-1]
        return counter.peak + kernel_bytes + logit_bytes
