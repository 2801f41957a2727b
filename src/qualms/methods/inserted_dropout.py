"""Inserted dropout: dropout before the last fully connected layer; mutual information over the
masks.

The features are computed once, only the head is redrawn. One mask serves all inputs of a draw, so
the score of an input does not depend on what else is in the batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.draws import draws_at_once, information_over_draws
from qualms.methods.method import SEVERAL_PASSES
from qualms.methods.monte_carlo import MonteCarlo
from qualms.parameters import SHARE, check_parameters, whole
from qualms.random import generator


@dataclass(frozen=True)
class InsertedDropout(MonteCarlo):
    """p is the share of features that are dropped. Paper: 0.4, 100 draws.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import InsertedDropout

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, InsertedDropout(p=0.4, draws=20)))
        ```
    """

    p: float = 0.4
    draws: int = 100

    name = "inserted-dropout"
    paper = (
        "Ledda et al., Dropout Injection at Test Time for Post Hoc Uncertainty Quantification, 2023"
    )
    needs = (SEVERAL_PASSES,)
    cost = "1 + N heads"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, p=SHARE, draws=whole(2))

    @property
    def extra_passes(self) -> float:
        """None: only the last layer is drawn anew."""
        return 0.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        head = context.head
        size = (self.draws, head.features.shape[1])
        kept = (
            torch.rand(size, generator=generator(context.seed, 0)).to(head.features.device)
            >= self.p
        )

        def log_probs(block: slice) -> Iterator[Tensor]:
            features = head.features[block, None]
            for masks in kept.split(draws_at_once(len(features), len(head.weight))):
                yield log_softmax(head.logits(features * masks / (1 - self.p)).double())

        return information_over_draws(context, self.draws, log_probs)
