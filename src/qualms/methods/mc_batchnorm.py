"""MC batch normalization: statistics from random batches of training data instead of the running
ones.

Each draw normalizes by the statistics of one training batch; the score is the mutual information
over the draws.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, num_samples, take_samples
from qualms.gradients.memory import require_room
from qualms.gradients.model_input import ModelInput
from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.draws import information_over_draws
from qualms.methods.method import SEVERAL_PASSES, TRAINING_DATA
from qualms.methods.monte_carlo import MonteCarlo
from qualms.parameters import check_parameters, whole


@dataclass(frozen=True)
class MCBatchNorm(MonteCarlo):
    """One draw for each of the first `draws` training batches, from the start again if there are
    fewer.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MCBatchNorm

        model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        print(qualms.score(model, torch.randn(5, 4), MCBatchNorm(draws=4), train=[torch.randn(50,
        4)])) ```
    """

    draws: int = 32

    name = "mc-batchnorm"
    paper = (
        "Teye et al., Bayesian Uncertainty Estimation for Batch Normalized Deep Networks, ICML 2018"
    )
    needs = (SEVERAL_PASSES, TRAINING_DATA)
    cost = "1 + N, and N training batches"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, draws=whole(2))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""

        def log_probs(block: slice) -> Iterator[Tensor]:
            for statistics in self._statistics(context):
                with _using(statistics):
                    logits = context.forward_all(take_samples(context.batch, block))
                yield log_softmax(logits.double())[:, None]

        return information_over_draws(context, self.draws, log_probs)

    def _statistics(self, context: BatchContext) -> "list[Statistics]":
        """Mean and variance of every layer's input for each training batch, found once."""
        fitted = context.model_context.fitted
        if self not in fitted:
            layers = [
                m for m in context.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
            ]
            if not any(m.running_mean is not None for m in layers):
                raise QualmsError(
                    "the model has no batch normalization, which mc-batchnorm needs; use perturb-theta."
                )
            found = []
            for batch in islice(context.model_context.training_batches(self.name), self.draws):
                self._require_room(context, batch)
                with _learning(layers):
                    context.forward(ModelInput(batch))
                    found.append([(m, _copy(m)) for m in layers])
            fitted[self] = list(islice(cycle(found), self.draws))
        return fitted[self]

    def _require_room(self, context: BatchContext, batch: Batch) -> None:
        """A training batch has its statistics as a whole: an error if that does not fit a `budget`
        that was given.
        """
        budget, rows = context.model_context.settings.budget, num_samples(batch)
        if budget is not None:
            each = (
                context.model_context.plain_work.bytes_of_row(batch, context.model_context.cache)
                or 0
            )
            what = f"the results of a training batch of {rows} inputs, which {self.name} runs as a whole,"
            require_room(rows * each, budget, what, "or smaller batches as train=")


Pair = tuple[Tensor | None, Tensor | None]  # mean and variance
Statistics = list[tuple[nn.modules.batchnorm._BatchNorm, Pair]]


def _copy(m: nn.modules.batchnorm._BatchNorm) -> Pair:
    """Copies of the layer's running mean and variance; (None, None) if it keeps none."""
    return (
        (None, None)
        if m.running_mean is None or m.running_var is None
        else (m.running_mean.clone(), m.running_var.clone())
    )


@contextmanager
def _learning(layers: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    """Layers normalize by the batch at hand and keep its statistics; everything is put back
    afterwards.
    """
    momenta = [m.momentum for m in layers]
    try:
        with _using([(m, _copy(m)) for m in layers]):
            for m in layers:
                m.momentum, m.training = 1.0, True
            yield
    finally:
        for m, momentum in zip(layers, momenta, strict=True):
            m.momentum, m.training = momentum, False


@contextmanager
def _using(statistics: Statistics) -> Iterator[None]:
    """Layers normalize by other statistics than their own."""
    before = [(m, m.running_mean, m.running_var) for m, _ in statistics]
    try:
        for m, (mean, variance) in statistics:
            m.running_mean, m.running_var = mean, variance
        yield
    finally:
        for m, own_mean, own_variance in before:
            m.running_mean, m.running_var = own_mean, own_variance
