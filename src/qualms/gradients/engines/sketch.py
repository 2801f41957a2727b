"""The sketch engine: norms of all class gradients from k random tangents on the weights.

A tangent s is a direction in the space of the parameters; J is the Jacobian of the logits. One
forward-mode pass over a batch gives J s, and v·(J s) = ⟨Jᵀv, s⟩ for every direction v: the
projections of all class gradients on s at once, whatever the class count. The same k tangents serve
all samples, so most of their noise is common to all and does not change the ranking. The layer
weights a_l are folded into the tangents:

- *quadrature*: s_l = a_l ξ_l with ξ_l random signs (normal for small parameters). A projection has
  variance Σ_l a_l² ‖g_l‖², and as a sum of many terms it is as good as normal.
- *sum*, the paper's form: s_l = a_l ξ_l / ζ_l with ζ_l one normal number for each layer. A layer's
  projection is Cauchy with scale a_l ‖g_l‖, and scales of independent Cauchy variables add up:
  Σ_l a_l ‖g_l‖, without tangents of its own for any layer.
- L1 norms: every entry of s_l is a_l times a Cauchy number, and the scale is Σ_l a_l ‖g_l‖₁.

Smoothing averages the projections of a sample's rows, which is averaging gradients before the norm
is taken. `SketchEngine.plan` probes the first rows. `run` and `project` compare products J s with
plain autograd and between batches before they use them (`sketching/sketch_probe.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import NotBatchable, batch_tensors, num_samples, slices
from qualms.gradients.directions import project_directions
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.layers import group_by_layer
from qualms.gradients.memory import release_free_memory, require_room
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan_cache import Key, PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.sketching.jvp import Jvp, JvpFunction, forward_mode
from qualms.gradients.sketching.projections import Projections
from qualms.gradients.sketching.sketch_probe import (
    CheckRows,
    SketchProbe,
    check_batches,
    find_jvp_function,
    probe_rows,
    same_products,
)
from qualms.gradients.sketching.tangents import (
    Tangent,
    Tangents,
    tangents_of_layers,
    tangents_of_model,
)

# The number of first samples that the probe gets; it runs three of their rows by plain autograd.
PROBED_SAMPLES = 8
# An operation's result for all rows may take so many bytes and stay in the CPU's cache.
MAX_RESULT_BYTES = 2**24
# The memory of a pass with a tangent for one row, in multiples of the largest result of an
# operation; copies that kernels make are included.
RESULTS_PER_ROW = 24
# Bytes of a projection in float64, and of its copy.
PROJECTION_BYTES = 16
# Parts of messages to the user.
NEEDS = "a tangent on the weights and the gradient that it is checked against"
INSTEAD = "select fewer parameters with `params`, or use engine='exact'"

# The projections of the gradients of b samples along m directions, and the logits of the samples.
ProjectionBlock = tuple[Projections, Float[Tensor, "b c"]]


def project_gradients(
    request: GradientRequest,
    lam: float | None,
    cache: PlanCache,
) -> Iterator[ProjectionBlock]:
    """Project gradients of all parameters together on k random tangents, for blocks of samples.

    Args:
        request: the samples, directions and settings.
        lam: λ, by which layer l is weighted with exp(λ(l - L)); None for the plain gradient.
        cache: the cached plans and measurements of the model.

    Yields:
        The projections of some samples along all directions, and their logits.
    """
    engine = SketchEngine(cache)
    plan = engine.plan(request)
    tangents = tangents_of_model(request, plan.probe.counted, lam, cache)
    yield from engine.project(plan, request, tangents)


@dataclass
class SketchPlan:
    """How the norms of a request's gradients are estimated from projections on random tangents.

    Attributes:
        probe: facts about the model, measured on the first rows.
        check_rows: rows of this request on which products J s of the Jacobian with a tangent are
            compared with plain autograd. None until they are needed, if the probe comes from
            another batch.
        samples_at_once: the number of samples in one pass.
    """

    probe: SketchProbe
    check_rows: CheckRows | None
    samples_at_once: int


class SketchEngine:
    """Estimates norms from projections of the gradients on random tangents.

    Args:
        cache: the cached plans and measurements of the model.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> SketchPlan:
        """Probe the first rows, and decide how many samples run in one pass.

        The probe measures facts about the model, such as the memory of a row, by plain autograd.
        Rows of a shape that was probed before are not probed again.

        Raises:
            QualmsError: if a tangent does not fit into memory, or the model is random.
        """
        key = ("sketch probe", request.shapes, tuple(request.selected))
        probe = self.cache.get(key, SketchProbe)
        check_rows = None
        # A tangent takes as much memory as the weights.
        tangent_bytes = sum(p.nbytes for p in request.selected.values())
        if probe is None:
            require_room(2 * tangent_bytes, request.limit, NEEDS, INSTEAD)
            probe, check_rows = _probe_first_rows(request)
            self.cache.keep(key, probe)
            release_free_memory()  # memory that the probe used
        row_bytes = RESULTS_PER_ROW * max(1, probe.largest_result)
        # Half of the bytes of a row are copies that kernels make, which do not exist all at once.
        require_room(2 * tangent_bytes + row_bytes // 2, request.limit, NEEDS, INSTEAD)
        samples_at_once = _count_samples_per_pass(request, probe, tangent_bytes)
        return SketchPlan(probe, check_rows, samples_at_once)

    def run(self, plan: SketchPlan, request: GradientRequest) -> ClassNorms:
        """Estimate the norms of each layer's gradients, from k random tangents on the layer.

        Args:
            plan: what `plan` returned for this request.
            request: the samples, and which of their gradients to compute.

        Returns:
            Estimated norms [b, m] for b samples and m directions, and their standard errors; keyed
            by layer.
        """
        model, granularity = request.model, request.settings.granularity
        values: dict[str, Tensor] = {}
        errors: dict[str, Tensor] = {}
        for layer, names in group_by_layer(model, plan.probe.counted, granularity).items():
            # Tangents on this layer only, with weight 1.
            tangents = tangents_of_layers(request, [(names, 1.0)])
            norms_of_blocks: list[Tensor] = []
            errors_of_blocks: list[Tensor] = []
            logits_of_blocks: list[Tensor] = []
            for projections, logits in self.project(plan, request, tangents):
                norms = projections.estimate_norms()
                norms_of_blocks.append(norms)
                errors_of_blocks.append(projections.error(norms))
                logits_of_blocks.append(logits)
            values[layer] = torch.cat(norms_of_blocks)
            errors[layer] = torch.cat(errors_of_blocks)
        # The logits are the same for every layer.
        return ClassNorms(values, torch.cat(logits_of_blocks), without_rule=set(), errors=errors)

    def project(
        self,
        plan: SketchPlan,
        request: GradientRequest,
        tangents: Tangents,
    ) -> Iterator[ProjectionBlock]:
        """Project the gradients on k tangents, for one block of samples after the other.

        Args:
            plan: what `plan` returned for this request.
            request: the samples, directions and settings.
            tangents: random tangents on some or all parameters.

        Yields:
            The projections of some samples along all directions, and their logits.

        Raises:
            QualmsError: if no way of computing J s, with J the Jacobian of the logits and s a
                tangent, agrees with plain autograd, or projections are not finite.
        """
        run = SketchRun(plan, request, tangents, self.cache)
        for block in run.split_into_blocks():
            values, logits = run.project_block(block)
            if not bool(torch.isfinite(values).all()):
                raise QualmsError(
                    "engine='sketch' overflowed the range of the model's dtype; use float32, or "
                    "engine='exact'."
                )
            yield Projections(values, tangents.projection_distribution), logits


def _probe_first_rows(request: GradientRequest) -> tuple[SketchProbe, CheckRows]:
    """Measure facts about the model on the first samples of a request.

    Returns:
        The facts; and a few rows with their gradients by plain autograd, to check other ways of
        differentiation with. The gradients are kept if they take at most an eighth of the budget.
    """
    first_samples = request.make_rows(slice(0, PROBED_SAMPLES))
    max_kept_bytes = request.budget // 8
    return probe_rows(request.model, first_samples, request.selected, max_kept_bytes)


def _count_samples_per_pass(
    request: GradientRequest,
    probe: SketchProbe,
    tangent_bytes: int,
) -> int:
    """Count the samples that run in one pass: as many as fit the budget and the CPU's cache.

    With fewer, a pass mostly waits for the weights to be read.

    Args:
        request: the samples and settings.
        probe: facts about the model.
        tangent_bytes: the bytes of one tangent.
    """
    # Whole tangents are kept, in up to a quarter of the budget; one more may be drawn besides them.
    max_kept_bytes = min(request.budget // 4, request.sketch.tangents * tangent_bytes)
    kept_bytes = max_kept_bytes // max(1, tangent_bytes) * tangent_bytes
    free_bytes = request.budget - kept_bytes - tangent_bytes
    result_bytes = max(1, probe.largest_result)
    rows_in_cache = MAX_RESULT_BYTES // result_bytes
    rows_in_budget = free_bytes // (RESULTS_PER_ROW * result_bytes)
    samples = min(rows_in_cache, rows_in_budget) // request.rows_per_sample
    wanted = request.settings.batch_size or request.num_samples
    return max(1, min(wanted, samples))


@dataclass
class SketchRun:
    """Projects the gradients of one request's samples on k tangents s, by products J s.

    J is the Jacobian of the logits; the gradient Jᵀv has the projection v·(J s) on a tangent s.

    Attributes:
        plan: the plan of the request.
        request: the samples, directions and settings.
        tangents: random tangents on some or all parameters.
        cache: the cached plans and measurements of the model.
    """

    plan: SketchPlan
    request: GradientRequest
    tangents: Tangents
    cache: PlanCache

    @property
    def num_tangents(self) -> int:
        """The number k of tangents."""
        return self.request.sketch.tangents

    @property
    def _function_key(self) -> Key:
        """The cache key of the function that computes J s, by input shapes and parameters of s."""
        return ("jvp function", self.request.shapes, tuple(self.tangents.parameters))

    def find_function(self) -> JvpFunction:
        """Find a function that computes J s as plain autograd does; cached per input shape.

        J is the Jacobian of the logits, and s a tangent.

        Raises:
            QualmsError: if no function agrees with plain autograd.
        """

        def find() -> JvpFunction:
            """Choose the first function that agrees with plain autograd on rows of this request."""
            # None: the probe comes from another batch.
            if self.plan.check_rows is None:
                _, self.plan.check_rows = _probe_first_rows(self.request)
            function = find_jvp_function(self.plan.probe, self.plan.check_rows, self.tangents[0])
            release_free_memory()  # memory that the checks used
            return function

        return self.cache.get_or_compute(self._function_key, find)

    def split_into_blocks(self) -> list[slice]:
        """Split the samples into blocks whose input rows and projections fit half of the budget."""
        first_sample = self.request.make_rows(slice(0, 1))
        input_bytes = sum(t.nbytes for t in batch_tensors(first_sample.batch))
        num_projections = self.num_tangents * self.plan.probe.classes
        sample_bytes = input_bytes + PROJECTION_BYTES * num_projections
        block_size = max(1, self.request.budget // 2 // sample_bytes)
        return slices(self.request.num_samples, block_size)

    def project_block(self, block: slice) -> tuple[Tensor, Tensor]:
        """Compute the projections [k, b, m] and the logits [b, c] of a block of b samples.

        k is the number of tangents, and m the number of directions. The function that computes J s
        may have been checked only on samples of an earlier request. If the block then fails, it
        runs again with a function that is checked on this request.
        """
        function = self.find_function()
        try:
            return self._project(block, function)
        except QualmsError:
            # With check rows, the function was already checked on this request.
            if self.plan.check_rows is not None:
                raise
        self.cache.forget(self._function_key)
        return self._project(block, self.find_function())

    def _project(
        self,
        block: slice,
        function: JvpFunction,
    ) -> tuple[Tensor, Tensor]:
        """Compute the projections [k, b, m] and the logits [b, c] of a block of b samples.

        k is the number of tangents s, and m the number of directions. If the block is a single row,
        several tangents in one pass are tried first.

        Args:
            block: the indices of the samples.
            function: computes J s, the derivative of the logits along a tangent s, for a batch of
                rows.
        """
        step = self.plan.samples_at_once
        batches: list[ModelInput] = []
        for start in range(block.start, block.stop, step):
            stop = min(start + step, block.stop)
            rows = self.request.make_rows(slice(start, stop))
            batches.append(self.plan.probe.reformat(rows))
        if len(batches) == 1 and num_samples(batches[0].batch) == 1:
            # Not in the format of `batches`, which may be channels-last.
            projected = self._project_stacked(self.request.make_rows(block), function)
            if projected is not None:
                return projected
        return self._project_one_by_one(batches, function)

    def _project_one_by_one(
        self,
        batches: list[ModelInput],
        function: JvpFunction,
    ) -> tuple[Tensor, Tensor]:
        """Run one pass for each tangent and batch.

        `check_batches` runs each batch with the first tangent, before other tangents are used.

        Args:
            batches: the rows of the block's samples, batch by batch.
            function: computes J s, the derivative of the logits along a tangent s, for a batch of
                rows.

        Returns:
            The projections [k, b, m] and the logits [b, c] of the block's b samples, for k tangents
            and m directions.
        """
        model = self.request.model
        s = self.tangents[0]
        checked = check_batches(function, model, self.plan.probe, batches, s, self.cache)
        release_free_memory()  # memory that the checks used
        # For each batch, its projections [samples, m] on each tangent so far.
        projections: list[list[Tensor]] = []
        logits: list[Tensor] = []
        for rows, jvp in zip(batches, checked, strict=True):
            projections.append([self._project_rows(rows, jvp.first)])
            # The first of each sample's rows is the sample itself.
            logits.append(jvp.first.logits[:: rows.rows_per_sample])
        for index in range(1, self.num_tangents):
            # Free the tangent before the next one is drawn: each is as large as the weights.
            del s
            s = self.tangents[index]
            for i, rows in enumerate(batches):
                product = checked[i].function(model, rows, s)
                projections[i].append(self._project_rows(rows, product))
        values = torch.cat([torch.stack(of_batch) for of_batch in projections], dim=1)
        return values, torch.cat(logits)

    def _project_rows(self, rows: ModelInput, product: Jvp) -> Float[Tensor, "b m"]:
        """Compute v·(J s) for each sample and direction v, averaged over the rows of the sample.

        J s is the derivative of the logits along a tangent s on the parameters.

        Args:
            rows: the rows of the samples.
            product: the logits of these rows, and J s.
        """
        samples_and_rows = (-1, rows.rows_per_sample)
        z = product.logits.unflatten(0, samples_and_rows)
        dz = product.derivative.unflatten(0, samples_and_rows)
        return project_directions(self.request.directions.names, z, dz)

    def _project_stacked(
        self,
        row: ModelInput,
        function: JvpFunction,
    ) -> tuple[Tensor, Tensor] | None:
        """Project one row's gradients, with several tangents in one pass; None if that fails.

        A pass over one row mostly waits for weights to be read, so tangents share it. The first
        time, the result must agree with that of one tangent in a pass of its own. Images keep the
        contiguous memory format, like the tangents: in channels-last torch would convert every
        tangent.

        Args:
            row: the row.
            function: the function that agrees with plain autograd for one tangent.

        Returns:
            The projections [k, 1, m] of the row, for k tangents and m directions, and its logits
            [1, c]. None if the function takes one tangent only, if two do not fit into memory, or
            if results disagreed now or earlier.
        """
        key = ("stacked tangents", *self._function_key)
        row_bytes = RESULTS_PER_ROW * max(1, self.plan.probe.largest_result)
        per_pass = min(self.tangents.stack_size, self.request.budget // row_bytes)
        has_agreed = self.cache.get(key, bool)  # None if it was not tried yet
        if function is not forward_mode or per_pass < 2 or has_agreed is False:
            return None

        def run() -> Jvp:
            """Run the stacked tangents; compare the first with a pass of its own, once."""
            alone = None if has_agreed else function(self.request.model, row, self.tangents[0])
            stacked = self._run_stacked(row, per_pass)
            first = Jvp(stacked.logits, stacked.derivative[0])
            if alone is not None and not same_products(first, alone, self.plan.probe.precision):
                raise NotBatchable("tangents influence each other")
            return stacked

        products = attempt("push several tangents at once", run)
        self.cache.keep(key, not isinstance(products, Fallback))
        if isinstance(products, Fallback):
            return None
        names = self.request.directions.names
        # `project_directions` takes [samples, rows, classes]; the sample has a single row.
        z = products.logits[:, None]
        values = [project_directions(names, z, dz[:, None]) for dz in products.derivative]
        return torch.stack(values), products.logits

    def _run_stacked(self, row: ModelInput, per_pass: int) -> Jvp:
        """Compute the logits [1, c] of a row, and J s [k, 1, c] for all k tangents s.

        J s is the derivative of the logits along a tangent s on the parameters.

        Args:
            row: the row.
            per_pass: how many tangents run in one pass.
        """
        derivatives: list[Tensor] = []
        for part in slices(self.num_tangents, per_pass):
            stacked: Tangent = self.tangents.stack(part.start, part.stop)
            z, dz = forward_mode(self.request.model, row, stacked, is_stacked=True)
            derivatives.append(dz)
        # `z` has the same logits for every tangent.
        return Jvp(z[0], torch.cat(derivatives))
