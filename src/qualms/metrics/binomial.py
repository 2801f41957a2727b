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
    k = torch.arange(wrong + 1, dtype=torch.double)
    n = torch.tensor(float(inputs), dtype=torch.double)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    log_terms = ways + k * math.log(rate) + (n - k) * math.log1p(-rate)
    return min(1.0, float(log_terms.logsumexp(0).exp()))


def upper_limit(wrong: int, inputs: int, confidence: float) -> float:
    """Compute the upper confidence limit of an error rate, from k mistakes on n inputs.

    It is the smallest rate p with P(Bin(n, p) <= k) <= 1 - confidence, found by bisection.

    Args:
        wrong: k, the number of mistakes.
        inputs: n, the number of inputs.
        confidence: The confidence at which all higher rates are ruled out.
    """
    low, high = wrong / inputs, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if binomial_cdf(wrong, inputs, middle) <= 1 - confidence:
            high = middle
        else:
            low = middle
    return high


def least_inputs(rate: float, confidence: float) -> int:
    """Compute the smallest n with (1 - rate)ⁿ <= 1 - confidence.

    That many inputs without a mistake rule out the rate.

    Args:
        rate: A rate of mistakes.
        confidence: The confidence at which it is ruled out.
    """
    # Without 1e-9, rounding could turn a whole number into the next one.
    inputs = math.log(1 - confidence) / math.log1p(-rate)
    return math.ceil(inputs - 1e-9)
