"""Rules for recurrent layers and cells: the gradient of each weight is a sum over all steps.

The cotangents δ_t of the gates p_t (`recurrent_steps.py`) of all steps arrive at one edge of the
graph. So the weights of a layer in one direction have the gradients of a linear layer with a
position for each step: ∂W = Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h_{t-1}ᵀ, and Σ_t δ_t for both biases. In a
GRU the gate n takes r_t (U h' + b'), so for U and b' its δ_t is scaled by r_t. Single cells are
written out as products and sums, which are traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.batch import map_tensors
from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.outer_product import Outer, SharedGram, out_in
from qualms.gradients.tracing.rules.recurrent_layers import OneWay, RecurrentOptions, run_layers
from qualms.gradients.tracing.rules.recurrent_steps import State, shift_steps, state_scale
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def recurrent(
    kind: str, call: OpCall, input: Tensor, hx: Any, params: Any, *options: Any, **named: Any
) -> Any:
    """Run recurrent layers, with ∂W = Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h_{t-1}ᵀ, ∂b = Σ_t δ_t for each.

    Args:
        kind: kind of layer: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        call: the operation.
        input: input of all steps, [t, n, f] or [n, t, f]; it may be a parameter.
        hx: the state before the first step: h, or (h, c) of an LSTM; it may be a parameter.
        params: W, U, b and b' of each layer and direction.
        options: positional arguments after the weights, in the order of `RecurrentOptions`.
        named: arguments after the weights that are given by name.

    Returns:
        What torch returns: the output of all steps, and h, for an LSTM also c, of all layers after
        the last step. NotImplemented, so that the general path runs it, for packed sequences,
        projections, active dropout, autocast, weights that depend on the input, and rows on another
        axis than the batch axis.
    """
    how = RecurrentOptions.of(options, named)
    if how is None:
        return NotImplemented
    layout = call.layout(input)
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    learnable = [t for t in (input, *states) if call.is_param(t)]
    if layout is None or layout.axis not in (None, 0 if how.batch_first else 1):
        return NotImplemented
    if any(p.requires_grad and not call.is_param(p) for p in params):
        return NotImplemented  # weights that depend on the input
    if not all(map(call.layout, learnable)):
        return NotImplemented
    inside = layout if layout.axis is None else replace(layout, axis=1)  # time comes first
    copies = {id(t): t.detach().requires_grad_() for t in learnable}

    def run(one_way: OneWay, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Run one layer in one direction, and add the factors of its weights."""
        return _run_one_way(call, one_way, inside, x, state)

    x, begin = map_tensors((input, hx), lambda t: copies.get(id(t), t))
    out = run_layers(kind, run, x, begin, params, how)
    if out is NotImplemented:
        return out
    for t in learnable:
        of_rows = call.layout(t)
        assert of_rows is not None
        gradient = Summed.row_parts(of_rows, call.samples, call.on_one_row(t).shape)
        call.add_factor(t, [get_gradient_edge(copies[id(t)])], gradient)
    return out


def _run_one_way(
    call: OpCall, one_way: OneWay, layout: Layout, x: Tensor, state: State
) -> tuple[Tensor, State]:
    """Run one layer in one direction, and add the factors of its weights.

    Args:
        call: the operation.
        one_way: the layer.
        layout: which axis of `x` counts the rows.
        x: input of all steps [t, n, f].
        state: the state before the first step.

    Returns:
        h of all steps [t, n, h], and the state after the last step.
    """
    detached = OneWay(one_way.kind, [weight.detach() for weight in one_way.weights])
    w, u, *biases = one_way.weights
    # Zeros added to the gates, so that their gradient is δ: all factors below have this edge.
    shift = x.new_zeros(()).expand(*x.shape[:2], len(w)).requires_grad_()
    edge = get_gradient_edge(shift)
    h, last, coefficients = detached(x, state, shift)
    scale, gram = state_scale(one_way.kind, coefficients), SharedGram()

    def product(a: Tensor, scale: Tensor | None) -> Outer:
        """Build Σ_t (δ_t scale_t) ⊗ a_t; without a scale, W and U share δδᵀ."""
        outer = Outer.product(call.samples, layout, a.detach(), w.shape[0], out_in)
        if scale is None:
            return replace(outer, delta_gram=gram)
        return replace(outer, grad_outputs=lambda d: outer.grad_outputs(d * scale))

    if call.is_param(w):
        call.add_factor(w, [edge], product(x, None))
    if call.is_param(u):
        call.add_factor(u, [edge], product(shift_steps(state[0], h), scale))
    for number, bias in enumerate(biases):
        if call.is_param(bias):
            # biases[1] is b', which a GRU scales
            get_scale = _constant(scale) if scale is not None and number == 1 else None
            call.add_factor(bias, [edge], Summed.trailing(call.samples, layout, bias, get_scale))
    return h, last


def _constant(t: Tensor) -> Callable[[], Tensor]:
    """Wrap a tensor in a function that returns it, as `Summed.trailing` takes its scale."""
    return lambda: t


# Single cells, which the user calls in a loop: `with call.recorder` traces the products and sums.


def lstm_cell(call: OpCall, input: Tensor, hx: Any, *weights: Any, **named: Any) -> Any:
    """Run one LSTM step: i, f, g, o = σ, σ, tanh, σ of p + q,  c = f c' + i g,  h = o tanh c.

    Args:
        call: the operation.
        input: the input x of this step, [n, f].
        hx: the state (h', c') before this step, each [n, h].
        weights: the weights and biases that `_gates` takes.
        named: weights and biases that are given by name.

    Returns:
        h and c after this step.
    """
    h, c = hx
    with call.recorder:  # traces each operation inside
        p, q = _gates(input, h, *weights, **named)
        i, f, g, o = (p + q).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


def gru_cell(call: OpCall, input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Any:
    """Run one GRU step: r, z = σ of p + q,  n = tanh(p + r q),  h = n + z (h' - n).

    Args:
        call: the operation.
        input: the input x of this step, [n, f].
        hx: the state h' before this step, [n, h].
        weights: the weights and biases that `_gates` takes.
        named: weights and biases that are given by name.
    """
    with call.recorder:  # traces each operation inside
        p, q = _gates(input, hx, *weights, **named)
        p_r, p_z, p_n = p.chunk(3, dim=-1)
        q_r, q_z, q_n = q.chunk(3, dim=-1)
        r, z = (p_r + q_r).sigmoid(), (p_z + q_z).sigmoid()
        n = (p_n + r * q_n).tanh()
        return n + z * (hx - n)


def rnn_cell(
    activation: Callable[[Tensor], Tensor],
    call: OpCall,
    input: Tensor,
    hx: Tensor,
    *weights: Any,
    **named: Any,
) -> Any:
    """Run one RNN step: h = activation(p + q).

    Args:
        activation: tanh or ReLU.
        call: the operation.
        input: the input x of this step, [n, f].
        hx: the state h' before this step, [n, h].
        weights: the weights and biases that `_gates` takes.
        named: weights and biases that are given by name.
    """
    with call.recorder:  # traces each operation inside
        p, q = _gates(input, hx, *weights, **named)
        return activation(p + q)


def _gates(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the two parts of the gates' pre-activations, p = W x + b and q = U h' + b'.

    Args:
        x: the input [n, f].
        h: the state h' before this step, [n, h].
        w_ih: W [g, f].
        w_hh: U [g, h].
        b_ih: b [g].
        b_hh: b' [g].
    """
    return F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)
