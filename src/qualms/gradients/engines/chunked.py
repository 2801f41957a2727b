"""One sample whose rows do not fit at once: gradients are written out and added up, part by part.

A gradient averaged over perturbed copies is a sum over rows, so it can be added up; its norm cannot.
As many gradients as there is room for are added up at the same time; for each such block of
directions the forward passes run again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import num_samples
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.measure import full_gradients, norm_of
from qualms.gradients.memory import require_room
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan import Plan
from qualms.gradients.request import GradientRequest
from qualms.gradients.tracing.recorder import Recorder
from qualms.gradients.tracing.traced_forward import trace_forward
from qualms.gradients.verify import (
    logits_in_groups,
    require_same_across_batches,
    require_same_alone,
)

Gradients = dict[str, Float[Tensor, "k p"]]  # along some directions, by the parameter's name


def accumulate_chunks(request: GradientRequest, model_input: ModelInput, plan: Plan) -> ClassNorms:
    """The norms [1, m] of one sample's gradients, from parts of its rows.

    Args:
        request: the directions are those of this sample.
        model_input: the rows of the sample.
        plan: of the model.

    Raises:
        QualmsError: if a single row and its gradient do not fit into memory.
        NotBatchable: if the rows influence each other.
    """
    require_room(plan.min_bytes, request.limit, "one row of the input and one of its gradients")
    size = plan.rows_at_once(request.budget // 2)
    work = _RowParts(request, model_input, plan, size)
    logits = work.other_logits
    held = max(1, request.budget // 4 // plan.gradient_bytes)
    directions = request.directions.along(logits[None])
    values: dict[str, Tensor] = {}
    number = 0
    for block, scales in directions.blocks():
        scale_parts = scales[:, 0].split(held)
        for some, scale in zip(block.to(logits.dtype).split(held), scale_parts, strict=True):
            for name, gradients in work.add_up(some, verify=number == 0).items():
                if name not in values:
                    values[name] = scale.new_zeros(1, directions.number)
                norms = norm_of(gradients, request.kind) * scale
                values[name][0, number : number + len(some)] = norms
            number += len(some)
    return ClassNorms(values, logits[:1], work.without_rule)


@dataclass
class _RowParts:
    """The rows of one sample, some of them at a time.

    Attributes:
        request: what is computed.
        model_input: the rows.
        plan: of the model.
        size: how many rows run at once.
        without_rule: parameters that no rule covered.
    """

    request: GradientRequest
    model_input: ModelInput
    plan: Plan
    size: int

    def __post_init__(self) -> None:
        self.without_rule: set[str] = set()
        self.rows = num_samples(self.model_input.batch)

    @cached_property
    def other_logits(self) -> Float[Tensor, "r c"]:
        """The logits of all rows, each in a group of others than it is traced with."""
        groups = -(-self.rows // self.size)
        return logits_in_groups(self.request.model, self.model_input, groups)

    def add_up(self, directions: Float[Tensor, "k r c"], verify: bool) -> Gradients:
        """The gradients along some directions, summed over all rows.

        Args:
            directions: in logit space, for each row.
            verify: whether to compare the logits of each part with those of other groups.
        """
        total: Gradients = {}
        for part in self._parts():
            logits, recorder = self._trace(part)
            if verify:
                self._verify(part, logits.detach(), recorder)
            self.without_rule |= recorder.without_rule
            for j, v in enumerate(directions):
                found = full_gradients(logits, v[part], recorder.factors, self.plan.weights)
                for name, g in found.items():
                    if name not in total:
                        total[name] = g.new_zeros(len(directions), g.numel())
                    total[name][j] += g.flatten()
        return total

    def _parts(self) -> Iterator[slice]:
        for start in range(0, self.rows, self.size):
            yield slice(start, min(start + self.size, self.rows))

    def _trace(self, part: slice) -> tuple[Tensor, Recorder]:
        plan = self.plan
        rows = replace(self.model_input.take(part), rows_per_sample=part.stop - part.start)
        return trace_forward(self.request.model, plan.reformat(rows), plan.weights, plan.trace_pair)

    def _verify(self, part: slice, logits: Tensor, recorder: Recorder) -> None:
        precision = self.plan.precision
        require_same_across_batches(logits, self.other_logits[part], precision)
        every = self.plan.must_compare_alone(recorder)
        rows = self.model_input.take(part)
        require_same_alone(self.request.model, rows, logits, every, precision)
