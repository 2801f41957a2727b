"""The last fully connected layer of any model, and the features that it reads."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch
from qualms.gradients.model_input import ModelInput, forward_logits


@dataclass(frozen=True)
class Head:
    """logits = features weightᵀ + bias."""

    features: Float[Tensor, "b f"]
    weight: Float[Tensor, "c f"]
    bias: Float[Tensor, " c"] | None

    def logits(self, features: Float[Tensor, "... f"]) -> Float[Tensor, "... c"]:
        """What the layer says of other features."""
        return F.linear(features, self.weight, self.bias)

    def take(self, index: Int[Tensor, " b"]) -> "Head":
        """The same with some of the inputs' features."""
        return replace(self, features=self.features[index.to(self.features.device)])

    @staticmethod
    def joined(parts: "list[Head | QualmsError]") -> "Head | QualmsError":
        """The heads of several parts of a batch in one."""
        heads = [part for part in parts if isinstance(part, Head)]
        if len(heads) < len(parts):
            return next(part for part in parts if isinstance(part, QualmsError))
        return Head(torch.cat([h.features for h in heads]), heads[0].weight, heads[0].bias)


def required(head: Head | QualmsError) -> Head:
    """The head, or the error that there is none."""
    if isinstance(head, QualmsError):
        raise head
    return head


NO_HEAD = (
    "the model's logits are not the result of a linear layer on one vector for each input, which this method needs; "
    "use entropy, energy, regrad or perturb-theta."
)


@torch.no_grad()
def with_head(
    model: nn.Module, on: Batch | ModelInput
) -> tuple[Float[Tensor, "b c"], Head | QualmsError]:
    """The logits of inputs and the head that they came from, or the reason why there is none."""
    watch = _LastLinear()
    logits = forward_logits(model, on if isinstance(on, ModelInput) else ModelInput(on), watch)
    for features, weight, bias, out in reversed(watch.calls):
        # The layer's result must be the logits themselves: nothing may happen between the two.
        if features.ndim == 2 and out.shape == logits.shape and torch.equal(out, logits):
            return logits, Head(
                features.detach(), weight.detach(), None if bias is None else bias.detach()
            )
    return logits, QualmsError(NO_HEAD)


class _LastLinear(TorchFunctionMode):
    """Keeps the arguments and results of the latest linear layers."""

    KEPT = 4  # a model may end in several heads

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").split(".")[0] == "linear":
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
            self.calls.append((given["input"], given["weight"], given.get("bias"), out))
            del self.calls[: -self.KEPT]
        return out
