"""Feature maps inside of any convolutional network: the last one, to be changed, and all, for gradients by them."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.inputs import Batch, count
from qualms.gradients.rows import Rows, logits_of

NORMALISATIONS = ("batch_norm", "group_norm", "instance_norm")
CONVOLUTION = "conv2d"
FLAT = ("relu", "relu6", "clamp", "clip", "hardtanh", "hardswish", "hardsigmoid", "threshold")  # somewhere


@torch.no_grad()
def with_last_map_changed(
    model: nn.Module, batch: Batch, change: Callable[[Float[Tensor, "b c p"]], Float[Tensor, "b c p"]], method: str
) -> Float[Tensor, "b classes"]:
    """The logits if the last feature map, [input, channel, position], were another.

    It is the last tensor [input, channel, height, width] that one operation turns into a vector for each input.
    """
    watch = _Collapses(count(batch))
    logits_of(model, Rows(batch), watch)
    if not watch.seen:
        raise QualmsError(
            "no operation of the model pools or flattens a feature map of a convolution into a vector for each input, "
            f"which {method} needs; use energy, scale, ash-s or regrad."
        )
    return logits_of(model, Rows(batch), _Collapses(count(batch), change, watch.seen))


class _Collapses(TorchFunctionMode):
    """Counts the operations that turn feature maps into vectors, and gives the `at`-th of them another map."""

    def __init__(self, rows: int, change: Callable[[Tensor], Tensor] | None = None, at: int = 0) -> None:
        super().__init__()
        self.rows, self.change, self.at = rows, change, at
        self.seen, self._convolved = 0, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        out = func(*args, **named)
        self._convolved |= _name(func) == CONVOLUTION
        given: Any = args[0] if args else named.get("input")
        if not self._convolved or not self._collapsed(given, out):
            return out
        self.seen += 1
        if self.change is None or self.seen != self.at:
            return out
        last = given.shape[1] != out.shape[1] == given.shape[3]  # the channels are on the last axis
        channels_first = given.movedim(3, 1) if last else given
        changed = self.change(channels_first.flatten(2)).reshape(channels_first.shape)
        other = changed.movedim(1, 3) if last else changed
        return func(other, *args[1:], **named) if args else func(**(named | {"input": other}))

    def _collapsed(self, given: Any, out: Any) -> bool:
        maps = isinstance(given, Tensor) and given.ndim == 4 and given.shape[2:].numel() > 1
        if not maps or not isinstance(out, Tensor) or not out.is_floating_point() or out.ndim < 2:
            return False
        return len(given) == len(out) == self.rows and out.shape[2:].numel() == 1


class InnerMaps(TorchFunctionMode):
    """Where gradients by normalised feature maps pass; by those of convolutions, in a model that has none such."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.flat = rows, False  # whether an operation with zero gradients, such as a ReLU, has run
        self._normalised, self._convolved = list[GradientEdge](), list[GradientEdge]()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = _name(func)
        self.flat |= name.rstrip("_") in FLAT
        if name not in (*NORMALISATIONS, CONVOLUTION) or out.ndim != 4 or len(out) != self.rows:
            return out
        if out.shape[2:].numel() > 1 and out.requires_grad:
            # The edge stays that of this result, even if what follows changes it in place.
            (self._normalised if name in NORMALISATIONS else self._convolved).append(get_gradient_edge(out))
        return out

    def edges(self) -> list[GradientEdge]:
        """In the order of the maps."""
        return self._normalised or self._convolved


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")
