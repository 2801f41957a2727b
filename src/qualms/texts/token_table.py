"""Scored documents as a table with a row for each token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qualms.texts.document import ScoredDocument

KINDS = {  # of columns; all others are float64
    "position": "int64",
    "start": "int64",
    "end": "int64",
    "generated": "bool",
    "document": "string",
    "token": "string",
    "likeliest_next": "string",
}


@dataclass(frozen=True)
class TokenTable:
    """A row for each token of some documents.

    Args:
        documents: with scores.
        written_from: from which character on a model has written each document, by name; None if
            no model has.
    """

    documents: Sequence[ScoredDocument]
    written_from: Mapping[str, int] | None = None

    def columns(self) -> dict[str, list[Any]]:
        """Return the table by column: `document`, `position`, `token`, `start`, `end`, `generated`,
        `score_METHOD` for each method, `log_prob_next`, `likeliest_next` and `likeliest_prob`.
        """
        table: dict[str, list[Any]] = {}
        for one in self.documents:
            for name, values in self._columns_of(one).items():
                table.setdefault(name, []).extend(values)
        return table

    def to_arrow(self) -> Any:
        """Return `columns()` as a pyarrow.Table."""
        import pyarrow

        arrays = {}
        for name, values in self.columns().items():
            kind = pyarrow.type_for_alias(KINDS.get(name, "float64"))
            arrays[name] = pyarrow.array(values, kind)
        return pyarrow.table(arrays)

    def _columns_of(self, one: ScoredDocument) -> dict[str, list[Any]]:
        name = one.document.name
        starts = [start for start, _ in one.offsets]
        likeliest = [tokens[0] for tokens in one.alternatives]
        table: dict[str, list[Any]] = {
            "document": [name] * len(one.ids),
            "position": list(range(len(one.ids))),
            "token": one.tokens,
            "start": starts,
            "end": [end for _, end in one.offsets],
        }
        if self.written_from is not None:
            table["generated"] = [start >= self.written_from[name] for start in starts]
        for method, values in one.scores.items():
            table[f"score_{method}"] = list(map(_without_nan, values))
        table["log_prob_next"] = list(map(_without_nan, one.next_log_probs))
        table["likeliest_next"] = [token for token, _ in likeliest]
        table["likeliest_prob"] = [prob for _, prob in likeliest]
        return table


def _without_nan(value: float) -> float | None:
    """Return the number, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value
