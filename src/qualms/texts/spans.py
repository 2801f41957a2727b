"""The span of a text that a model knows least about."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qualms.texts.document import ScoredDocument

LENGTH = 8  # tokens


@dataclass(frozen=True)
class Span:
    """Neighboring tokens.

    Args:
        start: the first token.
        end: the token after the last one.
        score: the mean of their scores.
    """

    start: int
    end: int
    score: float


def worst_span(scores: Sequence[float] | np.ndarray, length: int = LENGTH) -> Span | None:
    """Return the `length` neighboring tokens with the highest mean score; the first of equals.

    Every token of a span has a score. Where no `length` neighbors have one, as in a short text, a
    span is as long as the longest run of tokens that do.

    Args:
        scores: of the tokens; NaN where there is none.
        length: the most tokens in a span.

    Returns:
        The span; None if no token has a score.
    """
    values = np.asarray(scores, dtype=np.float64)
    length = min(length, _longest_run(~np.isnan(values)))
    if length == 0:
        return None
    means = np.lib.stride_tricks.sliding_window_view(values, length).mean(axis=1)
    start = int(np.nanargmax(means))
    return Span(start, start + length, float(means[start]))


def worst_span_of(
    document: ScoredDocument,
    method: str,
    length: int = LENGTH,
) -> Span | None:
    """Return the worst span of a text, ignoring the tokens that the tokenizer adds.

    Args:
        document: with scores.
        method: by which it was scored.
        length: the most tokens in a span.
    """
    values = np.array(document.scores[method], dtype=np.float64)
    for place, (start, end) in enumerate(document.offsets):
        if start >= end:
            values[place] = np.nan
    return worst_span(values, length)


def _longest_run(there: np.ndarray) -> int:
    ends = np.flatnonzero(~np.concatenate([[False], there, [False]]))
    return int(np.diff(ends).max()) - 1
