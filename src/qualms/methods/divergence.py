"""Logarithms of probabilities, and divergences between predictions, accurate for confident models.

If two logits differ by more than 37, 1 - p is zero in double precision, so it is computed from the
other classes. The difference of two entropies of almost the same predictions would be nothing but
rounding errors, so mutual information is a sum of divergences.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.gradients.directions import uniform_direction

# The number of probabilities that are compared at a time; a dozen copies of them exist then.
AT_ONCE = 2**19


def log_softmax(logits: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """Compute log p_c of each class c from the logits z, accurately even where p_c rounds to 1.

    With d the likeliest class, it is (z_c - z_d) - log(1 + s), s the sum of exp(z_k - z_d) over all
    other classes k.
    """
    best = logits.argmax(-1, keepdim=True)
    differences = logits - logits.gather(-1, best)
    return differences - log_sum_of_others(differences, best).exp().log1p()


def log_complements(log_p: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """Compute log(1 - p_c) of each class c, accurately even where p_c rounds to 1.

    For the likeliest class it is the log of the sum of all other probabilities.

    Args:
        log_p: log p_c of each class.
    """
    best = log_p.argmax(-1, keepdim=True)
    return (-log_p.exp()).log1p().scatter(-1, best, log_sum_of_others(log_p, best))


def log_sum_of_others(
    log_p: Float[Tensor, "... c"],
    best: Int[Tensor, "... 1"],
) -> Float[Tensor, "... 1"]:
    """Compute log Σ_c p_c over all classes c but `best`.

    Args:
        log_p: log p_c of each class; or logits, for log Σ_c exp z_c.
        best: the index of the class that is left out.
    """
    # exp(-∞) = 0 leaves the class out of the sum.
    return log_p.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)


def kl(
    log_q: Float[Tensor, "... c"],
    log_p: Float[Tensor, "... c"],
) -> Float[Tensor, "..."]:
    """Compute KL(q ‖ p) = Σ_c q_c log(q_c / p_c).

    It is computed as Σ_c (q_c log(q_c / p_c) - q_c + p_c), in which no term is negative, so that
    nothing cancels.
    """
    # With r = log(q / p) a term is q (r + e⁻ʳ - 1), or in other words p (r eʳ - eʳ + 1). The first
    # form is accurate for r > 0, the second for r ≤ 0; each gets an r clamped to its own side.
    r = log_q - log_p
    positive = r.clamp_min(0)
    negative = r.clamp_max(0)
    first_form = log_q.exp() * (positive + (-positive).expm1())
    second_form = log_p.exp() * (negative * negative.exp() - negative.expm1())
    return torch.where(r > 0, first_form, second_form).clamp_min(0).sum(-1)


def distance_from_uniform(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Compute Σ_c |p_c - 1/C| over C classes, accurately even where p is nearly uniform."""
    differences = uniform_direction(logits[:, None])[0, :, 0]  # 1/C - p_c: [b, c]
    return differences.abs().sum(-1)


def expected_kl(
    log_q: Float[Tensor, "b n c"],
    log_p: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """Compute E_n KL(q_n ‖ p), the mean divergence over the draws n.

    Args:
        log_q: log q_n, the log-probabilities of each input and draw n.
        log_p: log p, the log-probabilities of each input.
    """
    return kl(log_q, log_p[:, None]).mean(1)


def mutual_information(log_q: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
    """Compute mutual information between the prediction and the draw, from log q_n of each draw n.

    It is H(E_n q_n) - E_n H(q_n) with H the entropy, computed as E_n KL(q_n ‖ E_n q_n), a block of
    classes at a time.

    Args:
        log_q: log q_n, the log-probabilities of each input, draw n and class.
    """
    num_inputs, num_draws, _ = log_q.shape
    block_size = max(1, AT_ONCE // (num_inputs * num_draws))
    parts = [_information_of_classes(block) for block in log_q.split(block_size, dim=-1)]
    return torch.stack(parts).sum(0)


def _information_of_classes(log_q: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
    """Compute the part of E_n KL(q_n ‖ E_n q_n) that a block of c classes contributes.

    Args:
        log_q: log q_n of each input, draw n and class of the block.
    """
    largest = log_q.amax(1, keepdim=True)
    # log E_n q_n; exact where all draws agree.
    log_mean = largest + (log_q - largest).expm1().mean(1, keepdim=True).log1p()
    return kl(log_q, log_mean).mean(1)
