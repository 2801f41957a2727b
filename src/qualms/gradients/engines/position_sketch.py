"""The sketch at every position of one sample: J s, [positions, classes], for k random tangents s.

One forward-mode pass gives v·(J s) for the gradients of all classes at all positions at once, so
that k passes score every token of a text over the whole vocabulary. A sample runs alone, several
tangents at a time.

Before a tangent is trusted, v·(J s) at some positions is compared with ⟨Jᵀv, s⟩ from plain
autograd, several tangents at once with one of them, and the logits of every pass with those of a
plain one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, batch_tensors, with_tensors
from qualms.gradients.fallback import Fallback, attempt
from qualms.gradients.memory import require_room
from qualms.gradients.model_input import ModelInput, call_model
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.position_input import AtPositions, classes_last
from qualms.gradients.precision import close_logits, coarser
from qualms.gradients.request import GradientRequest
from qualms.gradients.sketching.jvp import Jvp, JvpFunction, forward_mode
from qualms.gradients.sketching.sketch_probe import (
    SketchProbe,
    find_jvp_function,
    probe_rows,
    same_products,
)
from qualms.gradients.sketching.tangents import Tangent, Tangents, tangents_of_model

# Of the largest result for several tangents in one pass: more would leave the processor's cache.
MAX_RESULT_BYTES = 2**23
MIN_AT_ONCE = 4  # tangents in one pass even so, as far as the budget allows
COMPARED_POSITIONS = 64  # at which the logits are compared
RESULT_COPIES = 3  # of a result's derivative that a layer holds while it makes one


@torch.no_grad()
def plain_logits(
    model: nn.Module,
    class_dim: int,
    batch: Batch,
) -> Float[Tensor, "*positions c"]:
    """The logits of one sample at all its positions, by one forward pass.

    Args:
        model: inside `preserve_state`.
        class_dim: the axis of the classes in the model's logits.
        batch: the sample alone.

    Raises:
        QualmsError: if the logits are not those of one sample, or not finite.
    """
    copies = [t.clone() for t in batch_tensors(batch)]  # which the model may change
    output = call_model(model, with_tensors(batch, copies))
    logits = classes_last(output, class_dim)
    if len(logits) != 1:
        raise QualmsError(
            f"the model returns logits of shape {tuple(logits.shape)} for one input; the first "
            "axis must be the batch."
        )
    logits = logits[0]
    if not bool(torch.isfinite(logits).all()):
        raise QualmsError(
            "the logits of an input contain NaN or infinity; check the model's weights and the "
            "input."
        )
    return logits


@dataclass(frozen=True)
class ExpectedLogits:
    """Some of the logits of a plain pass, which those of other passes are compared with.

    Attributes:
        shape: positions and classes.
        positions: the positions of those that are kept.
        values: their logits.
    """

    shape: tuple[int, int]
    positions: list[int]
    values: Float[Tensor, "n c"]

    @classmethod
    def of(cls, logits: Float[Tensor, "t c"]) -> "ExpectedLogits":
        """Keep logits at positions spread over all of them."""
        positions, classes = logits.shape
        number = min(COMPARED_POSITIONS, positions)
        spread = torch.linspace(0, positions - 1, number).round().int().tolist()
        return cls((positions, classes), spread, logits[spread].clone())

    @property
    def nbytes(self) -> int:
        """The size of all logits."""
        return self.values[:1].nbytes * self.shape[0]

    def require_same(
        self,
        logits: Float[Tensor, "t c"],
        precision: torch.dtype,
    ) -> None:
        """Raise an error if the logits of a pass differ."""
        if not close_logits(logits[self.positions], self.values.to(logits), precision):
            raise QualmsError(
                "the model returns different logits in forward mode than in a plain pass, so its "
                "sketch is unreliable; name a few positions= and use engine='exact'."
            )


@dataclass(frozen=True)
class PositionProducts:
    """J s of one row at all its positions, for some of the tangents.

    Attributes:
        first: the number of the first tangent.
        row: 0 for the sample itself, then its perturbed copies.
        logits: of the row.
        tangents: J s for each of the tangents.
    """

    first: int
    row: int
    logits: Float[Tensor, "t c"]
    tangents: Float[Tensor, "g t c"]


@dataclass(frozen=True)
class PositionPlan:
    """How a sample is sketched at all its positions.

    Attributes:
        expected: logits of a plain pass.
        probe: what a look at a few positions has shown of the model.
        function: computes the products.
        tangents: on the whole model.
        at_once: how many tangents run in one pass.
    """

    expected: ExpectedLogits
    probe: SketchProbe
    function: JvpFunction
    tangents: Tangents
    at_once: int

    def run(
        self,
        model: nn.Module,
        row: ModelInput,
        tangent: Tangent,
        stacked: bool,
    ) -> Jvp:
        """The logits [t, c] of a row, and its products [g, t, c].

        Args:
            model: read at all positions.
            row: a single row.
            tangent: one tangent, or g of them.
            stacked: whether there are several.
        """
        if stacked:
            z, dz = forward_mode(model, row, tangent, several=True)
            z = z[0]
        else:
            z, dz = self.function(model, row, tangent)
        shape = self.expected.shape
        return Jvp(z.view(shape), dz.view(-1, *shape))


class PositionSketchEngine:
    """Sketches one sample at all its positions.

    Args:
        cache: of the model.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(
        self,
        request: GradientRequest,
        expected: ExpectedLogits,
        lam: float | None,
        held_bytes: int = 0,
    ) -> PositionPlan:
        """Find out how to compute products for this sample, and how many tangents fit in a pass.

        Args:
            request: the sample as a batch of one, and the model read at all positions.
            expected: logits of a plain pass.
            lam: layer l is weighted by exp(λ(l - L)); None for the plain gradient.
            held_bytes: what the caller keeps for each tangent of a pass.

        Raises:
            QualmsError: if the settings ask for sums of norms, or there is no room.
        """
        adds_layers = request.sketch.combine == "sum" and lam is not None
        if request.settings.norm == "l1" or adds_layers:
            raise QualmsError(
                "at many positions, a sketch supports only L2 norms and layers added in "
                "quadrature; leave out norm='l1' and combine='sum', or name a few positions= and "
                "use engine='exact'."
            )
        probe, function, tangents = self._find_function(request, expected, lam)
        plan = PositionPlan(expected, probe, function, tangents, 1)
        at_once = _tangents_at_once(plan, request, held_bytes)
        if at_once > 1 and not self._several_agree(plan, request, at_once):
            at_once = 1
        return PositionPlan(expected, probe, function, tangents, at_once)

    def run(
        self,
        plan: PositionPlan,
        request: GradientRequest,
    ) -> Iterator[PositionProducts]:
        """The products of all rows with all tangents.

        Args:
            plan: of this request.
            request: the sample as a batch of one, and the model read at all positions.

        Raises:
            QualmsError: if a pass gives other logits than a plain one.
        """
        rows = _single_rows(request)
        number = request.sketch.tangents
        for first in range(0, number, plan.at_once):
            tangent = _side_by_side(plan.tangents, first, plan.at_once, number)
            for i, row in enumerate(rows):
                z, dz = plan.run(request.model, row, tangent, plan.at_once > 1)
                if i == 0:
                    plan.expected.require_same(z, coarser(z.dtype, plan.probe.precision))
                products = PositionProducts(first, i, z, dz)
                del z, dz
                yield products
                del products  # the caller lets it go as well: the next pass needs the room

    def _find_function(
        self,
        request: GradientRequest,
        expected: ExpectedLogits,
        lam: float | None,
    ) -> tuple[SketchProbe, JvpFunction, Tangents]:
        """What a look at three positions shows of the model, and the function that it confirms.

        Both are found once for samples of one shape: a model may take another path for longer
        texts.
        """
        model, selected = request.model, request.selected

        def find() -> tuple[SketchProbe, JvpFunction]:
            assert isinstance(model, AtPositions)
            last = expected.shape[0] - 1
            at_three = AtPositions(model.model, model.class_dim, sorted({0, last // 2, last}))
            probe, check_rows = probe_rows(at_three, _single_rows(request)[0], selected)
            tangents = tangents_of_model(request, probe.counted, lam, self.cache)
            return probe, find_jvp_function(probe, check_rows, tangents[0])

        key = ("position push", request.rows_per_sample > 1, tuple(selected), *request.shapes)
        probe, function = self.cache.once(key, find)
        return probe, function, tangents_of_model(request, probe.counted, lam, self.cache)

    def _several_agree(
        self,
        plan: PositionPlan,
        request: GradientRequest,
        at_once: int,
    ) -> bool:
        """Whether several tangents in one pass give what one gives, found once for each kind."""
        row = _single_rows(request)[0]
        at = plan.expected.positions

        def compare() -> bool:
            one = plan.run(request.model, row, plan.tangents[0], False)
            stacked = _side_by_side(plan.tangents, 0, at_once, at_once)
            several = plan.run(request.model, row, stacked, True)
            precision = coarser(one.logits.dtype, plan.probe.precision)
            have = Jvp(several.logits[at], several.derivative[0, at])
            want = Jvp(one.logits[at], one.derivative[0, at])
            return same_products(have, want, precision)

        def agree() -> bool:
            same = attempt("push several tangents at once", compare)
            return not isinstance(same, Fallback) and same

        kinds = tuple((t.ndim, t.dtype) for t in batch_tensors(request.batch))
        smoothed = request.rows_per_sample > 1
        key = ("position several", smoothed, tuple(request.selected), *kinds)
        return self.cache.once(key, agree)


def _single_rows(request: GradientRequest) -> list[ModelInput]:
    """The sample and its perturbed copies, each on its own."""
    rows = request.rows(slice(0, 1))
    return [rows.take([i]) for i in range(request.rows_per_sample)]


def _tangents_at_once(
    plan: PositionPlan,
    request: GradientRequest,
    held_bytes: int,
) -> int:
    """How many tangents run in one pass: as many as fit the budget, and the processor's cache.

    Args:
        plan: of the request, but for this number.
        request: the sample.
        held_bytes: what the caller keeps for each of them.
    """
    number = request.sketch.tangents
    size = plan.expected.nbytes
    largest = max(size, plan.probe.largest_result)
    positions, classes = plan.expected.shape
    one_tangent = RESULT_COPIES * largest + held_bytes
    needs = f"the results of one input with {positions} positions and {classes} classes, and "
    require_room(2 * size + one_tangent, request.limit, needs + "derivatives,")
    if plan.function is not forward_mode:
        return 1
    fit = (request.budget - 2 * size) // one_tangent
    cached = MAX_RESULT_BYTES // largest
    most = min(number, fit, max(MIN_AT_ONCE, cached), plan.tangents.stack_size)
    passes = -(-number // max(1, most))
    return -(-number // passes)  # groups of nearly equal size


def _side_by_side(
    tangents: Tangents,
    first: int,
    size: int,
    number: int,
) -> Tangent:
    """Tangents from number `first` on, [size, …] for each parameter; a single one without an axis.

    Args:
        tangents: where they come from.
        first: the number of the first one.
        size: how many.
        number: how many there are in all.
    """
    if size == 1:
        return tangents[first]
    whole = tangents.stack_size // size * size
    start = first // whole * whole
    stacked = tangents.stack(start, min(start + whole, number))
    return {name: s[first - start : first - start + size] for name, s in stacked.items()}
