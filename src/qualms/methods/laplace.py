"""Last-layer Laplace: mutual information over samples from the posterior of the last layer, fitted on training data.

The backbone runs once over the training inputs and once over the inputs; samples go through the head alone. The
posterior is Gaussian with the full Gauss-Newton matrix up to 4096 parameters, and its Kronecker form beyond.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.methods.divergence import log_softmax, mutual_information
from qualms.methods.head import required, with_head
from qualms.methods.head_posterior import HeadPosterior, fit_head
from qualms.methods.method import TRAINING_DATA
from qualms.methods.monte_carlo import MonteCarlo
from qualms.methods.passes import Passes
from qualms.parameters import POSITIVE, check_parameters, whole


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

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        weights, biases = self._posterior(passes).sample(self.draws, passes.seed)
        features = passes.head.features.to(weights)
        log_q = [
            log_softmax(F.linear(features, weight, None if biases is None else biases[i]).double())
            for i, weight in enumerate(weights)
        ]
        return mutual_information(torch.stack(log_q, dim=1))

    def _posterior(self, passes: Passes) -> HeadPosterior:
        """Fitted once for a model."""
        fitted = passes.subject.fitted
        if self not in fitted:
            head = passes.head
            fitted[self] = fit_head(self._training(passes), head.weight, head.bias, self.prior_precision)
        return fitted[self]

    def _training(self, passes: Passes) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in passes.subject.training_batches(self.name):
            for part in passes.chunks(batch):
                logits, head = with_head(passes.model, part)
                yield required(head).features, logits
