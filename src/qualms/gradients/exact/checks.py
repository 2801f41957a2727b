"""When may the recorded pieces be believed? Each check compares them, or what they rest on, with something simpler.

- The first row's gradient is also computed by plain autograd (`probe.py`).
- No parameter may reach the logits around its stand-in: the graph itself is searched for it (`watch/forward.py`).
- The logits of a chunk must not change when its rows are run in other company: rows that influence each other do.
- If the model picks or places rows by an index that depends on the input, a cotangent on some inputs must leave the
  gradients of all others at exactly zero.

Whatever fails is run by plain autograd, one row at a time, which is right by definition.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.exact.measure import measure
from qualms.gradients.inputs import Unclear, count
from qualms.gradients.job import Job
from qualms.gradients.precision import close_logits
from qualms.gradients.rows import Rows, logits_of
from qualms.gradients.watch.record import Recorder
from qualms.gradients.watch.weights import Weights


@torch.no_grad()
def regrouped_logits(job: Job, chunks: int) -> Float[Tensor, "b r c"]:
    """The logits of all rows from plain forward passes in other groups than the chunks of consecutive inputs.

    A group takes an input of each chunk, or every second one if there is a single chunk; and of an input's rows every
    second one.
    """
    step = min(job.inputs, max(2, chunks))
    logits: Tensor | None = None
    for start in range(step):
        on = job.rows(slice(start, None, step))
        members = count(on.batch) // on.per_input
        for parity in range(min(2, on.per_input)):
            group = [m * on.per_input + r for m in range(members) for r in range(parity, on.per_input, 2)]
            found = logits_of(job.model, on.take(group))
            if logits is None:
                logits = found.new_empty(job.inputs, on.per_input, found.shape[1])
            logits[start::step, parity::2] = found.unflatten(0, (members, -1))
    assert logits is not None
    return logits


@torch.no_grad()
def require_independent_rows(
    model: nn.Module,
    on: Rows,
    logits: Float[Tensor, "rows c"],
    regrouped: Float[Tensor, "rows c"],
    recorder: Recorder,
) -> None:
    """Rows must give the logits that they give in other company; alone, if the model reads values.

    A model that takes values out of tensors, to branch on them or to compute elsewhere, may treat a whole chunk as it
    would treat no row of it.
    """
    if recorder.reads_values:
        regrouped = torch.cat([logits_of(model, on.take([row])) for row in range(count(on.batch))])
    if not close_logits(regrouped, logits):
        raise Unclear("the inputs of a batch influence each other")


def require_separate_gradients(
    logits: Float[Tensor, "rows c"], recorder: Recorder, weights: Weights, inputs: int
) -> None:
    """For each binary digit of an input's number: a cotangent on the inputs that have it reaches no other input."""
    if inputs < 2 or not recorder.picks_rows:
        return
    digits = range(math.ceil(math.log2(inputs)))
    number = torch.arange(inputs, device=logits.device)
    chosen = torch.stack([(number >> k & 1) == side for k in digits for side in (0, 1)])  # [m, inputs]
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
    cotangents = noise * chosen.repeat_interleave(len(logits) // inputs, dim=1)[:, :, None]
    for value in measure(logits, cotangents, recorder.pieces, weights, inputs, "l2").values():
        if bool((value.T[~chosen] != 0).any()):
            raise Unclear("the model moves the inputs of a batch about")
