"""Intervals over whole texts: what drawing texts and ranking all their tokens anew gives."""

import numpy as np
import pytest

import qualms
from qualms import metrics
from qualms.metrics.groups import auroc_difference_interval, auroc_interval, count_pairs_won

random = np.random.default_rng(0)
# Texts differ from each other, and scores have ties.
KNOWN = (random.normal(size=(12, 1)) + random.normal(size=(12, 20))).round(1)
OTHER = (random.normal(size=(9, 1)) + random.normal(size=(9, 15)) + 0.5).round(1)


def test_all_pairs_of_all_groups_are_the_auroc() -> None:
    won = count_pairs_won(list(KNOWN), list(OTHER))
    assert won.sum() / (KNOWN.size * OTHER.size) == pytest.approx(
        metrics.auroc(KNOWN.ravel(), OTHER.ravel())
    )
    assert won[3, 4] / (20 * 15) == pytest.approx(metrics.auroc(KNOWN[3], OTHER[4]))


def test_the_interval_is_that_of_drawn_groups_ranked_anew() -> None:
    want = metrics.interval(
        lambda a, b: metrics.auroc(a.ravel(), b.ravel()), KNOWN, OTHER, resamples=200, seed=3
    )
    assert auroc_interval(list(KNOWN), list(OTHER), resamples=200, seed=3) == pytest.approx(want)


def test_groups_that_belong_together_are_drawn_together() -> None:
    right = random.random(KNOWN.shape) < 0.5
    right[0], right[1] = True, False  # texts without a mistake, and without anything right

    def measure(u: np.ndarray, r: np.ndarray) -> float:
        return metrics.auroc(u[r == 1], u[r == 0])

    want = metrics.interval(measure, KNOWN, right, paired=True, resamples=200, seed=1)
    split = [
        [u[r == outcome] for u, r in zip(KNOWN, right, strict=True)] for outcome in (True, False)
    ]
    assert auroc_interval(*split, paired=True, resamples=200, seed=1) == pytest.approx(want)


def test_the_lead_of_a_score_is_drawn_on_the_same_groups_as_its_rival() -> None:
    noise = random.normal(size=KNOWN.shape), random.normal(size=OTHER.shape)
    rival = KNOWN + noise[0], OTHER + noise[1]

    def lead(a: np.ndarray, b: np.ndarray) -> float:  # tables with both scores, side by side
        mine, theirs = (metrics.auroc(a[:, i].ravel(), b[:, i].ravel()) for i in (0, 1))
        return mine - theirs

    tables = [np.stack([own, other], 1) for own, other in ((KNOWN, rival[0]), (OTHER, rival[1]))]
    want = metrics.interval(lead, *tables, resamples=200, seed=5)
    mine, theirs = (list(KNOWN), list(OTHER)), (list(rival[0]), list(rival[1]))
    assert auroc_difference_interval(mine, theirs, resamples=200, seed=5) == pytest.approx(want)
    assert want[0] < want[1]
    assert auroc_difference_interval(mine, mine) == (0, 0)
    with pytest.raises(qualms.QualmsError, match="groups of different sizes"):
        auroc_difference_interval(mine, (theirs[0][:-1], theirs[1]))


def test_unless_told_there_are_1000_resamples_of_seed_0() -> None:
    mine, theirs = (list(KNOWN), list(OTHER)), (list(KNOWN**3), list(OTHER))
    for have, want, other in (
        (
            auroc_interval(*mine),
            *(auroc_interval(*mine, resamples=n, level=0.95, seed=0) for n in (1000, 1001)),
        ),
        (
            auroc_difference_interval(mine, theirs),
            *(
                auroc_difference_interval(mine, theirs, resamples=n, level=0.95, seed=0)
                for n in (1000, 1001)
            ),
        ),
    ):
        assert have == want != other


def test_an_interval_over_texts_is_wider_than_one_over_their_tokens() -> None:
    low, high = auroc_interval(list(KNOWN), list(OTHER))
    of_tokens = metrics.interval(metrics.auroc, KNOWN.ravel(), OTHER.ravel())
    assert high - low > 2 * (of_tokens[1] - of_tokens[0])


def test_without_unknown_inputs_there_is_no_interval() -> None:
    with pytest.raises(qualms.QualmsError, match="no resample has inputs of both kinds"):
        auroc_interval(list(KNOWN), [np.empty(0)])
