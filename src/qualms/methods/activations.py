"""How much of the features' activation is in the largest of them, for methods that shape features
by it.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def largest(
    features: Float[Tensor, "b f"], percentile: float
) -> tuple[Float[Tensor, "b k"], Tensor]:
    """The values and places of the features above a percentile of their number; at least one."""
    count = features.shape[1]
    return torch.topk(features, max(1, count - round(count * percentile / 100)), dim=1)


def spread(features: Float[Tensor, "b f"], percentile: float) -> Float[Tensor, " b"]:
    """r = Σ of all activations / Σ of those above the percentile: 1 if the largest are all there
    is.

    Negative features count as zero, so that r is at least 1 and finite; without a positive one it
    is 1.
    """
    active = features.double().relu()
    every, top = active.sum(1), largest(active, percentile)[0].sum(1)
    return torch.where(top > 0, every / top, 1.0)


def stretched(
    logits: Float[Tensor, "b c"], bias: Float[Tensor, " c"] | None, spreads: Float[Tensor, " b"]
) -> Float[Tensor, "b c"]:
    """The logits of a linear layer whose features are exp(r) times as large."""
    shift = 0.0 if bias is None else bias.double()
    # What float32 holds; r reaches 80 only at percentiles that leave fewer than one feature in
    # eighty.
    return (logits.double() - shift) * spreads.clamp(max=80).exp()[:, None] + shift
