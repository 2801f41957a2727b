"""LSTM, GRU and RNN step by step, with their derivatives in reverse and in forward mode.

Let p_t = W x_t + b be the part of the gates' pre-activations that does not depend on the step
before. A layer is the recursion

    LSTM    i, f, g, o = σ, σ, tanh, σ of p_t + U h',    c = f c' + i g,    h = o tanh c
    GRU     r, z = σ of p_t + q,    n = tanh(p_t + r q),    q = U h' + b',    h = (1 - z) n + z h'
    RNN     h = tanh or ReLU of p_t + U h'

in which a prime marks the step before. The derivative of a step is a few products with coefficients
that depend on the forward pass alone. They are computed once, for all steps together, and used for
every cotangent that is pulled back and every tangent that is pushed forward. The gradients of the
weights need only the cotangent δ_t of p_t, which torch's fused kernels do not return: ∂W = Σ_t δ_t
x_tᵀ, ∂U = Σ_t δ_t h'ᵀ.

Tensors have time first here: [steps, rows, features].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# (h,), or (h, c) of an LSTM, each [rows, hidden].
State = tuple[Tensor, ...]
# Partial derivatives of all steps: computed by a `run` function, used by `pull` and `push`.
Coefficients = tuple[Tensor, ...]
# In shapes: t steps, n rows, g gate entries (hidden features times gates), h hidden features.
Gates = Float[Tensor, "t n g"]
Hidden = Float[Tensor, "t n h"]
RunFn = Callable[[Gates, Tensor, Tensor | None, State], tuple[Hidden, State, Coefficients]]


@dataclass(frozen=True)
class Recursion:
    """A kind of recurrent layer: its forward pass, and both modes of differentiation.

    p is the part of the gates' pre-activations that comes from the input, U the weight of the state
    and b' its bias. The coefficients are partial derivatives, which `run` computes for `pull` and
    `push`. Shapes have t steps, n rows and h hidden features.

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
    """Return the state before each of t steps: `first`, then all of `later` but the last.

    Args:
        first: the state before the first step, for n rows and h hidden features.
        later: the states after each step.
    """
    return torch.cat([first.unsqueeze(0), later[:-1]])


def state_scale(kind: str, coefficients: Coefficients) -> Float[Tensor, "t n g"] | None:
    """Return the scale s of q = U h' + b' in the gates' pre-activations p + s q of a GRU.

    s is 1, 1 and r for the gates r, z and n, at each of t steps and n rows; h' is the state before
    the step. None for other kinds of layer, which add q to p without a scale.

    Args:
        kind: kind of layer, a key of `RECURSIONS`.
        coefficients: the coefficients that the layer's `run` function returned.
    """
    return coefficients[1].flatten(2) if kind == "gru" else None


# LSTM


def _lstm_run(
    p: Gates,
    weight: Tensor,
    bias: Tensor | None,
    state: State,
) -> tuple[Hidden, State, Coefficients]:
    """Run all steps of an LSTM: c = f c' + i g, h = o tanh c.

    h', c' is the state before a step; i, f, g, o = σ, σ, tanh, σ of p + U h' are the gates. Shapes
    have t steps, n rows and h hidden features.

    Args:
        p: the gates' pre-activations W x plus both biases, without the term U h', [t, n, 4h].
        weight: U [4h, h].
        bias: None; b' is part of p.
        state: (h, c) before the first step.

    Returns:
        h of all steps, the state after the last step, and the coefficients: ∂c/∂(i, f, g) and ∂h/∂o
        with respect to pre-activations, stacked [t, n, 4, h]; ∂h/∂c and ∂c/∂c' [t, n, h].
    """
    first_h, first_c = state
    h, c = first_h, first_c
    transposed, hidden = weight.t(), weight.shape[1]
    # i, f, g, o, h and c of all steps; the loop writes into these tensors.
    gates = torch.empty_like(p)
    all_h = p.new_empty(len(p), *h.shape)
    all_c = p.new_empty(len(p), *c.shape)
    for p_t, gates_t, h_t, c_t in zip(p, gates, all_h, all_c, strict=True):
        pre_activations = torch.addmm(p_t, h, transposed)
        # σ for all four gates; then tanh overwrites that of g.
        torch.sigmoid(pre_activations, out=gates_t)
        i, f, g, o = gates_t.chunk(4, dim=1)
        torch.tanh(pre_activations[:, 2 * hidden : 3 * hidden], out=g)
        c = torch.addcmul(f * c, i, g, out=c_t)
        h = torch.mul(o, c.tanh(), out=h_t)
    i, f, g, o = gates.unflatten(-1, (4, -1)).unbind(2)
    tanh_c = all_c.tanh()
    dc_di = g * i * (1 - i)
    dc_df = shift_steps(first_c, all_c) * f * (1 - f)
    dc_dg = i * (1 - g * g)
    dh_do = tanh_c * o * (1 - o)
    gate_slopes = torch.stack([dc_di, dc_df, dc_dg, dh_do], dim=2)
    dh_dc = o * (1 - tanh_c * tanh_c)
    # Copies: views of `all_c` and `gates` would keep these tensors in memory.
    return all_h, (h, c.clone()), (gate_slopes, dh_dc, f.contiguous())


