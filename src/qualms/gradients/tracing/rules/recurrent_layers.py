"""Runs recurrent layers step by step, with derivatives in reverse and in forward mode.

torch's fused kernels return no cotangents of the gates, and have no fast rule for forward mode.
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
    """One recurrent layer in one direction, with both modes of differentiation.

    Returns h of all steps, for an LSTM also c after the last step, and the coefficients of the
    derivative. `shift`, all zero, stands for a term added to the gates p, so its gradient is their
    cotangent δ. The gradients of weights follow from δ and are not computed here.
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
            kind: kind of layer, a key of `RECURSIONS`.
            x: input of all steps [t, n, f].
            shift: zeros [t, n, g], whose gradient is δ; None if δ is not wanted.
            w: weight W [g, f] of the input.
            u: weight U [g, h] of the state.
            b: bias b [g], for an LSTM or RNN the sum of both biases.
            b_state: bias b' [g] of the state; GRU only.
            state: the state before the first step: h, or h and c of an LSTM, each [n, h].

        Returns:
            h of all steps [t, n, h], for an LSTM then c after the last step [n, h], then the
            coefficients.
        """
        h, last, coefficients = RECURSIONS[kind].run(_linear(x, w, b), u, b_state, state)
        # Last: (h,), or (h, c) of an LSTM.
        return h, *last[1:], *coefficients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what both modes of differentiation need.

        Args:
            ctx: torch's object that `backward` and `jvp` get.
            inputs: the arguments of `forward`.
            output: what `forward` returned: h, c of an LSTM, and the coefficients.
        """
        ctx.kind, x, _, w, u, _, _, *state = inputs
        h, coefficients = output[0], output[len(state) :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*coefficients)
        ctx.shape, ctx.cells = h.shape, len(state) - 1
        # X, so that a change in place is noticed.
        ctx.save_for_backward(x, w, u, *coefficients)
        ctx.save_for_forward(x, w, u, state[0], h, *coefficients)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        """Pull the cotangents of h and c back to x, the shift (this is δ) and the first state.

        Args:
            ctx: what `setup_context` kept.
            dh: cotangents of h at all steps; None if h is unused.
            others: the cotangent of c after the last step for an LSTM, then None for each
                coefficient.

        Returns:
            A cotangent for each argument of `forward`; None for the kind, the weights and biases.
        """
        # W, U, b, b': called with detached weights.
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
        """Push the tangents of all inputs forward to h, and to c after the last step.

        Args:
            ctx: what `setup_context` kept.
            dx: tangent of x.
            dshift: None; the shift has no tangent.
            dw: tangent of W.
            du: tangent of U.
            db: tangent of b.
            db_state: tangent of b' (GRU only).
            dstate: tangents of the state before the first step.

        Returns:
            A tangent for each output of `forward`; None for the coefficients.
        """
        x, w, u, first, h, *coefficients = ctx.saved_tensors
        # LSTM, RNN: U h' + b' adds directly to p, and b' is already part of b; a GRU scales it by r
        # (state_scale).
        scale = state_scale(ctx.kind, tuple(coefficients))
        of_input, of_state = [(x, dw), (dx, w)], [(shift_steps(first, h), du)]
        if scale is None:
            dp = _tangent([*of_input, *of_state], db, u, h)
        else:
            dq = _tangent(of_state, db_state, u, h)
            dp = torch.addcmul(_tangent(of_input, db, u, h), dq, scale)
        state = tuple(torch.zeros_like(first) if d is None else d for d in dstate)
        dh, last_state = RECURSIONS[ctx.kind].push(tuple(coefficients), u, dp, state)
        dc_last = last_state[1:]  # of an LSTM; else empty
        no_tangents = [None] * len(coefficients)
        return dh, *dc_last, *no_tangents


def _linear(x: Float[Tensor, "t n f"], weight: Tensor, bias: Tensor | None) -> Gates:
    """Compute x Wᵀ + b as one matrix product: with three axes torch may run one for each step."""
    return F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])


def _tangent(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    bias: Tensor | None,
    u: Tensor,
    h: Hidden,
) -> Gates:
    """Compute Σ x Wᵀ + b over pairs (x, W), as one product of all x and all W side by side.

    Args:
        products: pairs of an input and a weight, of which one is a tangent; a pair with None, for a
            tangent of zero, is left out.
        bias: tangent of b.
        u: weight U [g, h], read for the number of gates g.
        h: states h of all steps, read for the number of steps and rows.
    """
    inputs: list[Tensor] = []
    weights: list[Tensor] = []
    for x, w in products:
        if x is not None and w is not None:
            inputs.append(x)
            weights.append(w)
    if inputs:
        return _linear(torch.cat(inputs, dim=2), torch.cat(weights, dim=1), bias)
    zeros = h.new_zeros(*h.shape[:2], len(u))
    return zeros if bias is None else zeros + bias


