"""LSTM, GRU and RNN step by step, and linearised: what fused kernels compute, open to both modes of differentiation.

With gates p_t = W x_t + b, the part of the pre-activations that needs no step before it, a layer is the recursion

    LSTM    i, f, g, o = σ, σ, tanh, σ of p_t + U h',    c = f c' + i g,    h = o tanh c
    GRU     r, z = σ of p_t + q,    n = tanh(p_t + r q),    q = U h' + b',    h = (1 - z) n + z h'
    RNN     h = tanh or ReLU of p_t + U h'

in which a prime marks the step before. Its derivative at each step is a handful of products with coefficients that
depend on the values alone: they are computed once, for all steps together, and serve every cotangent that is pulled
back and every tangent that is pushed forward. What the fused kernels cannot say, the cotangent δ_t of p_t, is all that
the gradients of the weights need: ∂W = Σ_t δ_t x_tᵀ, ∂U = Σ_t δ_t h'ᵀ.

Tensors have time first here: [t, n, feature].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

State = tuple[Tensor, ...]  # h, and c of an LSTM: each [n, h]
Values = tuple[Tensor, ...]  # of all steps: h [t, n, h] first, then whatever the coefficients are made from
Gates = Float[Tensor, "t n g"]
Hidden = Float[Tensor, "t n h"]


@dataclass(frozen=True)
class Kind:
    """One kind of recurrent layer.

    Args:
        run: the values of all steps from p, U, b' (GRU's) and the state before the first step.
        linearised: the coefficients of all steps, from the values and the state before the first step.
        pull: from the coefficients, U and the cotangents of h [t, n, h] and of c after the last step to the cotangents
            of p and of the state before the first step.
        push: from the coefficients, U, the tangents of p, of U h' + b' through U and b' alone, and of the state before
            the first step to those of h and of c after the last step.
    """

    run: Callable[[Gates, Tensor, Tensor | None, State], Values]
    linearised: Callable[[Values, State], tuple[Tensor, ...]]
    pull: Callable[[tuple[Tensor, ...], Tensor, Hidden, Tensor | None], tuple[Gates, State]]
    push: Callable[[tuple[Tensor, ...], Tensor, Gates, Gates | None, State], tuple[Hidden, Tensor | None]]


def before(first: Float[Tensor, "n h"], later: Hidden) -> Hidden:
    """What each step finds: the first one what was given, every other one what the one before it left."""
    return torch.cat([first.unsqueeze(0), later[:-1]])


def _lstm(gates: Gates, weight: Tensor, bias: Tensor | None, state: State) -> Values:
    (h, c), across, size = state, weight.t(), weight.shape[1]
    inner: list[Tensor] = []
    hs: list[Tensor] = []
    cs: list[Tensor] = []
    for p in gates.unbind(0):
        p = torch.addmm(p, h, across)
        s = p.sigmoid()
        s[:, 2 * size : 3 * size] = p[:, 2 * size : 3 * size].tanh()
        i, f, g, o = s.chunk(4, dim=1)
        c = torch.addcmul(f * c, i, g)
        h = o * c.tanh()
        inner.append(s)
        hs.append(h)
        cs.append(c)
    return torch.stack(hs), torch.stack(cs), torch.stack(inner)


def _lstm_linearised(values: Values, state: State) -> tuple[Tensor, ...]:
    """∂c/∂(i, f, g), ∂h/∂o, ∂h/∂c and ∂c/∂c'."""
    _, c, inner = values
    i, f, g, o = inner.unflatten(-1, (4, -1)).unbind(2)
    seen = c.tanh()
    into_c = torch.stack([g * i * (1 - i), before(state[1], c) * f * (1 - f), i * (1 - g * g)], dim=2)
    return into_c, seen * o * (1 - o), o * (1 - seen * seen), f.contiguous()


def _lstm_pull(coefficients: tuple[Tensor, ...], weight: Tensor, dh: Hidden, dc: Tensor | None) -> tuple[Gates, State]:
    steps, n, size = dh.shape
    gates = dh.new_empty(steps, n, 4, size)
    backwards = [t.unbind(0)[::-1] for t in (*coefficients, gates[:, :, :3], gates[:, :, 3], gates.flatten(2), dh)]
    after: Tensor | None = None  # the cotangent of h from the step after
    for into_c, into_h, through, kept, of_c, of_o, whole, own in zip(*backwards, strict=True):
        d = own if after is None else own + after
        dc = d * through if dc is None else torch.addcmul(dc, d, through)
        torch.mul(dc.unsqueeze(1), into_c, out=of_c)
        torch.mul(d, into_h, out=of_o)
        dc = dc * kept
        after = whole @ weight
    assert after is not None
    assert dc is not None
    return gates.flatten(2), (after, dc)


