"""The prediction rejection ratio: by hand, in every order of ties, and beside rAULC."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import qualms
from qualms import metrics

PAIRS = st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), min_size=2, max_size=6)


def area(qualities: list[float]) -> float:
    """What is kept when 0, 1, … of the outputs are rejected from the end, its mean quality, and the
    mean of those.
    """
    kept = [qualities[: len(qualities) - rejected] for rejected in range(len(qualities))]
    return float(np.mean([np.mean(some) for some in kept]))


def test_the_ratio_is_what_it_is_by_hand() -> None:
    # Kept by the score: 1; 1 and 0; all: means 1, 1/2, 1/2. Ideal: 1; 1 and 1/2; all: 1, 3/4, 1/2.
    # At random: 1/2.
    assert metrics.prr([0.1, 0.2, 0.3], [1.0, 0.0, 0.5]) == pytest.approx(
        (2 / 3 - 1 / 2) / (3 / 4 - 1 / 2)
    )


@given(PAIRS)
def test_ties_count_as_in_every_order_of_theirs_and_random_is_every_order(
    pairs: list[tuple[int, int]],
) -> None:
    qualities = [float(q) for _, q in pairs]
    assume(len(set(qualities)) > 1)
    every = list(itertools.permutations(pairs))
    allowed = [order for order in every if [u for u, _ in order] == sorted(u for u, _ in order)]
    mine, random = (
        np.mean([area([float(q) for _, q in order]) for order in orders])
        for orders in (allowed, every)
    )
    ideal = area(sorted(qualities, reverse=True))
    have = metrics.prr([u for u, _ in pairs], qualities)
    assert have == pytest.approx((mine - random) / (ideal - random), abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=2, max_size=30))
def test_of_right_and_wrong_alone_it_is_the_raulc(pairs: list[tuple[int, bool]]) -> None:
    u, right = [u for u, _ in pairs], [right for _, right in pairs]
    assume(0 < sum(right) < len(right))
    assert metrics.prr(u, right) == pytest.approx(metrics.raulc(u, right), abs=1e-12)


def test_the_unit_and_the_zero_of_the_quality_do_not_matter() -> None:
    random = np.random.default_rng(0)
    u, q = random.normal(size=50), random.normal(size=50)
    assert metrics.prr(u, q) == pytest.approx(metrics.prr(u, 7 * q - 3))
    assert metrics.prr(-q, q) == pytest.approx(1)
    assert metrics.prr(q, q) < 0


def test_one_quality_for_all_has_no_ratio() -> None:
    with pytest.raises(qualms.QualmsError, match="quality is 2 everywhere"):
        metrics.prr([1, 2, 3], [2, 2, 2])
    with pytest.raises(
        qualms.QualmsError, match="2 scores in uncertainty and 3 numbers in quality"
    ):
        metrics.prr([1, 2], [2, 2, 3])
