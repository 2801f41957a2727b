"""One input whose rows do not fit at once: parts of its rows, their gradients written out and added
up.

A gradient averaged over perturbed copies is a sum over rows, so it can be added up part by part;
its norm cannot. As many gradients as there is room for are added up at the same time; for each such
block of directions the forward passes are made again.
"""

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import num_samples
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.engines.probe import Probe
from qualms.gradients.measure import Kind, full_gradients, norm_of
from qualms.gradients.memory import require_room
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.request import GradientRequest
from qualms.gradients.tracing.traced_forward import trace_forward
from qualms.gradients.verify import require_same_across_batches, require_same_alone

Gradients = dict[str, Float[Tensor, "k ..."]]  # along some directions, by the parameter's name


def accumulate_chunks(job: GradientRequest, on: ModelInput, kind: Kind, probe: Probe) -> ClassNorms:
    """The norms [1, m] of one input's gradients, from parts of its rows."""
    require_room(probe.row_needs, job.limit, "one row of the input and one of its gradients")
    rows, at_once = num_samples(on.batch), probe.rows_in(job.budget // 2)
    logits = _in_other_company(job, on, -(-rows // at_once))
    parts = [slice(i, min(i + at_once, rows)) for i in range(0, rows, at_once)]
    held = max(1, job.budget // 4 // probe.gradient_bytes)
    directions = job.directions.along(logits[None])
    values: dict[str, Tensor] = {}
    general: set[str] = set()
    number = 0
    for block, sizes in directions.blocks():
        for some, size in zip(
            block.to(logits.dtype).split(held), sizes[:, 0].split(held), strict=True
        ):
            total: Gradients = {}
            for part in parts:
                z, recorder = trace_forward(
                    job.model, _rows(on, part, probe), probe.weights, probe.trace_pair
                )
                if number == 0:
                    require_same_across_batches(z.detach(), logits[part], probe.precision)
                    alone = probe.compares_alone(recorder)
                    require_same_alone(job.model, on.take(part), z.detach(), alone, probe.precision)
                general |= recorder.without_rule
                for j, v in enumerate(some):
                    for name, g in full_gradients(
                        z, v[part], recorder.factors, probe.weights
                    ).items():
                        if name not in total:
                            total[name] = g.new_zeros(len(some), g.numel())
                        total[name][j] += g.flatten()
            for name, gradients in total.items():
                if name not in values:
                    values[name] = size.new_zeros(1, directions.number)
                values[name][0, number : number + len(some)] = norm_of(gradients, kind) * size
            number += len(some)
    return ClassNorms(values, logits[:1], general)


@torch.no_grad()
def _in_other_company(job: GradientRequest, on: ModelInput, groups: int) -> Float[Tensor, "r c"]:
    """The logits of all rows, each with others than the consecutive ones that make up a part."""
    rows = num_samples(on.batch)
    members = [list(range(start, rows, groups)) for start in range(groups)]
    order = torch.tensor([row for group in members for row in group]).argsort()
    return torch.cat([forward_logits(job.model, on.take(group)) for group in members])[order]


def _rows(on: ModelInput, part: slice, probe: Probe) -> ModelInput:
    return probe.reformat(replace(on.take(part), rows_per_sample=part.stop - part.start))
