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
kernels do not return, the cotangent δ_t of p_t, is all that the gradients of the weights need: ∂W =
Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h'ᵀ.

Tensors have time first here: [t, n, feature].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

State = tuple[Tensor, ...]  # h, and c of an LSTM: each [n, h]
Coefficients = tuple[Tensor, ...]  # of all steps
Gates = Float[Tensor, "t n g"]
Hidden = Float[Tensor, "t n h"]
RunFn = Callable[[Gates, Tensor, Tensor | None, State], tuple[Hidden, State, Coefficients]]


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

    run: RunFn
    pull: Callable[[Coefficients, Tensor, Hidden, Tensor | None], tuple[Gates, State]]
    push: Callable[[Coefficients, Tensor, Gates, State], tuple[Hidden, State]]


def shift_steps(first: Float[Tensor, "n h"], later: Hidden) -> Hidden:
    """The state before each step, from the first one and those after all steps."""
    return torch.cat([first.unsqueeze(0), later[:-1]])


def state_scale(kind: str, coefficients: Coefficients) -> Float[Tensor, "t n g"] | None:
    """∂p/∂q where U h' + b' does not simply add to p: 1, 1 and r for the gates r, z and n of a GRU.

    None for other kinds, where it does.
    """
    return coefficients[1].flatten(2) if kind == "gru" else None


# LSTM


def _lstm_run(
    gates: Gates, weight: Tensor, bias: Tensor | None, state: State
) -> tuple[Hidden, State, Coefficients]:
    """h = o tanh c, c = f c' + i g.

    Args:
        gates: p.
        weight: U.
        bias: None; b' is part of p.
        state: (h, c) before the first step.

    Returns:
        h, the last state, and the coefficients: ∂c/∂(i, f, g) and ∂h/∂o [t, n, 4, h], ∂h/∂c and
        ∂c/∂c' [t, n, h].
    """
    h, c = state
    across, size, steps = weight.t(), weight.shape[1], len(gates)
    inner = torch.empty_like(gates)  # i, f, g, o
    all_h = gates.new_empty(steps, *h.shape)
    all_c = gates.new_empty(steps, *h.shape)
    for projected, activated, out_h, out_c in zip(gates, inner, all_h, all_c, strict=True):
        p = torch.addmm(projected, h, across)
        torch.sigmoid(p, out=activated)
        i, f, g, o = activated.chunk(4, dim=1)
        torch.tanh(p[:, 2 * size : 3 * size], out=g)
        c = torch.addcmul(f * c, i, g, out=out_c)
        h = torch.mul(o, c.tanh(), out=out_h)
    i, f, g, o = inner.unflatten(-1, (4, -1)).unbind(2)
    tanh_c = all_c.tanh()
    to_i = g * i * (1 - i)
    to_f = shift_steps(state[1], all_c) * f * (1 - f)
    to_g = i * (1 - g * g)
    to_o = tanh_c * o * (1 - o)
    from_gates = torch.stack([to_i, to_f, to_g, to_o], dim=2)
    return all_h, (h, c.clone()), (from_gates, o * (1 - tanh_c * tanh_c), f.contiguous())


def _lstm_pull(
    coefficients: Coefficients, weight: Tensor, dh: Hidden, dc: Tensor | None
) -> tuple[Gates, State]:
    """δ_i, δ_f, δ_g = dc ∂c/∂(i, f, g), δ_o = dh ∂h/∂o, dc += dh ∂h/∂c, dc' = dc ∂c/∂c', dh' = δ U.

    Args:
        coefficients: of `_lstm_run`.
        weight: U.
        dh: cotangents of h.
        dc: cotangent of c after the last step.
    """
    steps, n, size = dh.shape
    gates = dh.new_empty(steps, n, 4, size)
    from_gates, *others = coefficients
    c_to_h, c_to_c = (t.unbind(0) for t in others)
    ifg_to_c, o_to_h = from_gates[:, :, :3].unbind(0), from_gates[:, :, 3].unbind(0)
    delta_ifg, delta_o = gates[:, :, :3].unbind(0), gates[:, :, 3].unbind(0)
    delta, own = gates.flatten(2).unbind(0), dh.unbind(0)
    d = own[-1]
    for t in reversed(range(steps)):
        dc = d * c_to_h[t] if dc is None else torch.addcmul(dc, d, c_to_h[t])
        torch.mul(dc.unsqueeze(1), ifg_to_c[t], out=delta_ifg[t])
        torch.mul(d, o_to_h[t], out=delta_o[t])
        dc = dc * c_to_c[t]
        d = torch.addmm(own[t - 1], delta[t], weight) if t else delta[t] @ weight
    assert dc is not None
    return gates.flatten(2), (d, dc)


def _lstm_push(
    coefficients: Coefficients, weight: Tensor, dp: Gates, state: State
) -> tuple[Hidden, State]:
    """ċ = ∂c/∂(i, f, g) q̇ + ∂c/∂c' ċ', ḣ = ∂h/∂o q̇ + ∂h/∂c ċ, with q̇ = ṗ + U ḣ'.

    Args:
        coefficients: of `_lstm_run`.
        weight: U.
        dp: tangents of p.
        state: tangents of (h, c) before the first step.
    """
    h, c = state
    across = weight.t()
    from_gates, c_to_h, c_to_c = coefficients
    hs: list[Tensor] = []
    steps = zip(dp, from_gates.flatten(2), c_to_h, c_to_c, strict=True)
    for p, slope, to_h, to_c in steps:
        i, f, g, o = (torch.addmm(p, h, across) * slope).chunk(4, dim=1)
        c = torch.addcmul(i, to_c, c) + (f + g)
        h = torch.addcmul(o, to_h, c)
        hs.append(h)
    return torch.stack(hs), (h, c)


