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

from qualms.gradients.batch import NotBatchable
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
    derivative. The argument `zeros` stands for a term added to the gates' pre-activations p, so its
    gradient is their cotangent δ. The gradients of weights follow from δ and are not computed here.
    """

    @staticmethod
    def forward(
        kind: str,
        x: Tensor,
        zeros: Tensor | None,
        w: Tensor,
        u: Tensor,
        b: Tensor | None,
        b_state: Tensor | None,
        *state: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run all steps of one layer.

        Shapes have t steps, n rows, f input features, h hidden features and g gate entries.

        Args:
            kind: kind of layer, a key of `RECURSIONS`.
            x: input of all steps [t, n, f].
            zeros: not read: an argument whose gradient [t, n, g] is δ, the cotangent of the gates'
                pre-activations; None if δ is not wanted.
            w: weight W [g, f] of the input.
            u: weight U [g, h] of the state.
            b: bias b [g], for an LSTM or RNN the sum of both biases.
            b_state: bias b' [g] of the state; GRU only.
            state: the state before the first step: h, or h and c of an LSTM, each [n, h].

        Returns:
            h of all steps [t, n, h], for an LSTM then c after the last step [n, h], then the
            coefficients of the derivative.
        """
        p = _apply_linear(x, w, b)
        h, last_state, coefficients = RECURSIONS[kind].run(p, u, b_state, state)
        # The last h is part of `h` already; what follows it is the c of an LSTM.
        return h, *last_state[1:], *coefficients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save what `backward` and `jvp` need, as torch asks of an autograd function.

        Args:
            ctx: torch's object that is passed to `backward` and `jvp`.
            inputs: the arguments of `forward`.
            output: what `forward` returned: h, c of an LSTM, and the coefficients.
        """
        ctx.kind, x, _, w, u, _, _, *state = inputs
        h, coefficients = output[0], output[len(state) :]
        # Pass None instead of zeros for a cotangent or tangent that is zero.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*coefficients)
        # The state of an LSTM has two parts, h and c.
        ctx.h_shape, ctx.has_cell_state = h.shape, len(state) == 2
        # x is not read, but torch then raises if it was changed in place.
        ctx.save_for_backward(x, w, u, *coefficients)
        ctx.save_for_forward(x, w, u, state[0], h, *coefficients)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        """Raise `NotBatchable`: several tangents cannot share a pass, but can run one by one.

        Args:
            info: torch's description of the mapped axis; not used.
            in_dims: the mapped axis of each argument; not used.
            args: the arguments of `forward`; not used.
        """
        raise NotBatchable("a recurrent layer takes one tangent at a time")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, *further: Tensor | None) -> tuple[Any, ...]:
        """Pull the cotangents of h and c back to the arguments x, `zeros` and the first state.

        Args:
            ctx: what `setup_context` saved.
            dh: cotangents of h at all steps; None if h is unused.
            further: the cotangent of c after the last step for an LSTM, then None for each
                coefficient.

        Returns:
            A cotangent for each argument of `forward`; None for the kind, the weights and biases.
        """
        # W, U, b and b' are detached by the caller.
        assert not any(ctx.needs_input_grad[3:7])
        _, w, u, *coefficients = ctx.saved_tensors
        if dh is None:
            dh = u.new_zeros(ctx.h_shape)
        dc = further[0] if ctx.has_cell_state else None
        # delta is the cotangent of the gates' pre-activations p = W x + b, and of `zeros`.
        delta, dstate = RECURSIONS[ctx.kind].pull(tuple(coefficients), u, dh, dc)
        needs_dx = ctx.needs_input_grad[1]
        dx = _apply_linear(delta, w.t(), None) if needs_dx else None
        return None, dx, delta, None, None, None, None, *dstate

    @staticmethod
    def jvp(
        ctx: Any,
        _: Any,
        dx: Tensor | None,
        dzeros: None,
        dw: Tensor | None,
        du: Tensor | None,
        db: Tensor | None,
        db_state: Tensor | None,
        *dstate: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Push the tangents of all inputs forward to h, and to c after the last step.

        Args:
            ctx: what `setup_context` saved.
            _: None; the kind of layer has no tangent.
            dx: tangent of x.
            dzeros: None; `zeros` has no tangent.
            dw: tangent of W.
            du: tangent of U.
            db: tangent of b.
            db_state: tangent of b' (GRU only).
            dstate: tangents of the state before the first step.

        Returns:
            A tangent for each output of `forward`; None for the coefficients.
        """
        x, w, u, first_h, h, *coefficients = ctx.saved_tensors
        # Tangents of the gates' pre-activations p = W x + b and q = U h' + b', at fixed states h'
        # before each step. They are sums of products with one tangent: x dWᵀ, dx Wᵀ and h' dUᵀ.
        input_products = [(x, dw), (dx, w)]
        state_products = [(shift_steps(first_h, h), du)]
        scale = state_scale(ctx.kind, tuple(coefficients))
        if scale is None:
            # LSTM, RNN: the gates take p + q, and b' is part of b already.
            dp = _sum_products([*input_products, *state_products], db, u, h)
        else:
            # GRU: the gates take p + scale · q.
            dq = _sum_products(state_products, db_state, u, h)
            dp = torch.addcmul(_sum_products(input_products, db, u, h), dq, scale)
        first_dstate = tuple(torch.zeros_like(first_h) if d is None else d for d in dstate)
        dh, last_dstate = RECURSIONS[ctx.kind].push(tuple(coefficients), u, dp, first_dstate)
        last_dc = last_dstate[1:]  # of an LSTM; else empty
        no_tangents = [None] * len(coefficients)
        return dh, *last_dc, *no_tangents


