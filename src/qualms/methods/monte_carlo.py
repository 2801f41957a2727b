"""What the scores over N random draws share: their price, and mutual information in bounded
memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import AT_ONCE, mutual_information
from qualms.methods.method import FEW, Method

DOUBLE_BYTES = 8  # of one number in float64
# From a block of inputs b to log q_n [b, d, c], d draws at a time.
LogProbs = Callable[[slice], Iterator[Float64[Tensor, "b d c"]]]


class MonteCarlo(Method, Protocol):
    """A score over random draws of the input, the weights, or features."""

    @property
    def draws(self) -> int:
        """N, the number of random draws."""
        ...

    @property
    def extra_passes(self) -> float:
        """A forward pass for each draw."""
        return float(self.draws)

    def quick(self) -> "MonteCarlo":
        """Return the same method with two draws at most."""
        return replace(self, draws=min(self.draws, FEW))


def information_over_draws(
    context: BatchContext,
    draws: int,
    log_probs: LogProbs,
    max_inputs: int | None = None,
) -> Float[Tensor, " b"]:
    """Compute mutual information between prediction and draw, one block of inputs at a time.

    Args:
        context: the batch of inputs.
        draws: the number of draws.
        log_probs: yields log q_n of a block of inputs, for all draws in order, several at a time.
        max_inputs: the largest number of inputs in a block; None for no limit.
    """
    parts: list[Tensor] = []
    what = f"the predictions of {draws} draws for one input"
    for block in context.blocks(DOUBLE_BYTES * draws * context.num_classes, what, max_inputs):
        shape = (block.stop - block.start, draws, context.num_classes)
        log_q = torch.empty(shape, dtype=torch.double, device=context.device)
        done = 0
        for log_q_part in log_probs(block):
            end = done + log_q_part.shape[1]
            log_q[:, done:end] = log_q_part
            done = end
        parts.append(mutual_information(log_q))
    return torch.cat(parts)


def draws_at_once(inputs: int, classes: int) -> int:
    """Compute how many draws to turn into probabilities at once: about `AT_ONCE` entries in all.

    Args:
        inputs: the number of inputs.
        classes: the number of classes.
    """
    return max(1, AT_ONCE // (inputs * classes))
