"""Scores of predictions by other versions of the model: perturbed weights, normalization by other
statistics, and the further members of an ensemble.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qualms.errors import QualmsError
from qualms.gradients.batch import (
    Batch,
    map_tensors,
    num_samples,
    split_batch,
    take_samples,
)
from qualms.gradients.function_modes import CallMode
from qualms.gradients.isolation import preserve_state
from qualms.gradients.memory import PassMemory, free_bytes, require_room
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import ROWS_AT_ONCE, BatchContext
from qualms.methods.divergence import (
    expected_kl,
    kl,
    log_softmax,
    mutual_information,
)
from qualms.methods.method import (
    MODELS,
    SEVERAL_PASSES,
    TRAINING_DATA,
    WANG_JI,
    Method,
)
from qualms.methods.monte_carlo import MonteCarlo, information_over_draws
from qualms.parameters import POSITIVE, whole
from qualms.random import generator

# The number of tensors of the size of a weight that exist while its noise is drawn and added.
NOISE_COPIES = 3


def perturb_theta(
    log_q: Float[Tensor, "b n c"],
    log_p: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """Perturb θ: E_n KL(q_n ‖ p), q_n the prediction with the n-th perturbed weights.

    Args:
        log_q: log q_n = log p(y | x, θ + Δθ_n) of each input b, draw n and class c.
        log_p: log p(y | x, θ) with the unchanged weights θ.
    """
    return expected_kl(log_q, log_p)


@dataclass(frozen=True)
class PerturbTheta(MonteCarlo):
    """E_Δθ KL( p(y | x, θ + Δθ) ‖ p(y | x, θ) ), Δθ ~ N(0, σ²I), one draw shared by all inputs.

    Every weight has the same σ. Paper: 0.008, CIFAR-100 0.0003.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import PerturbTheta

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, PerturbTheta(sigma=0.01, draws=20)))
        ```
    """

    sigma: float = 0.008
    draws: int = 100

    name = "perturb-theta"
    paper = WANG_JI
    needs = (SEVERAL_PASSES,)
    cost = "1 + N"
    rules: ClassVar = {"sigma": POSITIVE, "draws": whole(1)}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `perturb_theta`, one draw of the weights at a time."""
        parameters = [p for p in context.model.parameters() if p.is_floating_point()]
        weight_bytes = sum(p.nbytes for p in parameters)
        # A perturbed copy of all weights, and what drawing the largest one takes.
        needed = weight_bytes + NOISE_COPIES * max((p.nbytes for p in parameters), default=0)
        available = context.model_context.settings.budget or free_bytes(context.device)
        require_room(needed, available, "perturbed weights", "or use perturb-x")
        total = torch.zeros_like(context.log_probs[:, 0])
        for draw in range(self.draws):
            noise = generator(context.seed, draw)
            perturbed: dict[int, Tensor] = {}
            for p in parameters:
                normal = torch.randn(p.shape, generator=noise).to(p)
                perturbed[id(p)] = p.detach() + self.sigma * normal
            with _ReplaceParameters(perturbed) as mode:
                logits = context.forward_all(occupied_bytes=weight_bytes)
            total += kl(log_softmax(logits.double()), context.log_probs)
            # No operation used a parameter, as far as the mode can see.
            if not mode.replaced_ids:
                raise QualmsError(
                    "torch's function modes cannot see the model's operations (a scripted "
                    "module?), so its weights cannot be perturbed; use perturb-x or regrad."
                )
        return total / self.draws


class _ReplaceParameters(CallMode):
    """Replaces parameters in the arguments of every operation; the model itself stays unchanged.

    Attributes:
        replacements: the tensor to use instead of a parameter, by `id(parameter)`.
        replaced_ids: the ids of the parameters that an operation received and that were replaced.
    """

    def __init__(self, replacements: dict[int, Tensor]) -> None:
        super().__init__()
        self.replacements = replacements  # from the id of each parameter to its replacement
        self.replaced_ids: set[int] = set()  # the ids of parameters that an operation used

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the replacements of its parameters."""
        args, kwargs = map_tensors((args, kwargs), self._replace)
        return func(*args, **kwargs)

    def _replace(self, t: Tensor) -> Tensor:
        """Return the replacement of a parameter, and record that it was used.

        Tensors without a replacement are returned unchanged.
        """
        if id(t) not in self.replacements:
            return t
        self.replaced_ids.add(id(t))
        return self.replacements[id(t)]


# Batch normalization by the statistics of training batches.

# The mean and the variance of a layer's input; None for a layer that keeps no running statistics.
Statistics = tuple[Tensor | None, Tensor | None]
# Pairs of a normalization layer and its statistics.
LayerStatistics = list[tuple[_BatchNorm, Statistics]]


@dataclass(frozen=True)
class MCBatchNorm(MonteCarlo):
    """MC batch normalization: mutual information over the statistics of training batches, which
    stand in for the running ones (`divergence.mutual_information`).

    One draw for each of the first `draws` training batches, from the start again if there are
    fewer.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MCBatchNorm

        model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        x = torch.randn(5, 4)
        print(qualms.score(model, x, MCBatchNorm(draws=4), train=[torch.randn(50, 4)]))
        ```
    """

    draws: int = 32

    name = "mc-batchnorm"
    paper = (
        "Teye et al., Bayesian Uncertainty Estimation for Batch Normalized Deep Networks, ICML 2018"
    )
    needs = (SEVERAL_PASSES, TRAINING_DATA)
    cost = "1 + N, and N training batches"
    rules: ClassVar = {"draws": whole(2)}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information over the statistics of the training batches."""
        model_context = context.model_context
        measured = model_context.get_or_compute(self, lambda: self._measure_statistics(context))

        def log_probs(block: slice) -> Iterator[Tensor]:
            """Yield log p of a block of inputs for one draw after the other, [b, 1, c]."""
            for statistics in measured:
                with _use_statistics(statistics):
                    logits = context.forward_all(take_samples(context.batch, block))
                yield log_softmax(logits.double())[:, None]  # [b, 1, c]: one draw

        return information_over_draws(context, self.draws, log_probs)

    def _measure_statistics(self, context: BatchContext) -> list[LayerStatistics]:
        """Measure the mean and variance of every normalization layer's input, for each draw.

        Each draw has its own training batch; if there are fewer batches than draws, they repeat.

        Returns:
            A list over draws of pairs of a layer and its statistics on the training batch.
        """
        layers = [m for m in context.model.modules() if isinstance(m, _BatchNorm)]
        if not any(m.running_mean is not None for m in layers):
            raise QualmsError(
                "mc-batchnorm needs batch normalization, but the model has none; use perturb-theta."
            )
        measured: list[LayerStatistics] = []
        for batch in islice(context.model_context.training_batches(self.name), self.draws):
            self._require_room(context, batch)
            with _track_batch_statistics(layers):
                context.forward(ModelInput(batch))
                # Copied before the exit of the context manager, which restores the layers.
                measured.append([(m, _copy_statistics(m)) for m in layers])
        return list(islice(cycle(measured), self.draws))

    def _require_room(self, context: BatchContext, batch: Batch) -> None:
        """Raise an error if a training batch as a whole does not fit the user's memory budget.

        The statistics of a batch cannot be measured in parts.
        """
        model_context = context.model_context
        budget = model_context.settings.budget
        if budget is None:
            return
        rows = num_samples(batch)
        # Unknown (None) if the model fails on a single row.
        row_bytes = model_context.plain_pass.bytes_of_row(batch, model_context.cache) or 0
        what = (
            f"the results of a training batch of {rows} inputs, which {self.name} runs as a whole,"
        )
        require_room(rows * row_bytes, budget, what, "or smaller batches as train=")


