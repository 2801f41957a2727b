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
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.batch import (
    Batch,
    num_samples,
    take_samples,
    tensors_in,
)
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

CHANNEL_DROPOUT = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUT = (nn.Dropout, *CHANNEL_DROPOUT)
DropoutLayer = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d


def drop(
    features: Float[Tensor, "b f"],
    masks: Bool[Tensor, "n f"],
    p: float,
) -> Float[Tensor, "b n f"]:
    """Apply dropout to features: mask them, and divide by 1 - p.

    Args:
        features: the features of each input.
        masks: True for the features that stay, in each of n draws.
        p: the share of features that is dropped.
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
        """0: only the last layer runs for every draw."""
        return 0.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information over the predictions with each mask."""
        # One mask for each draw, shared by all inputs: [draws, features].
        head = context.head
        size = (self.draws, head.features.shape[1])
        uniform = torch.rand(size, generator=generator(context.seed, 0))
        masks = uniform.to(head.features.device) >= self.p

        def log_probs(block: slice) -> Iterator[Tensor]:
            """Yield log p of some inputs for several masks at a time, [b, d, c]."""
            features = head.features[block]
            for mask_block in masks.split(draws_at_once(len(features), len(head.weight))):
                logits = head.logits(drop(features, mask_block, self.p))
                yield log_softmax(logits.double())

        return information_over_draws(context, self.draws, log_probs)


@dataclass(frozen=True)
class MCDropout(MonteCarlo):
    """MC dropout, the model's own dropout layers stay on: mutual information over the masks
    (`divergence.mutual_information`).

    What comes before the first dropout layer runs once and is replayed. The share of dropped units
    is the model's own.

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
            """Yield log p of some inputs for one draw after the other, [b, 1, c]."""
            part = take_samples(context.batch, block)
            replay = _Replay()
            for draw in range(self.draws):
                logits = _forward_thinned(context, layers, part, draw, replay)
                yield log_softmax(logits.double())[:, None]

        def run(row: Batch) -> Tensor:
            """Run one recorded pass, to measure its memory."""
            return _forward_thinned(context, layers, row, 0, _Replay())

        model_context, batch = context.model_context, context.batch
        work = PassMemory("a pass that is replayed", run, ROWS_AT_ONCE)
        settings, cache = model_context.settings, model_context.cache
        max_inputs = work.rows_at_once(batch, num_samples(batch), settings, cache)
        return information_over_draws(context, self.draws, log_probs, max_inputs)


@torch.no_grad()
def _forward_thinned(
    context: BatchContext,
    layers: Sequence[DropoutLayer],
    part: Batch,
    draw: int,
    replay: "_Replay",
) -> Float[Tensor, "b c"]:
    """Compute the logits of one thinned network: the model with the masks of one draw.

    Args:
        context: the context that holds the model.
        layers: the dropout layers of the model.
        part: the inputs.
        draw: the number of the draw, which decides the masks.
        replay: reuses what an earlier draw computed before the first dropout layer.
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
    """Inside, dropout layers multiply by masks, although they are off in evaluation mode.

    Args:
        layers: the dropout layers.
        rows: the number of inputs in the batch.
        noise: the generator that masks are drawn from.
        replay: the recorder of results, whose prefix ends at the first dropout layer.
    """

    def mask(layer: Any, _args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Apply dropout to the result of a dropout layer; a hook that runs after the layer."""
        replay.end_prefix()
        if out.shape[0] != rows:
            raise QualmsError(
                "a dropout layer of the model receives a tensor whose first axis is not the "
                "batch, so mc-dropout cannot use one mask for all inputs; use inserted-dropout."
            )
        shape: tuple[int, ...] = (1, *out.shape[1:])
        if isinstance(layer, CHANNEL_DROPOUT):  # drops whole channels
            shape = (1, out.shape[1], *[1] * (out.ndim - 2))
        stays = torch.rand(shape, generator=noise).to(out.device) >= layer.p
        return out * stays / (1 - layer.p)

    handles = [layer.register_forward_hook(mask) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Replay:
    """Repeats a forward pass; what comes before `end_prefix` is computed only once.

    Later runs return the results of the first run's operations again. If a later operation changes
    one of them in place, they cannot be used, and later runs compute everything.

    Attributes:
        results: the results of the operations before `end_prefix`, in order; None before the first
            run, and if they cannot be used.
    """

    def __init__(self) -> None:
        self.results: list[Any] | None = None
        self._versions: list[
            int
        ] = []  # the version counters of the results at the end of the prefix
        # Of the current run; None if nothing is recorded.
        self._mode: _ReplayMode | None = None
        self._is_reusable = True

    @contextmanager
    def run(self) -> Iterator[None]:
        """Inside, a forward pass is recorded, or reuses the recorded results up to `end_prefix`."""
        self._mode = _ReplayMode(self.results) if self._is_reusable else None
        if self._mode is None:
            yield
            return
        with self._mode:
            yield
        if self.results is None:
            self.results = self._mode.results
        if self._versions != _versions(self.results):  # changed in place
            self._is_reusable = False
            self.results = None

    def end_prefix(self) -> None:
        """Mark that from here on operations differ from run to run."""
        if self._mode is not None and self._mode.is_prefix:
            self._mode.is_prefix = False
            if self.results is None:
                self._versions = _versions(self._mode.results)


def _versions(results: list[Any]) -> list[int]:
    """Return the version counters of the tensors in `results`; in-place operations increment them."""
    return [t._version for t in tensors_in(results)]


class _ReplayMode(TorchFunctionMode):
    """Records the results of operations, or returns those of an earlier run.

    Attributes:
        earlier: the results of the first run, in order; None in the first run itself.
        results: the results of this run.
        is_prefix: whether operations are still among those that every run has in common.
    """

    def __init__(self, earlier: list[Any] | None) -> None:
        super().__init__()
        self.earlier = earlier
        self.results: list[Any] = []
        self.is_prefix = True

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation and record its result, or return the result of the first run.

        After the prefix, operations just run.

        Args:
            func: the operation.
            types: the classes of its tensors; not used.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        kwargs = kwargs or {}
        if not self.is_prefix:
            return func(*args, **kwargs)
        if self.earlier is None:
            self.results.append(func(*args, **kwargs))
        else:
            self.results.append(self.earlier[len(self.results)])
        return self.results[-1]
