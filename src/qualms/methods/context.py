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
    slices,
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
        compares_logits: whether the exact engine will compare its logits with those of a plain
            forward pass.
    """

    model: nn.Module
    settings: Settings = field(default_factory=Settings)
    train: Any = None
    members: tuple[nn.Module, ...] = ()
    gradient_methods: "tuple[GradientScore, ...]" = ()
    cache: PlanCache = field(default_factory=PlanCache)
    method_cache: dict[Any, Any] = field(default_factory=dict)
    compares_logits: bool = False

    def get_or_compute(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result that is cached for a key, or compute and cache it at the first call.

        Results are kept for later batches of this model.

        Args:
            key: identifies the result, such as the method (with its parameters) that needs it.
            compute: computes the result.
        """
        if key not in self.method_cache:
            self.method_cache[key] = compute()
        result: T = self.method_cache[key]
        return result

    def training_batches(self, method: str) -> Iterator[Batch]:
        """Yield the batches of training inputs, without their labels.

        Args:
            method: the name of the method that needs the data, for the error if there is none.
        """
        for batch, _ in self.labeled_training_batches(method):
            yield batch

    def labeled_training_batches(self, method: str) -> Iterator[tuple[Batch, Tensor | None]]:
        """Iterate over the batches of training inputs, each with its labels or None.

        Args:
            method: the name of the method that needs the data, for the error if there is none.
        """
        if self.train is None:
            raise QualmsError(
                f"{method} needs training data; pass train=, a loader of training inputs."
            )
        return labeled_batches(self.train, self.model, "train")

    @property
    def plain_pass(self) -> PassMemory:
        """A plain forward pass, in the form in which the memory of a row can be measured."""

        def compute_logits(rows: Batch) -> Tensor:
            """Run the plain forward pass."""
            logits, _ = forward_with_head(self.model, rows)
            return logits

        return PassMemory("a forward pass", compute_logits, ROWS_AT_ONCE)

    def rows_at_once(
        self,
        batch: Batch,
        num_rows: int | None = None,
        occupied_bytes: int = 0,
    ) -> int:
        """Compute how many rows of a batch fit the memory budget in one plain forward pass.

        Args:
            batch: inputs of the shape of the rows.
            num_rows: how many rows will be run in all; as many as the batch has by default.
            occupied_bytes: the bytes that other tensors occupy during the pass.
        """
        work = replace(self.plain_pass, extra_bytes=occupied_bytes)
        num_rows = num_rows or num_samples(batch)
        return work.rows_at_once(batch, num_rows, self.settings, self.cache)

    def rows_with_graph(self, batch: Batch, memory_factor: int = 1) -> int:
        """Compute how many rows fit the memory budget in one forward and backward pass.

        Args:
            batch: inputs of the shape of the rows.
            memory_factor: the memory that both passes take, divided by that of the forward pass
                with its autograd graph.
        """

        def compute_logits_with_graph(rows: Batch) -> Tensor:
            """Run a forward pass that keeps the graph of all parameters."""
            with (
                torch.enable_grad(),
                all_parameters_differentiable(self.model),
            ):
                return forward_logits(self.model, ModelInput(rows))

        work = PassMemory(
            "a pass that keeps its graph",
            compute_logits_with_graph,
            ROWS_WITH_GRAPH,
            safety_factor=memory_factor,
        )
        return work.rows_at_once(batch, num_samples(batch), self.settings, self.cache)


