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
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}
# The groups of images in a file: those of the table, and those of --reference.
IMAGES = "images"
REFERENCE = "reference"
JsonTensor = dict[str, str | list[float | str]]  # a tensor [n] as JSON: `dtype` and `values`


def partial_path(table: Path) -> Path:
    """Return where the scores of a table are kept until it is complete.

    Args:
        table: The file of the table, such as `scores.csv`.
    """
    return table.with_name(f"{table.name}.partial")


class PartialFile(AbstractContextManager["PartialFile"]):
    """The scored batches of a table, in memory and, with a path, on disk.

    If the `with` block fails, the file stays and its path is printed. A file without a batch is
    removed.

    Args:
        path: The file; None keeps the batches in memory only.
        about: The settings that decide the scores. A file with other settings is refused.
        overwrite: Whether a file with other settings is replaced instead.
    """

    def __init__(self, path: Path | None, about: dict[str, Any], overwrite: bool = False) -> None:
        """Open or create the file, lock it, and read the batches of an earlier run."""
        self._path = path
        # Whether batches are saved in the file; False without a path, or once the disk is full.
        self._on_disk = path is not None
        # If the journal cannot be opened, no empty file is left behind.
        with ExitStack() as on_failure:
            on_failure.callback(self._remove_if_empty)
            first_line = {"task": "score", **about}
            self._journal = Journal(path, first_line, ADVICE, replace=overwrite)
            # It is open: the callback is not run.
            on_failure.pop_all()
        # The rows of the scored batches, by group and position of the batch's first image.
        self._parts: dict[tuple[str, int], PartRow] = {}
        for row in self._journal.where(row="part"):
            # A row that lacks a key is damaged.
            if not PartRow.__required_keys__ <= row.keys():
                # Closed here, since a constructor that fails returns no object to close.
                self._journal.__exit__()
                raise self._damage_error()
            self._parts[row["of"], row["first"]] = row

    def count_scored(self, group: str | None = None) -> int:
        """Return how many images are scored already, of one group or of both.

        Args:
            group: `IMAGES` or `REFERENCE`; None for both.
        """
        count = 0
        for (part_group, _), row in self._parts.items():
            if group in (None, part_group):
                count += len(row["ids"])
        return count

    def saved_row(self, group: str, first: int, count: int) -> PartRow | None:
        """Return the saved row of a batch, or None if the batch is not scored yet.

        Args:
            group: `IMAGES` or `REFERENCE`.
            first: The position of the batch's first image in the group.
            count: The number of images in the batch.

        Raises:
            QualmsError: If the saved row has another number of images.
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
        # Removes the file, since there are no batches.
        self.__exit__()
        # The `with` block calls `__exit__` again, which must not remove another run's new file.
        self._path = None

    def restore(self, row: PartRow, threshold: Threshold | None) -> Scored:
        """Convert a saved row to scores, or raise an error if the row is damaged.

        Args:
            row: The row of a batch, from `saved_row`.
            threshold: The threshold of the scores, if there is one.

        Returns:
            The scores, with the probability of the predicted class alone.
        """
        try:
            return _scored_from_row(row, threshold)
        # What wrong keys, types or numbers in the row lead to.
        except (ValueError, KeyError, TypeError, ArithmeticError):
            raise self._damage_error() from None

    def __exit__(self, error_type: type[BaseException] | None = None, *_: object) -> None:
        """Close the file; remove it if it has no batch.

        After a `QualmsError`, print where the scored batches are kept. For Ctrl-C,
        `report_interruption` prints that.
        """
        failed = error_type is not None and issubclass(error_type, QualmsError)
        if failed and self._parts and self._path is not None:
            echo(f"{_describe_progress(self._path)}.")
        is_empty = not self._parts
        is_removed = False
        # While the journal still locks the file, so that no other run can have opened it.
        if is_empty:
            is_removed = self._remove()
        self._journal.__exit__()
        # Windows refuses to remove an open file, so it is removed after closing.
        if is_empty and not is_removed:
            self._remove()

    def _remove(self) -> bool:
        """Remove the file; return False if the system refuses, as Windows does for an open file."""
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
        """Return the error for a file whose rows are not those that this class has written."""
        return QualmsError(f"{self._path} is damaged; remove it, and run the same command again.")


class PartialFileSink:
    """Saves each batch of a table in a partial file: the sink of `score_stream`.

    Args:
        file: The partial file, which may hold batches of an earlier run.
        group: The group of the images, `IMAGES` or `REFERENCE`.
        threshold: The threshold of the scores, if there is one.

    Attributes:
        parts: The scores of each batch so far, in the order of the images.
    """

    def __init__(self, file: PartialFile, group: str, threshold: Threshold | None) -> None:
        """Create a sink that saves the batches of one group in `file`."""
        self.file = file
        self.group = group
        self.threshold = threshold
        self.parts: list[Scored] = []
        # The number of the network's classes; 0 until a batch is scored or restored.
        self.num_classes = 0

    def restore(self, batch: ImageBatch) -> bool:
        """Add a batch to the parts if an earlier run has scored it; return whether it has.

        Args:
            batch: A batch of images, of which only the position and the count are used.

        Returns:
            False if the batch has to be scored.
        """
        row = self.file.saved_row(self.group, batch.first, batch.count)
        if row is not None:
            self._append(row)
        return row is not None

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Save the scores of a batch.

        Args:
            batch: A batch of images.
            scored: The scores of the batch. None would be a batch without a readable image, which
                cannot occur here, since all images are in memory.
        """
        assert scored is not None
        row = part_row(self.group, batch.first, scored)
        self.file.add(row)
        # Converted to the row and back, so that a run that resumes has exactly the same scores.
        self._append(row)

    def _append(self, row: PartRow) -> None:
        """Restore the scores of a batch from its saved row, and append them to `parts`."""
        self.parts.append(self.file.restore(row, self.threshold))
        self.num_classes = row["classes"]


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
        about, *rows = read(path)
        num_kept = sum(len(row["ids"]) for row in rows)
        num_total = sum(about[group]["count"] for group in (IMAGES, REFERENCE) if about.get(group))
    # The file may be another program's, if Ctrl-C was pressed before the file was opened.
    except (QualmsError, KeyError, TypeError, ValueError):
        return NOTHING
    with_reference = ", including the reference," if about.get(REFERENCE) else ""
    return f"{num_kept} of {num_total} images{with_reference} are kept in {path}; {GOES_ON}"


