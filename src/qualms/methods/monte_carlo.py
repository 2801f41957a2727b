"""Common code of scores over N random draws: mutual information in bounded memory."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import AT_ONCE, mutual_information
from qualms.methods.method import FEW, Method

DOUBLE = 8  # bytes
# log q_n of a block of inputs, [b, d, c] for some draws at a time.
LogProbs = Callable[[slice], Iterator[Float64[Tensor, "b d c"]]]


class MonteCarlo(Method, Protocol):
    """A score over random draws of the input, the weights, or features."""

    @property
    def draws(self) -> int:
        """N."""
        ...

    @property
    def extra_passes(self) -> float:
        """A forward pass for each draw."""
        return float(self.draws)

    def quick(self) -> "MonteCarlo":
        """The same method with two draws at most."""
        return replace(self, draws=min(self.draws, FEW))


def information_over_draws(
    context: BatchContext,
    draws: int,
    log_probs: LogProbs,
    most: int | None = None,
) -> Float[Tensor, " b"]:
    """Mutual information between prediction and draw, one block of inputs at a time.

    Args:
        context: the inputs.
        draws: how many there are.
        log_probs: log q_n of a block of inputs, for all draws in order, some of them at a time.
        most: inputs of a block.
    """
    parts: list[Tensor] = []
    what = f"the predictions of {draws} draws for one input"
    for block in context.blocks(DOUBLE * draws * context.num_classes, what, most):
        shape = (block.stop - block.start, draws, context.num_classes)
        log_q = torch.empty(shape, dtype=torch.double, device=context.device)
        done = 0
        for some in log_probs(block):
            log_q[:, done : done + some.shape[1]] = some
            done += some.shape[1]
        parts.append(mutual_information(log_q))
    return torch.cat(parts)


def draws_at_once(inputs: int, classes: int) -> int:
    """How many draws of so many inputs become probabilities at once."""
    return max(1, AT_ONCE // (inputs * classes))
