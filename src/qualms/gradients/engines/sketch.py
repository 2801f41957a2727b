"""The sketch engine: norms of all class gradients from k random tangents on the weights.

For a tangent s one forward-mode pass over a batch gives J s, and v·(J s) = ⟨Jᵀv, s⟩ for every
direction v: the projections of all class gradients on s at once, whatever the class count. The same
k tangents serve all samples, so most of their noise is common to all and leaves the ranking alone.
The layer weights a_l are folded into the tangents:

- *quadrature*: s_l = a_l ξ_l with ξ_l random signs (normal for small parameters). A projection has
  variance Σ_l a_l² ‖g_l‖², and as a sum of many terms it is as good as normal.
- *sum*, the paper's form: s_l = a_l ξ_l / ζ_l with ζ_l one normal number for each layer. A layer's
  projection is Cauchy with scale a_l ‖g_l‖, and scales of independent Cauchy variables add up:
  Σ_l a_l ‖g_l‖, without tangents of its own for any layer.
- L1 norms: every entry of s_l is a_l times a Cauchy number, and the scale is Σ_l a_l ‖g_l‖₁.

Smoothing averages the projections of a sample's rows, which is averaging gradients before the norm
is taken. `SketchEngine.plan` looks at the first rows; `run` and `project` check each tangent's
products before they are used (`sketching/jvp_check.py`).
"""

import logging
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

log = logging.getLogger("qualms")
# Samples that the probe looks at; three of their rows are run by plain autograd.
PROBED_SAMPLES = 8
# Bytes of an operation's result for all rows: more leaves the CPU's cache.
MAX_RESULT_BYTES = 2**24
# The memory of a pass with a tangent for one row, in multiples of the largest result of an
# operation; copies that kernels make are included.
RESULTS_PER_ROW = 24
DOUBLES = 16  # bytes of a projection in float64, and of its copy
NEEDS = "a tangent on the weights and the gradient that it is checked with"
INSTEAD = "select fewer parameters with `params`, or use engine='exact'"

# The projections of the gradients of b samples along m directions, and the logits of the samples.
ProjectionBlock = tuple[Projections, Float[Tensor, "b c"]]


def project_gradients(
    request: GradientRequest,
    lam: float | None,
    cache: PlanCache,
) -> Iterator[ProjectionBlock]:
    """Project gradients of all parameters together on k tangents, block by block of the samples.

    Args:
        request: the samples, directions and settings.
        lam: λ, by which layer l is weighted with exp(λ(l - L)); None for the plain gradient.
        cache: the plans of the model.

    Yields:
        The projections of some samples along all directions, and their logits.
    """
    engine = SketchEngine(cache)
    plan = engine.plan(request)
    tangents = tangents_of_model(request, plan.probe.counted, lam, cache)
    yield from engine.project(plan, request, tangents)


@dataclass
class SketchPlan:
    """How the samples of a request are sketched.

    Attributes:
        probe: facts about the model, measured on the first rows.
        check_rows: rows of this request whose products J s are compared with plain autograd; None
            until they are needed, if the probe comes from another batch.
        samples_at_once: the number of samples in one pass.
    """

    probe: SketchProbe
    check_rows: CheckRows | None
    samples_at_once: int


