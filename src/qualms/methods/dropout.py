"""Scores over dropout masks: those of the model's own layers, or of features before the classifier.

One mask serves all inputs of a draw: each draw is one thinned network, and the score of an input
does not depend on what else is in the batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import (
    Batch,
    num_samples,
    take_samples,
    tensors_in,
)
from qualms.gradients.function_modes import CallMode
from qualms.gradients.memory import PassMemory
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import ROWS_AT_ONCE, BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.method import SEVERAL_PASSES
from qualms.methods.monte_carlo import (
    MonteCarlo,
    draws_at_once,
    information_over_draws,
)
from qualms.parameters import SHARE, whole
from qualms.random import generator

CHANNEL_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # they drop whole channels
DROPOUT = (nn.Dropout, *CHANNEL_DROPOUT)
DropoutLayer = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d


def drop(
    features: Float[Tensor, "b f"],
    masks: Bool[Tensor, "n f"],
    p: float,
) -> Float[Tensor, "b n f"]:
    """Apply n dropout masks to the features of each input, and divide by 1 - p.

    Args:
        features: the features of each input.
        masks: True for the features that are kept, for each of n draws.
        p: the share of features that is dropped on average.
    """
    return features[:, None] * masks / (1 - p)


@dataclass(frozen=True)
class InsertedDropout(MonteCarlo):
    """Dropout before the last fully connected layer: mutual information over the masks
    (`divergence.mutual_information`).

    The features are computed once; only the last layer runs for every draw. p is the share of
    features that are dropped. Paper: 0.4, 100 draws.

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
    rules: ClassVar = {"p": SHARE, "draws": whole(2)}

    @property
    def extra_passes(self) -> float:
        """0, since only the last layer runs for every draw."""
        return 0.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information over the predictions with each mask."""
        head = context.head
        # One mask for each draw, shared by all inputs: [draws, features].
        shape = (self.draws, head.features.shape[1])
        uniform = torch.rand(shape, generator=generator(context.seed, 0))
        masks = uniform.to(head.features.device) >= self.p

        def log_probs(block: slice) -> Iterator[Tensor]:
            """Yield log p of a block of inputs for d masks at a time, [b, d, c]."""
            features = head.features[block]
            num_classes = len(head.weight)
            for mask_block in masks.split(draws_at_once(len(features), num_classes)):
                logits = head.logits(drop(features, mask_block, self.p))
                yield log_softmax(logits.double())

        return information_over_draws(context, self.draws, log_probs)


@dataclass(frozen=True)
class MCDropout(MonteCarlo):
    """MC dropout, the model's own dropout layers stay on: mutual information over the masks
    (`divergence.mutual_information`).

    Operations before the first dropout layer run once, and later draws reuse their results. The
    share of dropped units is the model's own.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MCDropout

        model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        print(qualms.score(model, torch.randn(5, 4), MCDropout(draws=20)))
        ```
    """

    draws: int = 100

    name = "mc-dropout"
    paper = "Gal & Ghahramani, Dropout as a Bayesian Approximation, ICML 2016"
    needs = (SEVERAL_PASSES,)
    cost = "1 + N tails"
    rules: ClassVar = {"draws": whole(2)}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information over the predictions with each mask."""
        layers = [m for m in context.model.modules() if isinstance(m, DROPOUT) and m.p > 0]
        if not layers:
            raise QualmsError(
                "mc-dropout needs a dropout layer, but the model has none; use inserted-dropout."
            )

        def log_probs(block: slice) -> Iterator[Tensor]:
            """Yield log p of a block of inputs for one draw after the other, [b, 1, c]."""
            part = take_samples(context.batch, block)
            # All draws share what the model computes before its first dropout layer.
            replay = _Replay()
            for draw in range(self.draws):
                logits = _forward_with_dropout(context, layers, part, draw, replay)
                yield log_softmax(logits.double())[:, None]  # [b, 1, c]: one draw

        def run_first_draw(rows: Batch) -> Tensor:
            """Run the draw that takes the most memory: the first also keeps results for the others."""
            return _forward_with_dropout(context, layers, rows, draw=0, replay=_Replay())

        model_context, batch = context.model_context, context.batch
        work = PassMemory("a pass that is replayed", run_first_draw, ROWS_AT_ONCE)
        settings, cache = model_context.settings, model_context.cache
        max_inputs = work.rows_at_once(batch, num_samples(batch), settings, cache)
        return information_over_draws(context, self.draws, log_probs, max_inputs)


@torch.no_grad()
def _forward_with_dropout(
    context: BatchContext,
    layers: Sequence[DropoutLayer],
    part: Batch,
    draw: int,
    replay: "_Replay",
) -> Float[Tensor, "b c"]:
    """Compute the logits of the model with the dropout masks of one draw.

    Args:
        context: the context that holds the model and the seed.
        layers: the dropout layers of the model.
        part: the inputs.
        draw: the index of the draw, which with the seed decides the masks.
        replay: reuses the results that an earlier draw computed before the first dropout layer.
    """
    noise = generator(context.seed, draw)
    with (
        _apply_masks(layers, num_samples(part), noise, replay),
        replay.run(),
    ):
        return forward_logits(context.model, ModelInput(part))


@contextmanager
def _apply_masks(
    layers: Sequence[DropoutLayer],
    rows: int,
    noise: torch.Generator,
    replay: "_Replay",
) -> Iterator[None]:
    """Inside, dropout layers apply masks, although dropout is off in evaluation mode.

    Args:
        layers: the dropout layers.
        rows: the number of inputs in the batch.
        noise: the generator from which masks are drawn.
        replay: is told when the first dropout layer runs, as results differ from there on.
    """

    def apply_mask(
        layer: Any,
        _args: tuple[Tensor, ...],
        out: Tensor,
    ) -> Tensor:
        """Apply dropout to the result of a dropout layer; a hook that runs after the layer."""
        replay.end_prefix()
        if out.shape[0] != rows:
            raise QualmsError(
                "a dropout layer of the model receives a tensor whose first axis is not the "
                "batch, so mc-dropout cannot use one mask for all inputs; use inserted-dropout."
            )
        # One mask for all inputs; whole channels have axes of length 1 for their positions.
        shape: tuple[int, ...] = (1, *out.shape[1:])
        if isinstance(layer, CHANNEL_DROPOUT):
            shape = (1, out.shape[1], *[1] * (out.ndim - 2))
        is_kept = torch.rand(shape, generator=noise).to(out.device) >= layer.p
        return out * is_kept / (1 - layer.p)

    handles = [layer.register_forward_hook(apply_mask) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Replay:
    """Speeds up repeated forward passes whose first operations, the prefix, are always the same.

    The first run records the results of these operations, up to a call of `end_prefix`. Later runs
    return the recorded results instead of computing them. If a later operation changes one of them
    in place, they cannot be reused, and later runs compute everything.

    Attributes:
        results: the results of the operations of the prefix, in order; None before the first run,
            and if they cannot be reused.
    """

    def __init__(self) -> None:
        self.results: list[Any] | None = None
        # The version counters of the recorded tensors at the end of the prefix.
        self._versions: list[int] = []
        # The function mode of the current run; None if the results cannot be reused.
        self._mode: _ReplayMode | None = None
        # Becomes False once an operation has changed a recorded tensor in place.
        self._is_reusable = True

    @contextmanager
    def run(self) -> Iterator[None]:
        """Inside, a forward pass reuses the results of the first one, up to `end_prefix`.

        The first pass keeps these results.
        """
        self._mode = _ReplayMode(self.results) if self._is_reusable else None
        if self._mode is None:
            yield
            return
        with self._mode:
            yield
        if self.results is None:
            self.results = self._mode.results
        was_changed_in_place = self._versions != _version_counters(self.results)
        if was_changed_in_place:
            self._is_reusable = False
            self.results = None

    def end_prefix(self) -> None:
        """Declare that from here on results differ from run to run, so they are not reused.

        Only the first call in a run has an effect.
        """
        if self._mode is not None and self._mode.is_prefix:
            self._mode.is_prefix = False
            is_first_run = self.results is None
            if is_first_run:
                # To see later whether an operation has changed a result in place.
                self._versions = _version_counters(self._mode.results)


def _version_counters(results: list[Any]) -> list[int]:
    """Return the version counters of the tensors in `results`; in-place operations increment them."""
    return [t._version for t in tensors_in(results)]


class _ReplayMode(CallMode):
    """Records the results of operations in the first run; returns the recorded ones in later runs.

    Attributes:
        recorded: the results of the first run, in order; None in the first run itself.
        results: the results of this run so far.
        is_prefix: whether operations are still among those that every run has in common.
    """

    def __init__(self, recorded: list[Any] | None) -> None:
        super().__init__()
        self.recorded = recorded
        self.results: list[Any] = []
        # Becomes False at the first dropout layer.
        self.is_prefix = True

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and keep its result; in later runs, return the kept one instead.

        This holds up to the first dropout layer. From there on operations just run, as their
        results differ from draw to draw.
        """
        if not self.is_prefix:
            return func(*args, **kwargs)
        if self.recorded is None:
            self.results.append(func(*args, **kwargs))
        else:
            # The operations of all runs have the same order.
            self.results.append(self.recorded[len(self.results)])
        return self.results[-1]
