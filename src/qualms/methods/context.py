"""The passes that scores are computed from. Each runs once, when the first score asks for it, and
serves them all.

`ModelContext` holds what belongs to the model, `BatchContext` what belongs to one batch.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import (
    Batch,
    batch_tensors,
    num_samples,
    split_batch,
    take_samples,
)
from qualms.gradients.directions import Directions
from qualms.gradients.input_data import labeled_batches
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.layer_table import LayerTable, layer_table
from qualms.gradients.layers import Granularity
from qualms.gradients.memory import (
    PassMemory,
    budget_of_rows,
    free_bytes,
    require_room,
)
from qualms.gradients.model_input import (
    ModelInput,
    forward_logits,
    perturbed_in_parts,
)
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings, Smoothing
from qualms.methods.divergence import log_softmax
from qualms.methods.head import Head, forward_with_head, require_head

if TYPE_CHECKING:
    from qualms.methods.gradient_score import GradientScore

T = TypeVar("T")
ROWS_AT_ONCE = 256  # in passes that keep nothing for a backward pass
ROWS_WITH_GRAPH = 32  # in passes that keep their graph


@dataclass
class ModelContext:
    """One model, the settings and data of its scores, and what they cache. The caller restores the
    model's state (`preserve_state`).

    Attributes:
        model: a classifier in evaluation mode.
        settings: how gradients are computed.
        train: training inputs, for the methods that need them.
        members: further models, for `ensemble`.
        gradient_methods: the gradient scores that will be computed, which share their passes.
        cache: what the engines have learned about the model.
        method_cache: what methods keep for this model, such as a posterior.
        compares: whether the exact engine will compare its logits with those of a plain pass.
    """

    model: nn.Module
    settings: Settings = field(default_factory=Settings)
    train: Any = None
    members: tuple[nn.Module, ...] = ()
    gradient_methods: "tuple[GradientScore, ...]" = ()
    cache: PlanCache = field(default_factory=PlanCache)
    method_cache: dict[Any, Any] = field(default_factory=dict)
    compares: bool = False

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what `compute` returns, called only once for this model and key.

        Args:
            key: identifies the result, such as the method that needs it.
            compute: computes the result at the first call.
        """
        if key not in self.method_cache:
            self.method_cache[key] = compute()
        result: T = self.method_cache[key]
        return result

    def training_batches(self, method: str) -> Iterator[Batch]:
        """Yield the batches of training inputs, without their labels.

        Args:
            method: the name of the method that needs the data, for the error if there are none.
        """
        for batch, _ in self.labeled_training_batches(method):
            yield batch

    def labeled_training_batches(self, method: str) -> Iterator[tuple[Batch, Tensor | None]]:
        """Iterate over the batches of training inputs, each with its labels or None.

        Args:
            method: the name of the method that needs the data, for the error if there are none.
        """
        if self.train is None:
            raise QualmsError(
                f"{method} needs training data; pass train=, a loader of training inputs."
            )
        return labeled_batches(self.train, self.model, "train")

    @property
    def plain_pass(self) -> PassMemory:
        """A plain forward pass, described so that `PassMemory` can measure the memory it takes."""

        def run(row: Batch) -> Tensor:
            return forward_with_head(self.model, row)[0]

        return PassMemory("a forward pass", run, ROWS_AT_ONCE)

    def rows_at_once(self, batch: Batch, rows: int | None = None, held: int = 0) -> int:
        """Compute how many rows fit the budget in one plain forward pass.

        Args:
            batch: inputs of the shape of the rows.
            rows: how many rows will be run in all; as many as the batch has by default.
            held: bytes that are occupied during the pass by other tensors.
        """
        work = replace(self.plain_pass, extra_bytes=held)
        return work.rows_at_once(batch, rows or num_samples(batch), self.settings, self.cache)

    def rows_with_graph(self, batch: Batch, times: int = 1) -> int:
        """Compute how many rows fit the budget in one forward and backward pass.

        Args:
            batch: inputs of the shape of the rows.
            times: the memory of the pass, as a multiple of that of its forward pass with a graph.
        """

        def run(row: Batch) -> Tensor:
            with (
                torch.enable_grad(),
                all_parameters_differentiable(self.model),
            ):
                return forward_logits(self.model, ModelInput(row))

        work = PassMemory(
            "a pass that keeps its graph",
            run,
            ROWS_WITH_GRAPH,
            safety_factor=times,
        )
        return work.rows_at_once(batch, num_samples(batch), self.settings, self.cache)