def _copy_statistics(layer: _BatchNorm) -> Statistics:
    """Copy a layer's running mean and variance; (None, None) if the layer keeps none."""
    if layer.running_mean is None or layer.running_var is None:
        return None, None
    return layer.running_mean.clone(), layer.running_var.clone()


@contextmanager
def _track_batch_statistics(layers: list[_BatchNorm]) -> Iterator[None]:
    """Let a forward pass inside overwrite the layers' running statistics by those of its batch.

    On exit, the layers have their previous statistics again and are in evaluation mode.
    """
    momenta = [layer.momentum for layer in layers]
    try:
        # Copies, since a forward pass in training mode writes the statistics in place.
        with _use_statistics([(layer, _copy_statistics(layer)) for layer in layers]):
            for layer in layers:
                # With 1, the running average becomes the statistics of the batch alone.
                layer.momentum = 1.0
                layer.training = True
            yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
            layer.training = False


@contextmanager
def _use_statistics(statistics: LayerStatistics) -> Iterator[None]:
    """Inside, layers normalize by the given statistics; on exit, the previous ones are restored."""
    previous = [(layer, layer.running_mean, layer.running_var) for layer, _ in statistics]
    try:
        for layer, (mean, variance) in statistics:
            layer.running_mean = mean
            layer.running_var = variance
        yield
    finally:
        for layer, old_mean, old_variance in previous:
            layer.running_mean = old_mean
            layer.running_var = old_variance


@dataclass(frozen=True)
class Ensemble(Method):
    """Deep ensemble: mutual information over the predictions of several models
    (`divergence.mutual_information`).

    The members are the model itself and those in `models=`.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Ensemble

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Ensemble(), models=[torch.nn.Linear(4, 3) for _ in range(4)]))
        ```
    """

    name = "ensemble"
    paper = (
        "Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using "
        "Deep Ensembles, NeurIPS 2017"
    )
    needs = (MODELS,)
    cost = "1 for each model"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information over the predictions of the members."""
        if not context.model_context.members:
            raise QualmsError(
                "ensemble needs several models; pass models=, the members other "
                "than the model itself."
            )
        log_q = [context.log_probs]
        for i, member in enumerate(context.model_context.members):
            with preserve_state(member) as inner, torch.no_grad():
                z = _forward_member(inner, context, f"a forward pass of member {i + 1}")
            if z.shape != context.logits.shape:
                raise QualmsError(
                    f"a member of the ensemble has {z.shape[1]} classes, but the model has "
                    f"{context.num_classes}; all must have the same classes."
                )
            log_q.append(log_softmax(z.double()))
        return mutual_information(torch.stack(log_q, dim=1))


def _forward_member(
    member: nn.Module,
    context: BatchContext,
    pass_name: str,
) -> Float[Tensor, "b c"]:
    """Compute the logits of an ensemble member, in parts that fit the memory budget.

    Args:
        member: a model of the ensemble other than the scored model.
        context: the batch.
        pass_name: a name for the member's forward pass, for errors; it also tells the memory
            measurements of the members apart.
    """

    def compute_logits(rows: Batch) -> Tensor:
        """Compute the member's logits of all rows in one pass."""
        return forward_logits(member, ModelInput(rows))

    model_context, batch = context.model_context, context.batch
    work = PassMemory(pass_name, compute_logits, ROWS_AT_ONCE)
    settings, cache = model_context.settings, model_context.cache
    max_rows = work.rows_at_once(batch, num_samples(batch), settings, cache)
    return torch.cat([compute_logits(part) for part in split_batch(batch, max_rows)])