@dataclass(frozen=True)
class OneWay:
    """One layer in one direction.

    Args:
        kind: kind of layer, a key of `RECURSIONS`.
        weights: the layer's parameters: W, U, and b and b' if there are biases.
    """

    kind: str
    weights: Sequence[Tensor]

    def __call__(
        self, x: Float[Tensor, "t n f"], state: State, shift: Gates | None = None
    ) -> tuple[Tensor, State, Coefficients]:
        """Run all steps.

        Args:
            x: input of all steps [t, n, f].
            state: the state before the first step.
            shift: zeros [t, n, g] whose gradient is δ, the cotangent of the gates.

        Returns:
            h of all steps, the state after the last step, and the coefficients of the derivative.
        """
        w, u, *biases = self.weights
        b, b_state = biases or (None, None)
        # A GRU scales b' by r; in other layers b and b' just add.
        if biases and self.kind != "gru":
            b, b_state = biases[0] + biases[1], None
        apply: Callable[..., Any] = _Layer.apply
        out = apply(self.kind, x, shift, w, u, b, b_state, *state)
        h, *others = out
        # 1 for an LSTM, which returns c as well; else 0.
        cells = len(state) - 1
        return h, (h[-1], *others[:cells]), tuple(others[cells:])


class RecurrentOptions(NamedTuple):
    """The arguments of `torch.lstm`, `gru`, ... that follow the weights, in torch's order."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @classmethod
    def of(cls, options: Sequence[Any], named: dict[str, Any]) -> "RecurrentOptions | None":
        """Name the options; None for packed sequences, whose arguments are in another order.

        Args:
            options: positional arguments after the weights.
            named: arguments after the weights that are given by name.
        """
        try:
            parsed = cls(*options, **named)
        except TypeError:  # another number of arguments
            return None
        return parsed if isinstance(parsed.has_biases, bool) else None


# Runs one layer in one direction: maps x and the state before the first step to h of all steps and
# the state after the last one.
Run = Callable[[OneWay, Float[Tensor, "t n f"], State], tuple[Tensor, State]]


def run_layers(
    kind: str, run: Run, input: Tensor, hx: Any, params: Sequence[Tensor], how: RecurrentOptions
) -> Any:
    """Compute what `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` returns, layer by layer.

    Args:
        kind: kind of layer: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        run: runs one layer in one direction.
        input: input of all steps, [t, n, f] or [n, t, f].
        hx: the state before the first step: h, or (h, c) of an LSTM.
        params: W, U, b and b' of each layer and direction.
        how: the arguments after the weights.

    Returns:
        The output of all steps, and h of all layers after the last step, for an LSTM also c.
        NotImplemented for projections, active dropout and autocast.
    """
    directions = 1 + how.bidirectional
    per_layer = 2 + 2 * how.has_biases  # W, U, b, b'
    if len(params) != how.num_layers * directions * per_layer:
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
            one_way = OneWay(kind, params[number * per_layer : (number + 1) * per_layer])
            first = tuple(state[number] for state in states)
            if backward:
                h, end = run(one_way, x.flip(0), first)
                h = h.flip(0)
            else:
                h, end = run(one_way, x, first)
            outputs.append(h)
            ends.append(end)
        x = torch.cat(outputs, dim=2) if how.bidirectional else outputs[0]
    # For each part of the state, h and c, the ends of all layers and directions: [layers, n, h].
    last = map(torch.stack, zip(*ends, strict=True))
    if how.batch_first:
        x = x.transpose(0, 1)
    return x, *last


def _run(one_way: OneWay, x: Float[Tensor, "t n f"], state: State) -> tuple[Tensor, State]:
    """Run one layer in one direction, without a shift and without its coefficients."""
    h, last, _ = one_way(x, state)
    return h, last


class Unrolled(CallMode):
    """A function mode that runs recurrent layers step by step, for forward-mode differentiation.

    torch's fused kernels have no forward-mode rule, or a slow one.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation: recurrent layers step by step, all others as they are."""
        kind = name_of(func)
        # args[:3] are the input, the state and the weights.
        how = RecurrentOptions.of(args[3:], kwargs) if kind in RECURSIONS else None
        if how is None:
            return run_function(func, args, kwargs)
        input, hx, params = args[:3]
        out = run_layers(kind, _run, input, hx, params, how)
        return run_function(func, args, kwargs) if out is NotImplemented else out
