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
    """Find the `length` neighboring tokens with the highest mean score; the first of equal ones.

    All tokens of the span have scores. If there are no `length` neighbors that all have scores, as
    in a short text, the span is as long as the longest run of tokens with scores.

    Args:
        scores: the score of each token, [n]; NaN for a token without a score.
        length: the most tokens in the span.

    Returns:
        The span; None if no token has a score.
    """
    values = np.asarray(scores, dtype=np.float64)
    length = min(length, _longest_run(~np.isnan(values)))
    if length == 0:
        return None
    # The mean score of the `length` tokens from each position on; NaN if one has no score.
    means = np.lib.stride_tricks.sliding_window_view(values, length).mean(axis=1)
    start = int(np.nanargmax(means))
    return Span(start, start + length, float(means[start]))


def worst_span_of(document: ScoredDocument, method: str, length: int = LENGTH) -> Span | None:
    """Find the span of a text with the highest mean score, ignoring tokens that the tokenizer adds.

    Args:
        document: the text with scores.
        method: the name of the method whose scores are averaged.
        length: the most tokens in the span.

    Returns:
        The span; None if no token has a score.
    """
    scores = np.array(document.scores[method], dtype=np.float64)
    for position, (start, end) in enumerate(document.offsets):
        # A token that the tokenizer adds has no characters in the text.
        if start >= end:
            scores[position] = np.nan
    return worst_span(scores, length)


def _longest_run(has_score: np.ndarray) -> int:
    """Return the length of the longest run of True in an array of booleans [n]."""
    # With False at both ends, each run lies between two positions of False.
    padded = np.concatenate([[False], has_score, [False]])
    false_positions = np.flatnonzero(~padded)
    return int(np.diff(false_positions).max()) - 1
