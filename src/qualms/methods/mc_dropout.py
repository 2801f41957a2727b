"""MC dropout: the model's own dropout layers stay on; mutual information over the masks.

One mask serves all inputs of a draw: each draw is one thinned network, and the score of an input
does not depend on what else is in the batch. What comes before the first dropout layer runs once
and is replayed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, num_samples, take_samples, tensors_in
from qualms.gradients.memory import PassMemory
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import ROWS_AT_ONCE, BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.draws import information_over_draws
from qualms.methods.method import SEVERAL_PASSES
from qualms.methods.monte_carlo import MonteCarlo
from qualms.parameters import check_parameters, whole
from qualms.random import generator

WHOLE_CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
DROPOUT = (nn.Dropout, *WHOLE_CHANNELS)
DropoutLayers = Sequence[nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d]


@dataclass(frozen=True)
class MCDropout(MonteCarlo):
    """The share of dropped units is the model's own.

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

    def __post_init__(self) -> None:
        check_parameters(self, self.name, draws=whole(2))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        layers = [m for m in context.model.modules() if isinstance(m, DROPOUT) and m.p > 0]
        if not layers:
            raise QualmsError(
                "the model has no dropout layer, which mc-dropout needs; use inserted-dropout."
            )

        def log_probs(block: slice) -> Iterator[Tensor]:
            part, replay = take_samples(context.batch, block), Replay()
            for draw in range(self.draws):
                yield log_softmax(_thinned(context, layers, part, draw, replay).double())[:, None]

        def run(row: Batch) -> Tensor:
            return _thinned(context, layers, row, 0, Replay())

        model_context = context.model_context
        work = PassMemory("a pass that is replayed", run, ROWS_AT_ONCE)
        most = work.rows_at_once(
            context.batch, num_samples(context.batch), model_context.settings, model_context.cache
        )
        return information_over_draws(context, self.draws, log_probs, most)


@torch.no_grad()
def _thinned(
    context: BatchContext, layers: DropoutLayers, part: Batch, draw: int, replay: "Replay"
) -> Float[Tensor, "b c"]:
    """The logits of one thinned network.

    Args:
        context: of the model.
        layers: its dropout layers.
        part: inputs.
        draw: its number, which decides the masks.
        replay: of what comes before the first of the layers.
    """
    with _masked(layers, num_samples(part), generator(context.seed, draw), replay), replay.run():
        return forward_logits(context.model, ModelInput(part))


@contextmanager
def _masked(
    layers: DropoutLayers, rows: int, noise: torch.Generator, replay: "Replay"
) -> Iterator[None]:
    """Dropout layers, off in evaluation mode, multiply by masks of their own."""

    def mask(layer: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        replay.prefix_ends()
        if out.shape[0] != rows:
            raise QualmsError(
                "a dropout layer of the model sees a tensor whose first axis does not count the inputs, so mc-dropout "
                "cannot give them the same mask; use inserted-dropout."
            )
        shape = (
            (1, out.shape[1], *[1] * (out.ndim - 2))
            if isinstance(layer, WHOLE_CHANNELS)
            else (1, *out.shape[1:])
        )
        kept = torch.rand(shape, generator=noise).to(out.device) >= layer.p
        return out * kept / (1 - layer.p)

    handles = [layer.register_forward_hook(mask) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Replay:
    """Runs a forward pass again and again, and carries out only once what comes before
    `prefix_ends` is called.

    The results of the first run's operations are handed out again. If what follows changes one of
    them in place, they cannot be, and later runs are carried out whole.
    """

    def __init__(self) -> None:
        self.results: list[Any] | None = None  # None: not run yet, or not usable
        self._versions: list[int] = []
        self._mode: _Recorded | None = None
        self._usable = True

    @contextmanager
    def run(self) -> Iterator[None]:
        """One forward pass."""
        self._mode = _Recorded(self.results) if self._usable else None
        if self._mode is None:
            yield
            return
        with self._mode:
            yield
        if self.results is None:
            self.results = self._mode.results
        if self._versions != self._versions_now():
            self._usable, self.results = False, None

    def prefix_ends(self) -> None:
        """From here on, operations differ from run to run."""
        if self._mode is not None and not self._mode.over:
            self._mode.over = True
            if self.results is None:
                self._versions = [t._version for t in tensors_in(self._mode.results)]

    def _versions_now(self) -> list[int]:
        return [t._version for t in tensors_in(self.results)]


class _Recorded(TorchFunctionMode):
    def __init__(self, known: list[Any] | None) -> None:
        super().__init__()
        self.known, self.results, self.over = known, list[Any](), False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self.over:
            return func(*args, **(kwargs or {}))
        place = len(self.results)
        out = self.known[place] if self.known is not None else func(*args, **(kwargs or {}))
        self.results.append(out)
        return out
