"""ViM: α ‖R(h - o)‖ - log Σ_c exp z_c, a virtual logit for what the training features do not span,
against the energy.

o = -W⁺b is the origin at which all logits are zero. R projects onto all but the D principal
directions of the training features around o, and α makes the mean of the virtual logit over the
training data that of the largest logit. It ranks like the probability of the virtual class among
all logits. The paper's α takes it for granted that this mean is
positive: a negative one would turn the score around, and is an error.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.errors import QualmsError
from qualms.methods.context import BatchContext
from qualms.methods.head import Head
from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.training_features import TrainingFeatures, training_features
from qualms.parameters import check_parameters, whole

ROWS = 4096  # of the training features that are in double precision at once


@dataclass(frozen=True)
class Residual:
    """The virtual logit of features."""

    origin: Float64[Tensor, " f"]
    directions: Float64[Tensor, "f r"]
    alpha: float

    def virtual_logit(self, features: Float[Tensor, "b f"]) -> Float64[Tensor, " b"]:
        """α ‖R(h - o)‖."""
        return self.alpha * ((features.double() - self.origin) @ self.directions).norm(dim=-1)


@dataclass(frozen=True)
class ViM(Method):
    """D, the principal directions; 0 takes the paper's 1000 from 2048 features on and 512 from 768
    on, half below.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ViM

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ViM(dimensions=2), train=[torch.randn(50, 4)]))
        ```
    """

    dimensions: int = 0

    name = "vim"
    paper = "Wang et al., ViM: Out-Of-Distribution with Virtual-logit Matching, CVPR 2022"
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, dimensions=whole(0))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted = context.model_context.fitted
        if self not in fitted:
            training = training_features(context, self.name)
            width = training.features.shape[1]
            fitted[self] = residual(
                training, context.head, self.dimensions or dimensions_for(width)
            )
        return fitted[self].virtual_logit(context.head.features) - context.logits.logsumexp(-1)

    def quick(self) -> "ViM":
        """The same with one principal direction, for which few training inputs do."""
        return replace(self, dimensions=1)


def dimensions_for(width: int) -> int:
    """D for features of a width, as the paper's code has it; its networks have 768 features at
    least.
    """
    return 1000 if width >= 2048 else 512 if width >= 768 else width // 2


def residual(training: TrainingFeatures, head: Head, dimensions: int) -> Residual:
    """Fitted to the training features; all sums in double precision."""
    weight = head.weight.double()
    width = weight.shape[1]
    if dimensions >= width:
        raise QualmsError(
            f"vim has dimensions {dimensions}, but the features have {width}; leave some over."
        )
    bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias.double()
    origin = -torch.linalg.pinv(weight) @ bias
    scatter = weight.new_zeros(width, width)
    for rows in training.features.split(ROWS):
        centered = rows.double() - origin
        scatter += centered.mT @ centered
    directions = torch.linalg.eigh(scatter).eigenvectors[
        :, : width - dimensions
    ]  # eigenvalues ascend
    plain = Residual(origin, directions, alpha=1.0)
    norm = torch.cat([plain.virtual_logit(rows) for rows in training.features.split(ROWS)]).mean()
    # Of the features themselves, and of the sums of squares that the directions come from.
    rounding = max(
        width * torch.finfo(training.features.dtype).eps,
        (width * torch.finfo(torch.double).eps) ** 0.5,
    )
    if norm <= rounding * (scatter.trace() / len(training.features)).sqrt():
        raise QualmsError(
            f"vim finds nothing of the {len(training.features)} training features outside of {dimensions} dimensions; "
            "pass more training inputs, or fewer dimensions."
        )
    largest = float(training.max_logits.double().mean())
    if largest <= 0:
        raise QualmsError(
            f"the largest logit of a training input is {largest:.3g} on average, but vim scales its virtual logit by "
            "that mean, which must be positive; use knn, mahalanobis or energy."
        )
    return Residual(origin, directions, largest / float(norm))
