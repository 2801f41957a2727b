"""Predictions over random draws, in memory that grows neither with the inputs nor with what scores
make of them.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import AT_ONCE, mutual_information

DOUBLE = 8  # bytes
LogProbs = Callable[
    [slice], Iterator[Float64[Tensor, "b d c"]]
]  # of a block of inputs, some draws at a time


def information_over_draws(
    context: BatchContext, draws: int, log_probs: LogProbs, most: int | None = None
) -> Float[Tensor, " b"]:
    """The mutual information between prediction and draw, a block of inputs at a time.

    Args:
        context: the inputs.
        draws: how many draws there are.
        log_probs: log q_n of a block of inputs, for all draws in order, some of them at a time.
        most: inputs of a block.
    """
    classes, parts = context.logits.shape[1], list[Tensor]()
    what = f"the predictions of {draws} draws for one input"
    for block in context.blocks(DOUBLE * draws * classes, what, most):
        log_q = torch.empty(
            block.stop - block.start, draws, classes, dtype=torch.double, device=context.device
        )
        done = 0
        for some in log_probs(block):
            log_q[:, done : done + some.shape[1]] = some
            done += some.shape[1]
        parts.append(mutual_information(log_q))
    return torch.cat(parts)


def draws_at_once(inputs: int, classes: int) -> int:
    """How many draws of so many inputs become probabilities at once."""
    return max(1, AT_ONCE // (inputs * classes))
