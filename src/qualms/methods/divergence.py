"""How much predictions differ over draws: expected divergence and mutual information."""

from jaxtyping import Float
from torch import Tensor


def entropy_of(log_p: Float[Tensor, "... c"]) -> Float[Tensor, "..."]:
    """-Σ_c p_c log p_c."""
    return -(log_p.exp() * log_p).sum(-1)


def expected_kl(log_q: Float[Tensor, "b n c"], log_p: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """E_n KL(q_n ‖ p) = E_n Σ_c q_nc (log q_nc - log p_c)."""
    return (log_q.exp() * (log_q - log_p[:, None])).sum(-1).mean(1)


def mutual_information(log_q: Float[Tensor, "b n c"]) -> Float[Tensor, " b"]:
    """H(E_n q_n) - E_n H(q_n), between the prediction and what was drawn."""
    mean = log_q.logsumexp(1) - log_q.new_tensor(log_q.shape[1]).log()
    return entropy_of(mean) - entropy_of(log_q).mean(1)
