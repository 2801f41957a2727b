"""The part of a text that a model knows least about."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qualms.texts.document import ScoredDocument

LENGTH = 8  # tokens


@dataclass(frozen=True)
class Span:
    """The tokens from `start` up to, but not including, `end`, and the mean of their scores."""

    start: int
    end: int
    score: float


def worst_span(scores: Sequence[float] | np.ndarray, length: int = LENGTH) -> Span | None:
    """The `length` neighboring tokens whose scores have the highest mean, the first of them if
    there are several.

    Every token of a span has a score: none is NaN. Where no `length` neighbors have one, as in a
    short text, spans are as long as the longest run of tokens that do; None if no token has.
    """
    values = np.asarray(scores, dtype=np.float64)
    length = min(length, _longest_run(~np.isnan(values)))
    if length == 0:
        return None
    means = np.lib.stride_tricks.sliding_window_view(values, length).mean(axis=1)
    start = int(np.nanargmax(means))
    return Span(start, start + length, float(means[start]))


def worst_span_of(document: ScoredDocument, method: str, length: int = LENGTH) -> Span | None:
    """The worst span of a text by a method, of the tokens that are in the text: none that a
    tokenizer adds.
    """
    inside = np.array([start < end for start, end in document.offsets], dtype=bool)
    return worst_span(
        np.where(inside, np.array(document.scores[method], dtype=np.float64), np.nan), length
    )


def _longest_run(there: np.ndarray) -> int:
    ends = np.flatnonzero(~np.concatenate([[False], there, [False]]))
    return int(np.diff(ends).max()) - 1
