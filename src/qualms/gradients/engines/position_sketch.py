"""The sketch at every position of one sample: J s, [positions, classes], for k random tangents s.

J is the Jacobian of the logits, and a tangent s is a direction in the space of the parameters. One
forward-mode pass gives v·(J s) for the gradients Jᵀv of all classes at all positions at once, so
that k passes score every token of a text over the whole vocabulary. A sample runs alone, with
several tangents in one pass.

Three checks come first: v·(J s) at some positions must equal ⟨Jᵀv, s⟩ from plain autograd; several
tangents in one pass must give what one tangent gives; and the logits of every pass must be those of
a plain forward pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

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

# The largest result in a pass with several tangents may take so many bytes and stay in the CPU's
# cache.
MAX_RESULT_BYTES = 2**23
# So many tangents share a pass even if their results leave the cache, as far as the budget allows.
MIN_TANGENTS_PER_PASS = 4
# The number of positions at which the logits of passes are compared with expected ones.
COMPARED_POSITIONS = 64
# Copies of a derivative that exist while a layer computes the next one.
RESULT_COPIES = 3


@torch.no_grad()
def plain_logits(
    model: nn.Module,
    class_dim: int,
    batch: Batch,
) -> Float[Tensor, "*positions c"]:
    """Compute the logits of one sample at all its positions by one plain forward pass.

    Args:
        model: the model, inside `preserve_state`.
        class_dim: the axis of the classes in the model's logits.
        batch: the sample, as a batch of one.

    Raises:
        QualmsError: if the first axis of the logits is not 1, or they are not finite.
    """
    # The model may change its inputs in place, so it gets copies.
    copies = [t.clone() for t in batch_tensors(batch)]
    output = call_model(model, with_tensors(batch, copies))
    logits = classes_last(output, class_dim)
    if len(logits) != 1:
        raise QualmsError(
            f"the model returns logits of shape {tuple(logits.shape)} for one input; the first "
            "axis must be the batch."
        )
    logits = logits[0]  # without the batch axis
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
        shape: the shape (t, c) of the logits at all t positions, with c classes.
        positions: the n positions whose logits are kept.
        values: the logits at these positions.
    """

    shape: tuple[int, int]
    positions: list[int]
    values: Float[Tensor, "n c"]

    @classmethod
    def of(cls, logits: Float[Tensor, "t c"]) -> "ExpectedLogits":
        """Keep the logits at up to `COMPARED_POSITIONS` evenly spread positions."""
        num_positions, num_classes = logits.shape
        num_kept = min(COMPARED_POSITIONS, num_positions)
        kept = torch.linspace(0, num_positions - 1, num_kept).round().int().tolist()
        return cls((num_positions, num_classes), kept, logits[kept].clone())

    @property
    def full_nbytes(self) -> int:
        """Bytes of the logits at all positions, whether kept or not."""
        bytes_per_position = self.values[:1].nbytes
        return bytes_per_position * self.shape[0]

    def require_same(
        self,
        logits: Float[Tensor, "t c"],
        precision: torch.dtype,
    ) -> None:
        """Raise a QualmsError if logits differ from the expected ones by more than rounding.

        Args:
            logits: the logits of another pass at all positions.
            precision: the coarsest float type that the pass casts to, which sets the tolerance.
        """
        if not close_logits(logits[self.positions], self.values.to(logits), precision):
            raise QualmsError(
                "the model returns different logits in forward-mode AD than in a plain pass, so "
                "its sketch is unreliable; pass a few positions as positions=, and use "
                "engine='exact'."
            )


@dataclass(frozen=True)
class PositionProducts:
    """J s of one row at all its t positions, for g consecutive tangents s that ran in one pass.

    J is the Jacobian of the logits; a tangent s is a direction in the space of the parameters.

    Attributes:
        row: the index of the row: 0 for the sample itself, then its perturbed copies.
        logits: the logits of the row at each position.
        tangents: J s at each position, for each tangent s.
    """

    row: int
    logits: Float[Tensor, "t c"]
    tangents: Float[Tensor, "g t c"]


