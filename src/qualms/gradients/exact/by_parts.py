"""One input whose rows do not fit at once: parts of its rows, their gradients written out and added up.

A gradient averaged over perturbed copies is a sum over rows, so it can be added up part by part; its norm cannot.
As many gradients as there is room for are added up at the same time; for each such block of directions the forward
passes are made again.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.exact.checks import require_same_alone, require_same_in_other_company
from qualms.gradients.exact.measure import Kind, norm_of, written_out
from qualms.gradients.exact.probe import Probe
from qualms.gradients.inputs import count
from qualms.gradients.job import Job
from qualms.gradients.measured import Measured
from qualms.gradients.memory import require_room
from qualms.gradients.rows import Rows, logits_of
from qualms.gradients.watch.forward import recorded

Gradients = dict[str, Float[Tensor, "k ..."]]  # along some directions, by the parameter's name


def by_parts(job: Job, on: Rows, kind: Kind, probe: Probe) -> Measured:
    """The norms [1, m] of one input's gradients, from parts of its rows."""
    require_room(probe.row_needs, job.limit, "one row of the input and one of its gradients")
    rows, at_once = count(on.batch), probe.rows_in(job.budget // 2)
    logits = _in_other_company(job, on, -(-rows // at_once))
    parts = [slice(i, min(i + at_once, rows)) for i in range(0, rows, at_once)]
    held = max(1, job.budget // 4 // probe.gradient_bytes)
    directions = job.directions.along(logits[None])
    values: dict[str, Tensor] = {}
    general: set[str] = set()
    number = 0
    for block, sizes in directions.blocks():
        for some, size in zip(block.to(logits.dtype).split(held), sizes[:, 0].split(held), strict=True):
            total: Gradients = {}
            for part in parts:
                z, recorder = recorded(job.model, _rows(on, part, probe), probe.weights, probe.twins)
                if number == 0:
                    require_same_in_other_company(z.detach(), logits[part], probe.precision)
                    alone = probe.compares_alone(recorder)
                    require_same_alone(job.model, on.take(part), z.detach(), alone, probe.precision)
                general |= recorder.general
                for j, v in enumerate(some):
                    for name, g in written_out(z, v[part], recorder.pieces, probe.weights).items():
                        if name not in total:
                            total[name] = g.new_zeros(len(some), g.numel())
                        total[name][j] += g.flatten()
            for name, gradients in total.items():
                if name not in values:
                    values[name] = size.new_zeros(1, directions.number)
                values[name][0, number : number + len(some)] = norm_of(gradients, kind) * size
            number += len(some)
    return Measured(values, logits[:1], general)


@torch.no_grad()
def _in_other_company(job: Job, on: Rows, groups: int) -> Float[Tensor, "r c"]:
    """The logits of all rows, each with others than the consecutive ones that make up a part."""
    rows = count(on.batch)
    members = [list(range(start, rows, groups)) for start in range(groups)]
    order = torch.tensor([row for group in members for row in group]).argsort()
    return torch.cat([logits_of(job.model, on.take(group)) for group in members])[order]


def _rows(on: Rows, part: slice, probe: Probe) -> Rows:
    return probe.formatted(replace(on.take(part), per_input=part.stop - part.start))