def _lstm_push(
    coefficients: tuple[Tensor, ...], weight: Tensor, dp: Gates, dq: Gates | None, state: State
) -> tuple[Hidden, Tensor | None]:
    (h, c), across, hs = state, weight.t(), []
    for p, into_c, into_h, through, kept in zip(dp if dq is None else dp + dq, *coefficients, strict=True):
        p = torch.addmm(p, h, across).unflatten(1, (4, -1))
        c = torch.addcmul((p[:, :3] * into_c).sum(1), kept, c)
        h = torch.addcmul(p[:, 3] * into_h, through, c)
        hs.append(h)
    return torch.stack(hs), c


def _gru(gates: Gates, weight: Tensor, bias: Tensor | None, state: State) -> Values:
    (h,), across, size = state, weight.t(), weight.shape[1]
    inner: list[Tensor] = []
    hs: list[Tensor] = []
    for p in gates.unbind(0):
        q = h @ across if bias is None else torch.addmm(bias, h, across)
        rz = (p[:, : 2 * size] + q[:, : 2 * size]).sigmoid()
        r, z = rz.chunk(2, dim=1)
        n = torch.addcmul(p[:, 2 * size :], r, q[:, 2 * size :]).tanh()
        h = torch.lerp(n, h, z)
        inner.append(torch.cat([rz, n, q[:, 2 * size :]], dim=1))
        hs.append(h)
    return torch.stack(hs), torch.stack(inner)


def _gru_linearised(values: Values, state: State) -> tuple[Tensor, ...]:
    """∂h/∂p and ∂h/∂q, both for r, z and n, and ∂h/∂h' past the gates."""
    h, inner = values
    r, z, n, q = inner.unflatten(-1, (4, -1)).unbind(2)
    of_n = (1 - z) * (1 - n * n)
    of_rz = [of_n * q * r * (1 - r), (before(state[0], h) - n) * z * (1 - z)]
    return torch.stack([*of_rz, of_n], dim=2), torch.stack([*of_rz, of_n * r], dim=2), z.contiguous()


def _plain_pull(coefficients: tuple[Tensor, ...], weight: Tensor, dh: Hidden, dc: Tensor | None) -> tuple[Gates, State]:
    """Of layers whose state is what they give."""
    by_input, by_state, past = coefficients
    gates = torch.empty_like(by_input)
    after: Tensor | None = None
    backwards = [t.unbind(0)[::-1] for t in (by_input, by_state, past, gates, dh)]
    for into_p, into_q, kept, of_p, own in zip(*backwards, strict=True):
        d = own if after is None else own + after
        torch.mul(d.unsqueeze(1), into_p, out=of_p)
        after = torch.addmm(d * kept, (d.unsqueeze(1) * into_q).flatten(1), weight)
    assert after is not None
    return gates.flatten(2), (after,)


def _plain_push(
    coefficients: tuple[Tensor, ...], weight: Tensor, dp: Gates, dq: Gates | None, state: State
) -> tuple[Hidden, Tensor | None]:
    by_input, by_state, past = coefficients
    (h,), across, hs = state, weight.t(), []
    given = (dp.view_as(by_input) * by_input).sum(2)
    if dq is not None:
        given = given + (dq.view_as(by_state) * by_state).sum(2)
    for own, into_q, kept in zip(given, by_state, past, strict=True):
        h = torch.addcmul(own, kept, h) + ((h @ across).view_as(into_q) * into_q).sum(1)
        hs.append(h)
    return torch.stack(hs), None


def _rnn(activation: Callable[[Tensor], Tensor]) -> Callable[..., Values]:
    def run(gates: Gates, weight: Tensor, bias: Tensor | None, state: State) -> Values:
        (h,), across, hs = state, weight.t(), []
        for p in gates.unbind(0):
            h = activation(torch.addmm(p, h, across))
            hs.append(h)
        return (torch.stack(hs),)

    return run