class SketchEngine:
    """Estimates norms from projections of the gradients on random tangents.

    Args:
        cache: the plans of the model.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> SketchPlan:
        """Probe the first rows, unless rows of this shape were probed before, and size the passes.

        The probe measures facts about the model, such as the memory of a row, by plain autograd.

        Raises:
            QualmsError: if a tangent does not fit into memory, or the model is random.
        """
        key = ("sketch probe", request.shapes, tuple(request.selected))
        probe = self.cache.get(key, SketchProbe)
        check_rows = None
        weights = sum(p.nbytes for p in request.selected.values())
        if probe is None:
            require_room(2 * weights, request.limit, NEEDS, INSTEAD)
            probe, check_rows = _probe_first_rows(request)
            self.cache.keep(key, probe)
            release_free_memory()
        row_bytes = RESULTS_PER_ROW * max(1, probe.largest_result)
        # Half of the bytes of a row are copies that kernels make, which do not exist all at once.
        require_room(2 * weights + row_bytes // 2, request.limit, NEEDS, INSTEAD)
        return SketchPlan(probe, check_rows, _samples_at_once(request, probe, weights))

    def run(self, plan: SketchPlan, request: GradientRequest) -> ClassNorms:
        """Estimate the norms of each layer's gradients and their standard errors, k tangents a layer.

        Returns:
            Estimated norms [b, m] and their errors, keyed by layer.
        """
        model, granularity = request.model, request.settings.granularity
        values: dict[str, Tensor] = {}
        errors: dict[str, Tensor] = {}
        for layer, names in group_by_layer(model, plan.probe.counted, granularity).items():
            tangents = tangents_of_layers(request, [(names, 1.0)])  # of this layer, with weight 1
            norms: list[Tensor] = []
            norm_errors: list[Tensor] = []
            logits: list[Tensor] = []
            for projections, z in self.project(plan, request, tangents):
                scale = projections.scale
                norms.append(scale)
                norm_errors.append(projections.error(scale))
                logits.append(z)
            values[layer] = torch.cat(norms)
            errors[layer] = torch.cat(norm_errors)
        return ClassNorms(values, torch.cat(logits), set(), errors)

    def project(
        self,
        plan: SketchPlan,
        request: GradientRequest,
        tangents: Tangents,
    ) -> Iterator[ProjectionBlock]:
        """Project the gradients on k tangents, block by block of the samples.

        Args:
            plan: what `plan` returned for this request.
            request: the samples, directions and settings.
            tangents: random tangents on some or all parameters.

        Yields:
            The projections of some samples along all directions, and their logits.

        Raises:
            QualmsError: if no way of computing J s agrees with plain autograd, or projections are
                not finite.
        """
        run = SketchRun(plan, request, tangents, self.cache)
        for block in run.blocks():
            values, logits = run.project_block(block)
            if not bool(torch.isfinite(values).all()):
                raise QualmsError(
                    "engine='sketch' overflowed the model's precision; use float32, or "
                    "engine='exact'."
                )
            yield Projections(values, tangents.law), logits


def _probe_first_rows(request: GradientRequest) -> tuple[SketchProbe, CheckRows]:
    """Measure facts about the model, and gradients to check products J s with, on the first samples.

    The gradients are kept if they take at most an eighth of the budget.
    """
    first = request.make_rows(slice(0, PROBED_SAMPLES))
    return probe_rows(request.model, first, request.selected, request.budget // 8)


def _samples_at_once(
    request: GradientRequest,
    probe: SketchProbe,
    weights: int,
) -> int:
    """How many samples run in one pass: as many as fit the budget and the processor's cache.

    With fewer, a pass mostly waits for the weights to be read.

    Args:
        request: the samples and settings.
        probe: facts about the model.
        weights: the bytes of one tangent.
    """
    # Stored tangents take up to a quarter of the budget, and one more may be drawn beside them.
    kept = min(request.budget // 4, request.sketch.tangents * weights)
    whole_tangents = kept // max(1, weights) * weights
    room = request.budget - whole_tangents - weights
    result = max(1, probe.largest_result)
    rows = min(MAX_RESULT_BYTES // result, room // (RESULTS_PER_ROW * result))
    wanted = request.settings.batch_size or request.num_samples
    return max(1, min(wanted, rows // request.rows_per_sample))


@dataclass
class SketchRun:
    """Computes J s for the rows of one request and k tangents s, and projects gradients by it.

    J is the Jacobian of the logits; the gradient Jᵀv has the projection v·(J s) on a tangent s.

    Attributes:
        plan: the plan of the request.
        request: the samples, directions and settings.
        tangents: random tangents on some or all parameters.
        cache: the plans of the model.
    """

    plan: SketchPlan
    request: GradientRequest
    tangents: Tangents
    cache: PlanCache

    @property
    def num_tangents(self) -> int:
        """k, the number of tangents."""
        return self.request.sketch.tangents

    @property
    def _key(self) -> Key:
        """The cache key of the function that computes J s."""
        return ("jvp function", self.request.shapes, tuple(self.tangents.parameters))

    def function(self) -> JvpFunction:
        """Find a function whose J s agree with plain autograd; cached per input shape.

        Raises:
            QualmsError: if no function agrees.
        """

        def find() -> JvpFunction:
            """Choose the function; plain autograd runs now if its rows come from another batch."""
            if self.plan.check_rows is None:
                _, self.plan.check_rows = _probe_first_rows(self.request)
            function = find_jvp_function(self.plan.probe, self.plan.check_rows, self.tangents[0])
            release_free_memory()
            return function

        return self.cache.get_or_compute(self._key, find)

    def blocks(self) -> list[slice]:
        """Split the samples into blocks whose input rows and projections fit half of the budget."""
        first = self.request.make_rows(slice(0, 1))
        input_bytes = sum(t.nbytes for t in batch_tensors(first.batch))
        sample_bytes = input_bytes + DOUBLES * self.num_tangents * self.plan.probe.classes
        return slices(self.request.num_samples, max(1, self.request.budget // (2 * sample_bytes)))

    def project_block(self, block: slice) -> tuple[Tensor, Tensor]:
        """Compute the projections [k, b, m] and the logits [b, c] of a block of samples.

        If that fails with a cached function, which was confirmed on other samples, a function is
        confirmed on these samples, and the block runs again.
        """
        function = self.function()
        try:
            return self._project(block, function)
        except QualmsError:
            # The function was confirmed on these samples.
            if self.plan.check_rows is not None:
                raise
        self.cache.forget(self._key)
        return self._project(block, self.function())

    def _project(
        self,
        block: slice,
        function: JvpFunction,
    ) -> tuple[Tensor, Tensor]:
        """Compute the projections [k, b, m] and the logits [b, c] of a block of samples.

        A block of one row first tries several tangents in one pass.

        Args:
            block: the indices of the samples.
            function: computes J s for a batch of rows and one tangent.
        """
        step = self.plan.samples_at_once
        batches: list[ModelInput] = []
        for start in range(block.start, block.stop, step):
            rows = self.request.make_rows(slice(start, min(start + step, block.stop)))
            batches.append(self.plan.probe.reformat(rows))
        if len(batches) == 1 and num_samples(batches[0].batch) == 1:
            projected = self._project_together(self.request.make_rows(block), function)
            if projected is not None:
                return projected
        return self._project_one_by_one(batches, function)

    def _project_one_by_one(
        self,
        batches: list[ModelInput],
        function: JvpFunction,
    ) -> tuple[Tensor, Tensor]:
        """Run one pass for each tangent and batch, as many rows at once as the plan says.

        Each batch is checked with the first tangent before others are used (`check_batches`).

        Args:
            batches: the rows of the block's samples, batch by batch.
            function: computes J s for a batch of rows and one tangent.

        Returns:
            The projections [k, b, m] and the logits [b, c] of the block's samples.
        """
        model = self.request.model
        s = self.tangents[0]
        checked = check_batches(function, model, self.plan.probe, batches, s, self.cache)
        release_free_memory()  # memory that the checks used
        projections = [
            [self._project_rows(rows, c.first)] for rows, c in zip(batches, checked, strict=True)
        ]
        for number in range(1, self.num_tangents):
            # Before the next one is drawn: each is as large as the weights.
            del s
            s = self.tangents[number]
            for i, rows in enumerate(batches):
                product = checked[i].function(model, rows, s)
                projections[i].append(self._project_rows(rows, product))
        logits: list[Tensor] = []
        for rows, c in zip(batches, checked, strict=True):
            logits.append(c.first.logits[:: rows.rows_per_sample])  # without perturbed copies
        values = torch.cat([torch.stack(per_tangent) for per_tangent in projections], dim=1)
        return values, torch.cat(logits)

    def _project_rows(self, rows: ModelInput, product: Jvp) -> Float[Tensor, "b m"]:
        """Compute v·(J s) for each sample and direction v, averaged over the rows of the sample.

        Args:
            rows: the rows of the samples.
            product: the logits of these rows and J s for one tangent s.
        """
        groups = (-1, rows.rows_per_sample)
        z = product.logits.unflatten(0, groups)
        dz = product.derivative.unflatten(0, groups)
        return project_directions(self.request.directions.names, z, dz)

    def _project_together(
        self,
        row: ModelInput,
        function: JvpFunction,
    ) -> tuple[Tensor, Tensor] | None:
        """Run several tangents in one pass over a single row; None if that fails or does not fit.

        A pass over one row mostly waits for weights to be read, so tangents share it. The first
        time, the result must agree with that of one tangent alone. Images keep the contiguous
        memory format, like the tangents: in channels-last torch would convert every tangent.

        Args:
            row: the row.
            function: the function that plain autograd confirmed for one tangent.

        Returns:
            The projections [k, 1, m] and the logits [1, c]; or None.
        """
        key = ("stacked tangents", *self._key)
        result = RESULTS_PER_ROW * max(1, self.plan.probe.largest_result)
        at_once = min(self.tangents.stack_size, self.request.budget // result)
        confirmed = self.cache.get(key, bool)  # None if it was not tried yet
        if function is not forward_mode or at_once < 2 or confirmed is False:
            return None

        def run() -> Jvp:
            """Run the stacked tangents; compare the first with a pass of its own, once."""
            alone = None if confirmed else function(self.request.model, row, self.tangents[0])
            stacked = self._stacked_products(row, at_once)
            first = Jvp(stacked.logits, stacked.derivative[0])
            if alone is not None and not same_products(first, alone, self.plan.probe.precision):
                raise NotBatchable("tangents influence each other")
            return stacked

        products = attempt("push several tangents at once", run)
        self.cache.keep(key, not isinstance(products, Fallback))
        if isinstance(products, Fallback):
            return None
        names = self.request.directions.names
        z = products.logits[:, None]
        values = [project_directions(names, z, dz[:, None]) for dz in products.derivative]
        return torch.stack(values), products.logits

    def _stacked_products(self, row: ModelInput, at_once: int) -> Jvp:
        """Compute the logits [1, c] of a row, and J s [k, 1, c] for all tangents s.

        Args:
            row: the row.
            at_once: how many tangents run in one pass.
        """
        derivatives: list[Tensor] = []
        for part in slices(self.num_tangents, at_once):
            stacked: Tangent = self.tangents.stack(part.start, part.stop)
            z, dz = forward_mode(self.request.model, row, stacked, several=True)
            derivatives.append(dz)
        return Jvp(z[0], torch.cat(derivatives))
