"""Scored documents as a table with a row for each token."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qualms.texts.document import ScoredDocument

KINDS = {"position": "int64", "start": "int64", "end": "int64", "generated": "bool"}
WORDS = ("document", "token", "likeliest_next")


@dataclass(frozen=True)
class TokenTable:
    """A row for each token; of texts that a model has written on, `written_from` says from which
    character.
    """

    documents: Sequence[ScoredDocument]
    written_from: Mapping[str, int] | None = None

    def columns(self) -> dict[str, list[Any]]:
        """The document and the token's place in it, its scores, log p of the token that follows,
        the likeliest one.
        """
        table: dict[str, list[Any]] = {}
        for one in self.documents:
            for name, values in self._of(one).items():
                table.setdefault(name, []).extend(values)
        return table

    def to_arrow(self) -> Any:
        """`columns()` as a pyarrow.Table."""
        import pyarrow

        columns = self.columns()
        kinds = {**KINDS, **dict.fromkeys(WORDS, "string")}
        arrays = [
            pyarrow.array(values, pyarrow.type_for_alias(kinds.get(name, "float64")))
            for name, values in columns.items()
        ]
        return pyarrow.table(arrays, names=list(columns))

    def _of(self, one: ScoredDocument) -> dict[str, list[Any]]:
        starts, name = [start for start, _ in one.offsets], one.document.name
        table: dict[str, list[Any]] = {
            "document": [name] * len(one.ids),
            "position": list(range(len(one.ids))),
            "token": one.tokens,
            "start": starts,
            "end": [end for _, end in one.offsets],
        }
        if self.written_from is not None:
            table["generated"] = [start >= self.written_from[name] for start in starts]
        table |= {
            f"score_{method}": [_known(value) for value in values]
            for method, values in one.scores.items()
        }
        table["log_prob_next"] = [_known(value) for value in one.next_log_probs]
        table["likeliest_next"] = [tokens[0][0] for tokens in one.alternatives]
        table["likeliest_prob"] = [tokens[0][1] for tokens in one.alternatives]
        return table


def _known(value: float) -> float | None:
    """A number, or nothing: JSON has no NaN."""
    return None if math.isnan(value) else value