@dataclass(frozen=True)
class PositionPlan:
    """How a sample is sketched at all its positions.

    Attributes:
        expected: logits of a plain forward pass over the sample, at some positions.
        probe: facts about the model, measured at a few positions.
        function: computes the logits and J s for one tangent s, with J the Jacobian of the logits:
            `forward_mode`, or a replacement for models that it cannot run.
        tangents: the random tangents s on all parameters.
        tangents_per_pass: the number of tangents that run in one pass.
    """

    expected: ExpectedLogits
    probe: SketchProbe
    function: JvpFunction
    tangents: Tangents
    tangents_per_pass: int

    def run(
        self,
        model: nn.Module,
        row: ModelInput,
        tangent: Tangent,
        is_stacked: bool,
    ) -> Jvp:
        """Compute the logits [t, c] of a row at its t positions, and J s [g, t, c] for g tangents s.

        Args:
            model: the model, read at all positions (`AtPositions`).
            row: a single row.
            tangent: one tangent; or g tangents, stacked along a new first axis of each parameter's
                tensor.
            is_stacked: whether `tangent` holds stacked tangents. They run by `forward_mode` in one
                pass; a single tangent (g = 1) runs by `function`.
        """
        if is_stacked:
            z, dz = forward_mode(model, row, tangent, is_stacked=True)
            z = z[0]  # the logits are the same for every tangent
        else:
            z, dz = self.function(model, row, tangent)
        # `AtPositions` returns the logits of all positions in one row of t · c entries.
        t, c = self.expected.shape
        return Jvp(z.view(t, c), dz.view(-1, t, c))