def describe_images(images: Images) -> dict[str, Any]:
    """Return what identifies some images in the first line of a partial file.

    Args:
        images: The images, in the order of the table.

    Returns:
        The number of images as `count`, and digests of their `pixels` and of their `ids`.
    """
    ids_digest = hashlib.sha256("\0".join(images.ids).encode()).hexdigest()[:16]
    return {"count": len(images), "pixels": images.fingerprint(), "ids": ids_digest}


def part_row(group: str, first: int, scored: Scored) -> PartRow:
    """Convert the scores of a batch to a row, with all digits of every number.

    Args:
        group: `IMAGES` or `REFERENCE`.
        first: The position of the batch's first image in the group.
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
        "confidence": _to_json_tensor(scored.confidence),
        "scores": {name: _to_json_tensor(values) for name, values in scored.scores.items()},
        "errors": {name: _to_json_tensor(values) for name, values in scored.errors.items()},
        "sketched": list(scored.sketched),
        "notes": dict(scored.notes),
    }


def _scored_from_row(row: PartRow, threshold: Threshold | None) -> Scored:
    """Convert a row of n images to scores, with probabilities [n, 1] of the predicted classes.

    Args:
        row: The row, from `part_row`.
        threshold: The threshold of the scores, if there is one.

    Raises:
        ValueError: If the row is not consistent, so that something else has changed it.
    """
    count = len(row["ids"])
    confidence = _from_json_tensor(row["confidence"], count)
    predicted = torch.tensor(row["prediction"])
    if predicted.shape != (count,):
        raise ValueError("not one prediction for each image")
    is_class = (predicted >= 0) & (predicted < row["classes"])
    if not bool(is_class.all()):
        raise ValueError("predictions that are not classes")
    # Of the classes, only the predicted one is known, on an axis of length 1.
    return Scored(
        scores={name: _from_json_tensor(values, count) for name, values in row["scores"].items()},
        errors={name: _from_json_tensor(values, count) for name, values in row["errors"].items()},
        probs=confidence[:, None],
        ids=row["ids"],
        threshold=threshold,
        sketched=tuple(row["sketched"]),
        notes=row["notes"],
        classes=predicted[:, None],
    )


def _to_json_tensor(values: Tensor) -> JsonTensor:
    """Convert a tensor [n] to values for JSON; NaN and infinities, which JSON lacks, to strings."""
    json_values = [value if math.isfinite(value) else str(value) for value in values.tolist()]
    return {"dtype": str(values.dtype).removeprefix("torch."), "values": json_values}


def _from_json_tensor(json_tensor: JsonTensor, count: int) -> Tensor:
    """Convert the output of `_to_json_tensor` back to the same tensor [n], in its dtype.

    Args:
        json_tensor: The dtype and the values.
        count: The required number of values; a `ValueError` is raised if there are others.
    """
    dtype = DTYPES[str(json_tensor["dtype"])]
    values = torch.tensor([float(value) for value in json_tensor["values"]], dtype=dtype)
    if len(values) != count:
        raise ValueError("not one number for each image")
    return values
