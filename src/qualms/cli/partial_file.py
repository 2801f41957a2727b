"""`scores.csv.partial`: what a table that is not complete has so far, so that the same command goes
on from there.

The file is a journal: its first line has all that decides the scores, each further line a batch of
images. It is gone when the table is there.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qualms.cli.status import NOTHING, echo, interruption
from qualms.data import Images
from qualms.errors import QualmsError
from qualms.result import Scored
from qualms.stream.source import ImageBatch
from qualms.tasks.journal import Journal, read
from qualms.tasks.rows import PartRow
from qualms.threshold import Threshold

ADVICE = "remove it, or pass --overwrite to begin anew"
DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
IMAGES, REFERENCE = "images", "reference"  # what a part may be of
Numbers = dict[str, str | list[float | str]]


def partial_path(out: Path) -> Path:
    """Where the scores of a table are kept until it is complete."""
    return out.with_name(f"{out.name}.partial")


class PartialFile(AbstractContextManager["PartialFile"]):
    """The parts of a table that are done, in memory and, with a path, on disk. A file without a
    part is removed.

    Args:
        path: the file; None keeps nothing.
        about: what decides the scores; a file that was made with something else is refused.
        overwrite: whether such a file is begun anew instead.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], overwrite: bool = False) -> None:
        self._path, self._keeps = path, path is not None
        try:
            self._journal = Journal(path, {"task": "score", **about}, ADVICE, replace=overwrite)
        except BaseException:  # also Ctrl-C
            self._remove_if_empty()
            raise
        self._parts: dict[tuple[str, int], PartRow] = {}
        for row in self._journal.where(row="part"):
            if not PartRow.__required_keys__ <= row.keys():
                self._journal.__exit__()
                raise self._damaged()
            self._parts[row["of"], row["first"]] = row

    def count(self, group: str | None = None) -> int:
        """How many images are done, of one group or of both."""
        count = 0
        for (of, _), part in self._parts.items():
            if group in (None, of):
                count += len(part["ids"])
        return count

    def part(self, group: str, first: int, count: int) -> PartRow | None:
        """The row of a batch, if it is done.

        Args:
            group: what the images are, `IMAGES` or `REFERENCE`.
            first: the position of the first image.
            count: the images of the batch.
        """
        row = self._parts.get((group, first))
        if row is not None and len(row["ids"]) != count:
            raise self._damaged()
        return row

    def add(self, row: PartRow) -> None:
        """Keep a part. If the disk refuses it, that is said, and the work goes on: the table may
        still be written.
        """
        self._parts[row["of"], row["first"]] = row
        if not self._keeps:
            return
        try:
            self._journal.add(row)
        except QualmsError as error:
            self._keeps = False
            echo(f"{error} Scoring goes on, but nothing more is kept until the table is written.")

    def finish(self) -> None:
        """The table is there: remove the file."""
        self._parts = {}
        self.__exit__()
        self._path = None

    def restore(self, row: PartRow, threshold: Threshold | None) -> Scored:
        """A part as a scorer returned it, with the probability of the predicted class alone."""
        try:
            return _restore(row, threshold)
        except (ValueError, KeyError, TypeError, ArithmeticError):
            raise self._damaged() from None

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        if (
            kind is not None
            and issubclass(kind, QualmsError)
            and self._parts
            and self._path is not None
        ):
            echo(f"{_describe_kept(self._path)}.")
        removed = (
            self._parts or self._removed()
        )  # while it is locked, where an open file can be removed
        self._journal.__exit__()
        if not removed:
            self._removed()

    def _removed(self) -> bool:
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _remove_if_empty(self) -> None:
        """Leave nothing of a file for whose first line there was no room."""
        with suppress(OSError):
            if self._path is not None and self._path.stat().st_size == 0:
                self._path.unlink()

    def _damaged(self) -> QualmsError:
        return QualmsError(f"{self._path} is damaged; remove it, and run the same command again.")