def _apply_linear(x: Float[Tensor, "t n f"], weight: Tensor, bias: Tensor | None) -> Gates:
    """Compute x Wᵀ + b for all steps as a single matrix product.

    With three axes torch may run one product for each step, which is slower.

    Args:
        x: input of t steps and n rows, with f features.
        weight: W [g, f].
        bias: b [g]; None for no bias.

    Returns:
        The result [t, n, g].
    """
    return F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])


def _sum_products(
    products: Sequence[tuple[Tensor | None, Tensor | None]],
    bias: Tensor | None,
    u: Tensor,
    h: Hidden,
) -> Gates:
    """Compute Σ x Wᵀ + b over pairs (x, W), as a single product of all x and W concatenated.

    Args:
        products: pairs of an input x [steps, rows, features] and a weight W [gates, features]. None
            in a pair stands for a tangent of zero: the pair is left out.
        bias: tangent of b; None for zero.
        u: the layer's weight [gates, hidden], read for the number of gates.
        h: states of all steps, read for the number of steps and rows.

    Returns:
        The sum [steps, rows, gates]; zeros if all pairs are left out.
    """
    inputs: list[Tensor] = []
    weights: list[Tensor] = []
    for x, w in products:
        if x is not None and w is not None:
            inputs.append(x)
            weights.append(w)
    if inputs:
        return _apply_linear(torch.cat(inputs, dim=2), torch.cat(weights, dim=1), bias)
    zeros = h.new_zeros(*h.shape[:2], len(u))
    return zeros if bias is None else zeros + bias


@dataclass(frozen=True)
class OneWay:
    """A recurrent layer in one direction; calling it runs all steps.

    Args:
        kind: kind of layer, a key of `RECURSIONS`.
        weights: the layer's parameters: W, U, and b and b' if there are biases.
    """

    kind: str
    weights: Sequence[Tensor]

    def __call__(
        self,
        x: Float[Tensor, "t n f"],
        state: State,
        zeros: Gates | None = None,
    ) -> tuple[Tensor, State, Coefficients]:
        """Run all steps of the layer.

        Args:
            x: input of t steps and n rows, with f features.
            state: the state before the first step: (h,), or (h, c) of an LSTM.
            zeros: zeros in the shape of the gates' pre-activations, so that their gradient is the
                cotangent of these; None if it is not wanted.

        Returns:
            h of all steps, the state after the last step, and the coefficients of the derivative.
        """
        w, u, *biases = self.weights
        b: Tensor | None
        b_state: Tensor | None
        if not biases:
            b, b_state = None, None
        elif self.kind == "gru":
            # A GRU scales U h' + b'.
            b, b_state = biases
        else:
            # In other layers b and b' just add.
            b, b_state = biases[0] + biases[1], None
        # torch declares no types for `apply`.
        apply: Callable[..., Any] = _Layer.apply
        h, *further = apply(self.kind, x, zeros, w, u, b, b_state, *state)
        # An LSTM returns c as well, before the coefficients.
        num_cell_states = len(state) - 1
        last_state = (h[-1], *further[:num_cell_states])
        return h, last_state, tuple(further[num_cell_states:])


