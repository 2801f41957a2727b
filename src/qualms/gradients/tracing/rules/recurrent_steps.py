"""LSTM, GRU and RNN step by step, and linearized: what fused kernels compute, for both modes of
differentiation.

With gates p_t = W x_t + b, the part of the pre-activations that needs no step before it, a layer is
the recursion

    LSTM    i, f, g, o = σ, σ, tanh, σ of p_t + U h',    c = f c' + i g,    h = o tanh c
    GRU     r, z = σ of p_t + q,    n = tanh(p_t + r q),    q = U h' + b',    h = (1 - z) n + z h'
    RNN     h = tanh or ReLU of p_t + U h'

in which a prime marks the step before. Its derivative at each step is a handful of products with
coefficients that depend on the values alone: they are computed once, for all steps together, and
serve every cotangent that is pulled back and every tangent that is pushed forward. What the fused
kernels cannot say, the cotangent δ_t of p_t, is all that the gradients of the weights need: ∂W =
Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h'ᵀ.

Tensors have time first here: [t, n, feature].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

State = tuple[Tensor, ...]  # h, and c of an LSTM: each [n, h]
Coefficients = tuple[Tensor, ...]  # of all steps
Gates = Float[Tensor, "t n g"]
Hidden = Float[Tensor, "t n h"]


@dataclass(frozen=True)
class Recursion:
    """A kind of recurrent layer.

    Args:
        run: from p, U, b' (GRU's) and the state before the first step to h [t, n, h], the state
            after the last step and the coefficients.
        pull: from the coefficients, U and the cotangents of h [t, n, h] and of c after the last
            step to the cotangents of p and of the state before the first step.
        push: from the coefficients, U and the tangents of p and of the state before the first step
            to those of h and of the state after the last step.
    """

    run: Callable[[Gates, Tensor, Tensor | None, State], tuple[Hidden, State, Coefficients]]
    pull: Callable[[Coefficients, Tensor, Hidden, Tensor | None], tuple[Gates, State]]
    push: Callable[[Coefficients, Tensor, Gates, State], tuple[Hidden, State]]


def shift_steps(first: Float[Tensor, "n h"], later: Hidden) -> Hidden:
    """The state before each step, from the first one and those after all steps."""
    return torch.cat([first.unsqueeze(0), later[:-1]])


def state_scale(kind: str, coefficients: Coefficients) -> Float[Tensor, "t n g"] | None:
    """∂p/∂q where U h' + b' does not simply add to p: 1, 1 and r for the gates r, z and n of a GRU."""
    return coefficients[1].flatten(2) if kind == "gru" else None


def _lstm(
    gates: Gates, weight: Tensor, bias: Tensor | None, state: State
) -> tuple[Hidden, State, Coefficients]:
    """With the coefficients ∂c/∂(i, f, g) beside ∂h/∂o, ∂h/∂c and ∂c/∂c'."""
    (h, c), across, size = state, weight.t(), weight.shape[1]
    inner = torch.empty_like(gates)
    every_h, every_c = (gates.new_empty(len(gates), *h.shape) for _ in range(2))
    for p, s, of_h, of_c in zip(
        *(t.unbind(0) for t in (gates, inner, every_h, every_c)), strict=True
    ):
        p = torch.addmm(p, h, across)
        torch.sigmoid(p, out=s)
        i, f, g, o = s.chunk(4, dim=1)
        torch.tanh(p[:, 2 * size : 3 * size], out=g)
        c = torch.addcmul(f * c, i, g, out=of_c)
        h = torch.mul(o, c.tanh(), out=of_h)
    i, f, g, o = inner.unflatten(-1, (4, -1)).unbind(2)
    seen = every_c.tanh()
    into_c = [g * i * (1 - i), shift_steps(state[1], every_c) * f * (1 - f), i * (1 - g * g)]
    into = torch.stack([*into_c, seen * o * (1 - o)], dim=2)
    return every_h, (h, c.clone()), (into, o * (1 - seen * seen), f.contiguous())


def _lstm_pull(
    coefficients: Coefficients, weight: Tensor, dh: Hidden, dc: Tensor | None
) -> tuple[Gates, State]:
    steps, n, size = dh.shape
    gates = dh.new_empty(steps, n, 4, size)
    into, *others = coefficients
    parts = (
        into[:, :, :3],
        into[:, :, 3],
        *others,
        gates[:, :, :3],
        gates[:, :, 3],
        gates.flatten(2),
    )
    backwards = zip(*(t.unbind(0)[::-1] for t in parts), strict=True)
    own = dh.unbind(0)
    d = own[-1]
    for left, (into_c, into_h, through, kept, of_c, of_o, whole) in zip(
        reversed(range(steps)), backwards, strict=True
    ):
        dc = d * through if dc is None else torch.addcmul(dc, d, through)
        torch.mul(dc.unsqueeze(1), into_c, out=of_c)
        torch.mul(d, into_h, out=of_o)
        dc = dc * kept
        d = torch.addmm(own[left - 1], whole, weight) if left else whole @ weight
    assert dc is not None
    return gates.flatten(2), (d, dc)