class BatchContext:
    """One batch of inputs, and the results of the passes over it that all scores share.

    Attributes:
        model_context: the model, its settings and caches.
        batch: the inputs.
        numbers: the number of each input in the whole data, which with the seed decides the random
            draws for this input; 0, 1, … by default.
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

    def get_or_compute(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the result that is cached for a key, or compute and cache it at the first call.

        Results are kept for this batch only.

        Args:
            key: identifies the result.
            compute: computes the result.
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
        """The seed on which all random draws depend."""
        return self.model_context.settings.seed

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return batch_tensors(self.batch)[0].device

    # The one plain forward pass.

    @cached_property
    def _plain_results(self) -> tuple[Float[Tensor, "b c"], Head | QualmsError]:
        """The logits of the batch, and the head that computed them or the error that there is none.

        The model runs on one group of inputs at a time: with k groups, on every k-th input. If the
        exact engine will compare its logits with these, k is at least 2. The engine batches
        consecutive inputs, so the comparison also shows whether inputs of a batch influence each
        other.
        """
        num_inputs = num_samples(self.batch)
        # Rounded up.
        num_groups = -(-num_inputs // self.model_context.rows_at_once(self.batch))
        if self.model_context.compares_logits and num_inputs > 1:
            num_groups = max(2, num_groups)
        grouped_indices: list[int] = []
        group_logits: list[Tensor] = []
        group_heads: list[Head | QualmsError] = []
        for first in range(num_groups):
            group = list(range(first, num_inputs, num_groups))
            logits, head = forward_with_head(self.model, take_samples(self.batch, group))
            grouped_indices += group
            group_logits.append(logits)
            group_heads.append(head)
        # From the order of the groups back to the order of the batch.
        order = torch.tensor(grouped_indices).argsort()
        all_logits = torch.cat(group_logits)[order]
        self.model_context.cache.warn_of_probabilities(all_logits)
        head = Head.concatenate(group_heads)
        if isinstance(head, Head):
            head = head.take(order)
        return all_logits, head

    @property
    def known_logits(self) -> Float[Tensor, "b c"] | None:
        """The logits of the plain forward pass, which the exact engine compares with those that it
        computes itself; None if the exact engine will not run.
        """
        return self._plain_results[0] if self.model_context.compares_logits else None

    @property
    def num_classes(self) -> int:
        """C, the number of classes."""
        return self._plain_results[0].shape[1]

    @property
    def logits(self) -> Float[Tensor, "b c"]:
        """The logits z(x), in double precision, which small probabilities and divergences need."""
        return self._plain_results[0].double()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which scores are returned: that of the logits, but at least float32."""
        return at_least_float32(self._plain_results[0]).dtype

    @cached_property
    def log_probs(self) -> Float[Tensor, "b c"]:
        """log p(y | x) for every class y, in double precision."""
        return log_softmax(self.logits)

    @property
    def probs(self) -> Float[Tensor, "b c"]:
        """p(y | x) for every class y, in double precision."""
        return self.logits.softmax(-1)

    @property
    def head(self) -> Head:
        """The last fully connected layer and the features that it reads; an error if there is none."""
        return require_head(self._plain_results[1])

    @property
    def head_weight(self) -> Float[Tensor, "c f"] | None:
        """The weight of the last fully connected layer; None if no such layer computes the logits."""
        head = self._plain_results[1]
        return head.weight if isinstance(head, Head) else None

    # Gradients.

    def create_request(
        self,
        directions: Directions,
        smooth: Smoothing | None,
        lam: float | None = None,
    ) -> GradientRequest:
        """Describe the gradients of this batch that an engine shall compute.

        Args:
            directions: the directions in the space of the logits along which gradients are taken.
            smooth: the input noise over which gradients are averaged; None for no noise.
            lam: the smallest λ among the scores; None if a score weights all layers equally.
        """
        return GradientRequest(
            model=self.model,
            batch=self.batch,
            numbers=self.numbers,
            settings=self.model_context.settings,
            directions=directions,
            smoothing=smooth,
            # The engine compares its own logits with these, which were computed in other groups of
            # inputs: a difference shows that inputs of a batch influence each other.
            known_logits=self.known_logits,
            smallest_lambda=lam,
        )

    def measure_norms(
        self,
        directions: Directions,
        smooth: Smoothing | None,
        lam: float | None,
    ) -> LayerTable:
        """Compute the gradient norms of every layer with the engine that the settings name.

        Scores that ask for the same table share it.

        Args:
            directions: the m directions in the space of the logits along which gradients are taken.
            smooth: the input noise over which gradients are averaged; None for no noise.
            lam: the smallest λ of the scores that use the table; None if a score weights all layers
                equally.

        Returns:
            A table whose `values` are the norms, [b inputs, m directions, l layers].
        """

        def compute() -> LayerTable:
            """Compute the table by one pass of the engine over the batch."""
            request = self.create_request(directions, smooth, lam)
            return layer_table([request], self.model_context.cache)

        return self.get_or_compute(("norms", directions, smooth, lam), compute)

    def measure_exactly(
        self,
        params: frozenset[str],
        directions: Directions,
        *,
        gram: bool = False,
        granularity: Granularity = "module",
    ) -> LayerTable:
        """Compute gradient norms with respect to some parameters, always with the exact engine.

        Backward passes stop at the first of these parameters.

        Args:
            params: the names of the parameters.
            directions: the m directions in the space of the logits along which gradients are taken.
            gram: whether to compute inner products of gradients instead of norms.
            granularity: what counts as a layer: `module`, `tensor` or `block`.

        Returns:
            A table whose `values` are the norms, [b inputs, m directions, l layers]; or the inner
            products, [b, l, m, m].
        """

        def compute() -> LayerTable:
            """Compute the table by one pass of the exact engine over the batch."""
            context_settings = self.model_context.settings
            # All other settings, such as a sketch or a tolerance, keep their exact defaults.
            settings = Settings(
                granularity=granularity,
                params=params.__contains__,  # selects parameters by name
                budget=context_settings.budget,
                batch_size=context_settings.batch_size,
            )
            request = self.create_request(directions, None)
            request = replace(request, settings=settings, gram=gram)
            return layer_table([request], self.model_context.cache)

        return self.get_or_compute(("exact", params, directions, gram, granularity), compute)

    # Further plain forward passes.

    def perturbed_log_probs(
        self,
        noise: Smoothing,
    ) -> Iterator[tuple[Int[Tensor, " rows"], Float[Tensor, "rows c"]]]:
        """Compute log p(y | x) and log p(y | x + Δx) for each draw of Δx, in parts.

        Args:
            noise: the noise level σ and the number of draws.

        Yields:
            The index of the input to which each row belongs, and log p of the rows. All rows of an
            input are consecutive: the unperturbed input first, then its draws.
        """
        rows_per_input = noise.draws + 1
        num_inputs = num_samples(self.batch)
        # The noise of all rows of an input exists at once, even if these rows run in parts.
        noise_bytes = rows_per_input * batch_tensors(self.batch)[0][:1].nbytes
        max_rows = self.model_context.rows_at_once(
            self.batch, num_inputs * rows_per_input, noise_bytes
        )
        input_of_row = torch.arange(num_inputs, device=self.device)
        input_of_row = input_of_row.repeat_interleave(rows_per_input)
        first_row = 0
        for block in slices(num_inputs, max(1, max_rows // rows_per_input)):
            samples = take_samples(self.batch, block)
            # With the seed, the number of an input decides its noise.
            numbers = self.numbers[block]
            for rows in perturbed_in_parts(samples, noise, numbers, self.seed, max_rows):
                log_q = log_softmax(self.forward(rows).double())
                yield input_of_row[first_row : first_row + len(log_q)], log_q
                first_row += len(log_q)

    @torch.no_grad()
    def forward(self, rows: ModelInput) -> Float[Tensor, "rows c"]:
        """Compute the logits of all rows in one pass, whether or not they fit the memory budget."""
        return forward_logits(self.model, rows)

    @torch.no_grad()
    def forward_all(
        self,
        batch: Batch | None = None,
        occupied_bytes: int = 0,
    ) -> Float[Tensor, "b c"]:
        """Compute the logits of a batch by plain forward passes over parts that fit the budget.

        Args:
            batch: the inputs; the batch of this context by default.
            occupied_bytes: the bytes that other tensors occupy during the passes.
        """
        batch = self.batch if batch is None else batch
        max_rows = self.model_context.rows_at_once(batch, occupied_bytes=occupied_bytes)
        parts = split_batch(batch, max_rows)
        return torch.cat([forward_logits(self.model, ModelInput(part)) for part in parts])

    def chunks(self, batch: Batch) -> Iterable[Batch]:
        """Split a batch into parts whose plain forward pass fits the memory budget."""
        return split_batch(batch, self.model_context.rows_at_once(batch))

    def chunks_with_graph(self, memory_factor: int = 1) -> Iterable[Batch]:
        """Split this batch into parts whose forward and backward pass fits the memory budget.

        Args:
            memory_factor: the memory that both passes take, divided by that of the forward pass
                with its autograd graph.
        """
        max_rows = self.model_context.rows_with_graph(self.batch, memory_factor)
        return split_batch(self.batch, max_rows)

    def blocks(
        self,
        bytes_per_input: int,
        results_name: str,
        max_inputs: int | None = None,
    ) -> list[slice]:
        """Split the inputs into blocks whose results take at most a quarter of the memory budget.

        A block has at least one input; an error is raised if the results of one input do not fit
        the whole budget.

        Args:
            bytes_per_input: the bytes of the results of one input.
            results_name: a plural noun for these results, for the error.
            max_inputs: the largest number of inputs in a block; None for no limit.
        """
        budget = self.model_context.settings.budget
        require_room(
            bytes_per_input,
            budget or free_bytes(self.device),
            results_name,
            "or take fewer draws",
        )
        num_inputs = num_samples(self.batch)
        fitting_inputs = budget_of_rows(budget, self.device) // (4 * bytes_per_input)
        return slices(num_inputs, max(1, min(max_inputs or num_inputs, fitting_inputs)))
