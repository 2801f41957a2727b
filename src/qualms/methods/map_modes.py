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

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, num_samples
from qualms.gradients.function_modes import CallMode
from qualms.gradients.model_input import ModelInput, forward_logits

# All of these are names of torch functions.
NORMALIZATIONS = ("batch_norm", "group_norm", "instance_norm")
CONVOLUTION = "conv2d"
# The second argument of these functions is the axis or axes to reduce.
REDUCTIONS = (
    "mean",
    "sum",
    "amax",
    "amin",
    "logsumexp",
)
FLAT = (  # the gradient of these functions is zero somewhere
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

    The last feature map is the last tensor with four axes, [sample, channel, height, width], that
    one operation, or two in a row, turn into a vector for each sample. A map does not count if it
    is pooled on the way and a later operation returns another map, as in a squeeze-and-excitation
    gate.

    Channels are on the second axis; or on the last axis, if a reduction such as a mean is taken
    over the two others, or if the vector is as long as the last axis and not as the second. If
    neither can be seen, as with a map that is flattened as a whole, they are taken to be on the
    second axis.

    Args:
        model: a classifier.
        batch: the inputs of the model.
        change: a function from the map [sample, channel, position] to another one of this shape.
        method: the name of the method, for the error.

    Raises:
        QualmsError: if there is no last feature map.
    """
    rows = num_samples(batch)
    # The first pass finds the last map, the second one changes it.
    finder = _PoolingMode(rows)
    forward_logits(model, ModelInput(batch), finder)
    if finder.last_pooling is None:
        raise QualmsError(
            f"{method} needs a last feature map of a convolution that is pooled or flattened into "
            "one vector per input, which the model does not have; use energy, scale, ash-s or "
            "regrad."
        )
    changer = _PoolingMode(rows, change, finder.last_pooling)
    return forward_logits(model, ModelInput(batch), changer)


@dataclass(frozen=True)
class _Pooling:
    """An operation that pools a feature map, and the layout of the map.

    Attributes:
        number: which operation of a forward pass it is: 1 for the first one that reduces the axes
            of a feature map, 2 for the second, and so on.
        is_channels_last: whether the map's channels are on its last axis.
    """

    number: int
    is_channels_last: bool


class _PoolingMode(CallMode):
    """Finds the operation that turns the last feature map into vectors, or changes its map.

    Attributes:
        last_pooling: the operation found in the pass so far; None if there is none.
    """

    def __init__(
        self,
        rows: int,
        change: ChangeMap | None = None,
        pooling_to_change: _Pooling | None = None,
    ) -> None:
        """Prepare a forward pass.

        Args:
            rows: the number of samples in the batch.
            change: a function from the map to another one; None to change nothing.
            pooling_to_change: the operation that gets the changed map; None to change nothing.
        """
        super().__init__()
        self.rows = rows
        self.change = change
        self.pooling_to_change = pooling_to_change
        self.last_pooling: _Pooling | None = None
        # The number of operations so far that reduced the axes of a map.
        self._num_reductions = 0
        # Tensors before the first convolution, such as the input images, are no feature maps.
        self._has_convolution = False
        # If the last reduction of a map kept one axis of positions: its result, the shape of the
        # map, and the number of the operation. The next operation may reduce the other axis.
        self._half_pooled: tuple[Tensor, torch.Size, int] | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record whether it returns a feature map or reduces the axes of one."""
        kwargs = dict(kwargs)
        out = func(*args, **kwargs)
        source: Any = args[0] if args else kwargs.get("input")
        is_convolution = _function_name(func) == CONVOLUTION
        self._has_convolution |= is_convolution
        if not self._has_convolution or not self._is_batch(out):
            return out
        is_vector = out.shape[2:].numel() == 1
        if self._is_map(out):
            # A new map: the operation found before did not pool the last one.
            self.last_pooling = None
            self._half_pooled = None
        elif self._half_pooled is not None and source is self._half_pooled[0] and is_vector:
            # The second of two operations that pool a map: the first of them got the map.
            _, map_shape, number = self._half_pooled
            self.last_pooling = _Pooling(number, _has_length_of_last_axis(map_shape, out))
        elif self._is_map(source) and not is_convolution:
            # The result is no map any more, so this operation has reduced one axis or both.
            self._num_reductions += 1
            if is_vector:
                axes: Any = args[1] if len(args) > 1 else kwargs.get("dim")
                is_channels_last = _is_channels_last(func, axes, source, out)
                self.last_pooling = _Pooling(self._num_reductions, is_channels_last)
            else:
                self._half_pooled = (out, source.shape, self._num_reductions)
            target = self.pooling_to_change
            if self.change and target and target.number == self._num_reductions:
                # Run the operation again, now on the changed map.
                changed = _change_map(source, self.change, target.is_channels_last)
                if args:
                    return func(changed, *args[1:], **kwargs)
                return func(**(kwargs | {"input": changed}))
        return out

    def _is_batch(self, t: Any) -> bool:
        """Whether an object is a floating-point tensor with an entry for each sample of the batch."""
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return False
        return t.ndim >= 2 and len(t) == self.rows

    def _is_map(self, t: Any) -> bool:
        """Whether an object is a feature map: four axes, and more than one position."""
        return self._is_batch(t) and t.ndim == 4 and t.shape[2:].numel() > 1


def _is_channels_last(
    func: Any,
    axes: Any,
    maps: Tensor,
    vectors: Tensor,
) -> bool:
    """Whether the channels of feature maps are on the last axis, judged by how they are pooled.

    Args:
        func: the operation that pools the maps.
        axes: the second argument of the operation, which for a reduction such as a mean is its
            axes.
        maps: the feature maps, with four axes.
        vectors: the result of the operation, one vector for each sample.
    """
    if _function_name(func) in REDUCTIONS and isinstance(axes, (tuple, list)):
        # The two axes that are not channels. Negative axes count from the end.
        return {axis % 4 for axis in axes} == {1, 2}
    return _has_length_of_last_axis(maps.shape, vectors)


def _has_length_of_last_axis(map_shape: torch.Size, vectors: Tensor) -> bool:
    """Whether the channels are on the last axis, judged by the length of the pooled vectors.

    Vectors as long as the last axis, and not as the second one, keep the last axis.

    Args:
        map_shape: the shape of the map, with four axes.
        vectors: the vectors to which it was pooled, one for each sample.
    """
    length = vectors.shape[1]
    return length == map_shape[3] and length != map_shape[1]


def _change_map(
    maps: Tensor,
    change: ChangeMap,
    is_channels_last: bool,
) -> Tensor:
    """Apply `change` to maps as [sample, channel, position], and restore their layout.

    Args:
        maps: feature maps with two axes of positions.
        change: a function from the maps to others of the same shape.
        is_channels_last: whether the channels are on the last axis of `maps`; else on the second.
    """
    channels_first = maps.movedim(3, 1) if is_channels_last else maps
    changed = change(channels_first.flatten(2)).reshape(channels_first.shape)
    return changed.movedim(1, 3) if is_channels_last else changed


class MapRecorder(CallMode):
    """Records the autograd edges of a forward pass's feature maps, for gradients with respect to
    them.

    The feature maps are the results of normalization layers, or of convolutions in a model without
    normalization layers.

    Attributes:
        rows: the number of samples in the batch.
        has_flat: whether the pass had an operation that can have zero gradients, such as a ReLU.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.has_flat = False
        # The edges of the results of normalization layers, in the order of the forward pass.
        self._normalization_edges: list[GradientEdge] = []
        # The edges of the results of convolutions, in the order of the forward pass.
        self._convolution_edges: list[GradientEdge] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record the autograd edge of its result if it is a feature map."""
        out = func(*args, **kwargs)
        name = _function_name(func)
        # Such as a ReLU, whose gradient may be zero. Names of in-place operations end in "_".
        self.has_flat |= name.rstrip("_") in FLAT
        if name not in (*NORMALIZATIONS, CONVOLUTION) or out.ndim != 4 or len(out) != self.rows:
            return out
        # A single position is no map.
        if out.shape[2:].numel() > 1 and out.requires_grad:
            # Unlike the tensor, the edge still refers to this result after an in-place operation.
            edge = get_gradient_edge(out)
            if name in NORMALIZATIONS:
                self._normalization_edges.append(edge)
            else:
                self._convolution_edges.append(edge)
        return out

    def edges(self) -> list[GradientEdge]:
        """Return the edges of the feature maps, in the order of the forward pass.

        These are the results of normalization layers; without any, those of convolutions.
        """
        return self._normalization_edges or self._convolution_edges


def _function_name(func: Any) -> str:
    """Return the full name of a torch function, "" if it has none.

    Overloads, such as `mean.dim` in an exported graph, match none of the names that are looked for.
    """
    return getattr(func, "__name__", "")
