"""Function modes that find the feature maps in any convolutional network: the last one, to be
changed, and all, for gradients with respect to them.
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
# Their second argument names axes.
REDUCTIONS = (
    "mean",
    "sum",
    "amax",
    "amin",
    "logsumexp",
)
FLAT = (  # their gradient is zero somewhere
    "relu", "relu6", "clamp", "clamp_min", "clamp_max", "clip", "maximum", "minimum", "hardtanh",
    "hardswish", "hardsigmoid", "hardshrink", "softshrink", "threshold",
)  # fmt: skip
ChangeMap = Callable[[Float[Tensor, "b c p"]], Float[Tensor, "b c p"]]


@torch.no_grad()
def forward_with_changed_map(
    model: nn.Module,
    batch: Batch,
    change: ChangeMap,
    method: str,
) -> Float[Tensor, "b classes"]:
    """Compute logits with the last feature map replaced by `change` of it.

    The last feature map is the last tensor [sample, channel, height, width] that one operation, or
    two in a row, turn into a vector for each sample, after which no operation makes another map (as
    a gate does that pools on the way). Channels are on the second axis; or on the last axis, if a
    reduction such as a mean is taken over the two others, or if the vector is as long as the last
    axis and not as the second. If neither can be seen, as with a map that is flattened as a whole,
    they are taken to be on the second axis.

    Args:
        model: a classifier.
        batch: the inputs of the model.
        change: a function from the map [sample, channel, position] to another one of this shape.
        method: the name of the method, for the error.

    Raises:
        QualmsError: if there is no last feature map.
    """
    rows = num_samples(batch)
    finder = _PoolingMode(rows)
    forward_logits(model, ModelInput(batch), finder)
    if finder.last is None:
        raise QualmsError(
            f"{method} needs a last feature map of a convolution that is pooled or flattened into "
            "one vector per input, which the model does not have; use energy, scale, ash-s or "
            "regrad."
        )
    return forward_logits(model, ModelInput(batch), _PoolingMode(rows, change, finder.last))


@dataclass(frozen=True)
class _Pooling:
    """The operation that turns a feature map into vectors, found by its number in a forward pass.

    Attributes:
        number: the number of the operation, from 1, among those that reduce the axes of a feature
            map.
        channels_last: whether the map's channels are on its last axis.
    """

    number: int
    channels_last: bool


class _PoolingMode(TorchFunctionMode):
    """Finds the operation that turns the last feature map into vectors, or changes its map.

    Attributes:
        last: the operation found in the pass so far; None if there is none.
    """

    def __init__(
        self,
        rows: int,
        change: ChangeMap | None = None,
        at: _Pooling | None = None,
    ) -> None:
        """Prepare a forward pass.

        Args:
            rows: the number of samples in the batch.
            change: a function from the map to another one; None leaves the map unchanged.
            at: the operation whose map is changed; None to only find that operation.
        """
        super().__init__()
        self.rows = rows
        self.change = change
        self.at = at
        self.last: _Pooling | None = None
        # Operations so far that reduce the axes of a map.
        self._count = 0
        # Nothing before the first convolution is a feature map.
        self._has_convolution = False
        # The result of an operation that took one axis from a map, the map's shape, the operation's
        # number: the next operation may take the other axis.
        self._half_pooled: tuple[Tensor, torch.Size, int] | None = None

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and see whether it makes a map or takes axes from one.

        Args:
            func: the operation.
            types: the classes of its tensors; not used.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        source: Any = args[0] if args else kwargs.get("input")
        is_convolution = _name(func) == CONVOLUTION
        self._has_convolution |= is_convolution
        if not self._has_convolution or not self._is_batch(out):
            return out
        is_vector = out.shape[2:].numel() == 1
        if self._is_map(out):
            # A new map: what was found before did not pool the last one.
            self.last = None
            self._half_pooled = None
        elif self._half_pooled is not None and source is self._half_pooled[0] and is_vector:
            # The second of two operations that pool a map: the first of them is the one to change.
            _, shape, number = self._half_pooled
            self.last = _Pooling(number, _is_last_axis(shape, out))
        elif self._is_map(source) and not is_convolution:
            # The result is no map any more, so this operation has reduced an axis or both.
            self._count += 1
            if is_vector:
                axes: Any = args[1] if len(args) > 1 else kwargs.get("dim")
                self.last = _Pooling(self._count, _has_channels_last(func, axes, source, out))
            else:
                self._half_pooled = (out, source.shape, self._count)
            if self.change is not None and self.at is not None and self._count == self.at.number:
                # Run the operation again, now on the changed map.
                changed = _change_map(source, self.change, self.at.channels_last)
                if args:
                    return func(changed, *args[1:], **kwargs)
                return func(**(kwargs | {"input": changed}))
        return out

    def _is_batch(self, t: Any) -> bool:
        """Whether an object is a tensor of floats with an entry for each sample of the batch."""
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return False
        return t.ndim >= 2 and len(t) == self.rows

    def _is_map(self, t: Any) -> bool:
        """Whether an object is a feature map: four axes, and more than one position."""
        return self._is_batch(t) and t.ndim == 4 and t.shape[2:].numel() > 1


def _has_channels_last(func: Any, axes: Any, source: Tensor, out: Tensor) -> bool:
    """Whether a map has its channels last, [b, height, width, channel], judged by how it is pooled.

    Args:
        func: the operation.
        axes: the second argument of the operation.
        source: the map.
        out: the vectors that the operation returned.
    """
    if _name(func) in REDUCTIONS and isinstance(axes, (tuple, list)):
        return {a % 4 for a in axes} == {1, 2}
    return _is_last_axis(source.shape, out)


def _is_last_axis(shape: torch.Size, out: Tensor) -> bool:
    """Whether a vector is as long as the last axis of a map, and not as the second.

    Args:
        shape: the shape of the map.
        out: the vectors that it was pooled to, one for each sample.
    """
    return shape[1] != out.shape[1] == shape[3]


def _change_map(maps: Tensor, change: ChangeMap, channels_last: bool) -> Tensor:
    """Apply `change` to maps as [sample, channel, position], and restore their layout.

    Args:
        maps: feature maps with two axes of positions.
        change: a function from the maps to others of the same shape.
        channels_last: whether the channels are on the last axis of `maps`; else on the second.
    """
    first = maps.movedim(3, 1) if channels_last else maps
    changed = change(first.flatten(2)).reshape(first.shape)
    return changed.movedim(1, 3) if channels_last else changed


class MapRecorder(TorchFunctionMode):
    """Records the autograd edges of the results of normalization layers, or of convolutions in a
    model without normalization layers.

    Attributes:
        has_flat: whether the pass had an operation that can have zero gradients, such as a ReLU.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.has_flat = False
        self._normalized: list[GradientEdge] = []
        self._convolved: list[GradientEdge] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and record its result if it is a feature map.

        Args:
            func: the operation.
            types: the classes of its tensors; not used.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        out = func(*args, **(kwargs or {}))
        name = _name(func)
        self.has_flat |= name.rstrip("_") in FLAT  # in-place operations end in "_"
        if name not in (*NORMALIZATIONS, CONVOLUTION) or out.ndim != 4 or len(out) != self.rows:
            return out
        if out.shape[2:].numel() > 1 and out.requires_grad:
            # Unlike the tensor, the edge still refers to this result after an in-place operation.
            edges = self._normalized if name in NORMALIZATIONS else self._convolved
            edges.append(get_gradient_edge(out))
        return out

    def edges(self) -> list[GradientEdge]:
        """Return the recorded edges, in the order of the forward pass."""
        return self._normalized or self._convolved


def _name(func: Any) -> str:
    """Return the name of a torch function, "" if it has none."""
    return getattr(func, "__name__", "")
