"""Last-layer Laplace: mutual information over samples from the posterior of the last layer, fitted
on training data.

The backbone runs once over the training inputs and once over the inputs; samples go through the
head alone. The posterior is Gaussian with the full Gauss-Newton matrix up to 4096 parameters, and
its Kronecker form beyond.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.memory import budget_of_rows, free_bytes, require_room
from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.draws import DOUBLE, information_over_draws
from qualms.methods.head import required, with_head
from qualms.methods.head_posterior import HeadPosterior, bytes_of_fit, fit_head
from qualms.methods.method import TRAINING_DATA
from qualms.methods.monte_carlo import MonteCarlo
from qualms.parameters import POSITIVE, check_parameters, whole

# in double precision, while one is drawn: its noise, what that becomes step by step, the mean
COPIES_OF_HEAD = 6


@dataclass(frozen=True)
class Laplace(MonteCarlo):
    """The prior precision is laplace-torch's default.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Laplace

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Laplace(draws=20), train=[torch.randn(50, 4)]))
        ```
    """

    prior_precision: float = 1.0
    draws: int = 100

    name = "laplace"
    paper = "Daxberger et al., Laplace Redux: Effortless Bayesian Deep Learning, NeurIPS 2021"
    needs = (TRAINING_DATA,)
    cost = "1 + N heads, and 1 for each training input"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, prior_precision=POSITIVE, draws=whole(2))

    @property
    def extra_passes(self) -> float:
        """None: only the last layer is drawn anew."""
        return 0.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        posterior, head = self._posterior(context), context.head
        each = COPIES_OF_HEAD * DOUBLE * head.weight.numel()
        budget = budget_of_rows(context.model_context.settings.budget, context.device)
        at_once = max(1, budget // (4 * each))

        def log_probs(block: slice) -> Iterator[Tensor]:
            for weights, biases in posterior.samples(self.draws, context.seed, at_once):
                features = head.features[block].to(weights)
                for i, weight in enumerate(weights):
                    logits = F.linear(features, weight, None if biases is None else biases[i])
                    yield log_softmax(logits.double())[:, None]

        return information_over_draws(context, self.draws, log_probs)

    def _posterior(self, context: BatchContext) -> HeadPosterior:
        """Fitted once for a model."""
        fitted = context.model_context.fitted
        if self not in fitted:
            head, budget = context.head, context.model_context.settings.budget
            classes, width = head.weight.shape[0], head.weight.shape[1] + int(head.bias is not None)
            needed = bytes_of_fit(classes, width) + COPIES_OF_HEAD * DOUBLE * head.weight.numel()
            what = f"the covariance of a head of {classes:,} classes on {width:,} features and one sample of it"
            require_room(
                needed, budget or free_bytes(context.device), what, "or use inserted-dropout"
            )
            fitted[self] = fit_head(
                self._training(context), head.weight, head.bias, self.prior_precision
            )
        return fitted[self]

    def _training(self, context: BatchContext) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in context.model_context.training_batches(self.name):
            for part in context.chunks(batch):
                logits, head = with_head(context.model, part)
                yield required(head).features, logits