class PositionSketchEngine:
    """Sketches one sample at all its positions: projects its gradients on k random tangents.

    A sketch estimates norms of gradients Jᵀv from their projections v·(J s) on random tangents s,
    with J the Jacobian of the logits.

    Args:
        cache: the cached plans and measurements of the model.
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
        """Find a function that computes J s for this sample, and how many tangents fit into a pass.

        J is the Jacobian of the logits, and s a random tangent on the parameters.

        Args:
            request: a request with the sample as a batch of one, and the model read at all
                positions.
            expected: logits of a plain forward pass over the sample.
            lam: λ, by which layer l is weighted with exp(λ(l - L)); None for the plain gradient.
            held_bytes: how many bytes the caller of `run` keeps for each tangent of a pass.

        Raises:
            QualmsError: if the settings ask for sums of norms, or memory does not suffice.
        """
        adds_layers = request.sketch.combine == "sum" and lam is not None
        if request.settings.norm == "l1" or adds_layers:
            raise QualmsError(
                "at many positions, a sketch supports only L2 norms and layers added in "
                "quadrature; leave out norm='l1' and combine='sum', or pass a few positions as "
                "positions= and use engine='exact'."
            )
        probe, function, tangents = self._find_function(request, expected, lam)
        single = PositionPlan(expected, probe, function, tangents, tangents_per_pass=1)
        number = _count_tangents_per_pass(single, request, held_bytes)
        if number > 1 and self._stacked_agree(single, request, number):
            return replace(single, tangents_per_pass=number)
        return single

    def run(
        self,
        plan: PositionPlan,
        request: GradientRequest,
    ) -> Iterator[PositionProducts]:
        """Yield J s of every row for all tangents s, as many tangents at a time as the plan says.

        J is the Jacobian of the logits. The rows of the same tangents follow each other.

        Args:
            plan: what `plan` returned for this request.
            request: a request with the sample as a batch of one, and the model read at all
                positions.

        Raises:
            QualmsError: if a pass gives other logits than a plain forward pass.
        """
        rows = _single_rows(request)
        num_tangents = request.sketch.tangents
        per_pass = plan.tangents_per_pass
        for first in range(0, num_tangents, per_pass):
            tangent = _select_tangents(plan.tangents, first, per_pass, num_tangents)
            for i, row in enumerate(rows):
                z, dz = plan.run(request.model, row, tangent, is_stacked=per_pass > 1)
                # The expected logits are those of row 0, the sample itself.
                if i == 0:
                    plan.expected.require_same(z, coarser(z.dtype, plan.probe.precision))
                products = PositionProducts(row=i, logits=z, tangents=dz)
                # Drop all references: the next pass needs the memory. The caller drops its own.
                del z, dz
                yield products
                del products

    def _find_function(
        self,
        request: GradientRequest,
        expected: ExpectedLogits,
        lam: float | None,
    ) -> tuple[SketchProbe, JvpFunction, Tangents]:
        """Probe the model at three positions, and find a function whose J s plain autograd confirms.

        J is the Jacobian of the logits, and s a random tangent. The probe and the function are
        cached per input shape: a model may run other code for longer texts.

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
            """Probe the model at its first, middle and last position; the logits of all are large."""
            assert isinstance(model, AtPositions)
            last = expected.shape[0] - 1  # index of the last position
            at_three = AtPositions(model.model, model.class_dim, sorted({0, last // 2, last}))
            probe, check_rows = probe_rows(at_three, _single_rows(request)[0], selected)
            tangents = tangents_of_model(request, probe.counted, lam, self.cache)
            return probe, find_jvp_function(probe, check_rows, tangents[0])

        is_smoothed = request.rows_per_sample > 1
        key = ("position push", is_smoothed, tuple(selected), *request.shapes)
        probe, function = self.cache.get_or_compute(key, find)
        return probe, function, tangents_of_model(request, probe.counted, lam, self.cache)

    def _stacked_agree(
        self,
        plan: PositionPlan,
        request: GradientRequest,
        number: int,
    ) -> bool:
        """Whether several tangents in one pass give what one tangent gives in a pass of its own.

        Cached per dtype and number of axes of the inputs.

        Args:
            plan: a plan of the request; its `tangents_per_pass` is not used.
            request: a request with the sample as a batch of one.
            number: how many tangents would run in one pass.
        """
        row = _single_rows(request)[0]
        positions = plan.expected.positions

        def compare() -> bool:
            """Compare logits and J s of the first tangent at some positions, from both passes."""
            alone = plan.run(request.model, row, plan.tangents[0], is_stacked=False)
            tangents = _select_tangents(plan.tangents, 0, number, number)
            stacked = plan.run(request.model, row, tangents, is_stacked=True)
            precision = coarser(alone.logits.dtype, plan.probe.precision)
            have = Jvp(stacked.logits[positions], stacked.derivative[0, positions])
            want = Jvp(alone.logits[positions], alone.derivative[0, positions])
            return same_products(have, want, precision)

        def agree() -> bool:
            """Return whether `compare` returns True; a pass that fails counts as False."""
            is_same = attempt("push several tangents at once", compare)
            return not isinstance(is_same, Fallback) and is_same

        kinds = tuple((t.ndim, t.dtype) for t in batch_tensors(request.batch))
        is_smoothed = request.rows_per_sample > 1
        key = ("position several", is_smoothed, tuple(request.selected), *kinds)
        return self.cache.get_or_compute(key, agree)


def _single_rows(request: GradientRequest) -> list[ModelInput]:
    """List the request's only sample and its perturbed copies, each as an input of one row."""
    rows = request.make_rows(slice(0, 1))
    return [rows.take([i]) for i in range(request.rows_per_sample)]


def _count_tangents_per_pass(
    plan: PositionPlan,
    request: GradientRequest,
    held_bytes: int,
) -> int:
    """Count the tangents that run in one pass: as many as fit the budget, and the CPU's cache.

    1 if the plan's function is not `forward_mode`, the only one that takes several tangents.

    Args:
        plan: a plan of the request; its `tangents_per_pass` is not used.
        request: a request with the sample as a batch of one.
        held_bytes: how many bytes are kept for each tangent of a pass besides the pass's own.

    Raises:
        QualmsError: if not even one tangent fits into memory.
    """
    num_tangents = request.sketch.tangents
    logits_bytes = plan.expected.full_nbytes
    largest_bytes = max(logits_bytes, plan.probe.largest_result)
    positions, classes = plan.expected.shape
    tangent_bytes = RESULT_COPIES * largest_bytes + held_bytes
    needs = f"the results of one input with {positions} positions and {classes} classes, and "
    # Twice: the model's logits, and the copy that `AtPositions` may make of them.
    require_room(2 * logits_bytes + tangent_bytes, request.limit, needs + "derivatives,")
    if plan.function is not forward_mode:
        return 1
    num_in_budget = (request.budget - 2 * logits_bytes) // tangent_bytes
    num_in_cache = max(MIN_TANGENTS_PER_PASS, MAX_RESULT_BYTES // largest_bytes)
    most = min(num_tangents, num_in_budget, num_in_cache, plan.tangents.stack_size)
    num_passes = -(-num_tangents // max(1, most))  # rounded up
    # Fewer than `most`, if the tangents then divide more evenly into as many passes.
    return -(-num_tangents // num_passes)


def _select_tangents(
    tangents: Tangents,
    first: int,
    size: int,
    num_tangents: int,
) -> Tangent:
    """Select up to `size` consecutive tangents, stacked to [size, …] for each parameter.

    With `size` 1 the tangent is returned without the additional axis.

    Args:
        tangents: all tangents, drawn when they are needed.
        first: the index of the first tangent to select, a multiple of `size`.
        size: the largest number of tangents to select.
        num_tangents: the number of all tangents.
    """
    if size == 1:
        return tangents[first]
    # Tangents are drawn in larger stacks, whose length is a multiple of `size`.
    stack_length = tangents.stack_size // size * size
    stack_start = first // stack_length * stack_length
    stack_stop = min(stack_start + stack_length, num_tangents)
    stack = tangents.stack(stack_start, stack_stop)
    start = first - stack_start  # index of `first` in the stack
    return {name: s[start : start + size] for name, s in stack.items()}