# GRU and RNN


def _gru_run(
    gates: Gates, weight: Tensor, bias: Tensor | None, state: State
) -> tuple[Hidden, State, Coefficients]:
    """h = (1 - z) n + z h'.

    Args:
        gates: p.
        weight: U.
        bias: b'.
        state: (h,) before the first step.

    Returns:
        h, the last state, and the coefficients: ∂h/∂p and ∂p/∂q [t, n, 3, h], and ∂h/∂h' past the
        gates [t, n, h].
    """
    (h,) = state
    across, size = weight.t(), weight.shape[1]
    inner: list[Tensor] = []
    hs: list[Tensor] = []
    for p in gates.unbind(0):
        q = h @ across if bias is None else torch.addmm(bias, h, across)
        p_rz, p_n = p[:, : 2 * size], p[:, 2 * size :]
        q_rz, q_n = q[:, : 2 * size], q[:, 2 * size :]
        rz = (p_rz + q_rz).sigmoid()
        r, z = rz.chunk(2, dim=1)
        n = torch.addcmul(p_n, r, q_n).tanh()
        h = torch.lerp(n, h, z)
        inner.append(torch.cat([rz, n, q_n], dim=1))
        hs.append(h)
    r, z, n, q_n = torch.stack(inner).unflatten(-1, (4, -1)).unbind(2)
    all_h, ones = torch.stack(hs), torch.ones_like(r)
    to_n = (1 - z) * (1 - n * n)
    to_r = to_n * q_n * r * (1 - r)
    to_z = (shift_steps(state[0], all_h) - n) * z * (1 - z)
    from_gates = torch.stack([to_r, to_z, to_n], dim=2)
    scale = torch.stack([ones, ones, r], dim=2)
    return all_h, (h,), (from_gates, scale, z.contiguous())


def _rnn_run(activation: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> RunFn:
    """The recursion of an RNN, with the coefficients of a GRU.

    Args:
        activation: tanh or ReLU.
        slope: its derivative, from its result.
    """

    def run(
        gates: Gates, weight: Tensor, bias: Tensor | None, state: State
    ) -> tuple[Hidden, State, Coefficients]:
        """h = activation(p + U h').

        Args:
            gates: p.
            weight: U.
            bias: None; b' is part of p.
            state: (h,) before the first step.
        """
        (h,) = state
        across = weight.t()
        hs: list[Tensor] = []
        for p in gates.unbind(0):
            h = activation(torch.addmm(p, h, across))
            hs.append(h)
        all_h = torch.stack(hs)
        scale = h.new_ones(len(hs), 1, 1, 1)
        past = h.new_zeros(len(hs), 1, 1)
        return all_h, (h,), (slope(all_h).unsqueeze(2), scale, past)

    return run


def _tanh_slope(h: Tensor) -> Tensor:
    return 1 - h * h


def _relu_slope(h: Tensor) -> Tensor:
    return (h > 0).to(h)


def _plain_pull(
    coefficients: Coefficients, weight: Tensor, dh: Hidden, dc: Tensor | None
) -> tuple[Gates, State]:
    """For layers whose state is h alone: δ = dh · ∂h/∂p, dh' = past · dh + (scale · δ) U.

    Args:
        coefficients: of `_gru_run`: ∂h/∂p, scale, past.
        weight: U.
        dh: cotangents of h.
        dc: None.
    """
    gates = torch.empty_like(coefficients[0])
    from_gates, scale, past = (t.unbind(0) for t in coefficients)
    delta, own = gates.unbind(0), dh.unbind(0)
    d: Tensor | None = None
    for t in reversed(range(len(own))):
        d = own[t] if d is None else d + own[t]
        torch.mul(d.unsqueeze(1), from_gates[t], out=delta[t])
        d = torch.addmm(d * past[t], (delta[t] * scale[t]).flatten(1), weight)
    assert d is not None
    return gates.flatten(2), (d,)


def _plain_push(
    coefficients: Coefficients, weight: Tensor, dp: Gates, state: State
) -> tuple[Hidden, State]:
    """For layers whose state is h alone: ḣ = ∂h/∂p · (ṗ + scale · U ḣ') + past · ḣ'.

    Args:
        coefficients: of `_gru_run`: ∂h/∂p, scale, past.
        weight: U.
        dp: tangents of p.
        state: tangent of (h,) before the first step.
    """
    from_gates, scale, past = coefficients
    (h,) = state
    across = weight.t()
    hs: list[Tensor] = []
    of_input = (dp.view_as(from_gates) * from_gates).sum(2)
    of_state = from_gates * scale
    for own, slope, kept in zip(of_input, of_state, past, strict=True):
        into_gates = (h @ across).view_as(slope)
        h = torch.addcmul(own, kept, h) + (into_gates * slope).sum(1)
        hs.append(h)
    return torch.stack(hs), (h,)


RECURSIONS = {
    "lstm": Recursion(_lstm_run, _lstm_pull, _lstm_push),
    "gru": Recursion(_gru_run, _plain_pull, _plain_push),
    "rnn_tanh": Recursion(_rnn_run(torch.tanh, _tanh_slope), _plain_pull, _plain_push),
    "rnn_relu": Recursion(_rnn_run(torch.relu, _relu_slope), _plain_pull, _plain_push),
}
