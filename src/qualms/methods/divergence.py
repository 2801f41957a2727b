"""Logarithms of probabilities, and divergences between predictions, accurate for confident models.

Beyond a margin of 37 between two logits, 1 - p is zero in double precision, so it is computed from
the other classes. The difference of two entropies of almost the same predictions would be nothing
but rounding, so mutual information is a sum of divergences.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.gradients.directions import uniform_direction

# Entries of q at a time; a dozen copies exist while a divergence is computed.
AT_ONCE = 2**19


def log_softmax(logits: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """Compute log p_c. For the likeliest class it is -log(1 + s), with s the sum of exp(z_k - z_c) of
    all other classes k: accurate where p_c rounds to 1.
    """
    best = logits.argmax(-1, keepdim=True)
    below = logits - logits.gather(-1, best)
    return below - log_sum_of_others(below, best).exp().log1p()


def log_complements(log_p: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """Compute log(1 - p_c). For the likeliest class it is the log of the sum of all other
    probabilities: accurate where p_c rounds to 1.
    """
    best = log_p.argmax(-1, keepdim=True)
    return (-log_p.exp()).log1p().scatter(-1, best, log_sum_of_others(log_p, best))


def log_sum_of_others(
    log_p: Float[Tensor, "... c"],
    best: Int[Tensor, "... 1"],
) -> Float[Tensor, "... 1"]:
    """Compute log Σ p_c over all classes but `best`.

    Args:
        log_p: log p_c, or logits up to a shift.
        best: the index of the class that is left out.
    """
    return log_p.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)


def kl(log_q: Float[Tensor, "... c"], log_p: Float[Tensor, "... c"]) -> Float[Tensor, "..."]:
    """Compute KL(q ‖ p) = Σ_c q_c log(q_c / p_c).

    The sum is taken as Σ_c (q_c log(q_c / p_c) - q_c + p_c), in which no term is negative, so that
    nothing cancels.
    """
    # With r = log(q / p) a term is q (r + e⁻ʳ - 1), or in other words p (r eʳ - eʳ + 1). The first
    # form is accurate for r > 0, the second for r ≤ 0; each gets an r clamped to its own side.
    r = log_q - log_p
    up = r.clamp_min(0)
    down = r.clamp_max(0)
    above = log_q.exp() * (up + (-up).expm1())
    below = log_p.exp() * (down * down.exp() - down.expm1())
    return torch.where(r > 0, above, below).clamp_min(0).sum(-1)


def distance_from_uniform(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Compute Σ_c |p_c - 1/C|, accurate where p is nearly uniform."""
    # `uniform_direction` is 1/C - p.
    return uniform_direction(logits[:, None])[0, :, 0].abs().sum(-1)


def expected_kl(log_q: Float[Tensor, "b n c"], log_p: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Compute E_n KL(q_n ‖ p), the mean over draws n.

    Args:
        log_q: log q_n of each input and draw n.
        log_p: log p of each input.
    """
    return kl(log_q, log_p[:, None]).mean(1)


def mutual_information(log_q: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
    """Compute mutual information between the prediction and the draw, from log q_n of each draw n.

    It is H(E_n q_n) - E_n H(q_n), computed as E_n KL(q_n ‖ E_n q_n), a block of classes at a time.

    Args:
        log_q: log q_n of each input, draw n and class.
    """
    inputs, draws, _ = log_q.shape
    classes = max(1, AT_ONCE // (inputs * draws))
    parts = [_information_of_classes(block) for block in log_q.split(classes, dim=-1)]
    return torch.stack(parts).sum(0)


def _information_of_classes(log_q: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
    """Compute the part of the mutual information that a block of classes contributes."""
    largest = log_q.amax(1, keepdim=True)
    # log E_n q_n; exact where all draws agree.
    log_mean = largest + (log_q - largest).expm1().mean(1, keepdim=True).log1p()
    return kl(log_q, log_mean).mean(1)
