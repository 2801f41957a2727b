"""Recurrent layers put together from their steps, not by torch's fused kernels: for both modes of
differentiation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from qualms.gradients.recurrent.steps import (
    RECURSIONS,
    Coefficients,
    Gates,
    Hidden,
    State,
    before,
    state_scale,
)


class _Layer(torch.autograd.Function):
    """(h of all steps, c after the last one if there is one, coefficients).

    `shift`, all zero, is added to p, so that its gradient is δ. Gradients of weights are left to
    those who want them.
    """

    @staticmethod
    def forward(
        kind: str,
        x: Tensor,
        shift: Tensor | None,
        w: Tensor,
        u: Tensor,
        b: Tensor | None,
        b_state: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        h, last, coefficients = RECURSIONS[kind].run(_linear(x, w, b), u, b_state, state)
        return h, *last[1:], *coefficients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kind, x, _, w, u, _, _, *state = inputs
        h, coefficients = output[0], output[len(state) :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*coefficients)
        ctx.shape, ctx.cells = h.shape, len(state) - 1
        ctx.save_for_backward(x, w, u, *coefficients)  # x, so that a change in place is noticed
        ctx.save_for_forward(x, w, u, state[0], h, *coefficients)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        assert not any(ctx.needs_input_grad[3:7])
        _, w, u, *coefficients = ctx.saved_tensors
        dh = u.new_zeros(ctx.shape) if dh is None else dh
        delta, state = RECURSIONS[ctx.kind].pull(
            tuple(coefficients), u, dh, others[0] if ctx.cells else None
        )
        dx = _linear(delta, w.t(), None) if ctx.needs_input_grad[1] else None
        return None, dx, delta, None, None, None, None, *state

    @staticmethod
    def jvp(
        ctx: Any,
        _: Any,
        dx: Tensor | None,
        dshift: None,
        dw: Tensor | None,
        du: Tensor | None,
        db: Tensor | None,
        db_state: Tensor | None,
        *dstate: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        x, w, u, first, h, *coefficients = ctx.saved_tensors
        scale = state_scale(ctx.kind, tuple(coefficients))
        of_input, of_state = [(x, dw), (dx, w)], [(before(first, h), du)]
        if scale is None:  # everything adds up to one product
            dp = _tangent([*of_input, *of_state], db, u, h)
        else:
            dp = torch.addcmul(
                _tangent(of_input, db, u, h), _tangent(of_state, db_state, u, h), scale
            )
        state = tuple(torch.zeros_like(first) if d is None else d for d in dstate)
        dh, last = RECURSIONS[ctx.kind].push(tuple(coefficients), u, dp, state)
        return dh, *last[1:], *(None for _ in coefficients)


def _linear(x: Float[Tensor, "t n f"], weight: Tensor, bias: Tensor | None) -> Gates:
    """One product for all steps and rows: that of three axes may take one for each step."""
    return F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])


def _tangent(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    bias: Tensor | None,
    u: Tensor,
    h: Hidden,
) -> Gates:
    """Σ x Wᵀ + b of the pairs x, W that are there: one product, of all x and all W side by side."""
    known = [(x, w) for x, w in products if x is not None and w is not None]
    if known:
        return _linear(
            torch.cat([x for x, _ in known], dim=2), torch.cat([w for _, w in known], dim=1), bias
        )
    nothing = h.new_zeros(*h.shape[:2], len(u))
    return nothing if bias is None else nothing + bias


@dataclass(frozen=True)
class OneWay:
    """One layer run in one direction: W, U, and b and b' if there are biases."""

    kind: str
    weights: Sequence[Tensor]

    def __call__(
        self, x: Float[Tensor, "t n f"], state: State, shift: Gates | None = None
    ) -> tuple[Tensor, State, Coefficients]:
        """h of all steps, the state after the last one, and the coefficients; the gradient of
        `shift` is δ.
        """
        w, u, *biases = self.weights
        b, b_state = biases or (None, None)
        if biases and self.kind != "gru":  # in which alone the two biases do more than add up
            b, b_state = biases[0] + biases[1], None
        inputs = (self.kind, x, shift, w, u, b, b_state)
        h, *others = _Layer.apply(*inputs, *state)  # type: ignore[no-untyped-call]
        cells = len(state) - 1
        return h, (h[-1], *others[:cells]), tuple(others[cells:])


# How one layer is run in one direction: from x and the state before the first step to h and the
# state after the last.
Run = Callable[[OneWay, Float[Tensor, "t n f"], State], tuple[Tensor, State]]


def unrolled(
    kind: str,
    run: Run,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    """What `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` gives for these arguments, layer by layer.

    NotImplemented for packed sequences (whose arguments are others), projections, active dropout
    and autocast.
    """
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    if not isinstance(has_biases, bool) or len(params) != num_layers * directions * each:
        return NotImplemented
    if (train and dropout > 0) or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    states = tuple(hx) if kind == "lstm" else (hx,)
    x = input.transpose(0, 1) if batch_first else input
    ends: list[State] = []
    for layer in range(num_layers):
        found: list[Tensor] = []
        for backwards in range(directions):
            number = layer * directions + backwards
            one_way = OneWay(kind, params[number * each : (number + 1) * each])
            h, end = run(one_way, x.flip(0) if backwards else x, tuple(s[number] for s in states))
            found.append(h.flip(0) if backwards else h)
            ends.append(end)
        x = torch.cat(found, dim=2) if bidirectional else found[0]
    last = (torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x), *last


def _run(one_way: OneWay, x: Float[Tensor, "t n f"], state: State) -> tuple[Tensor, State]:
    h, last, _ = one_way(x, state)
    return h, last


class Unrolled(TorchFunctionMode):
    """Recurrent layers step by step, since the fused kernels have no rule, or a slow one, for
    forward mode.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kind, kwargs = getattr(func, "__name__", "").partition(".")[0], kwargs or {}
        out = unrolled(kind, _run, *args, **kwargs) if kind in RECURSIONS else NotImplemented
        return func(*args, **kwargs) if out is NotImplemented else out