class BatchContext:
    """One batch of inputs, and the results of the passes over it that its scores share.

    Attributes:
        model_context: the model, its settings and caches.
        batch: the inputs.
        numbers: a number for each input, which decides its random draws; 0, 1, … by default.
    """

    def __init__(
        self,
        model_context: ModelContext,
        batch: Batch,
        numbers: Sequence[int] | None = None,
    ) -> None:
        self.model_context = model_context
        self.batch = batch
        self.numbers = range(num_samples(batch)) if numbers is None else numbers
        self._results: dict[Hashable, Any] = {}

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what `compute` returns, called only once for this batch and key.

        Args:
            key: identifies the result.
            compute: computes the result at the first call.
        """
        if key not in self._results:
            self._results[key] = compute()
        result: T = self._results[key]
        return result

    @property
    def model(self) -> nn.Module:
        """The classifier."""
        return self.model_context.model

    @property
    def seed(self) -> int:
        """The seed; with the number of an input, it decides every random draw."""
        return self.model_context.settings.seed

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return batch_tensors(self.batch)[0].device

    # The one plain forward pass.

    @cached_property
    def _plain_results(self) -> tuple[Float[Tensor, "b c"], Head | QualmsError]:
        """The logits, and the head that computed them or the error that there is none.

        If the exact engine will compare its logits with these, every k-th input is in one group,
        k ≥ 2. The engine batches consecutive inputs, so the comparison also shows whether inputs
        of a batch influence each other.
        """
        inputs = num_samples(self.batch)
        at_once = self.model_context.rows_at_once(self.batch)
        groups = -(-inputs // at_once)
        if self.model_context.compares and inputs > 1:
            groups = max(2, groups)
        indices: list[int] = []
        logits: list[Tensor] = []
        heads: list[Head | QualmsError] = []
        for start in range(groups):
            group = list(range(start, inputs, groups))
            z, head = forward_with_head(self.model, take_samples(self.batch, group))
            indices += group
            logits.append(z)
            heads.append(head)
        # From the groups back to the order of the batch.
        order = torch.tensor(indices).argsort()
        head = Head.concatenate(heads)
        joined = torch.cat(logits)[order]
        self.model_context.cache.warn_of_probabilities(joined)
        return joined, head.take(order) if isinstance(head, Head) else head

    @property
    def known_logits(self) -> Float[Tensor, "b c"] | None:
        """The logits of the plain pass, which the exact engine compares with those that it computes
        itself; None if it will not run.
        """
        return self._plain_results[0] if self.model_context.compares else None

    @property
    def num_classes(self) -> int:
        """C, the number of classes."""
        return self._plain_results[0].shape[1]

    @property
    def logits(self) -> Float[Tensor, "b c"]:
        """z(x), in double precision, which small probabilities and divergences need."""
        return self._plain_results[0].double()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that scores are returned in: that of the logits, but at least float32."""
        return at_least_float32(self._plain_results[0]).dtype

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
        """The last fully connected layer and the features that it reads."""
        return require_head(self._plain_results[1])

    @property
    def head_weight(self) -> Float[Tensor, "c f"] | None:
        """The weight of the last fully connected layer; None if the logits come from elsewhere."""
        head = self._plain_results[1]
        return head.weight if isinstance(head, Head) else None

    # Gradients.

    def request(self, directions: Directions, smooth: Smoothing | None) -> GradientRequest:
        """Create the request to an engine for gradients of this batch.

        Args:
            directions: the directions of the logits that gradients are taken along.
            smooth: input noise that gradients are averaged over; None for no noise.
        """
        return GradientRequest(
            self.model,
            self.batch,
            self.numbers,
            self.model_context.settings,
            directions,
            smooth,
        )

    def norm_table(
        self,
        directions: Directions,
        smooth: Smoothing | None,
        lam: float | None,
    ) -> LayerTable:
        """Compute gradient norms of every layer, [b, m, l], by the engine of the settings.

        Scores that ask for the same table share it.

        Args:
            directions: the m directions of the logits that gradients are taken along.
            smooth: input noise that gradients are averaged over; None for no noise.
            lam: the smallest λ of the scores that use the table; None if a score weights all layers
                equally.
        """

        def compute() -> LayerTable:
            request = self.request(directions, smooth)
            cache = self.model_context.cache
            # known_logits: these logits were computed in other groups of inputs than the engine's.
            return layer_table([request], cache, known_logits=self.known_logits, lam=lam)

        return self.once(("norms", directions, smooth, lam), compute)

    def exact_table(
        self,
        params: frozenset[str],
        directions: Directions,
        *,
        gram: bool = False,
        granularity: Granularity = "module",
    ) -> LayerTable:
        """Compute gradients with respect to some parameters, always by the exact engine.

        Backward passes stop at the first of these parameters.

        Args:
            params: the names of the parameters.
            directions: the m directions of the logits that gradients are taken along.
            gram: whether the table has inner products [b, l, m, m] in place of norms [b, m, l].
            granularity: what counts as a layer: `module`, `tensor` or `block`.
        """

        def compute() -> LayerTable:
            shared = self.model_context.settings
            settings = Settings(
                granularity=granularity,
                params=params.__contains__,
                budget=shared.budget,
                batch_size=shared.batch_size,
            )
            request = replace(self.request(directions, None), settings=settings)
            cache = self.model_context.cache
            return layer_table([request], cache, gram=gram, known_logits=self.known_logits)

        return self.once(("exact", params, directions, gram, granularity), compute)

    # Further plain forward passes.

    def perturbed_log_probs(
        self,
        noise: Smoothing,
    ) -> Iterator[tuple[Int[Tensor, " rows"], Float[Tensor, "rows c"]]]:
        """Compute log p(y | x) and log p(y | x + Δx) for each draw of Δx, in parts.

        Args:
            noise: the noise level σ and the number of draws.

        Yields:
            The index of the input that each row belongs to, and log p of the rows. Rows come input
            by input, the unperturbed input first, then its draws.
        """
        rows_per_sample = noise.draws + 1
        inputs = num_samples(self.batch)
        # The noise of all rows of an input exists at once, even if these rows run in parts.
        held = rows_per_sample * batch_tensors(self.batch)[0][:1].nbytes
        at_once = self.model_context.rows_at_once(self.batch, inputs * rows_per_sample, held)
        sample_of_row = torch.arange(inputs, device=self.device).repeat_interleave(rows_per_sample)
        first_row = 0
        size = max(1, at_once // rows_per_sample)
        for start in range(0, inputs, size):
            block = slice(start, start + size)
            samples = take_samples(self.batch, block)
            numbers = self.numbers[block]
            for rows in perturbed_in_parts(samples, noise, numbers, self.seed, at_once):
                log_q = log_softmax(self.forward(rows).double())
                yield sample_of_row[first_row : first_row + len(log_q)], log_q
                first_row += len(log_q)

    @torch.no_grad()
    def forward(self, rows: ModelInput) -> Float[Tensor, "rows c"]:
        """Compute the logits of all rows at once, whether or not they fit the budget."""
        return forward_logits(self.model, rows)

    @torch.no_grad()
    def forward_all(self, batch: Batch | None = None, held: int = 0) -> Float[Tensor, "b c"]:
        """Compute the logits of a batch by plain forward passes, in parts that fit the budget.

        Args:
            batch: the inputs; the batch of this context by default.
            held: bytes that are occupied during the pass by other tensors.
        """
        batch = self.batch if batch is None else batch
        parts = split_batch(batch, self.model_context.rows_at_once(batch, held=held))
        return torch.cat([forward_logits(self.model, ModelInput(part)) for part in parts])

    def chunks(self, batch: Batch) -> Iterable[Batch]:
        """Split a batch into parts whose plain forward pass fits the budget."""
        return split_batch(batch, self.model_context.rows_at_once(batch))

    def chunks_with_graph(self, times: int = 1) -> Iterable[Batch]:
        """Split this batch into parts whose forward and backward pass fits the budget.

        Args:
            times: the memory of the pass, as a multiple of that of its forward pass with a graph.
        """
        return split_batch(
            self.batch,
            self.model_context.rows_with_graph(self.batch, times),
        )

    def blocks(self, bytes_each: int, what: str, max_inputs: int | None = None) -> Iterator[slice]:
        """Split the inputs into blocks whose results take at most a quarter of the budget.

        A block has at least one input; an error is raised if the results of one input do not fit
        the whole budget.

        Args:
            bytes_each: the bytes of the results of one input.
            what: a name for these results, for the error.
            max_inputs: the largest number of inputs in a block; None for no limit.
        """
        budget = self.model_context.settings.budget
        require_room(
            bytes_each,
            budget or free_bytes(self.device),
            what,
            "or take fewer draws",
        )
        inputs = num_samples(self.batch)
        room = budget_of_rows(budget, self.device) // (4 * bytes_each)
        size = max(1, min(max_inputs or inputs, room))
        for start in range(0, inputs, size):
            yield slice(start, min(start + size, inputs))
