"""The worst span, counted by hand."""

import math

import pytest

from qualms.texts.document import Document, ScoredDocument
from qualms.texts.spans import Span, worst_span, worst_span_of

NAN = math.nan


def test_the_worst_span_has_the_highest_mean() -> None:
    assert worst_span([1.0, 5.0, 1.0, 4.0, 4.0, 0.0], length=2) == Span(3, 5, 4.0)
    assert worst_span([1.0, 5.0, 1.0, 4.0, 4.0, 0.0], length=1) == Span(1, 2, 5.0)
    assert worst_span([1.0, 5.0, 1.0, 4.0, 4.0, 0.0], length=4) == Span(1, 5, 3.5)


def test_a_span_is_eight_tokens_unless_told_otherwise() -> None:
    assert worst_span([9.0, *[0.0] * 8, *[2.0] * 8, 1.0]) == Span(9, 17, 2.0)


def test_the_first_of_equals_is_taken() -> None:
    assert worst_span([0.0, 3.0, 1.0, 3.0, 1.0], length=2) == Span(1, 3, 2.0)


def test_no_token_of_a_span_is_without_a_score() -> None:
    assert worst_span([9.0, NAN, 2.0, 3.0, NAN, 8.0, NAN], length=2) == Span(2, 4, 2.5)


def test_a_short_text_has_a_span_as_long_as_its_longest_run() -> None:
    assert worst_span([1.0, 2.0]) == Span(0, 2, 1.5)
    assert worst_span([7.0, NAN, 1.0, 2.0, 3.0, NAN]) == Span(2, 5, 2.0)
    assert worst_span([NAN, 7.0, NAN, 9.0]) == Span(3, 4, 9.0)


@pytest.mark.parametrize("scores", [[], [NAN], [NAN, NAN, NAN]])
def test_without_any_score_there_is_no_span(scores: list[float]) -> None:
    assert worst_span(scores) is None


def test_scores_below_zero_count_like_others() -> None:
    assert worst_span([-3.0, -1.0, -2.0, -9.0], length=2) == Span(1, 3, -1.5)


def test_tokens_that_are_not_in_the_text_are_in_no_span_of_it() -> None:
    document = ScoredDocument(
        Document("t", "abcd"),
        ids=(1, 5, 6, 7, 8, 2),
        offsets=((0, 0), (0, 1), (1, 2), (2, 3), (3, 4), (0, 0)),
        scores={"regrad": (90.0, 1.0, 2.0, 4.0, 1.0, 90.0)},
        alternatives=((),) * 6,
        next_log_probs=(NAN,) * 6,
    )
    assert worst_span_of(document, "regrad", length=2) == Span(2, 4, 3.0)
    assert worst_span_of(document, "regrad") == Span(1, 5, 2.0)
