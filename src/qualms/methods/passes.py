"""What scores are made from. Each expensive pass runs once, when the first score asks for it, and serves them all.

`Subject` holds what belongs to the model, `Passes` what belongs to one batch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.inputs import Batch, batches, count, take, tensors
from qualms.gradients.norms import LayerTable, layer_table
from qualms.gradients.settings import Settings
from qualms.gradients.sketch.engine import Sketched, sketch_totals
from qualms.gradients.smoothing import Rows, Smoothing, logits_of, rows
from qualms.gradients.watch.pieces import accurate
from qualms.methods.head import Head, with_head

ROWS_AT_ONCE = 256  # in passes that keep nothing for a backward pass


@dataclass
class Subject:
    """One model under examination, for as long as its scores are computed. The model is under `untouched`."""

    model: nn.Module
    settings: Settings = field(default_factory=Settings)
    train: Any = None  # training inputs, for the methods that need them
    members: tuple[nn.Module, ...] = ()  # further models, for `ensemble`
    directions: dict[Smoothing | None, tuple[str, ...]] = field(default_factory=dict)  # that will be asked for
    smallest_lambda: dict[Smoothing | None, float | None] = field(default_factory=dict)  # of the scores to come
    with_errors: bool = False  # standard errors will be asked for
    fitted: dict[Any, Any] = field(default_factory=dict)  # what methods learnt from the training inputs

    def training_batches(self, method: str) -> Iterator[Batch]:
        """The training inputs, labels dropped."""
        if self.train is None:
            raise QualmsError(f"{method} needs training data; pass train=, a loader of training inputs.")
        return batches(self.train)

    @property
    def rows_at_once(self) -> int:
        """How many rows a plain forward pass takes."""
        return self.settings.batch_size or ROWS_AT_ONCE


class Passes:
    """What the scores of one batch share."""

    def __init__(self, subject: Subject, batch: Batch, first_index: int = 0) -> None:
        self.subject, self.batch, self.first_index = subject, batch, first_index
        self._tables: dict[Smoothing | None, LayerTable] = {}
        self._sketches: dict[tuple[Smoothing | None, float | None], Sketched] = {}
        self._without: int | None = None  # the tangent whose influence on the norms is left out
        self._draws: dict[Any, Tensor] = {}

    @property
    def model(self) -> nn.Module:
        """The model under examination."""
        return self.subject.model

    @property
    def seed(self) -> int:
        """Decides every random draw, together with an input's number."""
        return self.subject.settings.seed

    @cached_property
    def _outcome(self) -> tuple[Float[Tensor, "b c"], Head | QualmsError]:
        """One plain forward pass: the logits, and what the last linear layer saw."""
        parts = [with_head(self.model, part) for part in self.chunks(self.batch)]
        return torch.cat([z for z, _ in parts]), Head.joined([head for _, head in parts])

    @property
    def logits(self) -> Float[Tensor, "b c"]:
        """z(x), in double precision: probabilities near 1 and small divergences keep their digits."""
        return self._outcome[0].double()

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores: that of the logits, 32 bits at least."""
        return accurate(self._outcome[0]).dtype

    @property
    def log_probs(self) -> Float[Tensor, "b c"]:
        """log p(y | x)."""
        return self.logits.log_softmax(-1)

    @property
    def probs(self) -> Float[Tensor, "b c"]:
        """p(y | x)."""
        return self.logits.softmax(-1)

    @property
    def head(self) -> Head:
        """The last fully connected layer and its input."""
        head = self._outcome[1]
        if isinstance(head, QualmsError):
            raise head
        return head

    def norms(self, direction: str, smooth: Smoothing | None) -> Float[Tensor, "b m l"]:
        """Gradient norms per layer along one set of directions, from the one pass that serves all sets."""
        names = self.subject.directions.get(smooth, (direction,))
        if smooth not in self._tables:
            numbered = [(self.first_index, self.batch)]
            lam = self.subject.smallest_lambda.get(smooth)
            self._tables[smooth] = layer_table(self.model, numbered, self.subject.settings, names, smooth, lam=lam)
        return self._tables[smooth].values[:, self._columns(direction, names)].double()

    def sketched_norms(self, direction: str, smooth: Smoothing | None, layers: float | None) -> Float[Tensor, "b m"]:
        """Norms of whole gradients along one set of directions, layers weighted, from one sketch for all sets."""
        names = self.subject.directions.get(smooth, (direction,))
        if (smooth, layers) not in self._sketches:
            numbers = range(self.first_index, self.first_index + count(self.batch))
            where = (self.model, self.batch, numbers, self.subject.settings)
            keep = self.subject.with_errors
            self._sketches[smooth, layers] = sketch_totals(*where, names, smooth, layers, keep)
        sketched = self._sketches[smooth, layers]
        norms = sketched.norms if self._without is None else sketched.without(self._without)
        return norms[:, self._columns(direction, names)]

    def standard_error(self, method: Any) -> Float[Tensor, " b"]:
        """What the choice of tangents adds to a score's error: sqrt(Σ_j (score - score without tangent j)²)."""
        sketch = self.subject.settings.sketch
        if sketch is None or not hasattr(method, "direction"):
            return torch.zeros(len(self.logits), dtype=torch.double, device=self.device)
        whole = method.score(self)
        total = torch.zeros_like(whole)
        for self._without in range(sketch.tangents):
            total += (method.score(self) - whole).square()
        self._without = None
        return total.sqrt()

    def _columns(self, direction: str, names: tuple[str, ...]) -> slice:
        """Where a set of directions stands among those of one pass."""
        sizes = [self.logits.shape[1] if name == "classes" else 1 for name in names]
        start = sum(sizes[: names.index(direction)])
        return slice(start, start + sizes[names.index(direction)])

    def perturbed_log_probs(self, noise: Smoothing) -> Float[Tensor, "b n c"]:
        """log p(y | x + Δx) for each draw of Δx, the input itself left out."""
        if noise not in self._draws:
            per_chunk = max(1, self.subject.rows_at_once // (noise.draws + 1))
            parts = []
            for start in range(0, count(self.batch), per_chunk):
                part = take(self.batch, slice(start, start + per_chunk))
                first = self.first_index + start
                on = rows(part, noise, range(first, first + count(part)), self.seed)
                parts.append(self.forward(on).unflatten(0, (count(part), -1))[:, 1:])
            self._draws[noise] = torch.cat(parts).double().log_softmax(-1)
        return self._draws[noise]

    @torch.no_grad()
    def forward(self, on: Rows) -> Float[Tensor, "rows c"]:
        """A plain forward pass."""
        return logits_of(self.model, on)

    @torch.no_grad()
    def forward_all(self, batch: Batch | None = None) -> Float[Tensor, "b c"]:
        """A plain forward pass over the whole batch, in parts."""
        parts = self.chunks(self.batch if batch is None else batch)
        return torch.cat([logits_of(self.model, Rows(part)) for part in parts])

    def chunks(self, batch: Batch) -> Iterable[Batch]:
        """The batch in parts that a plain forward pass takes at once."""
        size = self.subject.rows_at_once
        return (take(batch, slice(start, start + size)) for start in range(0, count(batch), size))

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return tensors(self.batch)[0].device
