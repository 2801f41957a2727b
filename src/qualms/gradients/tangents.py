"""One tangent on the weights, pushed forward: J s for every row, by forward-mode differentiation or by a difference.

Nothing is believed untested: v·(J s) of the first row must be ⟨Jᵀv, s⟩ by plain autograd, and the J s of all rows must
not change when they run in other company. Rows that fail run one at a time.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.guard import all_parameters_differentiable
from qualms.gradients.inputs import count, tensors, with_tensors
from qualms.gradients.layout import Unclear
from qualms.gradients.plain import gradients_of, row_gradients
from qualms.gradients.probe import along, in_channels_last, recorded, wants_channels_last
from qualms.gradients.smoothing import Rows, logits_of
from qualms.gradients.trust import COARSE, TOLERANCE, close
from qualms.gradients.weights import Weights

log = logging.getLogger("qualms")
DIFFERENCE = 1e-3  # relative error allowed to a central difference, which steps over kinks: far below a sketch's noise
Tangent = dict[str, Tensor]  # by the parameter's name
Push = Callable[[nn.Module, Rows, Tangent], tuple[Float[Tensor, "rows c"], Float[Tensor, "rows c"]]]


def forward_mode(model: nn.Module, on: Rows, tangent: Tangent) -> tuple[Tensor, Tensor]:
    """The logits z and J s, exact: one pass with dual numbers."""
    inner = _Logits(model)
    x = tensors(on.batch)[0]
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()

    def formatted(t: Tensor) -> Tensor:
        return t.contiguous(memory_format=torch.channels_last) if last and t.ndim == 4 else t

    theta = {f"model.{name}": formatted(model.get_parameter(name).detach()) for name in tangent}
    along = {f"model.{name}": formatted(s) for name, s in tangent.items()}
    with torch.no_grad(), _differentiable_kernels(), ConstantPadding(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of the rules it compiles on first use
        pair: Any = torch.func.jvp(lambda t: torch.func.functional_call(inner, t, (on,)), (theta,), (along,))
    return pair[0].detach(), pair[1].detach()


@torch.no_grad()
def central_difference(model: nn.Module, on: Rows, tangent: Tangent) -> tuple[Tensor, Tensor]:
    """(z(θ + εs) - z(θ - εs)) / 2ε in double precision, for models that forward mode cannot run."""
    inner = _Logits(model)
    state = {f"model.{n}": _double(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    on = Rows(with_tensors(on.batch, map(_double, tensors(on.batch))), on.per_input, on.embedding_noise)
    tangent = {name: s.double() for name, s in tangent.items()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and f"{name}.weight" in tangent:
            tangent[f"{name}.weight"][module.padding_idx] = 0
    step = _step(state, tangent)

    def moved(by: float) -> Tensor:
        there = {f"model.{n}": state[f"model.{n}"] + by * s for n, s in tangent.items()}
        return torch.func.functional_call(inner, state | there, (on,))

    return moved(0.0), (moved(step) - moved(-step)) / (2 * step)


def _step(state: Tangent, tangent: Tangent) -> float:
    """The step at which truncation and rounding of a central difference balance, relative to the weights' size."""
    size = sum(float(state[f"model.{n}"].square().sum()) for n in tangent) ** 0.5
    length = sum(float(s.square().sum()) for s in tangent.values()) ** 0.5
    return torch.finfo(torch.double).eps ** (1 / 3) * max(size, 1e-3) / max(length, 1e-30)


def _double(t: Tensor) -> Tensor:
    return t.detach().double() if t.is_floating_point() else t.detach()


class _Logits(nn.Module):
    """A model that takes rows and returns checked logits, for `functional_call`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.training = False

    def forward(self, on: Rows) -> Tensor:
        return logits_of(self.model, on)


class ConstantPadding(TorchFunctionMode):
    """The row of an embedding that stands for padding has no gradient, and so no tangent."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.embedding:
            return out
        given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | (kwargs or {})
        padding = given.get("padding_idx")
        if padding is None:
            return out
        at = given["input"] == padding % len(given["weight"])
        return torch.where(at.unsqueeze(-1), out.detach(), out)


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


