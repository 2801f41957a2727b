"""The passes that scores are made from. Each runs once, when the first score asks for it, and serves them all.

`Subject` holds what belongs to the model, `Passes` what belongs to one batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.directions import Directions
from qualms.gradients.exact.drawn_classes import FIRST
from qualms.gradients.inputs import Batch, count, labelled_batches, take, tensors
from qualms.gradients.job import Job
from qualms.gradients.layers import total_norms
from qualms.gradients.learnt import Learnt
from qualms.gradients.precision import accurate
from qualms.gradients.rows import Rows, logits_of, rows_of
from qualms.gradients.settings import Settings
from qualms.gradients.sketch.engine import sketch_totals
from qualms.gradients.sketch.stable import Sample
from qualms.gradients.smoothing import Smoothing
from qualms.gradients.table import LayerTable, layer_table
from qualms.methods.divergence import log_softmax
from qualms.methods.few_classes import scores_by_few_classes
from qualms.methods.head import Head, required, with_head

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

ROWS_AT_ONCE = 256  # in passes that keep nothing for a backward pass
ROWS_WITH_GRAPH = 32  # in those that keep everything


@dataclass
class Subject:
    """One model, what its scores will ask for, and what is fitted to it once and kept. It is under `untouched`."""

    model: nn.Module
    settings: Settings = field(default_factory=Settings)
    train: Any = None  # training inputs, for the methods that need them
    members: tuple[nn.Module, ...] = ()  # further models, for `ensemble`
    gradient_methods: "tuple[GradientScore, ...]" = ()  # those that will be asked for
    learnt: Learnt = field(default_factory=Learnt)  # what the engines found out about the model
    fitted: dict[Any, Any] = field(default_factory=dict)  # what methods keep for this model, such as a posterior
    compares: bool = False  # the exact engine will run on the inputs themselves; smoothed ones it compares on its own

    def training_batches(self, method: str) -> Iterator[Batch]:
        """The training inputs, labels dropped."""
        return (batch for batch, _ in self.labelled_training_batches(method))

    def labelled_training_batches(self, method: str) -> Iterator[tuple[Batch, Tensor | None]]:
        """The training inputs, each batch with its labels if it is a pair of inputs and labels."""
        if self.train is None:
            raise QualmsError(f"{method} needs training data; pass train=, a loader of training inputs.")
        return labelled_batches(self.train, self.model, "train")

    @property
    def rows_at_once(self) -> int:
        """How many rows a plain forward pass takes."""
        return self.settings.batch_size or ROWS_AT_ONCE

    def directions(self, smooth: Smoothing | None) -> Directions:
        """The directions that the gradient methods with this smoothing need, each set once; None is the plain pass."""
        return Directions(tuple(dict.fromkeys(m.direction for m in self.gradient_methods if m.smooth == smooth)))

    def smallest_lambda(self, smooth: Smoothing | None) -> float | None:
        """The least that early layers are weighted down by any score of one pass; None if one does not weight them."""
        lambdas = [m.layers for m in self.gradient_methods if m.smooth == smooth]
        known = [lam for lam in lambdas if lam is not None]
        return min(known) if known and len(known) == len(lambdas) else None


class Passes:
    """What the scores of one batch share; the number of an input, 0, 1, … by default, decides its draws."""

    def __init__(self, subject: Subject, batch: Batch, numbers: Sequence[int] | None = None) -> None:
        self.subject, self.batch = subject, batch
        self.numbers = range(count(batch)) if numbers is None else numbers
        self._tables: dict[tuple[Smoothing | None, Directions, bool], LayerTable] = {}
        self._estimated: dict[GradientScore, tuple[Tensor, Tensor]] = {}
        self._draws: dict[Smoothing, Tensor] = {}

    @property
    def model(self) -> nn.Module:
        """The model that is asked."""
        return self.subject.model

    @property
    def seed(self) -> int:
        """Decides every random draw, together with an input's number."""
        return self.subject.settings.seed

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return tensors(self.batch)[0].device

    # The one plain forward pass.

    @cached_property
    def _outcome(self) -> tuple[Float[Tensor, "b c"], Head | QualmsError]:
        """The logits, and what the last linear layer saw.

        If an engine will compare with them, inputs run in groups of every second one, or fewer: in other company than
        the consecutive ones that it takes, so that these logits also tell whether inputs influence each other.
        """
        inputs = count(self.batch)
        groups = max(2 if self.subject.compares and inputs > 1 else 1, -(-inputs // self.subject.rows_at_once))
        members = [list(range(start, inputs, groups)) for start in range(groups)]
        parts = [with_head(self.model, take(self.batch, group)) for group in members]
        order = torch.tensor([i for group in members for i in group]).argsort()
        head = Head.joined([head for _, head in parts])
        logits = torch.cat([z for z, _ in parts])[order]
        self.subject.learnt.warn_of_probabilities(logits)
        return logits, head.take(order) if isinstance(head, Head) else head

    @property
    def _regrouped(self) -> Float[Tensor, "b c"] | None:
        return self._outcome[0] if self.subject.compares else None

    @property
    def logits(self) -> Float[Tensor, "b c"]:
        """z(x), in double precision: probabilities near 1 and small divergences keep their digits."""
        return self._outcome[0].double()

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores: that of the logits, 32 bits at least."""
        return accurate(self._outcome[0]).dtype

    @cached_property
    def log_probs(self) -> Float[Tensor, "b c"]:
        """log p(y | x)."""
        return log_softmax(self.logits)

    @property
    def probs(self) -> Float[Tensor, "b c"]:
        """p(y | x)."""
        return self.logits.softmax(-1)

    @property
    def head(self) -> Head:
        """The last fully connected layer and its input."""
        return required(self._outcome[1])

    # Gradients.

    def gradient_score(self, method: "GradientScore") -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Σ_m w_m ‖g_m‖, or of ‖g_m‖², along a method's directions, and its standard error if it is estimated."""
        if self.estimates(method):
            if method not in self._estimated:
                (self._draw_classes if self.subject.settings.sketch is None else self._sketch)(method)
            return self._estimated[method]
        table, columns = self._norms(method)
        norms = total_norms(table.values[:, columns].double(), method.layers, self.subject.settings.norm)
        # p of the rows as the engine ran them: alone, if inputs influence each other.
        value = (method.weights_at(table.logits) * norms**method.power).sum(-1)
        return value, torch.zeros_like(value)

    def estimates(self, method: "GradientScore") -> bool:
        """Whether a score has a standard error: it is sketched, or comes from some of many classes."""
        settings, many = self.subject.settings, self._outcome[0].shape[1] > 2 * FIRST
        sums = method.direction == "classes" and method.power == 1
        few = settings.tolerance > 0 and settings.engine_name == "exact" and sums and many
        return settings.sketch is not None or few

    def _norms(self, method: "GradientScore") -> tuple[LayerTable, slice]:
        """Gradient norms per layer, from the one pass that serves all methods, and where this one's directions are."""
        smooth, wanted, foreseen = method.smooth, self._wanted(method), method in self.subject.gradient_methods
        key = (smooth, wanted, foreseen)
        if key not in self._tables:
            lam = self.subject.smallest_lambda(smooth) if foreseen else None
            job, regrouped = self.job(wanted, smooth), self._regrouped
            self._tables[key] = layer_table([job], self.subject.learnt, regrouped=regrouped, lam=lam)
        return self._tables[key], self._columns(method.direction, wanted)

    def gram(self, params: frozenset[str]) -> Float[Tensor, "b l c c"]:
        """G_l = J_l J_lᵀ, the inner products between the gradients of the logits by some of the parameters, exact."""
        own = self.subject.settings
        settings = Settings(params=params.__contains__, budget=own.budget, batch_size=own.batch_size)
        job = replace(self.job(Directions(("logits",)), None), settings=settings)
        return layer_table([job], self.subject.learnt, gram=True, regrouped=self._regrouped).values.double()

    def traces(self, blocks: Sequence[Sequence[str]]) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b c"]]:
        """tr(P G_l P) of blocks of parameters, P = I - 11ᵀ/C and G_l = J_l J_lᵀ; beyond 17 classes an estimate.

        And the logits of the inputs as the engine ran them: alone, if they influence each other. Backward passes go no
        further than the first of the blocks.
        """
        own, names = self.subject.settings, {name: i for i, block in enumerate(blocks) for name in block}
        settings = Settings(
            granularity="tensor", params=names.__contains__, budget=own.budget, batch_size=own.batch_size
        )
        job = replace(self.job(Directions(("contrasts",)), None), settings=settings)
        table = layer_table([job], self.subject.learnt, regrouped=self._regrouped)
        squares = table.values.double().square().sum(1)
        place = torch.tensor([names[name] for name in table.layers], device=squares.device)
        return squares.new_zeros(len(squares), len(blocks)).index_add_(1, place, squares), table.logits.double()

    def _sketch(self, method: "GradientScore") -> None:
        """All scores of one sketch, block by block: their errors are linear in those of the norms."""
        wanted, foreseen = self._wanted(method), self.subject.gradient_methods
        like = [m for m in foreseen if (m.smooth, m.layers) == (method.smooth, method.layers)]
        methods = dict.fromkeys(like if method in foreseen else [method])
        parts = {m: list[tuple[Tensor, Tensor]]() for m in methods}
        for sample, logits in sketch_totals(self.job(wanted, method.smooth), method.layers, self.subject.learnt):
            norms = sample.scale
            for m in methods:
                columns = self._columns(m.direction, wanted)
                own = Sample(sample.projections[:, :, columns], sample.law)
                weights = m.weights_at(logits)
                scale = norms[:, columns]
                if m.power == 2:
                    slope = 2 * weights * scale
                    parts[m].append(((weights * own.square).sum(-1), own.weighted_error(scale, slope)))
                else:
                    parts[m].append(((weights * scale).sum(-1), own.weighted_error(scale, weights)))
        for m, blocks in parts.items():
            values, errors = (torch.cat(column) for column in zip(*blocks, strict=True))
            self._estimated[m] = values, errors

    def _draw_classes(self, method: "GradientScore") -> None:
        """All scores that are sums over the same classes, from some of them."""
        foreseen = self.subject.gradient_methods
        like = [m for m in foreseen if (m.smooth, m.direction) == (method.smooth, method.direction) and m.power == 1]
        methods = list(dict.fromkeys(like)) if method in foreseen else [method]
        lam = self.subject.smallest_lambda(method.smooth) if method in foreseen else None
        job, learnt = self.job(Directions((method.direction,)), method.smooth), self.subject.learnt
        self._estimated |= scores_by_few_classes(job, methods, self.logits, learnt, regrouped=self._regrouped, lam=lam)

    def job(self, directions: Directions, smooth: Smoothing | None) -> Job:
        """The batch as an engine takes it."""
        return Job(self.model, self.batch, self.numbers, self.subject.settings, directions, smooth)

    def _wanted(self, method: "GradientScore") -> Directions:
        """The directions of the pass that serves a method; one that nobody foresaw has a pass of its own."""
        foreseen = method in self.subject.gradient_methods
        return self.subject.directions(method.smooth) if foreseen else Directions((method.direction,))

    def _columns(self, direction: str, wanted: Directions) -> slice:
        """The columns of the set named `direction` among all the directions of one pass."""
        return wanted.columns(direction, self._outcome[0].shape[1])

    # Further plain forward passes.

    def perturbed_log_probs(self, noise: Smoothing) -> Float[Tensor, "b n c"]:
        """log p(y | x + Δx) for each draw of Δx, the input itself left out."""
        if noise not in self._draws:
            per_chunk = max(1, self.subject.rows_at_once // (noise.draws + 1))
            parts = []
            for start in range(0, count(self.batch), per_chunk):
                part = take(self.batch, slice(start, start + per_chunk))
                on = rows_of(part, noise, self.numbers[start : start + per_chunk], self.seed)
                parts.append(self.forward(on).unflatten(0, (count(part), -1))[:, 1:])
            self._draws[noise] = log_softmax(torch.cat(parts).double())
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

    def chunks_with_graph(self) -> Iterable[Batch]:
        """The batch in parts that a pass with a backward pass takes at once."""
        size = self.subject.settings.batch_size or ROWS_WITH_GRAPH
        return (take(self.batch, slice(start, start + size)) for start in range(0, count(self.batch), size))