def _lstm_pull(
    coefficients: Coefficients,
    weight: Tensor,
    dh: Hidden,
    dc: Tensor | None,
) -> tuple[Gates, State]:
    """Pull cotangents back through all steps of an LSTM, last step first.

    dc += dh ∂h/∂c,  δ_i, δ_f, δ_g = dc ∂c/∂(i, f, g),  δ_o = dh ∂h/∂o,
    dc' = dc ∂c/∂c',  dh' = δ U.

    dh and dc are the cotangents of the state h, c after a step, dh' and dc' of that before it, and
    δ those of the pre-activations of the gates i, f, g, o.

    Args:
        coefficients: the partial derivatives that `_lstm_run` returned.
        weight: U [4h, h], for h hidden features.
        dh: cotangents of h at all t steps and n rows, from the layers above.
        dc: cotangent of c after the last step; None for zero.

    Returns:
        δ at all steps [t, n, 4h], and the cotangents of (h, c) before the first step.
    """
    num_steps, num_rows, hidden = dh.shape
    gate_slopes, *state_slopes = coefficients
    # Lists with an entry for each step, as indexing a tensor in the loop is slow.
    ifg_slopes, o_slopes = gate_slopes[:, :, :3].unbind(0), gate_slopes[:, :, 3].unbind(0)
    dh_dc, dc_dc = (slopes.unbind(0) for slopes in state_slopes)
    dh_from_above = dh.unbind(0)
    # The loop writes into `all_delta`, through views of it for each step.
    all_delta = dh.new_empty(num_steps, num_rows, 4, hidden)
    delta_ifg, delta_o = all_delta[:, :, :3].unbind(0), all_delta[:, :, 3].unbind(0)
    delta = all_delta.flatten(2).unbind(0)
    dh_t = dh_from_above[-1]
    for t in reversed(range(num_steps)):
        dc = dh_t * dh_dc[t] if dc is None else torch.addcmul(dc, dh_t, dh_dc[t])
        torch.mul(dc.unsqueeze(1), ifg_slopes[t], out=delta_ifg[t])
        torch.mul(dh_t, o_slopes[t], out=delta_o[t])
        dc = dc * dc_dc[t]
        # The state before the first step has no cotangent from the layers above.
        dh_t = torch.addmm(dh_from_above[t - 1], delta[t], weight) if t else delta[t] @ weight
    assert dc is not None
    return all_delta.flatten(2), (dh_t, dc)


def _lstm_push(
    coefficients: Coefficients,
    weight: Tensor,
    dp: Gates,
    state: State,
) -> tuple[Hidden, State]:
    """Push tangents (dotted) forward through all steps of an LSTM.

    ċ = ∂c/∂(i, f, g) q̇ + ∂c/∂c' ċ',  ḣ = ∂h/∂o q̇ + ∂h/∂c ċ,  with q̇ = ṗ + U ḣ'.

    h, c is the state after a step, h', c' that before it, and p + U h' are the pre-activations of
    the gates i, f, g, o. Shapes have t steps, n rows and h hidden features.

    Args:
        coefficients: the partial derivatives that `_lstm_run` returned.
        weight: U [4h, h].
        dp: tangents of p, the part of the pre-activations that comes from the input, [t, n, 4h].
        state: tangents of (h, c) before the first step.

    Returns:
        The tangents of h at all steps, and of the state after the last step.
    """
    h_dot, c_dot = state
    transposed = weight.t()
    gate_slopes, *state_slopes = coefficients
    all_h_dot: list[Tensor] = []
    steps = zip(dp, gate_slopes.flatten(2), *state_slopes, strict=True)
    for dp_t, slopes, dh_dc, dc_dc in steps:
        from_gates = torch.addmm(dp_t, h_dot, transposed) * slopes
        # The tangents of c from i, f and g, and of h from o.
        from_i, from_f, from_g, from_o = from_gates.chunk(4, dim=1)
        c_dot = torch.addcmul(from_i, dc_dc, c_dot) + (from_f + from_g)
        h_dot = torch.addcmul(from_o, dh_dc, c_dot)
        all_h_dot.append(h_dot)
    return torch.stack(all_h_dot), (h_dot, c_dot)


