"""ClaFR: the share of the features' norm that the space of the last layer's weights does not
reconstruct.

‖h - V Vᵀ h‖ / ‖h‖, with V an orthonormal basis of the row space of the weight W (its right singular
vectors), h the features that the last linear layer reads. What lies outside of that space has no
influence on any class.

From the paper's abstract: an orthogonal decomposition of the classifier's weights, the features
mapped into the space that it yields, their reconstruction error as the score. Our reading, as we
had no access to its formulas: all singular vectors are kept, nothing is centered, and the error is
divided by the features' norm, without which it mostly says how large features are.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.precision import at_least_float32
from qualms.methods.context import BatchContext
from qualms.methods.method import LOGITS, Method


@dataclass(frozen=True)
class ClaFR(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ClaFR

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ClaFR()))
        ```
    """

    name = "clafr"
    paper = "Wang et al., Frustratingly Easy Feature Reconstruction for Out-of-Distribution Detection, PRCV 2025"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted, head = context.model_context.fitted, context.head
        if self not in fitted:
            fitted[self] = row_space(head.weight)
        return unreconstructed(head.features, fitted[self])


def row_space(weight: Float[Tensor, "c f"]) -> Float[Tensor, "r f"]:
    """An orthonormal basis of the space that a layer's weight sees."""
    _, values, basis = torch.linalg.svd(weight.double(), full_matrices=False)
    seen = basis[
        values > values.amax() * max(weight.shape) * torch.finfo(at_least_float32(weight).dtype).eps
    ]
    if not len(seen):
        raise QualmsError(
            "the weights of the last layer are all zero, so they reconstruct nothing and clafr is the same for every "
            "input; check the model's weights."
        )
    if len(seen) == weight.shape[1]:
        raise QualmsError(
            f"the last layer has {weight.shape[0]} classes on {weight.shape[1]} features, so its weights reconstruct "
            "every feature and clafr is zero; use energy, scale or regrad."
        )
    return seen


def unreconstructed(
    features: Float[Tensor, "b f"], basis: Float[Tensor, "r f"]
) -> Float[Tensor, " b"]:
    """The share of the norm of each vector outside of the space of a basis; 0 for a zero vector."""
    h = features.double()
    size = h.norm(dim=1)
    outside = (h - h @ basis.T @ basis).norm(dim=1)
    return torch.where(size > 0, outside / size, 0.0)
