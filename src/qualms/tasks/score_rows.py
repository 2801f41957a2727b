"""Shared by the scoring of images and of tokens: rows of scores, and the choice of methods."""

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

# The methods by their names in rows; their noise levels are for pixels in [0, 1].
Methods = Mapping[str, Method]


class ScoreRows(ABC, Generic[BatchT]):
    """The scores of a stream as rows of a journal, so that a killed run can resume.

    A sink (see `qualms.stream.sink`) that adds a row for each batch. A batch is scored only by its
    `missing` methods: those by which the journal has no scores of the batch yet.

    Args:
        journal: keeps the rows.
        about: the entries that all rows share: the name of the data, the seed and the engine.
        exactly: all parameters of each method as a string, by the method's name. Scores that were
            computed with other parameters are not used.
    """

    def __init__(
        self, journal: Journal, about: Mapping[str, Any], exactly: Mapping[str, str]
    ) -> None:
        """Store the arguments (see the class); the journal is searched later, batch by batch."""
        self.journal, self.about, self.exactly = journal, about, exactly
        # The rows of each batch, by the position of the batch's first sample.
        self._rows: dict[int, list[Any]] = {}
        # When the last call of `restore` began, by `time.perf_counter`.
        self._start = 0.0

    @abstractmethod
    def key(self, batch: BatchT) -> Mapping[str, Any]:
        """Return the entries by which the rows of a batch are found, whatever their methods."""

    @abstractmethod
    def measures(self, batch: BatchT, scored: Scored) -> dict[str, Any]:
        """Return what the row of a scored batch holds: `scores` by method, and any predictions."""

    def rows(self, batch: BatchT) -> list[Any]:
        """Return all rows of a batch, in the order in which they were added to the journal."""
        if batch.first not in self._rows:
            self._rows[batch.first] = self.journal.where(**self.key(batch))
        return self._rows[batch.first]

    def scores(self, batch: BatchT) -> dict[str, Any]:
        """Return the scores that the journal has of a batch, by method.

        Scores of a method with other parameters than those in `exactly` are left out.
        """
        scores_by_method: dict[str, Any] = {}
        # Each run that had other methods has added a row.
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
        """Whether a batch need not be scored, since the journal has its scores by all methods.

        Else it is scored now: the time is stored, from which `write` computes the seconds.
        """
        self._start = time.perf_counter()
        return not self.missing(batch)

    def write(self, batch: BatchT, scored: Scored | None) -> None:
        """Add a row with the new scores of a batch, and the seconds since its `restore`.

        Args:
            batch: A batch of images or windows.
            scored: The batch's scores by the methods that were missing.
        """
        # A sink gets None for files that cannot be read; these samples are in memory.
        assert scored is not None
        measures = self.measures(batch, scored)
        row: Any = {
            **self.key(batch),
            "methods": {name: self.exactly[name] for name in measures["scores"]},
            "seconds": round(time.perf_counter() - self._start, 3),
            **measures,
        }
        # `rows` returns the stored list, so that later calls return the new row as well.
        self.rows(batch).append(self.journal.add(row))


def keep_usable(
    methods: Methods, try_method: Callable[[str, Method], object]
) -> tuple[dict[str, Method], list[LeftOutRow]]:
    """Try each method, and leave out those that a model does not support.

    Args:
        methods: the methods by name.
        try_method: called with the name of each method and the method; computes a few scores, and
            raises a `QualmsError` if the method cannot be used.

    Returns:
        The methods that work, by name, and a row with the reason for each method that does not.

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
