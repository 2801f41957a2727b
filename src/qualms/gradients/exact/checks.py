"""When may the recorded pieces be believed? Each test here compares them, or what they rest on, with something simpler.

- The first row's gradient is also computed by plain autograd (`probe.py`).
- No parameter may reach the logits around its stand-in: the graph itself is searched for it.
- The logits of a chunk must not change when its rows are run in other company: rows that influence each other do.
- If the model picks or places rows by an index that depends on the input, a cotangent on some inputs must leave the
  gradients of all others at exactly zero.

Whatever fails is run by plain autograd, one row at a time, which is right by definition.
"""

import math
from collections.abc import Callable, Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.exact.measure import measure
from qualms.gradients.inputs import count
from qualms.gradients.smoothing import Rows, logits_of
from qualms.gradients.watch.layout import Unclear
from qualms.gradients.watch.record import Recorder
from qualms.gradients.watch.weights import Weights, leaves_behind

# Rounding, nothing more; 16-bit numbers are coarse.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 0.1
MASKED = 100.0  # below the largest logit: a class without any probability
NOTHING = 1e-6  # of the largest row, which is rounding in a row of zeros


def close(have: Float[Tensor, "rows n"], want: Float[Tensor, "rows n"]) -> bool:
    """Whether two tensors are the same but for rounding, each row measured by its largest entry."""
    return have.shape == want.shape and _within(have, want, want.abs().amax(-1, keepdim=True))


def close_logits(have: Float[Tensor, "rows c"], want: Float[Tensor, "rows c"]) -> bool:
    """The same for logits, where classes that are masked by a huge negative number set no measure for the others."""
    if have.shape != want.shape:
        return False
    live = want >= want.amax(-1, keepdim=True) - MASKED
    return _within(have, want, torch.where(live, want, 0.0).abs().amax(-1, keepdim=True).maximum(want.abs() * ~live))


def _within(have: Tensor, want: Tensor, scale: Tensor) -> bool:
    tolerance = TOLERANCE.get(want.dtype, COARSE)
    return bool(((have - want).abs() <= tolerance * (scale + NOTHING * scale.max())).all())


def same_norms(found: dict[str, Tensor], expected: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether the squared norms of all parameters are what plain autograd says."""
    scale = sum(expected.values()) ** 0.5
    tolerance = TOLERANCE.get(dtype, COARSE)
    for name in found.keys() | expected.keys():
        have = float(found[name].sum()) ** 0.5 if name in found else 0.0
        want = expected.get(name, 0.0) ** 0.5
        if abs(have - want) > tolerance * max(have, want) + tolerance * 1e-2 * scale:
            return False
    return True


def require_no_bypass(logits: Tensor, parameters: Iterable[Tensor]) -> None:
    """A parameter that is used where function modes do not look (a script, an autograd function) is in the graph."""
    if not leaves_behind([logits.grad_fn]).isdisjoint(map(id, parameters)):
        raise Unclear("a parameter is used where it cannot be watched")


@torch.no_grad()
def regrouped_logits(
    model: nn.Module, inputs: int, rows_for: Callable[[slice], Rows], chunks: int
) -> Float[Tensor, "b r c"]:
    """The logits of all rows from plain forward passes in other groups than the chunks of consecutive inputs.

    A group takes an input of each chunk, or every second one if there is a single chunk; and of an input's rows every
    second one.
    """
    step = min(inputs, max(2, chunks))
    logits: Tensor | None = None
    for start in range(step):
        on = rows_for(slice(start, None, step))
        members = count(on.batch) // on.per_input
        for parity in range(min(2, on.per_input)):
            group = [m * on.per_input + r for m in range(members) for r in range(parity, on.per_input, 2)]
            found = logits_of(model, on.take(group))
            if logits is None:
                logits = found.new_empty(inputs, on.per_input, found.shape[1])
            logits[start::step, parity::2] = found.unflatten(0, (members, -1))
    assert logits is not None
    return logits


@torch.no_grad()
def require_independent_rows(
    model: nn.Module,
    on: Rows,
    logits: Float[Tensor, "rows c"],
    in_other_company: Float[Tensor, "rows c"],
    recorder: Recorder,
) -> None:
    """Rows must give the logits that they give in other company; alone, if the model reads values.

    A model that takes values out of tensors, to branch on them or to compute elsewhere, may treat a whole chunk as it
    would treat no row of it.
    """
    if recorder.reads_values:
        in_other_company = torch.cat([logits_of(model, on.take([row])) for row in range(count(on.batch))])
    if not close_logits(in_other_company, logits):
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
