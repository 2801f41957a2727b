"""`scores.csv.partial`: the scores so far of a table that is not complete, to resume from.

The file is a journal: its first line has all that decides the scores, each further line a batch of
images (`PartRow`). It is removed when the table is complete.

    {"row": "run", "task": "score", "network": …, "methods": …, "seed": 0, "images": …, …}
    {"row": "part", "of": "images", "first": 0, "ids": ["a.png"], "prediction": [3], …}
    {"row": "part", "of": "images", "first": 1, "ids": ["b.png", "c.png", "d.png"], …}

With --reference, the images of the reference are scored first; their parts are `"of": "reference"`.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qualms.cli.status import GOES_ON, NOTHING, echo, interruption
from qualms.data import Images
from qualms.errors import QualmsError
from qualms.result import Scored
from qualms.stream.source import ImageBatch
from qualms.tasks.journal import Journal, read
from qualms.tasks.rows import PartRow
from qualms.threshold import Threshold

ADVICE = "remove it, or pass --overwrite to start again"
DTYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
IMAGES, REFERENCE = "images", "reference"  # the groups of images in a file
Numbers = dict[str, str | list[float | str]]  # a tensor as JSON


def partial_path(table: Path) -> Path:
    """Return where the scores of a table are kept until it is complete.

    Args:
        table: The file of the table, such as `scores.csv`.
    """
    return table.with_name(f"{table.name}.partial")


class PartialFile(AbstractContextManager["PartialFile"]):
    """The scored batches of a table, in memory and, with a path, on disk.

    If the block fails, the file stays and its path is printed. A file without a batch is removed.

    Args:
        path: The file; None keeps the batches in memory only.
        about: The settings that decide the scores. A file with other settings is refused.
        overwrite: Whether a file with other settings is replaced instead.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], overwrite: bool = False) -> None:
        """Open or create the file, lock it, and read the batches of an earlier run."""
        self._path = path
        self._on_disk = path is not None
        with ExitStack() as on_failure:
            on_failure.callback(self._remove_if_empty)
            self._journal = Journal(path, {"task": "score", **about}, ADVICE, replace=overwrite)
            on_failure.pop_all()
        # By group and position of the first image.
        self._parts: dict[tuple[str, int], PartRow] = {}
        for row in self._journal.where(row="part"):
            if not PartRow.__required_keys__ <= row.keys():
                self._journal.__exit__()
                raise self._damage_error()
            self._parts[row["of"], row["first"]] = row

    def count(self, group: str | None = None) -> int:
        """Return how many images are scored already, of one group or of both.

        Args:
            group: `IMAGES` or `REFERENCE`; None for both.
        """
        count = 0
        for (of, _), part in self._parts.items():
            if group in (None, of):
                count += len(part["ids"])
        return count

    def part(self, group: str, first: int, count: int) -> PartRow | None:
        """Return the saved row of a batch, or None if the batch is not scored yet.

        Args:
            group: `IMAGES` or `REFERENCE`.
            first: The position of the first image.
            count: The number of images in the batch.
        """
        row = self._parts.get((group, first))
        if row is not None and len(row["ids"]) != count:
            raise self._damage_error()
        return row

    def add(self, row: PartRow) -> None:
        """Save the row of a batch.

        If the disk is full, the error is printed once, and scoring continues: the table may still
        be written, and later batches are kept in memory.
        """
        self._parts[row["of"], row["first"]] = row
        if not self._on_disk:
            return
        try:
            self._journal.add(row)
        except QualmsError as error:
            self._on_disk = False
            echo(f"{error} Scoring continues, but if it is interrupted, later scores are lost.")

    def finish(self) -> None:
        """Forget all batches, and remove the file: the table is complete."""
        self._parts = {}
        self.__exit__()
        self._path = None

    def restore(self, row: PartRow, threshold: Threshold | None) -> Scored:
        """Turn a row back into scores, with the probability of the predicted class alone.

        Args:
            row: The row of a batch, from `part`.
            threshold: The threshold of the scores, if there is one.
        """
        try:
            return _restore(row, threshold)
        except (ValueError, KeyError, TypeError, ArithmeticError):
            raise self._damage_error() from None

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        """Close the file; remove it if it has no batch.

        After a `QualmsError`, print where the scored batches are kept. For Ctrl-C,
        `report_interruption` prints that.
        """
        failed = kind is not None and issubclass(kind, QualmsError)
        if failed and self._parts and self._path is not None:
            echo(f"{_describe_progress(self._path)}.")
        is_settled = (
            bool(self._parts) or self._remove()
        )  # removed while it is locked, if the system allows that
        self._journal.__exit__()
        if not is_settled:
            self._remove()

    def _remove(self) -> bool:
        """Remove the file; return False if it is open and the system (Windows) refuses."""
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError:
            return False
        return True

    def _remove_if_empty(self) -> None:
        """Remove an empty file, such as one for whose first line the disk had no room."""
        with suppress(OSError):
            if self._path is not None and self._path.stat().st_size == 0:
                self._path.unlink()

    def _damage_error(self) -> QualmsError:
        """Return the error for a file that was changed by something else."""
        return QualmsError(f"{self._path} is damaged; remove it, and run the same command again.")