def _rnn_linearised(slope: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def linearised(values: Values, state: State) -> tuple[Tensor, ...]:
        into_h = slope(values[0]).unsqueeze(2)
        return into_h, into_h, into_h.new_zeros(len(into_h), 1, 1)

    return linearised


KINDS = {
    "lstm": Kind(_lstm, _lstm_linearised, _lstm_pull, _lstm_push),
    "gru": Kind(_gru, _gru_linearised, _plain_pull, _plain_push),
    "rnn_tanh": Kind(_rnn(torch.tanh), _rnn_linearised(lambda h: 1 - h * h), _plain_pull, _plain_push),
    "rnn_relu": Kind(_rnn(torch.relu), _rnn_linearised(lambda h: (h > 0).to(h)), _plain_pull, _plain_push),
}


class _Steps(torch.autograd.Function):
    """(h of all steps, c after the last one if there is one, further values of all steps)."""

    @staticmethod
    def forward(kind: str, gates: Tensor, weight: Tensor, bias: Tensor | None, *state: Tensor) -> tuple[Tensor, ...]:
        values = KINDS[kind].run(gates, weight, bias, state)
        return values[0], *(c[-1].clone() for c in values[1 : len(state)]), *values[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.kind, _, weight, _, *state = inputs
        h, *further = output[0], *output[len(state) :]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*further)
        ctx.further = len(further)
        coefficients = KINDS[ctx.kind].linearised((h, *further), tuple(state))
        ctx.save_for_backward(weight, *coefficients)
        ctx.save_for_forward(weight, state[0], h, *coefficients)

    @staticmethod
    def backward(ctx: Any, dh: Tensor | None, *others: Tensor | None) -> tuple[Any, ...]:
        assert not any(ctx.needs_input_grad[2:4])  # δ of the gates is what weights need
        weight, *coefficients = ctx.saved_tensors
        dc = others[0] if len(others) > ctx.further else None
        if dh is None:
            like = coefficients[1]
            dh = like.new_zeros(len(like), like.shape[1], like.shape[-1])
        dp, state = KINDS[ctx.kind].pull(tuple(coefficients), weight, dh, dc)
        return None, dp, None, None, *state

    @staticmethod
    def jvp(
        ctx: Any, _: Any, dp: Tensor | None, dweight: Tensor | None, dbias: Tensor | None, *dstate: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        weight, first, h, *coefficients = ctx.saved_tensors
        state = tuple(torch.zeros_like(first) if d is None else d for d in dstate)
        dq = None if dweight is None else before(first, h) @ dweight.t()
        if dbias is not None:
            dq = dbias.expand(*h.shape[:2], -1) if dq is None else dq + dbias
        if dp is None:
            dp = h.new_zeros(*h.shape[:2], len(weight))
        dh, dc = KINDS[ctx.kind].push(tuple(coefficients), weight, dp, dq, state)
        return dh, *(() if dc is None else (dc,)), *(None,) * ctx.further


@dataclass(frozen=True)
class Direction:
    """One layer run in one direction: W, U, and b and b' if there are biases."""

    kind: str
    weights: Sequence[Tensor]

    def gates(self, x: Float[Tensor, "t n f"]) -> Gates:
        """p of all steps, with both biases in it where they do nothing but add up."""
        biases = self.weights[2:3] if self.kind == "gru" else self.weights[2:]
        return F.linear(x, self.weights[0], sum(biases[1:], biases[0]) if biases else None)

    def steps(self, gates: Gates, state: State) -> tuple[Tensor, ...]:
        """h of all steps, c after the last one if there is one, then further values of all steps."""
        bias = self.weights[3] if self.kind == "gru" and len(self.weights) > 2 else None
        found: tuple[Tensor, ...] = _Steps.apply(self.kind, gates, self.weights[1], bias, *state)  # type: ignore[no-untyped-call]
        return found

    def __call__(self, x: Float[Tensor, "t n f"], state: State) -> tuple[Tensor, State]:
        """h of all steps, and the state after the last one."""
        h, *others = self.steps(self.gates(x), state)
        return h, (h[-1], *others[: len(state) - 1])


# How one layer is run in one direction: from x and the state before the first step to h and the state after the last.
Run = Callable[[Direction, Float[Tensor, "t n f"], State], tuple[Tensor, State]]


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

    NotImplemented for packed sequences (whose arguments are others), projections, active dropout and autocast.
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
            direction = Direction(kind, params[number * each : (number + 1) * each])
            h, end = run(direction, x.flip(0) if backwards else x, tuple(s[number] for s in states))
            found.append(h.flip(0) if backwards else h)
            ends.append(end)
        x = torch.cat(found, dim=2) if bidirectional else found[0]
    last = (torch.stack(parts) for parts in zip(*ends, strict=True))
    return (x.transpose(0, 1) if batch_first else x), *last


class Unrolled(TorchFunctionMode):
    """Recurrent layers step by step, since the fused kernels have no rule, or a slow one, for forward mode."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind, kwargs = getattr(func, "__name__", "").partition(".")[0], kwargs or {}
        out = unrolled(kind, Direction.__call__, *args, **kwargs) if kind in KINDS else NotImplemented
        return func(*args, **kwargs) if out is NotImplemented else out
