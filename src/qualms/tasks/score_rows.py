"""What scoring images and scoring tokens share: rows of scores in a journal, and usable methods."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Generic

from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.result import Scored
from qualms.stream.sink import BatchT
from qualms.tasks.journal import Journal
from qualms.tasks.rows import LeftOutRow

Methods = Mapping[str, Method]  # by their names in rows; noise is for pixels in [0, 1]


class ScoreRows(ABC, Generic[BatchT]):
    """The scores of a stream as rows of a journal, so that a killed run can resume.

    A sink (see `qualms.stream.sink`) that adds a row for each batch. Only the methods by which the
    journal has no scores of a batch are `missing`, and need to be computed.

    Args:
        journal: keeps the rows.
        about: what all rows share: the name of the data, the seed and the engine.
        exactly: all parameters of each method, by the method's name. Scores that were computed with
            other parameters are not used.
    """

    def __init__(
        self, journal: Journal, about: Mapping[str, Any], exactly: Mapping[str, str]
    ) -> None:
        self.journal, self.about, self.exactly = journal, about, exactly
        self._rows: dict[int, list[Any]] = {}  # by the position of a batch's first sample
        self._start = 0.0

    @abstractmethod
    def key(self, batch: BatchT) -> Mapping[str, Any]:
        """Return what identifies the rows of a batch, whatever the method."""

    @abstractmethod
    def measures(self, batch: BatchT, scored: Scored) -> dict[str, Any]:
        """Return the other entries of a batch's row: `scores` by method, and maybe more."""

    def rows(self, batch: BatchT) -> list[Any]:
        """Return all rows of a batch, in the order in which they were added."""
        if batch.first not in self._rows:
            self._rows[batch.first] = self.journal.where(**self.key(batch))
        return self._rows[batch.first]

    def scores(self, batch: BatchT) -> dict[str, Any]:
        """Return the scores that a batch has so far, by method."""
        scores_by_method: dict[str, Any] = {}
        for row in self.rows(batch):
            for name, scores in row["scores"].items():
                if row["methods"][name] == self.exactly.get(name):
                    scores_by_method[name] = scores
        return scores_by_method

    def missing(self, batch: BatchT) -> tuple[str, ...]:
        """Return the methods by which a batch has no scores yet."""
        scores = self.scores(batch)
        return tuple(name for name in self.exactly if name not in scores)

    def restore(self, batch: BatchT) -> bool:
        """Return whether the journal has all methods' scores of a batch; start its timer."""
        self._start = time.perf_counter()
        return not self.missing(batch)

    def write(self, batch: BatchT, scored: Scored | None) -> None:
        """Add the row of a batch, with the seconds since `restore` was called for it."""
        assert scored is not None
        measures = self.measures(batch, scored)
        row: Any = {
            **self.key(batch),
            "methods": {name: self.exactly[name] for name in measures["scores"]},
            "seconds": round(time.perf_counter() - self._start, 3),
            **measures,
        }
        self.rows(batch).append(self.journal.add(row))


def keep_usable(
    methods: Methods, try_method: Callable[[str, Method], object]
) -> tuple[dict[str, Method], list[LeftOutRow]]:
    """Try each method, and leave out those that a model does not support.

    Args:
        methods: the methods by name.
        try_method: computes a few scores by a method, given its name; a `QualmsError` means that
            the method cannot be used.

    Returns:
        The methods that work, and a row with the reason for each other one.

    Raises:
        QualmsError: if no method can be used.
    """
    usable: dict[str, Method] = {}
    left_out: list[LeftOutRow] = []
    for name, method in methods.items():
        try:
            try_method(name, method)
            usable[name] = method
        except QualmsError as error:
            left_out.append({"row": "left out", "method": name, "why": str(error)})
    if not usable:
        first = left_out[0]
        raise QualmsError(f"no method can be used: {first['method']}: {first['why']}")
    return usable, left_out
