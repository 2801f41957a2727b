"""The sketch at every position of one sample: J s, [positions, classes], for k random tangents s.

One forward-mode pass gives v·(J s) for the gradients of all classes at all positions at once, so
that k passes score every token of a text over the whole vocabulary. A sample runs alone, with
several tangents in one pass.

Three checks come first: v·(J s) at some positions must equal ⟨Jᵀv, s⟩ from plain autograd; several
tangents in one pass must give what one tangent gives; and the logits of every pass must be those of
a plain forward pass.
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

# Bytes of the largest result of a pass with several tangents: more would leave the CPU's cache.
MAX_RESULT_BYTES = 2**23
# Tangents in one pass even if they leave the cache, as far as the budget allows.
MIN_AT_ONCE = 4
# Positions at which logits of passes are compared with expected ones.
COMPARED_POSITIONS = 64
# Copies of a derivative that exist while a layer computes the next one.
RESULT_COPIES = 3


@torch.no_grad()
def plain_logits(
    model: nn.Module,
    class_dim: int,
    batch: Batch,
) -> Float[Tensor, "*positions c"]:
    """Compute the logits of one sample at all its positions by one forward pass.

    Args:
        model: the model, inside `preserve_state`.
        class_dim: the axis of the classes in the model's logits.
        batch: the sample, as a batch of one.

    Raises:
        QualmsError: if the first axis of the logits is not 1, or they are not finite.
    """
    # The model may change them in place.
    copies = [t.clone() for t in batch_tensors(batch)]
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
    """Logits of a plain forward pass at some positions, to compare with those of other passes.

    Attributes:
        shape: the shape (t, c) of the logits at all positions.
        positions: the n positions whose logits are kept.
        values: the logits at these positions.
    """

    shape: tuple[int, int]
    positions: list[int]
    values: Float[Tensor, "n c"]

    @classmethod
    def of(cls, logits: Float[Tensor, "t c"]) -> "ExpectedLogits":
        """Keep the logits at up to `COMPARED_POSITIONS` evenly spread positions."""
        positions, classes = logits.shape
        number = min(COMPARED_POSITIONS, positions)
        spread = torch.linspace(0, positions - 1, number).round().int().tolist()
        return cls((positions, classes), spread, logits[spread].clone())

    @property
    def nbytes(self) -> int:
        """Bytes of the logits at all positions, of which only `values` are kept."""
        return self.values[:1].nbytes * self.shape[0]

    def require_same(
        self,
        logits: Float[Tensor, "t c"],
        precision: torch.dtype,
    ) -> None:
        """Raise an error if the logits of a pass differ from the expected ones by more than rounding.

        Args:
            logits: the logits of the pass at all positions.
            precision: the coarsest float type that the pass casts to, which sets the tolerance.
        """
        if not close_logits(logits[self.positions], self.values.to(logits), precision):
            raise QualmsError(
                "the model returns different logits in forward mode than in a plain pass, so its "
                "sketch is unreliable; name a few positions= and use engine='exact'."
            )


@dataclass(frozen=True)
class PositionProducts:
    """J s of one row at all its t positions, for g consecutive tangents s that ran in one pass.

    J is the Jacobian of the logits; a tangent s is a direction in the space of the parameters.

    Attributes:
        first: the index of the first of the g tangents among all k.
        row: the index of the row: 0 for the sample itself, then its perturbed copies.
        logits: the logits of the row at each position.
        tangents: J s at each position, for each tangent s.
    """

    first: int
    row: int
    logits: Float[Tensor, "t c"]
    tangents: Float[Tensor, "g t c"]


@dataclass(frozen=True)
class PositionPlan:
    """How a sample is sketched at all its positions.

    Attributes:
        expected: logits of a plain forward pass over the sample, at some positions.
        probe: facts about the model, measured at a few positions.
        function: computes the logits and J s for one tangent s: `forward_mode`, or a replacement
            for models that it cannot run.
        tangents: the random tangents on all parameters.
        at_once: the number of tangents in one pass.
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
        several: bool,
    ) -> Jvp:
        """Compute the logits [t, c] of a row, and J s [g, t, c] for g tangents s.

        Args:
            model: the model, read at all positions (`AtPositions`).
            row: a single row.
            tangent: one tangent; with `several`, g tangents stacked along the first axis of each
                parameter's tensor.
            several: whether `tangent` holds stacked tangents. They run by `forward_mode` in one
                pass; a single tangent (g = 1) runs by `function`.
        """
        if several:
            z, dz = forward_mode(model, row, tangent, several=True)
            z = z[0]  # the logits are the same for every tangent
        else:
            z, dz = self.function(model, row, tangent)
        # (t, c): `AtPositions` returns all positions side by side.
        shape = self.expected.shape
        return Jvp(z.view(shape), dz.view(-1, *shape))


