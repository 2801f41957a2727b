"""The span of a text that a model knows least about."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qualms.texts.document import ScoredDocument

LENGTH = 8  # tokens


@dataclass(frozen=True)
class Span:
    """Neighboring tokens of a text.

    Args:
        start: the position of the first token.
        end: the position after the last token.
        score: the mean of the tokens' scores.
    """

    start: int
    end: int
    score: float


def worst_span(scores: Sequence[float] | np.ndarray, length: int = LENGTH) -> Span | None:
    """Find the `length` neighboring tokens with the highest mean score; the first if several tie.

    Every token of a span has a score. If no `length` neighbors all have scores, as in a short text,
    the span is as long as the longest run of tokens with scores.

    Args:
        scores: the score of each token, [n]; NaN for a token without a score.
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


def worst_span_of(document: ScoredDocument, method: str, length: int = LENGTH) -> Span | None:
    """Find the worst span of a text, ignoring the tokens that the tokenizer adds.

    Args:
        document: the text with scores.
        method: the method whose scores are averaged.
        length: the most tokens in a span.
    """
    values = np.array(document.scores[method], dtype=np.float64)
    for place, (start, end) in enumerate(document.offsets):
        # A token that the tokenizer adds has no characters.
        if start >= end:
            values[place] = np.nan
    return worst_span(values, length)


def _longest_run(has_score: np.ndarray) -> int:
    """Return the length of the longest run of True in an array [n]."""
    # The positions of False, also before and after the array: a run lies between two of them.
    gaps = np.flatnonzero(~np.concatenate([[False], has_score, [False]]))
    return int(np.diff(gaps).max()) - 1
