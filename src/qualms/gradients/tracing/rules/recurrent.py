"""Rules for recurrent layers and cells: the gradient of each weight is a sum over all steps.

The cotangents δ_t of the gates' pre-activations p_t (`recurrent_steps.py`) of all steps arrive at
one edge of the graph. So the weights of a layer in one direction have the gradients of a linear
layer with a position for each step: ∂W = Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h_{t-1}ᵀ, and Σ_t δ_t for both
biases. In a GRU the gate n takes r_t (U h' + b'), so for U and b' its δ_t is scaled by r_t. Single
cells are written out as products and sums, which are traced one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.batch import map_tensors
from qualms.gradients.tracing.factors import Summed
from qualms.gradients.tracing.outer_product import Outer, SharedGram, arrange_out_in
from qualms.gradients.tracing.rules.recurrent_layers import OneWay, RecurrentOptions, run_layers
from qualms.gradients.tracing.rules.recurrent_steps import State, shift_steps, state_scale
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def recurrent(
    kind: str, call: OpCall, input: Tensor, hx: Any, params: Any, *options: Any, **named: Any
) -> Any:
    """Run recurrent layers, with ∂W = Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h_{t-1}ᵀ, ∂b = Σ_t δ_t for each.

    x_t is a layer's input at step t, h_{t-1} its state before the step, W and U are their weights,
    and δ_t is the cotangent of the gates' pre-activations. Shapes have t steps, n rows, f features.

    Args:
        kind: kind of layer: `lstm`, `gru`, `rnn_tanh` or `rnn_relu`.
        call: the operation.
        input: input of all steps, [t, n, f] or [n, t, f]; it may be a parameter.
        hx: the state before the first step: h, or (h, c) of an LSTM; it may be a parameter.
        params: W, U, b and b' of each layer and direction.
        options: positional arguments after the weights, in the order of `RecurrentOptions`.
        named: arguments after the weights that are passed by name.

    Returns:
        What torch returns: the output of all steps, and h, for an LSTM also c, of all layers after
        the last step. NotImplemented, so that `OpCall.run_on_copies` runs it, for packed sequences,
        projections, active dropout, autocast, weights that depend on the input, and a batch axis
        that is not where `batch_first` says.
    """
    layer_options = RecurrentOptions.of(options, named)
    if layer_options is None:
        return NotImplemented
    layout = call.find_layout(input)
    batch_axis = 0 if layer_options.batch_first else 1
    if layout is None or layout.axis not in (None, batch_axis):
        return NotImplemented
    # The input or the states may be parameters themselves, such as a learned initial state.
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    learned_inputs = [t for t in (input, *states) if call.is_param(t)]
    # Weights that the model computed from the input.
    if any(p.requires_grad and not call.is_param(p) for p in params):
        return NotImplemented
    # Each must have a batch axis; without one, the model did not repeat it for each row.
    if not all(map(call.find_layout, learned_inputs)):
        return NotImplemented
    # `run_layers` runs each layer on [t, n, f], where the batch axis is 1.
    time_first = layout if layout.axis is None else replace(layout, axis=1)
    copies = {id(t): t.detach().requires_grad_() for t in learned_inputs}
    x, first_state = map_tensors((input, hx), lambda t: copies.get(id(t), t))
    run = partial(_run_one_way, call, time_first)
    out = run_layers(kind, run, x, first_state, params, layer_options)
    if out is NotImplemented:
        return out
    for t in learned_inputs:
        row_layout = call.find_layout(t)
        assert row_layout is not None
        shape = call.value_on_one_row(t).shape
        gradient = Summed.for_repeated(row_layout, call.num_samples, shape)
        call.add_factor(t, [get_gradient_edge(copies[id(t)])], gradient)
    return out


def _run_one_way(
    call: OpCall,
    layout: Layout,
    one_way: OneWay,
    x: Tensor,
    state: State,
) -> tuple[Tensor, State]:
    """Run one layer in one direction, and add the factors of its weights.

    With input x_t and state h_t at step t, and δ_t the cotangent of the gates' pre-activations, the
    gradients are ∂W = Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h_{t-1}ᵀ and Σ_t δ_t for the biases b and b'. In a
    GRU, δ_t is scaled for U and b' (`state_scale`).

    Args:
        call: the operation.
        layout: which axis of `x` is the batch axis.
        one_way: the layer, with its weights W, U, b and b'.
        x: input of all t steps and n rows, [t, n, features].
        state: the state before the first step.

    Returns:
        h of all steps [t, n, hidden], and the state after the last step.
    """
    detached = OneWay(one_way.kind, [weight.detach() for weight in one_way.weights])
    w, u, *biases = one_way.weights
    num_gates = len(w)
    # Zeros added to the gates' pre-activations: their cotangent is δ, so all factors below have
    # this edge.
    zeros = x.new_zeros(()).expand(*x.shape[:2], num_gates).requires_grad_()
    edge = get_gradient_edge(zeros)
    h, last_state, coefficients = detached(x, state, zeros)
    build_product = partial(
        Outer.for_product,
        call.num_samples,
        layout,
        out_features=num_gates,
        arrange=arrange_out_in,
    )
    # W and U share δδᵀ, unless δ is scaled for U.
    shared_gram = SharedGram()
    scale = state_scale(one_way.kind, coefficients)
    if call.is_param(w):
        w_gradient = build_product(activations=x.detach())
        call.add_factor(w, [edge], replace(w_gradient, delta_gram=shared_gram))
    if call.is_param(u):
        u_gradient = build_product(activations=shift_steps(state[0], h).detach())
        if scale is None:
            call.add_factor(u, [edge], replace(u_gradient, delta_gram=shared_gram))
        else:
            call.add_factor(u, [edge], _scale_delta(u_gradient, scale))
    # δ is scaled for b' alone. Not strict, as a layer may have no biases.
    for bias, bias_scale in zip(biases, (None, scale), strict=False):
        if call.is_param(bias):
            get_scale = None if bias_scale is None else _return_always(bias_scale)
            gradient = Summed.for_trailing_axes(call.num_samples, layout, bias, get_scale)
            call.add_factor(bias, [edge], gradient)
    return h, last_state


def _return_always(t: Tensor) -> Callable[[], Tensor]:
    """Make a function that returns `t`, as `Summed.for_trailing_axes` takes its scale."""
    return lambda: t


def _scale_delta(outer: Outer, scale: Tensor) -> Outer:
    """Build the gradient Σ_t (s_t δ_t) ⊗ a_t from the gradient Σ_t δ_t ⊗ a_t.

    Args:
        outer: the gradient Σ_t δ_t ⊗ a_t.
        scale: s, in the shape of a cotangent.
    """

    def grad_outputs(cotangent: Tensor) -> Tensor:
        """Compute the factor δ from the cotangent times the scale."""
        return outer.grad_outputs(cotangent * scale)

    return replace(outer, grad_outputs=grad_outputs)


# Single cells, which the user calls in a loop: `with call.recorder` traces the products and sums.


def lstm_cell(call: OpCall, input: Tensor, hx: Any, *weights: Any, **named: Any) -> Any:
    """Run one LSTM step: i, f, g, o = σ, σ, tanh, σ of p + q,  c = f c' + i g,  h = o tanh c.

    p = W x + b comes from the input x, and q = U h' + b' from the state h' before the step.

    Args:
        call: the operation.
        input: the input x of this step, [rows, features].
        hx: the state (h', c') before this step, each [rows, hidden].
        weights: the weights and biases that `_pre_activations` takes.
        named: weights and biases that are passed by name.

    Returns:
        h and c after this step.
    """
    h, c = hx
    # The recorder is off while it runs a rule: turn it on to trace each operation.
    with call.recorder:
        p, q = _pre_activations(input, h, *weights, **named)
        i, f, g, o = (p + q).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


def gru_cell(call: OpCall, input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Any:
    """Run one GRU step: r, z = σ of p + q,  n = tanh(p + r q),  h = n + z (h' - n).

    p = W x + b comes from the input x, and q = U h' + b' from the state h' before the step.

    Args:
        call: the operation.
        input: the input x of this step, [rows, features].
        hx: the state h' before this step, [rows, hidden].
        weights: the weights and biases that `_pre_activations` takes.
        named: weights and biases that are passed by name.

    Returns:
        h after this step.
    """
    # The recorder is off while it runs a rule: turn it on to trace each operation.
    with call.recorder:
        p, q = _pre_activations(input, hx, *weights, **named)
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

    p = W x + b comes from the input x, and q = U h' + b' from the state h' before the step.

    Args:
        activation: tanh or ReLU.
        call: the operation.
        input: the input x of this step, [rows, features].
        hx: the state h' before this step, [rows, hidden].
        weights: the weights and biases that `_pre_activations` takes.
        named: weights and biases that are passed by name.

    Returns:
        h after this step.
    """
    # The recorder is off while it runs a rule: turn it on to trace each operation.
    with call.recorder:
        p, q = _pre_activations(input, hx, *weights, **named)
        return activation(p + q)


def _pre_activations(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the two parts of the gates' pre-activations, p = W x + b and q = U h' + b'.

    Args:
        x: the input [rows, features].
        h: the state h' before this step, [rows, hidden].
        w_ih: W [gates, features].
        w_hh: U [gates, hidden].
        b_ih: b [gates].
        b_hh: b' [gates].
    """
    return F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)
