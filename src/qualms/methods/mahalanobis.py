"""Mahalanobis: min_c (h - μ_c)ᵀ Σ⁻¹ (h - μ_c), with the mean of each class and one covariance for
all of them.

h is what the last linear layer reads. The paper's full detector also adds noise to the input and
weighs several layers by out-of-distribution examples; neither is done here.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.errors import QualmsError
from qualms.methods.context import BatchContext
from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.training_features import TrainingFeatures, training_features


@dataclass(frozen=True)
class Classes:
    """A Gaussian for each class that has training inputs."""

    means: Float64[Tensor, "k f"]
    whitening: Float64[Tensor, "f r"]  # A, Σ⁻¹ = A Aᵀ

    def distances(self, features: Float[Tensor, "b f"]) -> Float64[Tensor, "b k"]:
        """The squared distance to each mean: a sum of squares, which is never negative."""
        each = [
            ((features.double() - mean) @ self.whitening).square().sum(-1) for mean in self.means
        ]
        return torch.stack(each, dim=1)


@dataclass(frozen=True)
class Mahalanobis(Method):
    """Classes are the labels if `train=` has pairs of inputs and labels, else the model's
    predictions.

    Directions in which the training features do not vary at all do not count: Σ has a
    pseudo-inverse, as in the paper's code.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Mahalanobis

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Mahalanobis(), train=[(torch.randn(50, 4), torch.arange(50) %
        3)])) ```
    """

    name = "mahalanobis"
    paper = (
        "Lee et al., A Simple Unified Framework for Detecting Out-of-Distribution Samples and Adversarial Attacks, "
        "NeurIPS 2018"
    )
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted = context.model_context.fitted
        if self not in fitted:
            fitted[self] = classes_of(training_features(context, self.name))
        return fitted[self].distances(context.head.features).amin(-1)


def classes_of(training: TrainingFeatures) -> Classes:
    """Means and the inverse covariance; a variance that is no more than rounding counts as none."""
    width = training.features.shape[1]
    means, scatter = [], training.features.new_zeros(width, width, dtype=torch.double)
    for label in training.labels.unique():
        own = training.features[training.labels == label].double()
        means.append(own.mean(0))
        scatter += (own - means[-1]).mT @ (own - means[-1])
    if scatter.trace().sqrt() <= torch.finfo(training.features.dtype).eps * training.features.norm(
        dtype=torch.double
    ):
        raise QualmsError(
            f"mahalanobis finds no variation within the classes of the {len(training.features)} training inputs, so it "
            "has no covariance; pass more training inputs for each class."
        )
    rounding = width * torch.finfo(training.features.dtype).eps
    smallest = max(width * torch.finfo(torch.double).eps, rounding**2)  # of the largest variance
    variances, directions = torch.linalg.eigh(scatter / len(training.features))
    some = variances > smallest * variances[-1]  # the largest is the last
    return Classes(torch.stack(means), directions[:, some] / variances[some].sqrt())
