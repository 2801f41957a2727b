"""What every score is: parameters, a name, where it comes from, what it needs and costs, and how to
compute it.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import Field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.settings import Smoothing
from qualms.methods.context import BatchContext

# What a method may need beside the model and the inputs.
LOGITS, GRADIENTS, SEVERAL_PASSES, TRAINING_DATA, MODELS = (
    "logits",
    "gradients",
    "several passes",
    "training data",
    "several models",
)

WANG_JI = (
    "Wang & Ji, Epistemic Uncertainty Quantification For Pre-trained Neural Networks, CVPR 2024"
)
FEW = 2  # draws that show whether a method works

Noise = float | tuple[float, ...]  # one level, or one per channel
Scale = Callable[[float], Noise]  # from pixels in [0, 1] to the units of a model's input


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass of parameters; higher scores mean more uncertain, always. Subclass it for
    one of your own.

    Args:
        name: as in a spec.
        paper: where it was published.
        needs: what it is made from.
        cost: in forward passes; C is the number of classes, N of draws.
        direction: along which gradients are taken; None for what is not a gradient score.
        always_exact: whether it asks the exact engine, whatever engine the gradient scores have.

    Example:
        ```python
        from dataclasses import dataclass

        import torch
        import qualms


        @dataclass(frozen=True)
        class Margin(qualms.methods.Method):  # minus the gap between the two largest probabilities
            name = "margin"
            paper = "none"
            needs = ("logits",)
            cost = "1"

            def score(self, context):
                best = context.probs.topk(2).values
                return best[:, 1] - best[:, 0]


        print(qualms.score(torch.nn.Linear(4, 3), torch.randn(5, 4), Margin()))
        ```
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    cost: ClassVar[str]
    direction: ClassVar[str | None] = None
    always_exact: ClassVar[bool] = False

    @abstractmethod
    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""

    def error(self, context: BatchContext) -> Float[Tensor, " b"]:
        """The standard error of a score that is an estimate; 0 for one that is not."""
        return torch.zeros(len(context.logits), dtype=torch.double, device=context.device)

    def note(self, context: BatchContext) -> str | None:
        """A sentence on what the scores of this model are, where that is not what the name says."""
        return None

    @property
    def extra_passes(self) -> float:
        """What it takes beside the plain forward pass, in forward passes an input; a backward pass
        counts as two.
        """
        return 0.0

    @property
    def layers(self) -> float | None:
        """λ of `+layers(λ)`, where that was asked for."""
        return None

    @property
    def smooth(self) -> Smoothing | None:
        """The perturbations of `+smooth(σ, N)`, where they were asked for."""
        return None

    @property
    def spec(self) -> str:
        """The text that names it: its name with its modifiers, without parameters of its own."""
        return self.name

    def in_units(self, scale: Scale) -> "Method":
        """The same with its noise, given in pixels scaled to [0, 1], in the units of the model's
        input.
        """
        return self

    def quick(self) -> "Method":
        """The same with two draws at most: enough to see whether it works."""
        return self


def converted(noise: Noise, scale: Scale) -> Noise:
    """A level of noise in the units of the model's input; levels per channel are in these already."""
    return noise if isinstance(noise, tuple) else scale(noise)


class NotFinite(QualmsError):
    """A score that is infinite, or not a number, in the type that it is returned in."""

    def __init__(self, method: str, number: int, score: float, dtype: torch.dtype) -> None:
        if math.isnan(score):
            why = "not a number"
        else:
            why = f"{score:.3g}, which is beyond what {str(dtype).removeprefix('torch.')} holds"
        super().__init__(
            f"{method} of input {number} is {why}; check the scale of the input and of the model's weights, or pass "
            "both in float64."
        )
        self.method, self.number = method, number


def in_range(
    scores: Float[Tensor, " b"], dtype: torch.dtype, name: str, numbers: Sequence[int]
) -> Float[Tensor, " b"]:
    """The scores in the type that they are returned in; an error if one of them is beyond it, or
    not a number.
    """
    found = scores.detach().to(dtype)
    bad = (~torch.isfinite(found)).nonzero().flatten().tolist()
    if bad:
        raise NotFinite(name, numbers[bad[0]], float(scores[bad[0]]), dtype)
    return found
