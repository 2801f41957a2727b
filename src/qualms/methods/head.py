"""The end of any model: its last fully connected layer, the features that it reads, and the blocks
of parameters before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, take_samples
from qualms.gradients.function_modes import CallMode, name_of
from qualms.gradients.layers import Params, group_by_layer, layer_of, select_parameters
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.tracing.traced_forward import use_order

NO_HEAD = (
    "this method needs logits from a final linear layer on one vector per input, which the model "
    "does not have; use entropy, energy, regrad or perturb-theta."
)


@dataclass(frozen=True)
class Head:
    """The last linear layer of a model, and the features that it read for a batch.

    The logits of the batch are features · weightᵀ + bias.
    """

    features: Float[Tensor, "b f"]
    weight: Float[Tensor, "c f"]
    bias: Float[Tensor, " c"] | None

    def logits(self, features: Float[Tensor, "... f"]) -> Float[Tensor, "... c"]:
        """Apply the linear layer to other features."""
        return F.linear(features, self.weight, self.bias)

    def take(self, index: Int[Tensor, " b"]) -> "Head":
        """Return the head with the features of some of the inputs, selected by their indices."""
        return replace(self, features=self.features[index.to(self.features.device)])

    @staticmethod
    def concatenate(
        parts: "list[Head | QualmsError]",
    ) -> "Head | QualmsError":
        """Join the features of the parts of a batch; return the first error if a part has no head.

        Args:
            parts: the head of each part, or the error that there is none.
        """
        heads: list[Head] = []
        for part in parts:
            if isinstance(part, QualmsError):
                return part
            heads.append(part)
        features = torch.cat([head.features for head in heads])
        return Head(features, heads[0].weight, heads[0].bias)


def require_head(head: Head | QualmsError) -> Head:
    """Return the head; if there is an error in its place, raise it."""
    if isinstance(head, QualmsError):
        raise head
    return head


@torch.no_grad()
def forward_with_head(
    model: nn.Module,
    rows: Batch | ModelInput,
) -> tuple[Float[Tensor, "b c"], Head | QualmsError]:
    """Compute the logits of a batch, and find the linear layer that computes them.

    Args:
        model: a classifier.
        rows: the inputs of the model.

    Returns:
        The logits; and the head, or an error that is not raised if no linear layer computes the
        logits: only methods that need a head raise it.
    """
    recorder = _LinearRecorder()
    model_input = rows if isinstance(rows, ModelInput) else ModelInput(rows)
    logits = forward_logits(model, model_input, recorder)
    # The latest call first.
    for features, weight, bias, out in reversed(recorder.calls):
        # The layer's result must equal the logits: nothing may change it on the way.
        if features.ndim == 2 and out.shape == logits.shape and torch.equal(out, logits):
            detached_bias = None if bias is None else bias.detach()
            return logits, Head(features.detach(), weight.detach(), detached_bias)
    return logits, QualmsError(NO_HEAD)


class _LinearRecorder(CallMode):
    """Records the arguments and results of the latest linear layers.

    Attributes:
        calls: (input, weight, bias, result) of each recorded call, the latest last.
    """

    # The number of calls that are kept; more than one, as a model may end in several heads.
    MAX_CALLS = 4

    def __init__(self) -> None:
        super().__init__()
        # The input, weight, bias and result of each linear layer.
        self.calls: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record it if it is a linear layer."""
        out = func(*args, **kwargs)
        if name_of(func) == "linear":
            named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
            self.calls.append((named["input"], named["weight"], named.get("bias"), out))
            # Drop all but the latest calls, to free the memory of their tensors.
            del self.calls[: -self.MAX_CALLS]
        return out


# The blocks before the head: residual or transformer blocks, or layers, in the order of use.


def find_blocks(
    model: nn.Module,
    batch: Batch,
    params: Params,
    method: str,
) -> list[list[str]]:
    """Group the parameters that a model uses by residual or transformer block, in order of use.

    A layer outside of such blocks is a block by itself. Every block has a matrix or kernel: layers
    without one (normalizations) join the block before them, and those before the first block are
    left out. If no parameter is a matrix or kernel, all parameters form one block.

    Args:
        model: a classifier, inside `preserve_state`.
        batch: the inputs of the model.
        params: selects the parameters that are put into blocks; others are left out.
        method: the name of the method, for the error.

    Returns:
        The names of each block's parameters.

    Raises:
        QualmsError: if the order of use cannot be seen.
    """
    selected = select_parameters(model, params)
    first_sample = ModelInput(take_samples(batch, slice(0, 1)))
    order = use_order(model, first_sample, selected)
    if not order.names:
        raise QualmsError(
            f"{method} needs the order in which the model uses its layers, but torch's function "
            "modes cannot see its operations (a scripted module?); use regrad or entropy."
        )
    used_names = order.relevant(order.names, selected)
    blocks: list[list[str]] = []
    for names in group_by_layer(model, used_names, "block").values():
        has_matrix = any(selected[name].ndim > 1 for name in names)
        if has_matrix:
            blocks.append([])
        # Names before the first block are left out.
        if blocks:
            blocks[-1] += names
    return blocks or [used_names]


def without_head(
    blocks: Sequence[Sequence[str]],
    head: Head,
    model: nn.Module,
    batch: Batch,
) -> list[list[str]]:
    """Remove the parameters of the last linear layer from the blocks of a model.

    Args:
        blocks: the names of each block's parameters.
        head: the last linear layer.
        model: the model that ends in this layer.
        batch: the inputs of the model.

    Returns:
        The blocks that have parameters left.
    """
    # The head has detached tensors, which share the memory of the parameters.
    name_of_address = {p.data_ptr(): name for name, p in model.named_parameters()}
    head_names: list[str] = []
    for tensor in (head.weight, head.bias):
        if tensor is not None and tensor.data_ptr() in name_of_address:
            head_names.append(name_of_address[tensor.data_ptr()])
    if head.weight.data_ptr() not in name_of_address:
        # The weight is computed from other parameters, as with weight normalization. These are taken
        # to be in the layer of the bias, or in that of the last parameter used.
        parameter = head_names[0] if head_names else _find_last_parameter(model, batch)
        head_layer = layer_of(model, parameter, "module")
        for name in name_of_address.values():
            if layer_of(model, name, "module") == head_layer:
                head_names.append(name)
    kept_blocks: list[list[str]] = []
    for block in blocks:
        kept_names = [name for name in block if name not in head_names]
        if kept_names:
            kept_blocks.append(kept_names)
    return kept_blocks


def _find_last_parameter(model: nn.Module, batch: Batch) -> str:
    """Find the name of the parameter that the model uses last in a forward pass over one sample."""
    first_sample = ModelInput(take_samples(batch, slice(0, 1)))
    return use_order(model, first_sample, dict(model.named_parameters())).names[-1]
