"""Recurrent layers run step by step, not by torch's fused kernels, for both modes of
differentiation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from qualms.gradients.function_modes import CallMode, name_of, run_function
from qualms.gradients.tracing.rules.recurrent_steps import (
    RECURSIONS,
    Coefficients,
    Gates,
    Hidden,
    State,
    shift_steps,
    state_scale,
)


class _Layer(torch.autograd.Function):
    """One layer in one direction: (h of all steps, c after the last one of an LSTM, coefficients).

    `shift`, all zero, is added to the gates p, so that its gradient is δ. The gradients of weights
    follow from δ and are not computed here.
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
        """Run all steps.

        Args:
            kind: of layer, a key of `RECURSIONS`.
            x: input of all steps [t, n, f].
            shift: zero, for its gradient.
            w: W [g, f].
            u: U [g, h].
            b: b [g].
            b_state: b' [g], of a GRU.
            state: before the first step.
        """
        h, last, coefficients = RECURSIONS[kind].run(_linear(x, w, b), u, b_state, state)
        return h, *last[1:], *coefficients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what both modes of differentiation need."""
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
        """From the cotangents of h and c to those of x, p and the first state."""
        assert not any(ctx.needs_input_grad[3:7])
        _, w, u, *coefficients = ctx.saved_tensors
        if dh is None:
            dh = u.new_zeros(ctx.shape)
        dc = others[0] if ctx.cells else None
        delta, state = RECURSIONS[ctx.kind].pull(tuple(coefficients), u, dh, dc)
        dx = None
        if ctx.needs_input_grad[1]:
            dx = _linear(delta, w.t(), None)
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
        """From the tangents of all inputs to those of h and c.

        Args:
            ctx: what `setup_context` kept.
            dx: tangent of x.
            dshift: None.
            dw: tangent of W.
            du: tangent of U.
            db: tangent of b.
            db_state: tangent of b'.
            dstate: tangents of the first state.
        """
        x, w, u, first, h, *coefficients = ctx.saved_tensors
        scale = state_scale(ctx.kind, tuple(coefficients))
        of_input, of_state = [(x, dw), (dx, w)], [(shift_steps(first, h), du)]
        if scale is None:  # everything adds up to one product
            dp = _tangent([*of_input, *of_state], db, u, h)
        else:
            tangent = _tangent(of_state, db_state, u, h)
            dp = torch.addcmul(_tangent(of_input, db, u, h), tangent, scale)
        state = tuple(torch.zeros_like(first) if d is None else d for d in dstate)
        dh, last = RECURSIONS[ctx.kind].push(tuple(coefficients), u, dp, state)
        return dh, *last[1:], *[None] * len(coefficients)


def _linear(x: Float[Tensor, "t n f"], weight: Tensor, bias: Tensor | None) -> Gates:
    """One product for all steps and rows: that of three axes may take one for each step."""
    return F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])


def _tangent(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    bias: Tensor | None,
    u: Tensor,
    h: Hidden,
) -> Gates:
    """Σ x Wᵀ + b of the pairs (x, W) that are known: one product of all x and all W side by side.

    Args:
        products: pairs of inputs and weights, of which one is a tangent.
        bias: tangent of b.
        u: U, for the number of gates.
        h: of all steps, for the number of steps and rows.
    """
    inputs: list[Tensor] = []
    weights: list[Tensor] = []
    for x, w in products:
        if x is not None and w is not None:
            inputs.append(x)
            weights.append(w)
    if inputs:
        return _linear(torch.cat(inputs, dim=2), torch.cat(weights, dim=1), bias)
    nothing = h.new_zeros(*h.shape[:2], len(u))
    return nothing if bias is None else nothing + bias


@dataclass(frozen=True)
class OneWay:
    """One layer in one direction.

    Args:
        kind: of layer, a key of `RECURSIONS`.
        weights: W, U, and b and b' if there are biases.
    """

    kind: str
    weights: Sequence[Tensor]

    def __call__(
        self, x: Float[Tensor, "t n f"], state: State, shift: Gates | None = None
    ) -> tuple[Tensor, State, Coefficients]:
        """Run all steps.

        Args:
            x: input of all steps.
            state: before the first step.
            shift: a zero whose gradient is δ.

        Returns:
            h of all steps, the state after the last one, and the coefficients of the derivative.
        """
        w, u, *biases = self.weights
        b, b_state = biases or (None, None)
        if biases and self.kind != "gru":  # in which alone the two biases do more than add up
            b, b_state = biases[0] + biases[1], None
        apply: Callable[..., Any] = _Layer.apply
        out = apply(self.kind, x, shift, w, u, b, b_state, *state)
        h, *others = out
        cells = len(state) - 1
        return h, (h[-1], *others[:cells]), tuple(others[cells:])


class RecurrentOptions(NamedTuple):
    """The arguments of `torch.lstm` and the like after the weights, in torch's order."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @classmethod
    def of(cls, options: Sequence[Any], named: dict[str, Any]) -> "RecurrentOptions | None":
        """The options by name; None for packed sequences, whose arguments are others."""
        try:
            how = cls(*options, **named)
        except TypeError:  # another number of arguments
            return None
        return how if isinstance(how.has_biases, bool) else None


# How one layer is run in one direction: from x and the state before the first step to h and the
# state after the last.
Run = Callable[[OneWay, Float[Tensor, "t n f"], State], tuple[Tensor, State]]


def run_layers(
    kind: str, run: Run, input: Tensor, hx: Any, params: Sequence[Tensor], how: RecurrentOptions
) -> Any:
    """What `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` returns, layer by layer.

    Args:
        kind: which of them.
        run: runs a layer in one direction.
        input: x of all steps.
        hx: the state before the first step: h, or (h, c) of an LSTM.
        params: W, U, b and b' of each layer and direction.
        how: the other arguments.

    Returns:
        (x, h), or (x, h, c) of an LSTM; NotImplemented for projections, active dropout and
        autocast.
    """
    directions = 1 + how.bidirectional
    each = 2 + 2 * how.has_biases
    if len(params) != how.num_layers * directions * each:
        return NotImplemented
    if (how.train and how.dropout > 0) or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    states = tuple(hx) if kind == "lstm" else (hx,)
    x = input.transpose(0, 1) if how.batch_first else input
    ends: list[State] = []
    for layer in range(how.num_layers):
        outputs: list[Tensor] = []
        for backward in range(directions):
            number = layer * directions + backward
            one_way = OneWay(kind, params[number * each : (number + 1) * each])
            first = tuple(state[number] for state in states)
            if backward:
                h, end = run(one_way, x.flip(0), first)
                h = h.flip(0)
            else:
                h, end = run(one_way, x, first)
            outputs.append(h)
            ends.append(end)
        x = torch.cat(outputs, dim=2) if how.bidirectional else outputs[0]
    last = map(torch.stack, zip(*ends, strict=True))
    if how.batch_first:
        x = x.transpose(0, 1)
    return x, *last


def _run(one_way: OneWay, x: Float[Tensor, "t n f"], state: State) -> tuple[Tensor, State]:
    h, last, _ = one_way(x, state)
    return h, last


class Unrolled(CallMode):
    """Runs recurrent layers step by step: fused kernels have no rule, or a slow one, for forward
    mode.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, a recurrent layer step by step."""
        kind = name_of(func)
        how = RecurrentOptions.of(args[3:], kwargs) if kind in RECURSIONS else None
        if how is None:
            return run_function(func, args, kwargs)
        input, hx, params = args[:3]
        out = run_layers(kind, _run, input, hx, params, how)
        return run_function(func, args, kwargs) if out is NotImplemented else out