class PartialFileSink:
    """The sink of a table: each batch is kept in a partial file until the table is complete.

    Args:
        file: The partial file, which may hold batches of an earlier run.
        group: The group of the images, `IMAGES` or `REFERENCE`.
        threshold: The threshold of the scores, if there is one.

    Attributes:
        parts: The scores of each batch so far, in the order of the images.
    """

    def __init__(self, file: PartialFile, group: str, threshold: Threshold | None) -> None:
        """Begin without parts."""
        self.file, self.group, self.threshold = file, group, threshold
        self.parts: list[Scored] = []
        # The number of the network's classes, once a batch was scored or restored.
        self.classes = 0

    def restore(self, batch: ImageBatch) -> bool:
        """Add the batch to the parts if an earlier run has scored it; False if it has to be scored.

        Args:
            batch: A batch of the source; only its position and count are used.
        """
        row = self.file.part(self.group, batch.first, batch.count)
        if row is not None:
            self._append(row)
        return row is not None

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Save the scores of a batch.

        Args:
            batch: A batch of the source.
            scored: The scores of the batch; never None, since all images are in memory.
        """
        assert scored is not None
        row = part_row(self.group, batch.first, scored)
        self.file.add(row)
        # Scores go through the row, so that a run that resumes has equal parts.
        self._append(row)

    def _append(self, row: PartRow) -> None:
        """Add the scores of a saved batch, restored from its row, to the parts."""
        self.parts.append(self.file.restore(row, self.threshold))
        self.classes = row["classes"]


@contextmanager
def report_interruption(path: Path | None) -> Iterator[None]:
    """On Ctrl-C, print how many images are kept in a partial file, and exit.

    Args:
        path: The file; None if nothing is kept.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise interruption(_describe_progress(path)) from None


def _describe_progress(path: Path | None) -> str:
    """Describe how much a partial file keeps: `4 of 60 images are kept in scores.csv.partial; …`.

    Args:
        path: The file; None if nothing is kept.
    """
    if path is None or not path.exists():
        return NOTHING
    try:
        about, *parts = read(path)
        kept = sum(len(part["ids"]) for part in parts)
        total = sum(about[group]["count"] for group in (IMAGES, REFERENCE) if about.get(group))
    # The file may be another program's, if Ctrl-C came before it was opened.
    except (QualmsError, KeyError, TypeError, ValueError):
        return NOTHING
    with_reference = ", including the reference," if about.get(REFERENCE) else ""
    return f"{kept} of {total} images{with_reference} are kept in {path}; {GOES_ON}"


def describe_images(images: Images) -> dict[str, Any]:
    """Return what identifies images in the first line of a file.

    Args:
        images: The images, in the order of the table.

    Returns:
        The number of images, and fingerprints of their pixels and of their ids.
    """
    ids = hashlib.sha256("\0".join(images.ids).encode()).hexdigest()[:16]
    return {"count": len(images), "pixels": images.fingerprint(), "ids": ids}


def part_row(group: str, first: int, scored: Scored) -> PartRow:
    """Convert the scores of a batch to a row, with all digits of every number.

    Args:
        group: `IMAGES` or `REFERENCE`.
        first: The position of the first image.
        scored: The scores of n images.

    Returns:
        The row. Of the class probabilities, only that of the predicted class is kept.
    """
    return {
        "row": "part",
        "of": group,
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
    """Convert a row back to scores, with probabilities [n, 1] of the predicted classes alone.

    Args:
        row: The row, from `part_row`.
        threshold: The threshold of the scores, if there is one.

    Raises:
        ValueError: If the row was changed by something else.
    """
    count = len(row["ids"])
    confidence = _tensor(row["confidence"], count)
    predicted = torch.tensor(row["prediction"])
    if predicted.shape != (count,):
        raise ValueError("not one prediction for each image")
    is_class = (predicted >= 0) & (predicted < row["classes"])
    if not bool(is_class.all()):
        raise ValueError("predictions that are not classes")
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
    """Convert a tensor [n] to JSON, where numbers that are not finite become strings."""
    plain = [value if math.isfinite(value) else str(value) for value in values.tolist()]
    return {"dtype": str(values.dtype).removeprefix("torch."), "values": plain}


def _tensor(numbers: Numbers, count: int) -> Tensor:
    """Convert the output of `_numbers` back to the same tensor, without loss for any dtype.

    Args:
        numbers: The dtype and the values.
        count: The number of values that there must be.
    """
    dtype = DTYPES[str(numbers["dtype"])]
    values = torch.tensor([float(value) for value in numbers["values"]], dtype=dtype)
    if len(values) != count:
        raise ValueError("not one number for each image")
    return values
