"""Scores of distances between features and those of the training data.

h are the features that the last linear layer reads, w_c the rows of its weight.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.errors import QualmsError
from qualms.methods.context import BatchContext
from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.training_features import (
    ROWS,
    TrainingFeatures,
    training_features,
)
from qualms.parameters import whole

PRODUCTS_AT_ONCE = 2**23  # inner products with training features
# Unit vectors at most this far apart differ only by rounding in 32 bits.
SAME = 1e-6
# A length whose inner products, or those of its inverse, may not fit 32 bits.
EXTREME = 1e30
# From the training mean, relative to the features' length: less is rounding.
MIN_DISTANCE = 1e-6


def knn(
    z: Float[Tensor, "b f"],
    neighbors: Float[Tensor, "n f"],
    lengths: Float64[Tensor, " n"],
    k: int,
) -> Float[Tensor, " b"]:
    """KNN: ‖z - z₍ₖ₎‖, the distance to the k-th nearest vector; of fewer than k, to the farthest.

    Args:
        z: unit vectors of the inputs.
        neighbors: training features, not yet divided by their lengths.
        lengths: the lengths of the training features.
        k: the rank of the neighbor that counts.
    """
    divisors = torch.where(lengths > 0, lengths, 1.0).to(neighbors)
    # A vector of zeros has the distance 1 from every unit vector: ‖z - 0‖² = 2 - 2 · 0.5.
    offsets = torch.where(lengths > 0, 0.0, 0.5).to(neighbors)
    parts: list[Tensor] = []
    for part in z.split(max(1, PRODUCTS_AT_ONCE // len(neighbors))):
        # ‖z - z'‖² is a constant minus twice an inner product, which finds the neighbor. The
        # distance itself would have half the digits only.
        nearness = (part @ neighbors.mT).div_(divisors).add_(offsets)
        index = nearness.topk(min(k, len(neighbors)), dim=-1).indices[:, -1]
        difference = part - to_unit(neighbors[index], lengths[index])
        distance = difference.double().norm(dim=-1)
        parts.append(torch.where(distance > SAME, distance, 0.0))
    return torch.cat(parts)


def vector_lengths(features: Float[Tensor, "n f"]) -> Float64[Tensor, " n"]:
    """Compute ‖h‖ in double precision, in which no square underflows or overflows."""
    return torch.cat([rows.double().norm(dim=-1) for rows in features.split(ROWS)])


def to_unit(features: Float[Tensor, "n f"], lengths: Float64[Tensor, " n"]) -> Float[Tensor, "n f"]:
    """Divide vectors by their lengths; a vector of zeros is left unchanged."""
    return (features.double() / torch.where(lengths > 0, lengths, 1.0)[:, None]).to(features)


@dataclass(frozen=True)
class KNN(Method):
    """‖z - z₍ₖ₎‖, the distance of z = h / ‖h‖ to its k-th nearest neighbor in the training data.

    h are the features that the last linear layer reads. The paper's k: 50 on CIFAR-10, 200 on
    CIFAR-100, 1000 on ImageNet. If there are fewer training inputs, the farthest counts. The
    training features are kept: 512 features in float32 take 2 KiB for each training input.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import KNN

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, KNN(k=10), train=[torch.randn(50, 4)]))
        ```
    """

    k: int = 50

    name = "knn"
    paper = "Sun et al., Out-of-Distribution Detection with Deep Nearest Neighbors, ICML 2022"
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"
    rules: ClassVar = {"k": whole(1)}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `knn` of the unit features."""
        # The key of the cache is the class: methods with different k share the training features.
        neighbors, lengths = context.model_context.get_or_compute(
            KNN, lambda: self._neighbors(context)
        )
        features = context.head.features.to(neighbors)
        return knn(
            to_unit(features, vector_lengths(features)),
            neighbors,
            lengths,
            self.k,
        )

    def _neighbors(
        self,
        context: BatchContext,
    ) -> tuple[Float[Tensor, "n f"], Float64[Tensor, " n"]]:
        """Return the training features, not divided by their lengths, and these lengths.

        The features are in double precision if 32 bits do not hold their inner products.
        """
        features = training_features(context, self.name).features
        lengths = vector_lengths(features)
        positive = lengths[lengths > 0]
        is_extreme = len(positive) > 0 and (
            float(positive.max()) > EXTREME or float(positive.min()) < 1 / EXTREME
        )
        return features.double() if is_extreme else features, lengths


@dataclass(frozen=True)
class ClassGaussians:
    """A Gaussian for each class that has training inputs, with one covariance Σ for all of them.

    Attributes:
        means: μ_c, the mean features of each of the k classes.
        whitening: A, with Σ⁻¹ = A Aᵀ; r is the rank of Σ.
    """

    means: Float64[Tensor, "k f"]
    whitening: Float64[Tensor, "f r"]


def mahalanobis(features: Float[Tensor, "b f"], classes: ClassGaussians) -> Float64[Tensor, " b"]:
    """Compute min_c (h - μ_c)ᵀ Σ⁻¹ (h - μ_c), as ‖Aᵀ(h - μ_c)‖², which is never negative.

    Args:
        features: h.
        classes: the means μ_c and A, with Σ⁻¹ = A Aᵀ.
    """
    h = features.double()
    distances = [((h - mean) @ classes.whitening).square().sum(-1) for mean in classes.means]
    return torch.stack(distances, dim=1).amin(-1)


def fit_classes(training: TrainingFeatures) -> ClassGaussians:
    """Fit the mean of each class and the shared inverse covariance to training features.

    Directions whose variance is no more than rounding are left out of the inverse.

    Raises:
        QualmsError: if features do not vary within the classes.
    """
    width = training.features.shape[1]
    eps = torch.finfo(training.features.dtype).eps
    means: list[Tensor] = []
    scatter = training.features.new_zeros(width, width, dtype=torch.double)
    for label in training.labels.unique():
        members = training.features[training.labels == label].double()
        mean = members.mean(0)
        means.append(mean)
        scatter += (members - mean).mT @ (members - mean)
    if scatter.trace().sqrt() <= eps * training.features.norm(dtype=torch.double):
        raise QualmsError(
            f"the {len(training.features)} training inputs do not vary within their classes, so "
            "mahalanobis has no covariance; pass more training inputs per class."
        )
    smallest = max(width * torch.finfo(torch.double).eps, (width * eps) ** 2)
    variances, directions = torch.linalg.eigh(scatter / len(training.features))
    counts = variances > smallest * variances[-1]  # the largest is the last
    return ClassGaussians(torch.stack(means), directions[:, counts] / variances[counts].sqrt())


@dataclass(frozen=True)
class Mahalanobis(Method):
    """min_c (h - μ_c)ᵀ Σ⁻¹ (h - μ_c), with the mean of each class and one covariance for all of
    them.

    Classes are the labels if `train=` has pairs of inputs and labels, else the model's predictions.
    Directions in which the training features do not vary at all do not count: Σ has a
    pseudo-inverse, as in the paper's code. The paper's full detector also adds noise to the input
    and weights several layers by out-of-distribution examples; neither is done here.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Mahalanobis

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        train = [(torch.randn(50, 4), torch.arange(50) % 3)]
        print(qualms.score(model, x, Mahalanobis(), train=train))
        ```
    """

    name = "mahalanobis"
    paper = (
        "Lee et al., A Simple Unified Framework for Detecting Out-of-Distribution Samples and "
        "Adversarial Attacks, NeurIPS 2018"
    )
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute the squared Mahalanobis distance to the nearest class."""
        classes = context.model_context.get_or_compute(
            self, lambda: fit_classes(training_features(context, self.name))
        )
        return mahalanobis(context.head.features, classes)


