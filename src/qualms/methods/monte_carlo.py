"""What the scores over N random draws have in common: their cost, and mutual information in bounded
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
# Takes a block of inputs, and yields the log-probabilities of all draws, d draws at a time.
LogProbs = Callable[[slice], Iterator[Float64[Tensor, "b d c"]]]


class MonteCarlo(Method, Protocol):
    """A score over random draws of the input, the weights, or features."""

    @property
    def draws(self) -> int:
        """N, the number of random draws."""
        ...

    @property
    def extra_passes(self) -> float:
        """The number of draws, as each takes a forward pass."""
        return float(self.draws)

    def quick(self) -> "MonteCarlo":
        """Return a copy with two draws at most: enough to see whether the method works."""
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
        log_probs: takes a block of inputs, and yields their log-probabilities [b, d, c] for all
            draws in order, d draws at a time.
        max_inputs: the largest number of inputs in a block; None for no limit.
    """
    information: list[Tensor] = []
    what = f"the predictions of {draws} draws for one input"
    for block in context.blocks(DOUBLE_BYTES * draws * context.num_classes, what, max_inputs):
        shape = (block.stop - block.start, draws, context.num_classes)
        # Filled draw by draw: a concatenation would take twice the memory.
        log_q = torch.empty(shape, dtype=torch.double, device=context.device)
        start = 0
        for some_draws in log_probs(block):
            end = start + some_draws.shape[1]
            log_q[:, start:end] = some_draws
            start = end
        information.append(mutual_information(log_q))
    return torch.cat(information)


def draws_at_once(inputs: int, classes: int) -> int:
    """Compute how many draws to turn into log-probabilities at once.

    Together they have at most `AT_ONCE` numbers, unless a single draw has more.

    Args:
        inputs: the number of inputs.
        classes: the number of classes.
    """
    return max(1, AT_ONCE // (inputs * classes))
