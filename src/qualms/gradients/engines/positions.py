"""The sketch at every position of one input: J s, [positions, classes], for each of k random
tangents s on the weights.

One forward-mode pass gives v·(J s) for the gradients of all classes at all positions at once, so
that k passes score every token of a text over the whole vocabulary. An input runs alone, several
tangents at a time.

Before a tangent is believed, v·(J s) at some positions is compared with ⟨Jᵀv, s⟩ from plain
autograd, several tangents at once with one of them, and the logits of every pass with those of a
plain one.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, batch_tensors, with_tensors
from qualms.gradients.engines.sketch import SketchRun
from qualms.gradients.memory import require_room
from qualms.gradients.model_input import ModelInput, call_model
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.position_input import AtPositions, classes_last
from qualms.gradients.precision import close, close_logits, coarser
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Sketch
from qualms.gradients.sketching.push import Push, PushProbe, Tangent, forward_mode, working_push
from qualms.gradients.sketching.tangents import Tangents

log = logging.getLogger("qualms")
AT_ONCE_BYTES = 2**23  # of the largest result for several tangents: more would leave the cache
SEVERAL = 4  # tangents that are pushed at once even so, as far as the budget allows
COMPARED = 64  # positions at which the logits are compared
COPIES = 3  # of a result's derivative that a layer holds while it makes one


@torch.no_grad()
def plain_logits(model: nn.Module, class_dim: int, batch: Batch) -> Float[Tensor, "*positions c"]:
    """One forward pass over one input."""
    copies = with_tensors(
        batch, [t.clone() for t in batch_tensors(batch)]
    )  # which the model may change
    logits = classes_last(call_model(model, copies), class_dim)
    if len(logits) != 1:
        raise QualmsError(
            f"the model returns logits of shape {tuple(logits.shape)} for one input; their first axis must count "
            "the inputs."
        )
    logits = logits[0]
    if not bool(torch.isfinite(logits).all()):
        raise QualmsError(
            "the logits of an input are NaN or infinite; check the model's weights and the input."
        )
    return logits


@dataclass(frozen=True)
class Pushed:
    """What tangents number `first` and on say of one row of an input: J s at all its positions."""

    first: int
    row: int
    logits: Float[Tensor, "t c"]
    tangents: Float[Tensor, "g t c"]


@dataclass(frozen=True)
class PositionSketch:
    """One input, ready to have tangents pushed through the model.

    `job` holds it as the only input of its batch, and the model read at all positions. `some` are
    logits of a plain pass, at the positions `at`. `held` is what whoever takes the results keeps,
    in bytes for each tangent at once.
    """

    job: GradientRequest
    learnt: PlanCache
    shape: tuple[int, int]  # positions, classes
    at: list[int]
    some: Float[Tensor, "n c"]
    held: int

    @classmethod
    def of(
        cls, job: GradientRequest, learnt: PlanCache, logits: Float[Tensor, "t c"], held: int = 0
    ) -> "PositionSketch":
        """Of an input with these logits."""
        at = torch.linspace(0, len(logits) - 1, min(COMPARED, len(logits))).round().int().tolist()
        return cls(job, learnt, (logits.shape[0], logits.shape[1]), at, logits[at].clone(), held)

    def pushed(self, lam: float | None) -> Iterator[Pushed]:
        """J s of all rows, for k tangents; with a λ, layers weighted by exp(λ(l - L))."""
        how = self.job.settings.sketch or Sketch()
        if self.job.settings.norm == "l1" or (how.combine == "sum" and lam is not None):
            raise QualmsError(
                "at many positions a sketch takes L2 norms and adds layers in quadrature; leave out norm='l1' and "
                "combine='sum', or name a few positions= and take engine='exact'."
            )
        probe, push, tangents = self._ready(how, lam)
        rows = self.job.rows(slice(0, 1))
        each = [rows.take([i]) for i in range(self.job.rows_per_sample)]
        step = self._at_once(push, tangents, probe, how.tangents)
        if step > 1 and not self._agree(push, each[0], tangents, step, probe):
            step = 1
        for first in range(0, how.tangents, step):
            some = side_by_side(tangents, first, step, how.tangents)
            for i, row in enumerate(each):
                z, dz = self._run(push, row, some, step > 1)
                if i == 0 and not close_logits(
                    z[self.at], self.some.to(z), coarser(z.dtype, probe.precision)
                ):
                    raise QualmsError(
                        "the model gives other logits in forward mode than in a plain pass, so a sketch of it cannot "
                        "be trusted; name a few positions= and use engine='exact'."
                    )
                pushed = Pushed(first, i, z, dz)
                del z, dz
                yield pushed
                del pushed  # whoever took it lets it go as well: the next pass needs the room

    def _ready(self, how: Sketch, lam: float | None) -> tuple[PushProbe, Push, Tangents]:
        """What a look at some positions tells of the model, and the way of pushing tangents that it
        confirms.

        Both are found once for inputs of one shape: a model may take another path for longer texts.
        """
        key = (
            "position push",
            self.job.rows_per_sample > 1,
            tuple(self.job.selected),
            *self.job.shapes,
        )
        kept: tuple[PushProbe, Push] | None = self.learnt.get(key)
        if kept is not None:
            return *kept, SketchRun(self.job, how, self.learnt, kept[0], None, 1).weighted_tangents(
                lam
            )
        last, model = self.shape[0] - 1, self.job.model
        assert isinstance(model, AtPositions)
        few = AtPositions(model.model, model.class_dim, sorted({0, last // 2, last}))
        probe, known = PushProbe.of(few, self.job.rows(slice(0, 1)).take([0]), self.job.selected)
        tangents = SketchRun(self.job, how, self.learnt, probe, None, 1).weighted_tangents(lam)
        push = working_push(probe, known, tangents[0])
        self.learnt.keep(key, (probe, push))
        return probe, push, tangents

    def _at_once(self, push: Push, tangents: Tangents, probe: PushProbe, number: int) -> int:
        """How many tangents to push at once: as many as fit the budget, and the cache."""
        size = self.some[:1].nbytes * self.shape[0]
        what = f"the results of an input of {self.shape[0]} positions and {self.shape[1]} classes, and derivatives,"
        one = max(COPIES * size, COPIES * probe.largest_result) + self.held
        require_room(2 * size + one, self.job.limit, what)
        if push is not forward_mode:
            return 1
        fits = (self.job.budget - 2 * size) // one
        cached = AT_ONCE_BYTES // max(size, probe.largest_result)
        most = max(1, min(number, fits, max(SEVERAL, cached), tangents.at_once))
        return -(-number // -(-number // most))  # groups of nearly equal size

    def _agree(
        self, push: Push, row: ModelInput, tangents: Tangents, step: int, probe: PushProbe
    ) -> bool:
        """Whether several tangents at once give what one gives, found out once for inputs of one
        kind.
        """

        def compare() -> bool:
            try:
                one = self._run(push, row, tangents[0], False)
                several = self._run(push, row, side_by_side(tangents, 0, step, step), True)
                rounds = coarser(one[0].dtype, probe.precision)
                logits = close_logits(several[0][self.at], one[0][self.at], rounds)
                return logits and close(several[1][0, self.at], one[1][0, self.at], rounds)
            except Exception as error:
                log.info("%s: tangents are pushed one at a time", error)
                return False

        kinds = tuple((t.ndim, t.dtype) for t in batch_tensors(self.job.batch))
        return self.learnt.once(
            ("position several", self.job.rows_per_sample > 1, tuple(self.job.selected), *kinds),
            compare,
        )

    def _run(
        self, push: Push, row: ModelInput, some: Tangent, several: bool
    ) -> tuple[Tensor, Tensor]:
        """The logits [t, c], and J s [g, t, c]."""
        if several:
            z, dz = forward_mode(self.job.model, row, some, several=True)
            z = z[0]
        else:
            z, dz = push(self.job.model, row, some)
        return z.view(self.shape), dz.view(-1, *self.shape)


def side_by_side(tangents: Tangents, first: int, size: int, number: int) -> Tangent:
    """Tangents from number `first` on, [size, …] for each parameter; a single one as it is."""
    if size == 1:
        return tangents[first]
    whole = tangents.at_once // size * size
    start = first // whole * whole
    stacked = tangents.stacked(start, min(start + whole, number))
    return {name: s[first - start : first - start + size] for name, s in stacked.items()}
