"""The exact upper confidence limit of an error rate, from k mistakes on n inputs.

Clopper & Pearson, The Use of Confidence or Fiducial Limits Illustrated in the Case of the Binomial,
Biometrika 1934: a rate p is ruled out at confidence 1 - δ if P(Bin(n, p) <= k) <= δ.
"""

import math

import torch


def binomial_cdf(wrong: int, inputs: int, rate: float) -> float:
    """Compute P(Bin(n, p) <= k), the cumulative distribution function of the binomial distribution.

    Args:
        wrong: k, the number of mistakes.
        inputs: n, the number of inputs.
        rate: p, the probability of a mistake.
    """
    if wrong >= inputs or rate <= 0:
        return 1.0
    # Sums C(n, j) p^j (1 - p)^(n - j) over j = 0..k, in logarithms, which do not overflow.
    j = torch.arange(wrong + 1, dtype=torch.double)
    n = torch.tensor(float(inputs), dtype=torch.double)
    log_binomials = torch.lgamma(n + 1) - torch.lgamma(j + 1) - torch.lgamma(n - j + 1)
    log_terms = log_binomials + j * math.log(rate) + (n - j) * math.log1p(-rate)
    # Rounding could exceed 1.
    return min(1.0, float(log_terms.logsumexp(0).exp()))


def upper_limit(wrong: int, inputs: int, confidence: float) -> float:
    """Compute the upper confidence limit of an error rate, from k mistakes on n inputs.

    It is the smallest rate p with P(Bin(n, p) <= k) <= 1 - confidence, with Bin(n, p) the binomial
    distribution. It is found by bisection.

    Args:
        wrong: k, the number of mistakes.
        inputs: n, the number of inputs.
        confidence: The confidence at which all higher rates are ruled out.
    """
    low, high = wrong / inputs, 1.0
    # After 60 halvings the interval is below the precision of doubles.
    for _ in range(60):
        middle = (low + high) / 2
        if binomial_cdf(wrong, inputs, middle) <= 1 - confidence:
            high = middle
        else:
            low = middle
    return high


def least_inputs(rate: float, confidence: float) -> int:
    """Compute how many inputs without a mistake rule out that mistakes occur at some rate.

    It is the smallest n with (1 - rate)ⁿ <= 1 - confidence.

    Args:
        rate: The rate of mistakes to rule out.
        confidence: The confidence at which it is ruled out.
    """
    inputs = math.log(1 - confidence) / math.log1p(-rate)
    # Without 1e-9, rounding could turn an integer into the next one.
    return math.ceil(inputs - 1e-9)