class PositionSketchEngine:
    """Sketches one sample at all its positions: projects its gradients on k random tangents.

    Args:
        cache: the plans of the model.
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
        """Find a function that computes J s for this sample, and how many tangents fit in a pass.

        Args:
            request: a request with the sample as a batch of one, and the model read at all
                positions.
            expected: logits of a plain forward pass over the sample.
            lam: λ, by which layer l is weighted with exp(λ(l - L)); None for the plain gradient.
            held_bytes: the bytes that the caller of `run` keeps for each tangent of a pass.

        Raises:
            QualmsError: if the settings ask for sums of norms, or memory does not suffice.
        """
        adds_layers = request.sketch.combine == "sum" and lam is not None
        if request.settings.norm == "l1" or adds_layers:
            raise QualmsError(
                "at many positions, a sketch supports only L2 norms and layers added in "
                "quadrature; leave out norm='l1' and combine='sum', or name a few positions= and "
                "use engine='exact'."
            )
        probe, function, tangents = self._find_function(request, expected, lam)
        plan = PositionPlan(expected, probe, function, tangents, at_once=1)
        at_once = _tangents_at_once(plan, request, held_bytes)
        if at_once > 1 and not self._several_agree(plan, request, at_once):
            at_once = 1
        return PositionPlan(expected, probe, function, tangents, at_once)

    def run(
        self,
        plan: PositionPlan,
        request: GradientRequest,
    ) -> Iterator[PositionProducts]:
        """Yield J s of every row for all tangents, as many tangents at a time as the plan says.

        Args:
            plan: what `plan` returned for this request.
            request: a request with the sample as a batch of one, and the model read at all
                positions.

        Raises:
            QualmsError: if a pass gives other logits than a plain forward pass.
        """
        rows = _single_rows(request)
        number = request.sketch.tangents
        for first in range(0, number, plan.at_once):
            tangent = _side_by_side(plan.tangents, first, plan.at_once, number)
            for i, row in enumerate(rows):
                z, dz = plan.run(request.model, row, tangent, several=plan.at_once > 1)
                # The expected logits are those of the sample itself.
                if i == 0:
                    plan.expected.require_same(z, coarser(z.dtype, plan.probe.precision))
                products = PositionProducts(first, i, z, dz)
                del z, dz
                yield products
                # The caller drops it as well: the next pass needs the memory.
                del products

    def _find_function(
        self,
        request: GradientRequest,
        expected: ExpectedLogits,
        lam: float | None,
    ) -> tuple[SketchProbe, JvpFunction, Tangents]:
        """Probe the model at three positions, and find a function that plain autograd confirms there.

        The probe and the function are cached per input shape: a model may run other code for longer
        texts.

        Args:
            request: a request with the sample as a batch of one, and the model read at all
                positions.
            expected: logits of a plain forward pass over the sample.
            lam: λ of the layer weights; None for the plain gradient.

        Returns:
            The facts about the model, the function that computes J s, and the tangents.
        """
        model, selected = request.model, request.selected

        def find() -> tuple[SketchProbe, JvpFunction]:
            """Probe the model at its first, middle and last position."""
            assert isinstance(model, AtPositions)
            last = expected.shape[0] - 1
            at_three = AtPositions(model.model, model.class_dim, sorted({0, last // 2, last}))
            probe, check_rows = probe_rows(at_three, _single_rows(request)[0], selected)
            tangents = tangents_of_model(request, probe.counted, lam, self.cache)
            return probe, find_jvp_function(probe, check_rows, tangents[0])

        key = ("position push", request.rows_per_sample > 1, tuple(selected), *request.shapes)
        probe, function = self.cache.get_or_compute(key, find)
        return probe, function, tangents_of_model(request, probe.counted, lam, self.cache)

    def _several_agree(
        self,
        plan: PositionPlan,
        request: GradientRequest,
        at_once: int,
    ) -> bool:
        """Whether several tangents in one pass give what one tangent gives in a pass of its own.

        Cached per type and number of axes of the inputs.

        Args:
            plan: the plan of the request, `at_once` not yet set.
            request: a request with the sample as a batch of one.
            at_once: how many tangents would run in one pass.
        """
        row = _single_rows(request)[0]
        positions = plan.expected.positions

        def compare() -> bool:
            """Compare logits and J s of the first tangent at some positions."""
            one = plan.run(request.model, row, plan.tangents[0], several=False)
            stacked = _side_by_side(plan.tangents, 0, at_once, at_once)
            several = plan.run(request.model, row, stacked, several=True)
            precision = coarser(one.logits.dtype, plan.probe.precision)
            have = Jvp(several.logits[positions], several.derivative[0, positions])
            want = Jvp(one.logits[positions], one.derivative[0, positions])
            return same_products(have, want, precision)

        def agree() -> bool:
            """Run `compare`; a pass that fails counts as a disagreement."""
            same = attempt("push several tangents at once", compare)
            return not isinstance(same, Fallback) and same

        kinds = tuple((t.ndim, t.dtype) for t in batch_tensors(request.batch))
        smoothed = request.rows_per_sample > 1
        key = ("position several", smoothed, tuple(request.selected), *kinds)
        return self.cache.get_or_compute(key, agree)


def _single_rows(request: GradientRequest) -> list[ModelInput]:
    """List the request's only sample and its perturbed copies, each as an input of one row."""
    rows = request.make_rows(slice(0, 1))
    return [rows.take([i]) for i in range(request.rows_per_sample)]


