"""What every score is: parameters, a name, where it comes from, what it needs and costs, and how to compute it."""

from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from qualms.methods.passes import Passes

# What a method may need beside the model and the inputs.
LOGITS, GRADIENTS, PASSES, TRAINING_DATA, MODELS = (
    "logits",
    "gradients",
    "several passes",
    "training data",
    "several models",
)

WANG_JI = "Wang & Ji, Epistemic Uncertainty Quantification For Pre-trained Neural Networks, CVPR 2024"


@runtime_checkable
class Method(Protocol):
    """A frozen dataclass of parameters; higher scores mean more uncertain, always."""

    @property
    def name(self) -> str:
        """As in a spec."""
        ...

    @property
    def paper(self) -> str:
        """Where it was published."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """What it is made from."""
        ...

    @property
    def cost(self) -> str:
        """In forward passes; C is the number of classes, N of draws."""
        ...

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        ...
