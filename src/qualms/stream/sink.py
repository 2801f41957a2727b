"""Where scores go, and the loop that every long run shares."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from qualms.progress import ProgressFn
from qualms.result import Scored


class Batch(Protocol):
    """Consecutive samples of a source: images, or windows of a text."""

    @property
    def first(self) -> int:
        """The position of the first sample in the source."""

    @property
    def count(self) -> int:
        """The number of samples, including those that could not be read."""

    @property
    def is_empty(self) -> bool:
        """Whether none of the samples could be read."""


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)


class Sink(Protocol[BatchT_contra]):
    """Takes the scores of a stream, batch by batch: into a table, a journal or shards."""

    def has(self, batch: BatchT_contra) -> bool:
        """Return whether an earlier run has saved the scores of this batch."""

    def write(self, batch: BatchT_contra, scored: Scored | None) -> None:
        """Save one batch; `scored` is None if none of its samples could be read."""


def score_stream(
    batches: Iterable[BatchT],
    score: Callable[[BatchT], Scored],
    sink: Sink[BatchT],
    progress: Callable[[int], None],
) -> None:
    """Score the batches of a source into a sink; skip those that the sink has.

    Args:
        batches: from a source.
        score: the scores of one batch.
        sink: takes each part once it is complete.
        progress: called with the position after each batch.
    """
    for batch in batches:
        if not sink.has(batch):
            sink.write(batch, None if batch.is_empty else score(batch))
        progress(batch.first + batch.count)


def report_to(
    progress: ProgressFn | None,
    name: str,
    total: int | None,
    samples: str = "images",
) -> Callable[[int], None]:
    """Return a function by which `score_stream` reports its position to a callback.

    Args:
        progress: the callback; None reports nothing.
        name: what people call the source.
        total: how many samples it has; None if that is not known.
        samples: what they are called.
    """

    def report(done: int) -> None:
        if progress is not None:
            progress(f"{samples} of {name} scored", done, total or done)

    return report