class PartialFileSink:
    """The scores of a table: each batch is kept in a partial file until the table is complete.

    Args:
        file: holds the batches, also those of an earlier run.
        group: what the images are, `IMAGES` or `REFERENCE`.
        threshold: of the scores.
    """

    def __init__(self, file: PartialFile, group: str, threshold: Threshold | None) -> None:
        self.file, self.group, self.threshold = file, group, threshold
        self.parts: list[Scored] = []
        self.classes = 0  # the network's, once a batch has passed

    def has(self, batch: ImageBatch) -> bool:
        """Whether the file has a batch, which is then restored."""
        row = self.file.part(self.group, batch.first, batch.count)
        if row is not None:
            self._take(row)
        return row is not None

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Keep a batch."""
        assert scored is not None
        row = part_row(self.group, batch.first, scored)
        self.file.add(row)
        self._take(row)

    def _take(self, row: PartRow) -> None:
        self.parts.append(self.file.restore(row, self.threshold))
        self.classes = row["classes"]


@contextmanager
def stopping(path: Path | None) -> Iterator[None]:
    """Ctrl-C is told here, with what is kept in a file of parts and how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise interruption(_describe_kept(path)) from None


def _describe_kept(path: Path | None) -> str:
    if path is None or not path.exists():
        return NOTHING
    try:
        about, *parts = read(path)
        kept = sum(len(part["ids"]) for part in parts)
        total = sum(about[of]["count"] for of in (IMAGES, REFERENCE) if about.get(of))
    except (
        QualmsError,
        KeyError,
        TypeError,
        ValueError,
    ):  # of a file that is not ours, and was not opened yet
        return NOTHING
    among = ", those of the reference among them," if about.get(REFERENCE) else ""
    return (
        f"{kept} of {total} images{among} are kept in {path}; run the same command again to go on"
    )


def describe_images(images: Images) -> dict[str, Any]:
    """What tells images from others, in the first line of a file."""
    ids = hashlib.sha256("\0".join(images.ids).encode()).hexdigest()[:16]
    return {"count": len(images), "pixels": images.fingerprint(), "ids": ids}


def part_row(of: str, first: int, scored: Scored) -> PartRow:
    """All that a table says of some images; every number in full."""
    return {
        "row": "part",
        "of": of,
        "first": first,
        "ids": list(scored.ids),
        "classes": scored.probs.shape[1],
        "prediction": scored.prediction.tolist(),
        "confidence": _numbers(scored.confidence),
        "scores": {name: _numbers(values) for name, values in scored.scores.items()},
        "errors": {name: _numbers(values) for name, values in scored.errors.items()},
        "sketched": list(scored.sketched),
        "notes": dict(scored.notes),
    }


def _restore(row: PartRow, threshold: Threshold | None) -> Scored:
    count = len(row["ids"])
    confidence = _tensor(row["confidence"], count)
    predicted = torch.tensor(row["prediction"])
    if predicted.shape != (count,) or not bool(
        ((predicted >= 0) & (predicted < row["classes"])).all()
    ):
        raise ValueError("predictions that are no classes")
    return Scored(
        {name: _tensor(values, count) for name, values in row["scores"].items()},
        {name: _tensor(values, count) for name, values in row["errors"].items()},
        confidence[:, None],
        row["ids"],
        None,
        threshold,
        tuple(row["sketched"]),
        row["notes"],
        classes=predicted[:, None],
    )


def _numbers(values: Tensor) -> Numbers:
    """A tensor for JSON, which has no word for what is not finite."""
    plain = [value if math.isfinite(value) else str(value) for value in values.tolist()]
    return {"dtype": str(values.dtype).removeprefix("torch."), "values": plain}


def _tensor(numbers: Numbers, count: int) -> Tensor:
    """The same tensor again, bit by bit: a Python number has all digits of each of these types."""
    values = torch.tensor(
        [float(value) for value in numbers["values"]], dtype=DTYPES[str(numbers["dtype"])]
    )
    if len(values) != count:
        raise ValueError("more or fewer numbers than images")
    return values