def boundary_distance(
    logits: Float[Tensor, "b c"],
    weight: Float[Tensor, "c f"],
) -> Float[Tensor, " b"]:
    """Compute the mean over c ≠ ĉ of (z_ĉ - z_c) / ‖w_ĉ - w_c‖, the distance to the boundaries
    between the predicted class ĉ and all others.

    Two classes with the same weights have no boundary between them; their distance counts as 0.

    Args:
        logits: z.
        weight: the weight of the last linear layer, with rows w_c.
    """
    largest, predicted = logits.max(-1)
    # Only pairs with a predicted class: all pairs of classes may be billions.
    predicted_classes, index = predicted.unique(return_inverse=True)
    rows = weight.double()
    pairs = torch.cdist(rows[predicted_classes], rows, compute_mode="donot_use_mm_for_euclid_dist")
    between = pairs[index]
    distances = torch.where(between > 0, (largest[:, None] - logits) / between, 0)
    return distances.sum(-1) / (logits.shape[1] - 1)


def fdbd(
    logits: Float[Tensor, "b c"],
    features: Float[Tensor, "b f"],
    weight: Float[Tensor, "c f"],
    mean: Float64[Tensor, " f"],
    min_distance: float = 0.0,
) -> Float[Tensor, " b"]:
    """fDBD: minus the `boundary_distance`, divided by ‖h - μ‖.

    Args:
        logits: z.
        features: h.
        weight: the weight of the last linear layer.
        mean: μ, the mean of the training features.
        min_distance: the lower bound of ‖h - μ‖ in the division.
    """
    from_mean = (features.double() - mean).norm(dim=-1).clamp_min(min_distance)
    return -boundary_distance(logits, weight) / from_mean


@dataclass(frozen=True)
class FDBD(Method):
    """fDBD: minus the mean distance of the features to the decision boundaries, divided by their
    distance to the training mean.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import FDBD

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, FDBD(), train=[torch.randn(50, 4)]))
        ```
    """

    name = "fdbd"
    paper = "Liu & Qin, Fast Decision Boundary based Out-of-Distribution Detector, ICML 2024"
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `fdbd` with the mean of the training features."""
        mean, min_distance = context.model_context.get_or_compute(self, lambda: self._fit(context))
        head = context.head
        return fdbd(context.logits, head.features, head.weight, mean, min_distance)

    def _fit(self, context: BatchContext) -> tuple[Float64[Tensor, " f"], float]:
        """Compute the mean of the training features, and the smallest distance from the mean that is
        more than rounding.
        """
        features = training_features(context, self.name).features
        # The root mean square of the lengths of the feature vectors.
        length = float(features.norm(dtype=torch.double)) / len(features) ** 0.5
        return features.mean(0, dtype=torch.double), MIN_DISTANCE * (length or 1.0)
