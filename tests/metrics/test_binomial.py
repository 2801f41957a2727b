"""Counts of mistakes and the rates that they rule out, against scipy."""

import pytest
from scipy.stats import beta, binom

from qualms.metrics.binomial import binomial_cdf, least_inputs, upper_limit


@pytest.mark.parametrize("rate", [1e-6, 0.01, 0.3, 0.999])
@pytest.mark.parametrize(
    ("wrong", "inputs"), [(0, 1), (0, 7), (1, 7), (3, 50), (49, 50), (3, 900), (40, 5000)]
)
def test_few_or_fewer_is_the_binomial_distribution(wrong: int, inputs: int, rate: float) -> None:
    assert binomial_cdf(wrong, inputs, rate) == pytest.approx(
        binom.cdf(wrong, inputs, rate), rel=1e-9, abs=1e-300
    )


def test_a_probability_is_never_more_than_one() -> None:
    assert binomial_cdf(7, 7, 0.3) == binomial_cdf(8, 7, 0.3) == binomial_cdf(2, 7, 0.0) == 1
    assert binomial_cdf(500, 1000, 1e-3) <= 1


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
@pytest.mark.parametrize(("wrong", "inputs"), [(0, 1), (0, 50), (39, 40), (3, 900), (40, 5000)])
def test_the_upper_limit_is_that_of_clopper_and_pearson(
    wrong: int, inputs: int, confidence: float
) -> None:
    want = beta.ppf(confidence, wrong + 1, inputs - wrong)
    assert upper_limit(wrong, inputs, confidence) == pytest.approx(want, rel=1e-10)


def test_if_all_are_wrong_no_rate_is_ruled_out() -> None:
    assert upper_limit(40, 40, 0.9) == 1


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.05, 0.01])
@pytest.mark.parametrize("confidence", [0.5, 0.75, 0.9, 0.95, 0.999])
def test_one_input_less_would_rule_out_nothing(rate: float, confidence: float) -> None:
    n = least_inputs(rate, confidence)
    assert (1 - rate) ** n <= (1 - confidence) * (1 + 1e-9)
    assert (1 - rate) ** (n - 1) > (1 - confidence) * (1 + 1e-9)


def test_a_rate_of_one_percent_takes_299_inputs_at_95_percent() -> None:
    assert least_inputs(0.01, 0.95) == 299