@dataclass(frozen=True)
class Look:
    """What the first rows tell."""

    used: list[str]  # parameters that the logits of these rows depend on, in order of first use
    gradient: dict[str, Float[Tensor, "1 ..."]]  # of the first row, along one random direction
    classes: int
    largest: int  # bytes of the largest result of one row
    channels_last: bool  # the model takes images in that memory format, in which convolutions are faster
    alone: bool  # rows are compared with what they give alone: the model reads values, or cannot be watched

    @classmethod
    def of(cls, model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> "Look":
        """Runs one row by plain autograd and watched, and the others to see which parameters they use."""
        first = on.take([0])
        logits, gradient = row_gradients(model, first, selected, along)
        known = gradient.keys() | _used_by(model, on, selected)
        used = [name for name in selected if name in known]
        if not used:
            raise QualmsError("none of the selected parameters takes part in the forward pass; widen `params`.")
        try:
            _, recorder = recorded(model, first, Weights.of(selected, model.parameters()), None)
        except Exception as reason:
            log.info("%s: each row is compared with what it gives alone", reason)
            return cls(used, gradient, logits.shape[1], logits.nbytes, False, True)
        order = [name for name in recorder.first_use if name in used]
        order += [name for name in used if name not in order]
        largest = max((t.numel() * t.element_size() for m in recorder.meetings for t in m.results), default=0)
        last = _takes_channels_last(model, first, logits)
        return cls(order, gradient, logits.shape[1], max(largest, logits.nbytes), last, recorder.reads_values)

    def push(self, model: nn.Module, first: Rows, tangent: Tangent) -> Push:
        """The first way of pushing a tangent that gives plain autograd's derivative."""
        reasons = []
        for name, push in PUSHES.items():
            try:
                z, dz = push(model, first, tangent)
            except Exception as error:
                reasons.append(f"{name}: {(str(error).strip() or type(error).__name__).splitlines()[0]}")
                continue
            have = float((along(z).flatten() * dz.double().flatten()).sum())
            terms = [
                g.double().flatten() * tangent[n].double().flatten() for n, g in self.gradient.items() if n in tangent
            ]
            want = float(sum(term.sum() for term in terms))
            size = float(sum(term.square().sum() for term in terms)) ** 0.5
            tolerance = TOLERANCE.get(dz.dtype, COARSE) if push is forward_mode else DIFFERENCE
            if abs(have - want) <= tolerance * max(size, abs(want)):
                return push
            reasons.append(f"{name} gives {have:.3g} where plain autograd gives {want:.3g}")
        raise QualmsError(
            f"engine='sketch' cannot push tangents through this model ({'; '.join(reasons)}); use engine='exact'."
        )


def _takes_channels_last(model: nn.Module, first: Rows, logits: Tensor) -> bool:
    """Whether it is an image model that gives the same logits; `view` on what a convolution returns may fail."""
    if not wants_channels_last(first):
        return False
    try:
        with torch.no_grad():
            return close(logits_of(model, in_channels_last(first)), logits)
    except QualmsError:
        return False


def _used_by(model: nn.Module, on: Rows, selected: dict[str, Tensor]) -> set[str]:
    """Which parameters the logits of several inputs depend on; a model that takes one at a time does not say."""
    inputs = on.take(list(range(0, count(on.batch), on.per_input)))
    with all_parameters_differentiable(model):
        try:
            found = gradients_of(logits_of(model, inputs).sum(), list(selected.values()))
        except QualmsError:
            return set()
    return {name for name, g in zip(selected, found, strict=True) if g is not None}


def trusted(
    push: Push, model: nn.Module, look: Look, chunks: Sequence[Rows], tangent: Tangent
) -> list[tuple[Push, tuple[Tensor, Tensor]]]:
    """How to push tangents through each chunk, all rows at once if they do not influence each other, and the first."""

    def alone(m: nn.Module, on: Rows, s: Tangent) -> tuple[Tensor, Tensor]:
        pairs = [push(m, on.take([row]), s) for row in range(count(on.batch))]
        return torch.cat([z for z, _ in pairs]), torch.cat([dz for _, dz in pairs])

    found: list[tuple[Push, tuple[Tensor, Tensor]]] = []
    for on in chunks:
        if count(on.batch) == 1:
            found.append((push, push(model, on, tangent)))
            continue
        try:
            together = push(model, on, tangent)
            apart = (alone if look.alone else in_halves(push))(model, on, tangent)
            if not all(close(a, t) for a, t in zip(apart, together, strict=True)):
                raise Unclear("the inputs of a batch influence each other")
            found.append((push, together))
        except Exception as reason:  # if the model itself is at fault, a row alone will say so
            log.info("%s: these inputs are run one row at a time", reason)
            found.append((alone, alone(model, on, tangent)))
    return found


def in_halves(push: Push) -> Push:
    """The same in other company: every second row with every second one."""

    def halves(model: nn.Module, on: Rows, tangent: Tangent) -> tuple[Tensor, Tensor]:
        pairs = [push(model, on.take(list(range(parity, count(on.batch), 2))), tangent) for parity in (0, 1)]
        both = [pairs[0][i].new_empty(count(on.batch), pairs[0][i].shape[1]) for i in (0, 1)]
        for parity, pair in enumerate(pairs):
            for whole, half in zip(both, pair, strict=True):
                whole[parity::2] = half
        return both[0], both[1]

    return halves
