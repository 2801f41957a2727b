"""Rules for recurrent layers: one sum over all steps for each weight, and single cells taken apart.

The cotangents δ_t of the gates p_t (`gradients/recurrent`) arrive together, at one edge, so the
weights of a layer in one direction are those of a linear layer with a position for each step: ∂W =
Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h_{t-1}ᵀ, and both biases Σ_t δ_t. What a GRU's state adds to its
candidate is scaled by r_t, and so are its δ_t for U and b'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.nested import each_tensor
from qualms.gradients.recurrent.layers import OneWay, unrolled
from qualms.gradients.recurrent.steps import State, before, state_scale
from qualms.gradients.tracing.factors import Outer, SharedPairs, Summed
from qualms.gradients.tracing.rules.scales import trailing_sum
from qualms.gradients.tracing.sample_axis import Layout

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import Call


def recurrent_rule(kind: str) -> Callable[..., Any]:
    """All layers and directions of `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu`."""

    def rule(
        call: Call,
        input: Tensor,
        hx: Any,
        params: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> Any:
        layout, axis = call.layout(input), 0 if batch_first else 1
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        learned = [t for t in (input, *states) if call.tracked(t)]
        computed = [p for p in params if p.requires_grad and not call.tracked(p)]  # from the input
        if (
            layout is None
            or layout.axis not in (None, axis)
            or computed
            or not all(map(call.layout, learned))
        ):
            return NotImplemented
        rows = layout if layout.axis is None else replace(layout, axis=1)  # time comes first inside
        copies = {id(t): t.detach().requires_grad_() for t in learned}

        def run(one_way: OneWay, x: Tensor, state: State) -> tuple[Tensor, State]:
            return _watched(call, one_way, rows, x, state)

        x, begin = each_tensor((input, hx), lambda t: copies.get(id(t), t))
        how = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        out = unrolled(kind, run, x, begin, params, *how)
        if out is NotImplemented:
            return out
        for t in learned:
            of_rows = call.layout(t)
            assert of_rows is not None
            gradient = Summed.over_rows(of_rows, call.inputs, call.on_one_row(t).shape)
            call.leave(t, [get_gradient_edge(copies[id(t)])], gradient)
        return out

    return rule


def _watched(
    call: Call, one_way: OneWay, rows: Layout, x: Tensor, state: State
) -> tuple[Tensor, State]:
    """One layer in one direction, and a piece for each of its weights."""
    plain = OneWay(one_way.kind, [w.detach() for w in one_way.weights])
    w, u, *biases = one_way.weights
    shift = x.new_zeros(()).expand(*x.shape[:2], len(w)).requires_grad_()
    edge = get_gradient_edge(shift)
    h, last, coefficients = plain(x, state, shift)
    scale, same = state_scale(one_way.kind, coefficients), SharedPairs()

    def product(a: Tensor, times: Tensor | None) -> Outer:
        outer = Outer.product(
            call.inputs, rows, a.detach(), w.shape[0], lambda grad: grad.squeeze(1)
        )
        if times is None:
            return replace(outer, moving_pairs=same)
        return replace(outer, grad_outputs=lambda d: outer.grad_outputs(d * times))

    if call.tracked(w):
        call.leave(w, [edge], product(x, None))
    if call.tracked(u):
        call.leave(u, [edge], product(before(state[0], h), scale))
    for number, bias in enumerate(biases):
        if call.tracked(bias):
            times = None if scale is None or number == 0 else lambda: scale
            call.leave(bias, [edge], trailing_sum(call.inputs, rows, bias, times))
    return h, last


def cell_rule(step: Callable[..., Any]) -> Callable[..., Any]:
    """A single step, in the user's own loop: its products and sums are watched one by one."""

    def rule(
        call: Call,
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Any = None,
        b_hh: Any = None,
    ) -> Any:
        h, *others = (hx,) if isinstance(hx, Tensor) else hx
        with call.recorder:
            return step(F.linear(input, w_ih, b_ih), F.linear(h, w_hh, b_hh), h, *others)

    return rule


def _lstm_step(p: Tensor, q: Tensor, h: Tensor, c: Tensor) -> State:
    i, f, g, o = (p + q).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_step(p: Tensor, q: Tensor, h: Tensor) -> Tensor:
    (pr, pz, pn), (qr, qz, qn) = p.chunk(3, dim=-1), q.chunk(3, dim=-1)
    r, z = (pr + qr).sigmoid(), (pz + qz).sigmoid()
    n = (pn + r * qn).tanh()
    return n + z * (h - n)


RECURRENT: dict[str, Callable[..., Any]] = {
    **{kind: recurrent_rule(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "lstm_cell": cell_rule(_lstm_step),
    "gru_cell": cell_rule(_gru_step),
    "rnn_tanh_cell": cell_rule(lambda p, q, h: (p + q).tanh()),
    "rnn_relu_cell": cell_rule(lambda p, q, h: (p + q).relu()),
}
