"""Logarithms of probabilities, and how much predictions differ over draws; no digit is lost where a
model is certain.

Beyond a margin of 37 between two logits 1 - p is zero in double precision, and so is what depends
on it unless it is computed from the other classes; the difference of two entropies of almost the
same predictions is nothing but rounding.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.directions import uniform

AT_ONCE = 2**19  # numbers of which a dozen copies exist while a divergence is computed


def log_softmax(logits: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """log p_c, that of the likeliest class from the odds s of all others: -log(1 + s)."""
    best = logits.argmax(-1, keepdim=True)
    away = logits - logits.gather(-1, best)
    return away - others_of(away, best).exp().log1p()


def log_complements(log_p: Float[Tensor, "... c"]) -> Float[Tensor, "... c"]:
    """log(1 - p_c), that of the likeliest class from the probabilities of all others."""
    best = log_p.argmax(-1, keepdim=True)
    return (-log_p.exp()).log1p().scatter(-1, best, others_of(log_p, best))


def others_of(log_p: Float[Tensor, "... c"], best: Tensor) -> Float[Tensor, "... 1"]:
    """log Σ p_c over all classes but one."""
    return log_p.scatter(-1, best, -torch.inf).logsumexp(-1, keepdim=True)


def entropy_of(log_p: Float[Tensor, "... c"]) -> Float[Tensor, "..."]:
    """-Σ_c p_c log p_c."""
    return -(log_p.exp() * log_p).sum(-1)


def kl(log_q: Float[Tensor, "... c"], log_p: Float[Tensor, "... c"]) -> Float[Tensor, "..."]:
    """KL(q ‖ p) = Σ_c q_c log(q_c / p_c) as Σ_c (q_c log(q_c / p_c) - q_c + p_c), no part of which
    is negative.
    """
    r = log_q - log_p
    up, down = r.clamp_min(0), r.clamp_max(0)
    above, below = (
        log_q.exp() * (up + (-up).expm1()),
        log_p.exp() * (down * down.exp() - down.expm1()),
    )
    return torch.where(r > 0, above, below).clamp_min(0).sum(-1)


def from_uniform(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Σ_c |p_c - 1/C|."""
    return uniform(logits[:, None])[0, :, 0].abs().sum(-1)


def expected_kl(log_q: Float[Tensor, "b n c"], log_p: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """E_n KL(q_n ‖ p)."""
    return kl(log_q, log_p[:, None]).mean(1)


def mutual_information(log_q: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
    """H(E_n q_n) - E_n H(q_n), between the prediction and what was drawn, as E_n KL(q_n ‖ E_n q_n).

    It is a sum over classes, some of which are taken at a time.
    """
    inputs, draws, _ = log_q.shape
    parts = [
        _information(some) for some in log_q.split(max(1, AT_ONCE // (inputs * draws)), dim=-1)
    ]
    return torch.stack(parts).sum(0)


def _information(log_q: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
    """The part of some of the classes."""
    most = log_q.amax(1, keepdim=True)
    mean = (
        most + (log_q - most).expm1().mean(1, keepdim=True).log1p()
    )  # exact where all draws agree
    return kl(log_q, mean).mean(1)
