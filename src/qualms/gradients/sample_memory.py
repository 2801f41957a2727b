"""How many bytes one row of a batch takes in a pass, by watching one, and how many rows fit a
budget.

A dispatch mode sees every result that a pass makes, inside scripts and backward passes as well, and
when it is let go. What kernels hold beside their results (copies in another memory format, gaps of
the allocator) it does not see: on a CPU the process took up to six times the largest result more
than all results together.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, batch_tensors, shapes_of, take_samples
from qualms.gradients.memory import budget_of_rows, free_bytes, release_free_memory, require_room
from qualms.gradients.nested import tensors_in
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.settings import Settings

log = logging.getLogger("qualms")
COPIES = 6  # of the largest result, which kernels hold beside it
COPIES_OF_LOGITS = 16  # in double precision, in what a score computes from them
DOUBLE = 8  # bytes
SMALL = 2**17  # bytes of inputs that run at once
LARGE = 2**26  # bytes of rows at once for which it matters what is free


@dataclass(frozen=True)
class SampleMemory:
    """What a pass over one row takes, in bytes."""

    alive: int  # results that exist at the same time
    largest: int  # the largest of them
    classes: int = 0

    @property
    def needed(self) -> int:
        """All that is to be reckoned with for a row."""
        return self.alive + COPIES * self.largest + COPIES_OF_LOGITS * DOUBLE * self.classes


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the results that exist at the same time; what existed before does not
    count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.most, self.largest = 0, 0, 0
        self._known: dict[int, Any] = {}  # weak references to storages, by their address

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = {
            t.untyped_storage()._cdata
            for t in tensors_in((args, kwargs))
            if t.layout == torch.strided
        }
        for t in tensors_in(out):
            if t.layout == torch.strided and t.untyped_storage()._cdata not in given:
                self._add(t.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def let_go(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, let_go)
        self.now += size
        self.most = max(self.most, self.now)
        self.largest = max(self.largest, size)


@dataclass(frozen=True)
class PassMemory:
    """Work on rows that run at once.

    Args:
        what: the kind of pass, for people and to tell looks apart.
        run: does it on one row, and returns the logits.
        most: rows at once, whatever the memory.
        held: bytes that are held beside it.
        times: what its results take, more than a look at a row tells.
    """

    what: str
    run: Callable[[Batch], Tensor]
    most: int
    held: int = 0
    times: int = 1

    def rows_at_once(self, batch: Batch, rows: int, settings: Settings, learnt: PlanCache) -> int:
        """How many rows like those of a batch fit the budget, of as many as there are, by one look
        at the first.

        No look is taken where nothing is to be decided: no `budget` that must be kept, and a single
        row, or numbers so few that results thousands of times their size would fit.
        """
        most = min(rows, settings.batch_size or self.most)
        device = batch_tensors(batch)[0].device
        first = batch_tensors(batch)[0]
        small = first.is_floating_point() and first[:1].nbytes * most < SMALL
        if settings.budget is None and (most == 1 or small):
            return most
        row = self.bytes_of_row(batch, learnt)
        if row is None:
            return most
        what = f"the results of {self.what} over one input"
        require_room(
            row + self.held, settings.budget or free_bytes(device), what, "or use smaller inputs"
        )
        room = budget_of_rows(settings.budget, device) - self.held
        size = max(1, min(most, room // row))
        if device.type == "cpu" and size * row > LARGE:
            release_free_memory()  # that of other kinds of work, and of the look
        return size

    def bytes_of_row(self, batch: Batch, learnt: PlanCache) -> int | None:
        """What one row like those of a batch takes, found once; None if a row does not run by
        itself.
        """
        key = ("memory of a row", self.what, shapes_of(batch))
        row = learnt.once(key, lambda: self._look(take_samples(batch, slice(0, 1))))
        return None if row is None else max(1, self.times * row.needed)

    def _look(self, row: Batch) -> SampleMemory | None:
        """What one row takes; None if it does not run by itself."""
        watch = _LiveBytes()
        try:
            with torch.random.fork_rng(devices=[]), watch:
                logits = self.run(row)
        except QualmsError as error:
            log.info("%s: how much memory a row takes is not known", error)
            return None
        return SampleMemory(watch.most, watch.largest, logits.shape[-1])