def _tangents_at_once(
    plan: PositionPlan,
    request: GradientRequest,
    held_bytes: int,
) -> int:
    """How many tangents run in one pass: as many as fit the budget, and the processor's cache.

    1 if they are not pushed by `forward_mode`, the only function that takes several.

    Args:
        plan: the plan of the request, `at_once` not yet set.
        request: a request with the sample as a batch of one.
        held_bytes: the bytes that the caller keeps for each tangent of a pass.

    Raises:
        QualmsError: if not even one tangent fits into memory.
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
    max_at_once = min(number, fit, max(MIN_AT_ONCE, cached), plan.tangents.stack_size)
    passes = -(-number // max(1, max_at_once))
    return -(-number // passes)  # groups of nearly equal size


def _side_by_side(
    tangents: Tangents,
    first: int,
    size: int,
    number: int,
) -> Tangent:
    """Select up to `size` consecutive tangents, stacked to [size, …] for each parameter.

    With `size` 1 the tangent is returned without the additional axis.

    Args:
        tangents: all tangents, drawn when they are needed.
        first: the index of the first tangent to select.
        size: the largest number of tangents to select.
        number: the number of all tangents.
    """
    if size == 1:
        return tangents[first]
    # Tangents are drawn in larger stacks, of a multiple of `size`; select from the stack around `first`.
    whole = tangents.stack_size // size * size
    start = first // whole * whole
    stacked = tangents.stack(start, min(start + whole, number))
    return {name: s[first - start : first - start + size] for name, s in stacked.items()}