class RecurrentOptions(NamedTuple):
    """The arguments of `torch.lstm`, `torch.gru` etc. that follow the weights, in torch's order."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @classmethod
    def of(cls, options: Sequence[Any], named: dict[str, Any]) -> "RecurrentOptions | None":
        """Parse the arguments that follow the weights.

        Args:
            options: positional arguments after the weights.
            named: arguments after the weights that are passed by name.

        Returns:
            The options; None for packed sequences, whose arguments are in another order.
        """
        try:
            parsed = cls(*options, **named)
        # Another number of arguments.
        except TypeError:
            return None
        # For packed sequences, the weights are in this place.
        return parsed if isinstance(parsed.has_biases, bool) else None


# Runs one layer in one direction: maps the layer, its input x [t, n, f] at t steps and the state
# before the first step to h of all steps and the state after the last step.
RunLayer = Callable[[OneWay, Float[Tensor, "t n f"], State], tuple[Tensor, State]]


def run_layers(
    kind: str,
    run: RunLayer,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    options: RecurrentOptions,
) -> Any:
    """Compute what `torch.lstm`, `gru`, `rnn_tanh` or `rnn_relu` returns, layer by layer.

    Args:
        kind: kind of layer: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        run: runs one layer in one direction.
        input: input of all t steps and n rows, [t, n, features] or [n, t, features].
        hx: the state before the first step: h, or (h, c) of an LSTM.
        params: W, U, b and b' of each layer and direction.
        options: the arguments after the weights.

    Returns:
        The output of all steps, and h of all layers after the last step, for an LSTM also c.
        NotImplemented for projections, active dropout and autocast.
    """
    # Whether the steps of each direction run backward in time.
    backward_flags = [False, True] if options.bidirectional else [False]
    params_per_layer = 4 if options.has_biases else 2  # W and U, with biases also b and b'
    # Projections have further weights.
    if len(params) != options.num_layers * len(backward_flags) * params_per_layer:
        return NotImplemented
    if (options.train and options.dropout > 0) or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    first_states = tuple(hx) if kind == "lstm" else (hx,)
    x = input.transpose(0, 1) if options.batch_first else input
    last_states: list[State] = []
    for _ in range(options.num_layers):
        outputs: list[Tensor] = []
        for is_backward in backward_flags:
            # torch lists both directions of a layer before the next layer.
            index = len(last_states)
            weights = params[index * params_per_layer : (index + 1) * params_per_layer]
            first_state = tuple(state[index] for state in first_states)
            steps = x.flip(0) if is_backward else x
            h, last_state = run(OneWay(kind, weights), steps, first_state)
            outputs.append(h.flip(0) if is_backward else h)
            last_states.append(last_state)
        x = torch.cat(outputs, dim=2) if options.bidirectional else outputs[0]
    # One tensor [layers·directions, n, hidden] for each part of the state, h and c.
    stacked_states = map(torch.stack, zip(*last_states, strict=True))
    if options.batch_first:
        x = x.transpose(0, 1)
    return x, *stacked_states


def _run_without_coefficients(
    one_way: OneWay, x: Float[Tensor, "t n f"], state: State
) -> tuple[Tensor, State]:
    """Run one layer in one direction, and drop the coefficients, which forward mode does not need.

    Args:
        one_way: the layer.
        x: input of t steps and n rows, with f features.
        state: the state before the first step.

    Returns:
        h of all steps, and the state after the last step.
    """
    h, last_state, _ = one_way(x, state)
    return h, last_state


class Unrolled(CallMode):
    """A function mode that runs recurrent layers step by step, for forward-mode differentiation.

    torch's fused kernels have no forward-mode rule, or a slow one.
    """

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation: a recurrent layer step by step, any other one as torch does.

        Args:
            func: the operation, a function of torch.
            args: the operation's positional arguments.
            kwargs: the operation's keyword arguments.
        """
        kind = name_of(func)
        if kind not in RECURSIONS:
            return run_function(func, args, kwargs)
        # The first three arguments are the input, the state and the weights.
        options = RecurrentOptions.of(args[3:], kwargs)
        if options is None:
            return run_function(func, args, kwargs)
        input, hx, params = args[:3]
        out = run_layers(kind, _run_without_coefficients, input, hx, params, options)
        return run_function(func, args, kwargs) if out is NotImplemented else out