# GRU and RNN


def _gru_run(
    p: Gates,
    weight: Tensor,
    bias: Tensor | None,
    state: State,
) -> tuple[Hidden, State, Coefficients]:
    """Run all steps of a GRU: h = (1 - z) n + z h'.

    h' is the state before a step, q = U h' + b', and r, z = σ of p + q and n = tanh(p + r q) are
    the gates. Shapes have t steps, n rows and h hidden features.

    Args:
        p: the gates' pre-activations W x + b, without the terms in q, [t, n, 3h].
        weight: U [3h, h].
        bias: b' [3h]; None for no bias.
        state: (h,) before the first step.

    Returns:
        h of all steps, the state after the last step, and the coefficients: ∂h/∂p and the scale of
        q in the gates (`state_scale`), both [t, n, 3, h], and ∂h/∂h' at fixed gates [t, n, h].
    """
    (first_h,) = state
    h = first_h
    transposed, hidden = weight.t(), weight.shape[1]
    all_gates: list[Tensor] = []
    all_h: list[Tensor] = []
    for p_t in p.unbind(0):
        q = h @ transposed if bias is None else torch.addmm(bias, h, transposed)
        p_rz, p_n = p_t[:, : 2 * hidden], p_t[:, 2 * hidden :]
        q_rz, q_n = q[:, : 2 * hidden], q[:, 2 * hidden :]
        rz = (p_rz + q_rz).sigmoid()
        r, z = rz.chunk(2, dim=1)
        n = torch.addcmul(p_n, r, q_n).tanh()
        h = torch.lerp(n, h, z)
        all_gates.append(torch.cat([rz, n, q_n], dim=1))
        all_h.append(h)
    r, z, n, q_n = torch.stack(all_gates).unflatten(-1, (4, -1)).unbind(2)
    stacked_h, ones = torch.stack(all_h), torch.ones_like(r)
    dh_dn = (1 - z) * (1 - n * n)
    dh_dr = dh_dn * q_n * r * (1 - r)
    dh_dz = (shift_steps(first_h, stacked_h) - n) * z * (1 - z)
    gate_slopes = torch.stack([dh_dr, dh_dz, dh_dn], dim=2)
    scale = torch.stack([ones, ones, r], dim=2)
    # A copy: z is a view, which would keep all gates in memory.
    return stacked_h, (h,), (gate_slopes, scale, z.contiguous())


