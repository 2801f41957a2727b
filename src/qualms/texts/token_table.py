"""Scored documents as a table with a row for each token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qualms.texts.document import ScoredDocument

COLUMN_TYPES = {  # all other columns are float64
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
    """Scored documents as columns, with a row for each token.

    Args:
        documents: the documents with scores.
        written_from: by document name, the position of the first character that a model has
            generated; None if no text was generated.
    """

    documents: Sequence[ScoredDocument]
    written_from: Mapping[str, int] | None = None

    def columns(self) -> dict[str, list[Any]]:
        """Return the values of each column by its name, one for each token of all documents.

        The columns are `document`, `position`, `token`, `start`, `end`, `generated` (only with
        `written_from`), `score_METHOD` for each method, `log_prob_next`, `likeliest_next` and
        `likeliest_prob`.
        """
        table: dict[str, list[Any]] = {}
        for document in self.documents:
            for name, values in self._document_columns(document).items():
                table.setdefault(name, []).extend(values)
        return table

    def to_arrow(self) -> Any:
        """Convert `columns()` to a pyarrow.Table."""
        import pyarrow

        arrays = {}
        for name, values in self.columns().items():
            column_type = pyarrow.type_for_alias(COLUMN_TYPES.get(name, "float64"))
            arrays[name] = pyarrow.array(values, column_type)
        return pyarrow.table(arrays)

    def _document_columns(self, document: ScoredDocument) -> dict[str, list[Any]]:
        """Return the part of the table of `columns` for one document; None in place of NaN."""
        name = document.document.name
        starts = [start for start, _ in document.offsets]
        # For each token the likeliest next token, with its probability.
        likeliest = [alternatives[0] for alternatives in document.alternatives]
        table: dict[str, list[Any]] = {
            "document": [name] * len(document.ids),
            "position": list(range(len(document.ids))),
            "token": document.tokens,
            "start": starts,
            "end": [end for _, end in document.offsets],
        }
        if self.written_from is not None:
            # All tokens from the first generated character on.
            table["generated"] = [start >= self.written_from[name] for start in starts]
        for method, values in document.scores.items():
            table[f"score_{method}"] = list(map(_without_nan, values))
        table["log_prob_next"] = list(map(_without_nan, document.next_log_probs))
        table["likeliest_next"] = [token for token, _ in likeliest]
        table["likeliest_prob"] = [prob for _, prob in likeliest]
        return table


def _without_nan(value: float) -> float | None:
    """Return the number, or None in place of NaN, as JSON has no NaN."""
    return None if math.isnan(value) else value
