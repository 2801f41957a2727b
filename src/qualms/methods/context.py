"""The passes that scores are made from. Each runs once, when the first score asks for it, and
serves them all.

`ModelContext` holds what belongs to the model, `BatchContext` what belongs to one batch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, batch_tensors, num_samples, parts_of, take_samples
from qualms.gradients.directions import Directions
from qualms.gradients.engines.choice import samples_classes
from qualms.gradients.engines.layer_cut import late_layers
from qualms.gradients.engines.sketch import project_gradients
from qualms.gradients.input_data import labeled_batches
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.layer_table import LayerTable, layer_table
from qualms.gradients.layers import total_norms
from qualms.gradients.memory import PassMemory, budget_of_rows, free_bytes, require_room
from qualms.gradients.model_input import ModelInput, forward_logits, perturbed_in_parts
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings, Smoothing
from qualms.gradients.sketching.projections import Projections
from qualms.methods.divergence import log_softmax
from qualms.methods.few_classes import ClassSums, layer_sums_by_few_classes
from qualms.methods.head import Head, required, with_head

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

ROWS_AT_ONCE = 256  # in passes that keep nothing for a backward pass
ROWS_WITH_GRAPH = 32  # in those that keep everything


@dataclass
class ModelContext:
    """One model, what its scores will ask for, and what is fitted to it once and kept. It is under
    `untouched`.
    """

    model: nn.Module
    settings: Settings = field(default_factory=Settings)
    train: Any = None  # training inputs, for the methods that need them
    members: tuple[nn.Module, ...] = ()  # further models, for `ensemble`
    gradient_methods: "tuple[GradientScore, ...]" = ()  # those that will be asked for
    cache: PlanCache = field(
        default_factory=PlanCache
    )  # what the engines found out about the model
    fitted: dict[Any, Any] = field(
        default_factory=dict
    )  # what methods keep for this model, such as a posterior
    compares: bool = False  # the exact engine will compare its logits with those of a plain pass

    def training_batches(self, method: str) -> Iterator[Batch]:
        """The training inputs, labels dropped."""
        return (batch for batch, _ in self.labeled_training_batches(method))

    def labeled_training_batches(self, method: str) -> Iterator[tuple[Batch, Tensor | None]]:
        """The training inputs, each batch with its labels if it is a pair of inputs and labels."""
        if self.train is None:
            raise QualmsError(
                f"{method} needs training data; pass train=, a loader of training inputs."
            )
        return labeled_batches(self.train, self.model, "train")

    def rows_at_once(self, batch: Batch, rows: int | None = None, held: int = 0) -> int:
        """How many rows like those of a batch a plain forward pass takes at once.

        Args:
            batch: inputs of the shape in question.
            rows: how many there are to run in all; those of the batch unless said otherwise.
            held: bytes that are held beside the pass.
        """
        work = replace(self.plain_work, extra_bytes=held)
        return work.rows_at_once(batch, rows or num_samples(batch), self.settings, self.cache)

    @property
    def plain_work(self) -> PassMemory:
        """A plain forward pass."""
        return PassMemory("a forward pass", lambda row: with_head(self.model, row)[0], ROWS_AT_ONCE)

    def rows_with_graph(self, batch: Batch, times: int = 1) -> int:
        """How many rows a pass with a backward pass takes at once, which needs so many times the
        bytes of its graph.
        """

        def run(row: Batch) -> Tensor:
            with torch.enable_grad(), all_parameters_differentiable(self.model):
                return forward_logits(self.model, ModelInput(row))

        work = PassMemory("a pass that keeps its graph", run, ROWS_WITH_GRAPH, factor=times)
        return work.rows_at_once(batch, num_samples(batch), self.settings, self.cache)

    def directions(self, smooth: Smoothing | None) -> Directions:
        """The directions that the gradient methods with this smoothing need, each set once; None is
        the plain pass.
        """
        return Directions(
            tuple(dict.fromkeys(m.direction for m in self.gradient_methods if m.smooth == smooth))
        )

    def smallest_lambda(self, smooth: Smoothing | None) -> float | None:
        """The least that early layers are weighted down by any score of one pass; None if one does
        not weight them.
        """
        lambdas = [m.layers for m in self.gradient_methods if m.smooth == smooth]
        known = [lam for lam in lambdas if lam is not None]
        return min(known) if known and len(known) == len(lambdas) else None


class BatchContext:
    """What the scores of one batch share; the number of an input, 0, 1, … by default, decides its
    draws.
    """

    def __init__(
        self, model_context: ModelContext, batch: Batch, numbers: Sequence[int] | None = None
    ) -> None:
        self.model_context, self.batch = model_context, batch
        self.numbers = range(num_samples(batch)) if numbers is None else numbers
        self._tables: dict[tuple[Smoothing | None, Directions, bool], LayerTable] = {}
        self._estimated: dict[GradientScore, tuple[Tensor, Tensor]] = {}
        self._grams: dict[tuple[frozenset[str], Directions | None], tuple[Tensor, Tensor]] = {}

    @property
    def model(self) -> nn.Module:
        """The model that is asked."""
        return self.model_context.model

    @property
    def seed(self) -> int:
        """Decides every random draw, together with an input's number."""
        return self.model_context.settings.seed

    @property
    def device(self) -> torch.device:
        """Where the inputs are."""
        return batch_tensors(self.batch)[0].device

    # The one plain forward pass.

    @cached_property
    def _outcome(self) -> tuple[Float[Tensor, "b c"], Head | QualmsError]:
        """The logits, and what the last linear layer saw.

        If an engine will compare with them, inputs run in groups of every second one, or fewer: in
        other company than the consecutive ones that it takes, so that these logits also tell
        whether inputs influence each other.
        """
        inputs = num_samples(self.batch)
        at_once = self.model_context.rows_at_once(self.batch)
        groups = max(2 if self.model_context.compares and inputs > 1 else 1, -(-inputs // at_once))
        members = [list(range(start, inputs, groups)) for start in range(groups)]
        parts = [with_head(self.model, take_samples(self.batch, group)) for group in members]
        order = torch.tensor([i for group in members for i in group]).argsort()
        head = Head.joined([head for _, head in parts])
        logits = torch.cat([z for z, _ in parts])[order]
        self.model_context.cache.warn_of_probabilities(logits)
        return logits, head.take(order) if isinstance(head, Head) else head

    @property
    def _regrouped(self) -> Float[Tensor, "b c"] | None:
        return self._outcome[0] if self.model_context.compares else None

    @property
    def logits(self) -> Float[Tensor, "b c"]:
        """z(x), in double precision: probabilities near 1 and small divergences keep their digits."""
        return self._outcome[0].double()

    @property
    def dtype(self) -> torch.dtype:
        """Of the scores: that of the logits, 32 bits at least."""
        return at_least_float32(self._outcome[0]).dtype

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

    @property
    def head_weight(self) -> Float[Tensor, "c f"] | None:
        """The weight of that layer; None where the logits come from elsewhere."""
        head = self._outcome[1]
        return head.weight if isinstance(head, Head) else None

    # Gradients.

    def gradient_score(
        self, method: "GradientScore"
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        """Σ_m w_m ‖g_m‖, or of ‖g_m‖², along a method's directions, and its standard error if it is
        estimated.
        """
        if self.estimates(method):
            if method not in self._estimated:
                (
                    self._draw_classes
                    if self.model_context.settings.sketch is None
                    else self._sketch
                )(method)
            return self._estimated[method]
        table, columns = self._norms(method)
        norms = total_norms(
            table.values[:, columns].double(), method.layers, self.model_context.settings.norm
        )
        # p of the rows as the engine ran them: alone, if inputs influence each other.
        value = (method.weights_at(table.logits) * norms**method.power).sum(-1)
        return value, method.power * table.left_out * value.abs()

    def estimates(self, method: "GradientScore") -> bool:
        """Whether a score has a standard error: it is sketched, or comes from some of many classes."""
        return self.model_context.settings.sketch is not None or self.draws_classes(method)

    def layer_sums(self, method: "GradientScore") -> tuple[list[str], Float[Tensor, "b l"]]:
        """Σ_c w_c ‖g_cl‖ⁿ of each layer l, over all classes, or from some of many."""
        if self.draws_classes(method):
            request = self.request(Directions(("classes",)), method.smooth)
            return layer_sums_by_few_classes(
                request, method, self.model_context.cache, self.head_weight
            )
        table, columns = self._norms(method)
        weights = method.weights_at(table.logits)
        return table.layers, torch.einsum(
            "bc,bcl->bl", weights, table.values[:, columns].double() ** method.power
        )

    def draws_classes(self, method: "GradientScore") -> bool:
        """Whether some of many classes stand for all of them."""
        classes = self._outcome[0].shape[1]
        settings = self.model_context.settings
        return method.direction == "classes" and samples_classes(settings, classes)

    def _norms(self, method: "GradientScore") -> tuple[LayerTable, slice]:
        """Gradient norms per layer, from the one pass that serves all methods, and where this one's
        directions are.
        """
        smooth, wanted, foreseen = (
            method.smooth,
            self._wanted(method),
            method in self.model_context.gradient_methods,
        )
        key = (smooth, wanted, foreseen)
        if key not in self._tables:
            lam = self.model_context.smallest_lambda(smooth) if foreseen else None
            request, regrouped = self.request(wanted, smooth), self._regrouped
            self._tables[key] = layer_table(
                [request], self.model_context.cache, regrouped=regrouped, lam=lam
            )
        return self._tables[key], self._columns(method.direction, wanted)

    def gram(
        self, params: frozenset[str], directions: Directions | None = None
    ) -> tuple[Float[Tensor, "b l m m"], Float[Tensor, "b c"]]:
        """Inner products between gradients by some of the parameters, exact, and the logits that
        belong to them.

        Along some directions, or along every logit, for which they are G_l = J_l J_lᵀ. Computed
        once.
        """
        own = self.model_context.settings
        wanted = directions or Directions(("logits",))
        key = (params, directions)
        if key not in self._grams:
            settings = Settings(
                params=params.__contains__, budget=own.budget, batch_size=own.batch_size
            )
            request = replace(self.request(wanted, None), settings=settings)
            table = layer_table(
                [request], self.model_context.cache, gram=True, regrouped=self._regrouped
            )
            self._grams[key] = table.values.double(), table.logits.double()
        return self._grams[key]

    def traces(
        self, blocks: Sequence[Sequence[str]]
    ) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b c"]]:
        """tr(P G_l P) of blocks of parameters, P = I - 11ᵀ/C and G_l = J_l J_lᵀ; beyond 17 classes
        an estimate.

        And the logits of the inputs as the engine ran them: alone, if they influence each other.
        Backward passes go no further than the first of the blocks.
        """
        own, names = (
            self.model_context.settings,
            {name: i for i, block in enumerate(blocks) for name in block},
        )
        settings = Settings(
            granularity="tensor",
            params=names.__contains__,
            budget=own.budget,
            batch_size=own.batch_size,
        )
        request = replace(self.request(Directions(("contrasts",)), None), settings=settings)
        table = layer_table([request], self.model_context.cache, regrouped=self._regrouped)
        squares = table.values.double().square().sum(1)
        place = torch.tensor([names[name] for name in table.layers], device=squares.device)
        return squares.new_zeros(len(squares), len(blocks)).index_add_(
            1, place, squares
        ), table.logits.double()

    def _sketch(self, method: "GradientScore") -> None:
        """All scores of one sketch, block by block: their errors are linear in those of the norms."""
        wanted, foreseen = self._wanted(method), self.model_context.gradient_methods
        like = [m for m in foreseen if (m.smooth, m.layers) == (method.smooth, method.layers)]
        methods = dict.fromkeys(like if method in foreseen else [method])
        parts = {m: list[tuple[Tensor, Tensor]]() for m in methods}
        request, left_out = self._late_job(self.request(wanted, method.smooth), method.layers)
        for projections, logits in project_gradients(
            request, method.layers, self.model_context.cache
        ):
            norms = projections.scale
            for m in methods:
                columns = self._columns(m.direction, wanted)
                own = Projections(projections.values[:, :, columns], projections.law)
                weights = m.weights_at(logits)
                scale = norms[:, columns]
                if m.power == 2:
                    slope = 2 * weights * scale
                    parts[m].append(
                        ((weights * own.square).sum(-1), own.weighted_error(scale, slope))
                    )
                else:
                    parts[m].append(((weights * scale).sum(-1), own.weighted_error(scale, weights)))
        for m, blocks in parts.items():
            values, errors = (torch.cat(column) for column in zip(*blocks, strict=True))
            self._estimated[m] = values, torch.hypot(errors, m.power * left_out * values)

    def _late_job(
        self, request: GradientRequest, lam: float | None
    ) -> tuple[GradientRequest, float]:
        """The job without early layers that a tolerance allows to leave out, and the largest share
        that they add.
        """
        late = late_layers(request, lam, self.model_context.cache)
        while late is not None and late.num_early:
            if late.confirm_blindly(request):
                return late.narrow(request), late.share
        return request, 0.0

    def _draw_classes(self, method: "GradientScore") -> None:
        """All scores that are sums over the same classes, from some of them."""
        foreseen = self.model_context.gradient_methods
        like = [m for m in foreseen if (m.smooth, m.direction) == (method.smooth, method.direction)]
        methods = list(dict.fromkeys(like)) if method in foreseen else [method]
        lam = self.model_context.smallest_lambda(method.smooth) if method in foreseen else None
        self._estimated |= self.class_sums(methods, lam).estimate(self.logits)

    def class_sums(self, methods: "Sequence[GradientScore]", lam: float | None) -> ClassSums:
        """Sums over many classes, to be estimated from some of them; λ as for `ClassSums`."""
        request = self.request(Directions(("classes",)), methods[0].smooth)
        return ClassSums(
            request, methods, self.model_context.cache, self.head_weight, lam, self._regrouped
        )

    def request(self, directions: Directions, smooth: Smoothing | None) -> GradientRequest:
        """The batch as an engine takes it."""
        return GradientRequest(
            self.model, self.batch, self.numbers, self.model_context.settings, directions, smooth
        )

    def _wanted(self, method: "GradientScore") -> Directions:
        """The directions of the pass that serves a method; one that nobody foresaw has a pass of
        its own.
        """
        foreseen = method in self.model_context.gradient_methods
        return (
            self.model_context.directions(method.smooth)
            if foreseen
            else Directions((method.direction,))
        )

    def _columns(self, direction: str, wanted: Directions) -> slice:
        """The columns of the set named `direction` among all the directions of one pass."""
        return wanted.columns(direction, self._outcome[0].shape[1])

    # Further plain forward passes.

    def perturbed_log_probs(
        self, noise: Smoothing
    ) -> Iterator[tuple[Int[Tensor, " rows"], Float[Tensor, "rows c"]]]:
        """log p(y | x) and log p(y | x + Δx) for each draw of Δx, in parts: which input a row is
        of, and its log p.

        Rows come input by input, the input itself first, then its draws.
        """
        rows_per_sample, inputs = noise.draws + 1, num_samples(self.batch)
        held = rows_per_sample * batch_tensors(self.batch)[0][:1].nbytes
        at_once = self.model_context.rows_at_once(self.batch, inputs * rows_per_sample, held)
        owners = torch.arange(inputs, device=self.device).repeat_interleave(rows_per_sample)
        first = 0
        size = max(1, at_once // rows_per_sample)
        for start in range(0, inputs, size):
            some = slice(start, start + size)
            for on in perturbed_in_parts(
                take_samples(self.batch, some), noise, self.numbers[some], self.seed, at_once
            ):
                log_q = log_softmax(self.forward(on).double())
                yield owners[first : first + len(log_q)], log_q
                first += len(log_q)

    @torch.no_grad()
    def forward(self, on: ModelInput) -> Float[Tensor, "rows c"]:
        """A plain forward pass."""
        return forward_logits(self.model, on)

    @torch.no_grad()
    def forward_all(self, batch: Batch | None = None, held: int = 0) -> Float[Tensor, "b c"]:
        """A plain forward pass over the whole batch, in parts; so many bytes are held beside it."""
        batch = self.batch if batch is None else batch
        parts = parts_of(batch, self.model_context.rows_at_once(batch, held=held))
        return torch.cat([forward_logits(self.model, ModelInput(part)) for part in parts])

    def chunks(self, batch: Batch) -> Iterable[Batch]:
        """The batch in parts that a plain forward pass takes at once."""
        return parts_of(batch, self.model_context.rows_at_once(batch))

    def chunks_with_graph(self, times: int = 1) -> Iterable[Batch]:
        """The batch in parts that a pass with a backward pass takes at once, `times` the bytes of
        its graph.
        """
        return parts_of(self.batch, self.model_context.rows_with_graph(self.batch, times))

    def blocks(self, bytes_each: int, what: str, most: int | None = None) -> Iterator[slice]:
        """The inputs in blocks of which each input holds so many bytes, within a quarter of the
        budget.

        Args:
            bytes_each: what is held for an input.
            what: what that is, for the error if it does not fit.
            most: inputs of a block.
        """
        given = self.model_context.settings.budget
        require_room(bytes_each, given or free_bytes(self.device), what, "or take fewer draws")
        inputs, room = (
            num_samples(self.batch),
            budget_of_rows(given, self.device) // (4 * bytes_each),
        )
        size = max(1, min(most or inputs, room))
        return (slice(start, min(start + size, inputs)) for start in range(0, inputs, size))