def _rnn_run(activation: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> RunFn:
    """Build the `run` function of an RNN, h = activation(p + U h').

    h' is the state before a step. The coefficients have the meaning of a GRU's.

    Args:
        activation: tanh or ReLU.
        slope: maps the activation's result to its derivative.
    """

    def run(
        p: Gates,
        weight: Tensor,
        bias: Tensor | None,
        state: State,
    ) -> tuple[Hidden, State, Coefficients]:
        """Run all steps of an RNN: h = activation(p + U h'), with the state h' before a step.

        Shapes have t steps, n rows and h hidden features.

        Args:
            p: the pre-activations W x plus both biases, without the term U h', [t, n, h].
            weight: U [h, h].
            bias: None; b' is part of p.
            state: (h,) before the first step.

        Returns:
            h of all steps, the state after the last step, and the coefficients: ∂h/∂p [t, n, 1, h],
            and in place of a GRU's other two, 1 and 0, to broadcast.
        """
        (h,) = state
        transposed = weight.t()
        all_h: list[Tensor] = []
        for p_t in p.unbind(0):
            h = activation(torch.addmm(p_t, h, transposed))
            all_h.append(h)
        stacked_h = torch.stack(all_h)
        scale = h.new_ones(len(all_h), 1, 1, 1)
        dh_dh = h.new_zeros(len(all_h), 1, 1)
        return stacked_h, (h,), (slope(stacked_h).unsqueeze(2), scale, dh_dh)

    return run


def _tanh_slope(h: Tensor) -> Tensor:
    """Compute the derivative of h = tanh x from h."""
    return 1 - h * h


def _relu_slope(h: Tensor) -> Tensor:
    """Compute the derivative of h = ReLU x from h."""
    return (h > 0).to(h)


def _gru_rnn_pull(
    coefficients: Coefficients,
    weight: Tensor,
    dh: Hidden,
    dc: Tensor | None,
) -> tuple[Gates, State]:
    """Pull cotangents back through all steps of a GRU or RNN, last step first.

    δ = dh · ∂h/∂p,  dh' = dh · ∂h/∂h' + (s · δ) U.

    dh is the cotangent of the state h after a step, dh' of h' before it, and δ that of p, the part
    of the gates' pre-activations that comes from the input. s is the scale of U h' in the gates.

    Args:
        coefficients: ∂h/∂p; s; ∂h/∂h' at fixed gates, as `_gru_run` or `_rnn_run` returned them.
        weight: U [g, h], for g gate entries and h hidden features.
        dh: cotangents of h at all t steps and n rows, from the layers above.
        dc: None; the state is h alone.

    Returns:
        δ at all steps [t, n, g], and the cotangent of (h,) before the first step.
    """
    # Lists with an entry for each step, as indexing a tensor in the loop is slow.
    gate_slopes, scale, dh_dh = (coefficient.unbind(0) for coefficient in coefficients)
    dh_from_above = dh.unbind(0)
    # The loop writes into `all_delta`, through views of it for each step.
    all_delta = torch.empty_like(coefficients[0])
    delta = all_delta.unbind(0)
    # The cotangent of the state that the next step takes.
    dh_from_next: Tensor | None = None
    for t in reversed(range(len(dh_from_above))):
        dh_t = dh_from_above[t] if dh_from_next is None else dh_from_next + dh_from_above[t]
        torch.mul(dh_t.unsqueeze(1), gate_slopes[t], out=delta[t])
        scaled_delta = (delta[t] * scale[t]).flatten(1)
        dh_from_next = torch.addmm(dh_t * dh_dh[t], scaled_delta, weight)
    assert dh_from_next is not None
    return all_delta.flatten(2), (dh_from_next,)


def _gru_rnn_push(
    coefficients: Coefficients,
    weight: Tensor,
    dp: Gates,
    state: State,
) -> tuple[Hidden, State]:
    """Push tangents (dotted) forward through all steps of a GRU or RNN.

    ḣ = ∂h/∂p · (ṗ + s · U ḣ') + ∂h/∂h' · ḣ'.

    h is the state after a step, h' that before it, p the part of the gates' pre-activations that
    comes from the input, and s the scale of U h' in the gates.

    Args:
        coefficients: ∂h/∂p; s; ∂h/∂h' at fixed gates, as `_gru_run` or `_rnn_run` returned them.
        weight: U [g, h], for g gate entries and h hidden features.
        dp: tangents of p at all t steps and n rows.
        state: tangent of (h,) before the first step.

    Returns:
        The tangents of h at all steps, and of the state after the last step.
    """
    gate_slopes, scale, dh_dh = coefficients
    (h_dot,) = state
    transposed = weight.t()
    all_h_dot: list[Tensor] = []
    # ∂h/∂p · ṗ, summed over the gates, and ∂h/∂p · s, which multiplies U ḣ'.
    from_input = (dp.view_as(gate_slopes) * gate_slopes).sum(2)
    state_slopes = gate_slopes * scale
    for from_input_t, slopes, dh_dh_t in zip(from_input, state_slopes, dh_dh, strict=True):
        into_gates = (h_dot @ transposed).view_as(slopes)
        from_gates = (into_gates * slopes).sum(1)
        h_dot = torch.addcmul(from_input_t, dh_dh_t, h_dot) + from_gates
        all_h_dot.append(h_dot)
    return torch.stack(all_h_dot), (h_dot,)


RECURSIONS = {
    "lstm": Recursion(
        run=_lstm_run,
        pull=_lstm_pull,
        push=_lstm_push,
    ),
    "gru": Recursion(
        run=_gru_run,
        pull=_gru_rnn_pull,
        push=_gru_rnn_push,
    ),
    "rnn_tanh": Recursion(
        run=_rnn_run(torch.tanh, _tanh_slope),
        pull=_gru_rnn_pull,
        push=_gru_rnn_push,
    ),
    "rnn_relu": Recursion(
        run=_rnn_run(torch.relu, _relu_slope),
        pull=_gru_rnn_pull,
        push=_gru_rnn_push,
    ),
}
