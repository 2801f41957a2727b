"""Where scores go, and the loop that every long run shares."""

from collections.abc import Callable, Iterable
from typing import Protocol

from qualms.progress import ProgressFn
from qualms.result import Scored
from qualms.stream.source import ImageBatch


class Sink(Protocol):
    """Takes the scores of a stream, batch by batch: into a table, a journal or shards."""

    def has(self, batch: ImageBatch) -> bool:
        """Whether an earlier run has saved the scores of this batch."""

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Save one batch; `scored` is None if none of its images could be read."""


def score_stream(
    batches: Iterable[ImageBatch],
    score: Callable[[ImageBatch], Scored],
    sink: Sink,
    progress: Callable[[int], None],
) -> None:
    """Score the batches of a source into a sink. Batches that the sink has are skipped.

    Args:
        batches: from a source.
        score: the scores of one batch.
        sink: takes each part once it is complete.
        progress: called with the position after each batch.
    """
    for batch in batches:
        if not sink.has(batch):
            sink.write(batch, score(batch) if len(batch.images) else None)
        progress(batch.first + batch.count)


def report_to(progress: ProgressFn | None, name: str, total: int | None) -> Callable[[int], None]:
    """How `score_stream` reports its position to a progress callback.

    Args:
        progress: the callback; None reports nothing.
        name: what people call the images.
        total: how many there are; None if that is not known.
    """

    def report(done: int) -> None:
        if progress is not None:
            progress(f"images of {name} scored", done, total or done)

    return report
