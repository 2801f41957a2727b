"""Gradients of a confounding label: minus ‖∇θ L(x, every class on)‖, L the binary cross-entropy of
the logits.

The label that turns every class on at once was never seen in training, and the update that it asks
for depends on what the model knows of the input. Lee & AlRegib train a detector on such magnitudes,
which leaves their sign to the fit. On classifiers trained with softmax a confident input asks for
the larger update, since all other logits are far down: hence the minus. A shift of all logits
changes it.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.gradient_score import GradientScore


@dataclass(frozen=True)
class ConfoundingLabel(GradientScore):
    """Minus ‖∇θ L‖, L the binary cross-entropy with every class on.

    Parameters: λ of `+layers(λ)` and the perturbations of `+smooth(σ, N)`; None leaves the modifier
    out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ConfoundingLabel

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ConfoundingLabel()))
        ```
    """

    name = "confounding-label"
    paper = "Lee & AlRegib, Gradients as a Measure of Uncertainty in Neural Networks, ICIP 2020"
    cost = "2, and 1 backward"
    direction = "confounding"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b 1"]:
        """-1: minus the norm."""
        return -torch.ones_like(probs[:, :1])
