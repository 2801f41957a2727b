"""One tangent on the weights, pushed forward: J s for every row, by forward-mode differentiation or
by a difference.

Nothing is believed untested: v·(J s) of the first row must be ⟨Jᵀv, s⟩ by plain autograd, and the J
s of all rows must not change when they run in other company. Rows that fail run one at a time.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError, reason
from qualms.gradients.batch import NotBatchable, batch_tensors, num_samples, with_tensors
from qualms.gradients.memory import release_free_memory
from qualms.gradients.model_input import (
    ModelInput,
    forward_logits,
    in_channels_last,
    some_alone,
    wants_channels_last,
)
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import close, close_logits, coarser, tolerance_of
from qualms.gradients.single_sample import (
    FirstSample,
    ModelProfile,
    random_direction,
    require_repeatable,
    sample_gradients,
)
from qualms.gradients.sketching.attention import DifferentiableAttention
from qualms.gradients.sketching.other_weights import LogitsAt
from qualms.gradients.tracing.param_use import largest_result
from qualms.gradients.tracing.recorder import Shapes, collapses_rows
from qualms.gradients.tracing.rules.recurrent_layers import Unrolled
from qualms.gradients.tracing.traced_forward import require_uses_that_vary, trace_forward
from qualms.gradients.tracing.weights import Weights

log = logging.getLogger("qualms")
FORMATTED_BYTES = (
    2**24
)  # of weights up to which both they and tangents are copied to the format of the input
UNSEEN = 2**22  # bytes that are taken for the largest result of a row where no result can be seen
# relative error allowed to a central difference, which steps over kinks: far below a sketch's noise
DIFFERENCE = 1e-3
Tangent = dict[str, Tensor]  # by the parameter's name
RowGradient = tuple[
    ModelInput, dict[str, Float[Tensor, "1 ..."]]
]  # a row, and its gradient along a random direction
Push = Callable[
    [nn.Module, ModelInput, Tangent], tuple[Float[Tensor, "rows c"], Float[Tensor, "rows c"]]
]


def forward_mode(
    model: nn.Module, on: ModelInput, tangent: Tangent, several: bool = False
) -> tuple[Tensor, Tensor]:
    """The logits z and J s, exact: one pass with dual numbers. `several`: s, z and J s are [k, …],
    for k tangents.
    """
    x = batch_tensors(on.batch)[0]
    last = (
        x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    )

    def formatted(t: Tensor) -> Tensor:
        """t in channels-last format if the input is in it and t has four axes, else t as it is."""
        return t.contiguous(memory_format=torch.channels_last) if last and t.ndim == 4 else t

    last = last and sum(s.nbytes for s in tangent.values()) <= FORMATTED_BYTES
    theta = {name: formatted(model.get_parameter(name).detach()) for name in tangent}
    tangents = {name: formatted(s) for name, s in tangent.items()}
    inner = LogitsAt(model)
    modes = (_differentiable_kernels(), DifferentiableAttention(), ConstantPadding(), Unrolled())
    with torch.no_grad(), ExitStack() as stack, warnings.catch_warnings():
        for mode in modes:
            stack.enter_context(mode)
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # torch's own, of the rules it compiles on first use
        jvp = partial(torch.func.jvp, lambda t: inner(t, on), (theta,))
        # "same": noise on embeddings is drawn in the pass, one draw for all tangents.
        many = torch.vmap(lambda s: jvp((s,)), randomness="same")
        pair: Any = many(tangents) if several else jvp((tangents,))
    return pair[0].detach(), pair[1].detach()


@torch.no_grad()
def central_difference(model: nn.Module, on: ModelInput, tangent: Tangent) -> tuple[Tensor, Tensor]:
    """(z(θ + εs) - z(θ - εs)) / 2ε in double precision, for models that forward mode cannot run."""
    inner = LogitsAt(model)
    state = {n: _double(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    on = ModelInput(
        with_tensors(on.batch, map(_double, batch_tensors(on.batch))),
        on.rows_per_sample,
        on.embedding_noise,
    )
    tangent = {name: s.double() for name, s in tangent.items()}
    step, padding = _step(state, tangent), list[Tensor]()

    def moved(by: float, keep_padding: ConstantPadding) -> Tensor:
        there = {n: state[n] + by * s for n, s in tangent.items()}
        with keep_padding:
            return inner(state | there, on)

    z = moved(0.0, ConstantPadding(seen=padding))
    ahead, behind = (moved(by, ConstantPadding(activations=padding)) for by in (step, -step))
    return z, (ahead - behind) / (2 * step)


def _step(state: Tangent, tangent: Tangent) -> float:
    """The step at which truncation and rounding of a central difference balance, relative to the
    weights' size.
    """
    size = sum(float(state[n].square().sum()) for n in tangent) ** 0.5
    length = sum(float(s.square().sum()) for s in tangent.values()) ** 0.5
    return torch.finfo(torch.double).eps ** (1 / 3) * max(size, 1e-3) / max(length, 1e-30)


def _double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()


class ConstantPadding(TorchFunctionMode):
    """What an embedding gives for padding has no gradient, and so no tangent; other uses of the
    same weight do.

    For a difference it stays what it was at the weights themselves: `seen` takes that down, and
    `activations` holds to it.
    """

    def __init__(
        self, seen: list[Tensor] | None = None, activations: Sequence[Tensor] = ()
    ) -> None:
        super().__init__()
        self.seen, self.activations = seen, iter(activations)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").partition(".")[0] != "embedding":
            return out
        names = IN_PYTHON if func is F.embedding else IN_ATEN
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        if given.get("scale_grad_by_freq"):
            raise QualmsError("an embedding scales its gradients by frequency; use engine='exact'.")
        padding = given.get("padding_idx")
        if padding is None or (func is not F.embedding and padding < 0):
            return out
        ids = given["input"] if func is F.embedding else given["indices"]
        if self.seen is not None:
            self.seen.append(out)
        constant = next(self.activations, out.detach())
        return torch.where((ids == padding % len(given["weight"])).unsqueeze(-1), constant, out)


IN_PYTHON = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
IN_ATEN = ("weight", "indices", "padding_idx", "scale_grad_by_freq")


@contextmanager
def _differentiable_kernels() -> Iterator[None]:
    """Attention by kernels that have a forward-mode rule."""
    fast: Any = torch.backends.mha
    before = fast.get_fastpath_enabled()
    fast.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        fast.set_fastpath_enabled(before)


PUSHES: dict[str, Push] = {"forward mode": forward_mode, "central difference": central_difference}


@dataclass
class KnownRows:
    """Rows whose gradients along a random direction plain autograd gives, kept or found anew each
    time.
    """

    model: nn.Module
    rows: list[ModelInput]
    selected: dict[str, Tensor]
    kept: list[dict[str, Tensor]]  # by row; none if they take too much

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> RowGradient:
        row = self.rows[i]
        if self.kept:
            return row, self.kept[i]
        _, gradient = sample_gradients(self.model, row, self.selected, random_direction)
        release_free_memory()  # that of its graph
        return row, gradient


@dataclass(frozen=True)
class PushProbe(ModelProfile):
    """What the first rows tell."""

    counted: list[str]  # parameters whose layers count, in the model's order
    alone: (
        bool  # rows are compared with what they give alone: what they give in halves may not tell
    )

    @classmethod
    def of(
        cls, model: nn.Module, on: ModelInput, selected: dict[str, Tensor], room: int | None = None
    ) -> "tuple[PushProbe, KnownRows]":
        """Runs one row by plain autograd and watched, and others by plain autograd.

        Args:
            model: under `untouched`.
            on: some rows.
            selected: the parameters that count.
            room: bytes that the rows' gradients may take to be kept; None keeps them.
        """
        inputs = list(range(0, num_samples(on.batch), on.rows_per_sample))
        others = [
            on.take([i])
            for i in sorted({inputs[len(inputs) // 2], num_samples(on.batch) - 1} - {0})
        ]
        size = sum(p.nbytes for p in selected.values())
        keep = room is None or (1 + len(others)) * size <= room
        first = FirstSample.of(model, on, selected)
        used, kept = set(first.gradient), [first.gradient] if keep else []
        if not keep:
            first = replace(first, gradient={})
        for row in others:
            logits, gradient = sample_gradients(model, row, selected, random_direction)
            require_repeatable(model, row, logits)
            used |= set(gradient)
            if keep:
                kept.append(gradient)
            del gradient
        known = KnownRows(model, [first.rows, *others], selected, kept)
        if not used:
            require_uses_that_vary(model, on)
        classes, nbytes = first.logits.shape[1], first.logits.nbytes
        try:
            _, recorder = trace_forward(
                model, first.rows, Weights.of(selected, model.parameters()), None
            )
        except Exception as error:
            log.info("%s: each row is compared with what it gives alone", error)
            return cls(
                classes, max(UNSEEN, nbytes), False, first.precision, list(selected), True
            ), known
        largest, order = max(largest_result(recorder.param_uses), nbytes), recorder.use_order
        shapes = recorder.shapes
        del recorder, _  # and the graph
        last = _takes_channels_last(model, first, selected)
        alone = not order.fixed or _collapses(model, on, shapes, selected)
        return cls(
            classes, largest, last, first.precision, order.relevant(used, selected), alone
        ), known


def _collapses(
    model: nn.Module, on: ModelInput, one: Sequence[Shapes], selected: dict[str, Tensor]
) -> bool:
    """Whether the model computes something from several rows at once, which shows in the shapes of
    a look at one.
    """
    if num_samples(on.batch) == 1:
        return False
    try:
        _, two = trace_forward(
            model, on.take([0, 1]), Weights.of(selected, model.parameters()), None
        )
    except Exception:
        return True
    return collapses_rows(one, two.shapes)


def working_push(probe: PushProbe, known: KnownRows, tangent: Tangent) -> Push:
    """The first way of pushing a tangent that gives plain autograd's derivative, for all rows where
    it is known.
    """
    reasons = []
    for name, push in PUSHES.items():
        try:
            wrong = next(
                filter(None, (_wrong(push, probe, known, i, tangent) for i in range(len(known)))),
                None,
            )
        except Exception as error:
            wrong = reason(error)
        if wrong is None:
            return push
        reasons.append(f"{name}: {wrong}")
    raise QualmsError(
        f"engine='sketch' cannot push tangents through this model ({'; '.join(reasons)}); use engine='exact'."
    )


def _wrong(push: Push, probe: PushProbe, known: KnownRows, i: int, tangent: Tangent) -> str | None:
    """How what a push gives for row number i differs from plain autograd's derivative, or None.

    Args:
        push: the way in question.
        probe: what is known of the model.
        known: rows and their gradients.
        i: the row.
        tangent: what is pushed.
    """
    row, gradient = known[i]
    z, dz = push(known.model, probe.reformat(row), tangent)
    have = float((random_direction(z).flatten() * dz.double().flatten()).sum())
    want, square = 0.0, 0.0
    for name, g in gradient.items():
        if name in tangent:
            terms = g.double().flatten() * tangent[name].double().flatten()
            want += float(terms.sum())
            square += float(terms.square().sum())
    size = square**0.5
    tolerance = (
        tolerance_of(coarser(dz.dtype, probe.precision)) if push is forward_mode else DIFFERENCE
    )
    right = abs(have - want) <= tolerance * max(size, abs(want))
    return None if right else f"{have:.3g} where plain autograd gives {want:.3g}"


def _takes_channels_last(model: nn.Module, first: FirstSample, selected: dict[str, Tensor]) -> bool:
    """Whether it is an image model that forward mode can run so; views of what a convolution
    returns may fail.
    """
    if not wants_channels_last(first.rows):
        return False
    try:
        z, _ = forward_mode(
            model, in_channels_last(first.rows), {name: p.detach() for name, p in selected.items()}
        )
    except Exception:
        return False
    return close_logits(z, first.logits, first.precision)


def checked_pushes(
    push: Push,
    model: nn.Module,
    probe: PushProbe,
    chunks: Sequence[ModelInput],
    tangent: Tangent,
    learnt: PlanCache,
) -> list[tuple[Push, tuple[Tensor, Tensor]]]:
    """How to push tangents through each chunk, all rows at once if they do not influence each
    other, and the first.
    """

    def alone(m: nn.Module, on: ModelInput, s: Tangent) -> tuple[Tensor, Tensor]:
        each = [on.take([row]) for row in range(num_samples(on.batch))]
        pairs = [push(m, row, s) for row in each]
        if s is tangent:
            for row in each:
                require_repeatable(m, row, forward_logits(m, row))
        return torch.cat([z for z, _ in pairs]), torch.cat([dz for _, dz in pairs])

    found: list[tuple[Push, tuple[Tensor, Tensor]]] = []
    for on in chunks:
        if num_samples(on.batch) == 1:
            found.append((push, push(model, on, tangent)))
            continue
        try:
            together = push(model, on, tangent)
            rounded = (
                coarser(together[0].dtype, probe.precision)
                if push is forward_mode
                else together[0].dtype
            )
            apart = (alone if probe.alone else in_halves(push))(model, on, tangent)
            pairs = [(apart, together)]
            for row in some_alone(num_samples(on.batch)):
                z, dz = together
                pairs.append(
                    (push(model, on.take([row]), tangent), (z[row : row + 1], dz[row : row + 1]))
                )
            if not all(
                close_logits(a[0], b[0], rounded) and close(a[1], b[1], rounded) for a, b in pairs
            ):
                raise NotBatchable("the inputs of a batch influence each other")
            found.append((push, together))
        except Exception as error:  # if the model itself is at fault, a row alone will say so
            learnt.warn_slow(error)
            found.append((alone, alone(model, on, tangent)))
    return found


def in_halves(push: Push) -> Push:
    """The same in other company: every second row with every second one."""

    def halves(model: nn.Module, on: ModelInput, tangent: Tangent) -> tuple[Tensor, Tensor]:
        pairs = [
            push(model, on.take(list(range(parity, num_samples(on.batch), 2))), tangent)
            for parity in (0, 1)
        ]
        both = [pairs[0][i].new_empty(num_samples(on.batch), pairs[0][i].shape[1]) for i in (0, 1)]
        for parity, pair in enumerate(pairs):
            for whole, half in zip(both, pair, strict=True):
                whole[parity::2] = half
        return both[0], both[1]

    return halves
