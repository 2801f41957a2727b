"""Maximum softmax probability, as uncertainty: 1 - max_c p_c."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.methods.method import LOGITS
from qualms.methods.passes import Passes


@dataclass(frozen=True)
class MSP:
    """No parameters."""

    name: ClassVar[str] = "msp"
    paper: ClassVar[str] = (
        "Hendrycks & Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution Examples, ICLR 2017"
    )
    needs: ClassVar[tuple[str, ...]] = (LOGITS,)
    cost: ClassVar[str] = "1"

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        return -(passes.log_probs.amax(-1)).expm1()
