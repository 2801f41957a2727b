"""LSTM, GRU and RNN step by step, with their derivatives in reverse and in forward mode.

Let p_t = W x_t + b, called the gates here, be the part of the gates' pre-activations that does not
depend on the step before. A layer is the recursion

    LSTM    i, f, g, o = σ, σ, tanh, σ of p_t + U h',    c = f c' + i g,    h = o tanh c
    GRU     r, z = σ of p_t + q,    n = tanh(p_t + r q),    q = U h' + b',    h = (1 - z) n + z h'
    RNN     h = tanh or ReLU of p_t + U h'

in which a prime marks the step before. The derivative of a step is a few products with coefficients
that depend on the forward pass alone. They are computed once, for all steps together, and used for
every cotangent that is pulled back and every tangent that is pushed forward. The gradients of the
weights need only the cotangent δ_t of p_t, which torch's fused kernels do not return: ∂W = Σ_t δ_t
x_tᵀ, ∂U = Σ_t δ_t h'ᵀ.

Tensors have time first here: [t, n, feature].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM: each [n, h]
# Partial derivatives of all steps, kept by a `run` function.
Coefficients = tuple[Tensor, ...]
Gates = Float[Tensor, "t n g"]
Hidden = Float[Tensor, "t n h"]
RunFn = Callable[[Gates, Tensor, Tensor | None, State], tuple[Hidden, State, Coefficients]]


@dataclass(frozen=True)
class Recursion:
    """A kind of recurrent layer: its forward pass, and both modes of differentiation.

    p is the part of the gates' pre-activations that comes from the input, and U the weight of the
    state. The coefficients are partial derivatives, which `run` computes for `pull` and `push`.

    Args:
        run: maps p, U, b' (of a GRU) and the state before the first step to h [t, n, h], the state
            after the last step and the coefficients.
        pull: reverse mode: maps the coefficients, U and the cotangents of h [t, n, h] and of c
            after the last step to the cotangents of p and of the state before the first step.
        push: forward mode: maps the coefficients, U and the tangents of p and of the state before
            the first step to the tangents of h and of the state after the last step.
    """

    run: RunFn
    pull: Callable[[Coefficients, Tensor, Hidden, Tensor | None], tuple[Gates, State]]
    push: Callable[[Coefficients, Tensor, Gates, State], tuple[Hidden, State]]


def shift_steps(first: Float[Tensor, "n h"], later: Hidden) -> Hidden:
    """Return the states h' before each step: `first`, then all of `later` but the last.

    Args:
        first: the state before the first step.
        later: the states after each step.
    """
    return torch.cat([first.unsqueeze(0), later[:-1]])


def state_scale(kind: str, coefficients: Coefficients) -> Float[Tensor, "t n g"] | None:
    """Return the factor of q = U h' + b' in the gates of a GRU: 1, 1 and r for r, z and n.

    None for other kinds of layer, in which q is added to p as it is.

    Args:
        kind: kind of layer, a key of `RECURSIONS`.
        coefficients: what the layer's `run` function returned.
    """
    return coefficients[1].flatten(2) if kind == "gru" else None


# LSTM


def _lstm_run(
    gates: Gates, weight: Tensor, bias: Tensor | None, state: State
) -> tuple[Hidden, State, Coefficients]:
    """Run all steps of an LSTM: c = f c' + i g, h = o tanh c.

    Args:
        gates: p [t, n, 4h], for i, f, g, o: W x plus both biases, without the term U h'.
        weight: U [4h, h].
        bias: None; b' is part of p.
        state: (h, c) before the first step.

    Returns:
        h of all steps, the state after the last step, and the coefficients: ∂c/∂(i, f, g) and ∂h/∂o
        with respect to pre-activations, stacked [t, n, 4, h]; ∂h/∂c and ∂c/∂c' [t, n, h].
    """
    h, c = state
    across, size, steps = weight.t(), weight.shape[1], len(gates)
    # I, f, g, o after activation, written in place below.
    inner = torch.empty_like(gates)
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
    # A view of `all_c` would keep the cells of all steps in memory.
    return all_h, (h, c.clone()), (from_gates, o * (1 - tanh_c * tanh_c), f.contiguous())


def _lstm_pull(
    coefficients: Coefficients, weight: Tensor, dh: Hidden, dc: Tensor | None
) -> tuple[Gates, State]:
    """Pull cotangents back through all steps of an LSTM, last step first.

    dc += dh ∂h/∂c,  δ_i, δ_f, δ_g = dc ∂c/∂(i, f, g),  δ_o = dh ∂h/∂o,
    dc' = dc ∂c/∂c',  dh' = δ U.

    Args:
        coefficients: the partial derivatives that `_lstm_run` returned.
        weight: U [4h, h].
        dh: cotangents of h at all steps, from the layers above.
        dc: cotangent of c after the last step.

    Returns:
        δ, the cotangents of p, and the cotangents of (h, c) before the first step.
    """
    steps, n, size = dh.shape
    gates = dh.new_empty(steps, n, 4, size)
    from_gates, *others = coefficients
    c_to_h, c_to_c = (t.unbind(0) for t in others)
    ifg_to_c, o_to_h = from_gates[:, :, :3].unbind(0), from_gates[:, :, 3].unbind(0)
    # Views of `gates`, one for each step, that δ is written to.
    delta_ifg, delta_o = gates[:, :, :3].unbind(0), gates[:, :, 3].unbind(0)
    delta, from_above = gates.flatten(2).unbind(0), dh.unbind(0)
    d = from_above[-1]
    for t in reversed(range(steps)):
        dc = d * c_to_h[t] if dc is None else torch.addcmul(dc, d, c_to_h[t])
        torch.mul(dc.unsqueeze(1), ifg_to_c[t], out=delta_ifg[t])
        torch.mul(d, o_to_h[t], out=delta_o[t])
        dc = dc * c_to_c[t]
        d = torch.addmm(from_above[t - 1], delta[t], weight) if t else delta[t] @ weight
    assert dc is not None
    return gates.flatten(2), (d, dc)


def _lstm_push(
    coefficients: Coefficients, weight: Tensor, dp: Gates, state: State
) -> tuple[Hidden, State]:
    """Push tangents (dotted) forward through all steps of an LSTM.

    ċ = ∂c/∂(i, f, g) q̇ + ∂c/∂c' ċ',  ḣ = ∂h/∂o q̇ + ∂h/∂c ċ,  with q̇ = ṗ + U ḣ'.

    Args:
        coefficients: the partial derivatives that `_lstm_run` returned.
        weight: U [4h, h].
        dp: tangents of p.
        state: tangents of (h, c) before the first step.

    Returns:
        The tangents of h at all steps, and of the state after the last step.
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
    """Run all steps of a GRU: h = (1 - z) n + z h'.

    Args:
        gates: p [t, n, 3h], for r, z, n: W x + b, without q = U h' + b'.
        weight: U [3h, h].
        bias: b' [3h].
        state: (h,) before the first step.

    Returns:
        h of all steps, the state after the last step, and the coefficients: ∂h/∂p and the factor of
        q in the gates (`state_scale`), both [t, n, 3, h], and ∂h/∂h' at fixed gates [t, n, h].
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
    """Build the `run` function of an RNN; its coefficients have the meaning of a GRU's.

    Args:
        activation: tanh or ReLU.
        slope: maps the activation's result to its derivative.
    """

    def run(
        gates: Gates, weight: Tensor, bias: Tensor | None, state: State
    ) -> tuple[Hidden, State, Coefficients]:
        """Run all steps of an RNN: h = activation(p + U h').

        Args:
            gates: p [t, n, h]: W x plus both biases, without the term U h'.
            weight: U [h, h].
            bias: None; b' is part of p.
            state: (h,) before the first step.

        Returns:
            h of all steps, the state after the last step, and the coefficients: ∂h/∂p [t, n, 1, h],
            and in place of a GRU's others, 1 and 0, to broadcast.
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
    """Compute the derivative of h = tanh x from h."""
    return 1 - h * h


def _relu_slope(h: Tensor) -> Tensor:
    """Compute the derivative of h = ReLU x from h."""
    return (h > 0).to(h)


def _gru_rnn_pull(
    coefficients: Coefficients, weight: Tensor, dh: Hidden, dc: Tensor | None
) -> tuple[Gates, State]:
    """Pull cotangents back through all steps of a GRU or RNN, last step first.

    δ = dh · ∂h/∂p,  dh' = past · dh + (scale · δ) U.

    Args:
        coefficients: ∂h/∂p; the factor `scale` of q in the gates; `past`, ∂h/∂h' at fixed gates.
        weight: U [g, h].
        dh: cotangents of h at all steps, from the layers above.
        dc: None; the state is h alone.

    Returns:
        δ, the cotangents of p, and the cotangent of (h,) before the first step.
    """
    gates = torch.empty_like(coefficients[0])
    from_gates, scale, past = (t.unbind(0) for t in coefficients)
    delta, from_above = gates.unbind(0), dh.unbind(0)
    d: Tensor | None = None
    for t in reversed(range(len(from_above))):
        d = from_above[t] if d is None else d + from_above[t]
        torch.mul(d.unsqueeze(1), from_gates[t], out=delta[t])
        d = torch.addmm(d * past[t], (delta[t] * scale[t]).flatten(1), weight)
    assert d is not None
    return gates.flatten(2), (d,)


def _gru_rnn_push(
    coefficients: Coefficients, weight: Tensor, dp: Gates, state: State
) -> tuple[Hidden, State]:
    """Push tangents (dotted) forward through all steps of a GRU or RNN.

    ḣ = ∂h/∂p · (ṗ + scale · U ḣ') + past · ḣ'.

    Args:
        coefficients: ∂h/∂p; the factor `scale` of q in the gates; `past`, ∂h/∂h' at fixed gates.
        weight: U [g, h].
        dp: tangents of p.
        state: tangent of (h,) before the first step.

    Returns:
        The tangents of h at all steps, and of the state after the last step.
    """
    from_gates, scale, past = coefficients
    (h,) = state
    across = weight.t()
    hs: list[Tensor] = []
    of_input = (dp.view_as(from_gates) * from_gates).sum(2)
    of_state = from_gates * scale
    for dh_of_input, slope, kept in zip(of_input, of_state, past, strict=True):
        into_gates = (h @ across).view_as(slope)
        h = torch.addcmul(dh_of_input, kept, h) + (into_gates * slope).sum(1)
        hs.append(h)
    return torch.stack(hs), (h,)


RECURSIONS = {
    "lstm": Recursion(_lstm_run, _lstm_pull, _lstm_push),
    "gru": Recursion(_gru_run, _gru_rnn_pull, _gru_rnn_push),
    "rnn_tanh": Recursion(_rnn_run(torch.tanh, _tanh_slope), _gru_rnn_pull, _gru_rnn_push),
    "rnn_relu": Recursion(_rnn_run(torch.relu, _relu_slope), _gru_rnn_pull, _gru_rnn_push),
}