def _lstm_push(
    coefficients: Coefficients, weight: Tensor, dp: Gates, state: State
) -> tuple[Hidden, State]:
    (h, c), across, hs = state, weight.t(), []
    into, *others = coefficients
    every = (t.unbind(0) for t in (dp, into.flatten(2), *others))
    for p, slope, through, kept in zip(*every, strict=True):
        i, f, g, o = (torch.addmm(p, h, across) * slope).chunk(4, dim=1)
        c = torch.addcmul(i, kept, c) + (f + g)
        h = torch.addcmul(o, through, c)
        hs.append(h)
    return torch.stack(hs), (h, c)


def _gru(
    gates: Gates, weight: Tensor, bias: Tensor | None, state: State
) -> tuple[Hidden, State, Coefficients]:
    """With the coefficients ∂h/∂p, ∂p/∂q and ∂h/∂h' past the gates."""
    (h,), across, size = state, weight.t(), weight.shape[1]
    inner: list[Tensor] = []
    hs: list[Tensor] = []
    for p in gates.unbind(0):
        q = h @ across if bias is None else torch.addmm(bias, h, across)
        rz = (p[:, : 2 * size] + q[:, : 2 * size]).sigmoid()
        r, z = rz.chunk(2, dim=1)
        n = torch.addcmul(p[:, 2 * size :], r, q[:, 2 * size :]).tanh()
        h = torch.lerp(n, h, z)
        inner.append(torch.cat([rz, n, q[:, 2 * size :]], dim=1))
        hs.append(h)
    r, z, n, q = torch.stack(inner).unflatten(-1, (4, -1)).unbind(2)
    every_h, ones = torch.stack(hs), torch.ones_like(r)
    of_n = (1 - z) * (1 - n * n)
    into_h = torch.stack(
        [of_n * q * r * (1 - r), (shift_steps(state[0], every_h) - n) * z * (1 - z), of_n], dim=2
    )
    return every_h, (h,), (into_h, torch.stack([ones, ones, r], dim=2), z.contiguous())


def _rnn(
    activation: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]
) -> Callable[..., Any]:
    """With the coefficients of a GRU. The slope is that at the activation's result."""

    def run(
        gates: Gates, weight: Tensor, bias: Tensor | None, state: State
    ) -> tuple[Hidden, State, Coefficients]:
        (h,), across, hs = state, weight.t(), []
        for p in gates.unbind(0):
            h = activation(torch.addmm(p, h, across))
            hs.append(h)
        every_h = torch.stack(hs)
        return (
            every_h,
            (h,),
            (slope(every_h).unsqueeze(2), h.new_ones(len(hs), 1, 1, 1), h.new_zeros(len(hs), 1, 1)),
        )

    return run


def _plain_pull(
    coefficients: Coefficients, weight: Tensor, dh: Hidden, dc: Tensor | None
) -> tuple[Gates, State]:
    """For layers whose state is their output h: dh' = past · dh + (scale · δ) U, δ = dh · ∂h/∂p."""
    gates = torch.empty_like(coefficients[0])
    d: Tensor | None = None
    for into_h, scale, past, of_p, own in zip(
        *(t.unbind(0)[::-1] for t in (*coefficients, gates, dh)), strict=True
    ):
        d = own if d is None else d + own
        torch.mul(d.unsqueeze(1), into_h, out=of_p)
        d = torch.addmm(d * past, (of_p * scale).flatten(1), weight)
    assert d is not None
    return gates.flatten(2), (d,)


def _plain_push(
    coefficients: Coefficients, weight: Tensor, dp: Gates, state: State
) -> tuple[Hidden, State]:
    into_h, scale, past = coefficients
    (h,), across, hs = state, weight.t(), []
    given, by_state = (dp.view_as(into_h) * into_h).sum(2), into_h * scale
    for own, through, kept in zip(given.unbind(0), by_state.unbind(0), past.unbind(0), strict=True):
        h = torch.addcmul(own, kept, h) + ((h @ across).view_as(through) * through).sum(1)
        hs.append(h)
    return torch.stack(hs), (h,)


RECURSIONS = {
    "lstm": Recursion(_lstm, _lstm_pull, _lstm_push),
    "gru": Recursion(_gru, _plain_pull, _plain_push),
    "rnn_tanh": Recursion(_rnn(torch.tanh, lambda h: 1 - h * h), _plain_pull, _plain_push),
    "rnn_relu": Recursion(_rnn(torch.relu, lambda h: (h > 0).to(h)), _plain_pull, _plain_push),
}
