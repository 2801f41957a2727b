"""Feature maps inside of any convolutional network: the last one, to be changed, and all, for
gradients by them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, num_samples
from qualms.gradients.model_input import ModelInput, forward_logits

NORMALIZATIONS = ("batch_norm", "group_norm", "instance_norm")
CONVOLUTION = "conv2d"
REDUCTIONS = ("mean", "sum", "amax", "amin", "logsumexp")  # whose second argument names axes
FLAT = (  # somewhere
    "relu", "relu6", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "hardtanh", "hardswish",
    "hardsigmoid", "hardshrink", "softshrink", "threshold",
)  # fmt: skip


@torch.no_grad()
def with_last_map_changed(
    model: nn.Module,
    batch: Batch,
    change: Callable[[Float[Tensor, "b c p"]], Float[Tensor, "b c p"]],
    method: str,
) -> Float[Tensor, "b classes"]:
    """The logits if the last feature map, [input, channel, position], were another.

    It is the last tensor [input, channel, height, width] that one operation, or one right after
    another, turns into a vector for each input; no operation after it may make another map, as
    those of a gate that pools on the way do. Channels are on the second axis, or on the last if a
    mean or the like is taken over the two others, or if the vector is as long as that axis alone.
    Where neither tells, as with a map that is flattened as a whole, they count as on the second.
    """
    watch = _Collapses(num_samples(batch))
    forward_logits(model, ModelInput(batch), watch)
    if watch.last is None:
        raise QualmsError(
            "no operation of the model pools or flattens its last feature map of a convolution into a vector for each "
            f"input, which {method} needs; use energy, scale, ash-s or regrad."
        )
    return forward_logits(
        model, ModelInput(batch), _Collapses(num_samples(batch), change, watch.last)
    )


@dataclass(frozen=True)
class _Collapse:
    number: int  # among the operations that take axes from a feature map
    channels_last: bool


class _Collapses(TorchFunctionMode):
    """Finds the operation that turns the last feature map into vectors, or gives the one `at`
    another map.
    """

    def __init__(
        self,
        rows: int,
        change: Callable[[Tensor], Tensor] | None = None,
        at: _Collapse | None = None,
    ) -> None:
        super().__init__()
        self.rows, self.change, self.at = rows, change, at
        self.last: _Collapse | None = None
        self._seen, self._convolved = 0, False
        self._halfway: tuple[Tensor, torch.Size, int] | None = (
            None  # with one axis less, the map's shape, the number
        )

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        out = func(*args, **named)
        given: Any = args[0] if args else named.get("input")
        convolution = _name(func) == CONVOLUTION
        self._convolved |= convolution
        if not self._convolved or not self._floats(out):
            return out
        if self._is_map(out):
            self.last = self._halfway = None
        elif self._halfway is not None and given is self._halfway[0] and out.shape[2:].numel() == 1:
            _, shape, number = self._halfway
            self.last = _Collapse(number, _left_over(shape, out))
        elif self._is_map(given) and not convolution:
            self._seen += 1
            if out.shape[2:].numel() == 1:
                axes: Any = args[1] if len(args) > 1 else named.get("dim")
                named_axes = _name(func) in REDUCTIONS and isinstance(axes, (tuple, list))
                last = (
                    {a % 4 for a in axes} == {1, 2} if named_axes else _left_over(given.shape, out)
                )
                self.last = _Collapse(self._seen, last)
            else:
                self._halfway = (out, given.shape, self._seen)
            if self.change is not None and self.at is not None and self._seen == self.at.number:
                other = _changed(given, self.change, self.at.channels_last)
                return (
                    func(other, *args[1:], **named) if args else func(**(named | {"input": other}))
                )
        return out

    def _floats(self, t: Any) -> bool:
        return (
            isinstance(t, Tensor) and t.is_floating_point() and t.ndim >= 2 and len(t) == self.rows
        )

    def _is_map(self, t: Any) -> bool:
        return self._floats(t) and t.ndim == 4 and t.shape[2:].numel() > 1


def _left_over(shape: torch.Size, out: Tensor) -> bool:
    """Whether a vector is as long as the last axis of a map, and not as the second."""
    return shape[1] != out.shape[1] == shape[3]


def _changed(maps: Tensor, change: Callable[[Tensor], Tensor], channels_last: bool) -> Tensor:
    first = maps.movedim(3, 1) if channels_last else maps
    changed = change(first.flatten(2)).reshape(first.shape)
    return changed.movedim(1, 3) if channels_last else changed


class InnerMaps(TorchFunctionMode):
    """Where gradients by normalized feature maps pass; by those of convolutions, in a model that
    has none such.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.flat = (
            rows,
            False,
        )  # whether an operation with zero gradients, such as a ReLU, has run
        self._normalized, self._convolved = list[GradientEdge](), list[GradientEdge]()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = _name(func)
        self.flat |= name.rstrip("_") in FLAT
        if name not in (*NORMALIZATIONS, CONVOLUTION) or out.ndim != 4 or len(out) != self.rows:
            return out
        if out.shape[2:].numel() > 1 and out.requires_grad:
            # The edge stays that of this result, even if what follows changes it in place.
            (self._normalized if name in NORMALIZATIONS else self._convolved).append(
                get_gradient_edge(out)
            )
        return out

    def edges(self) -> list[GradientEdge]:
        """In the order of the maps."""
        return self._normalized or self._convolved


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")
