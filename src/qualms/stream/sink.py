"""`Sink`, which saves scores, and `score_stream`, the loop of every long run."""

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
        """The number of samples in this batch, including unreadable ones."""

    @property
    def is_empty(self) -> bool:
        """Whether none of the samples could be read."""


BatchT = TypeVar("BatchT", bound=Batch)
BatchT_contra = TypeVar("BatchT_contra", bound=Batch, contravariant=True)


class Sink(Protocol[BatchT_contra]):
    """Saves the scores of a stream batch by batch, for example in a table, a journal or shards."""

    def restore(self, batch: BatchT_contra) -> bool:
        """Restore the scores of a batch from an earlier run.

        Returns:
            False if there are none, so that the batch has to be scored.
        """

    def write(self, batch: BatchT_contra, scored: Scored | None) -> None:
        """Save one batch; `scored` is None if none of its samples could be read."""


def score_stream(
    batches: Iterable[BatchT],
    score: Callable[[BatchT], Scored],
    sink: Sink[BatchT],
    progress: Callable[[int], None],
) -> None:
    """Score the batches of a source and write them to a sink, skipping those it can restore.

    Args:
        batches: the batches of a source, in order.
        score: computes the scores of one batch.
        sink: saves the scores of each batch as soon as they are computed.
        progress: called after each batch with the number of samples that are done.
    """
    for batch in batches:
        if not sink.restore(batch):
            sink.write(batch, None if batch.is_empty else score(batch))
        progress(batch.first + batch.count)


def report_to(
    progress: ProgressFn | None,
    name: str,
    total: int | None,
    samples: str = "images",
) -> Callable[[int], None]:
    """Build the `progress` argument of `score_stream`, which is called with a count alone.

    Args:
        progress: the callback, called with a text, the samples done and their total; None reports
            nothing.
        name: the display name of the source.
        total: how many samples the source has; None if that is not known.
        samples: the plural noun for the samples in the text.
    """

    def report(done: int) -> None:
        """Report that `done` samples are scored so far."""
        # Where the total is unknown, the callback gets the count so far as the total.
        if progress is not None:
            progress(f"{samples} of {name} scored", done, total or done)

    return report
