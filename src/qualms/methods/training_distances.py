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
from qualms.methods.training_react_vim import (
    ROWS,
    TrainingFeatures,
    training_features,
)
from qualms.parameters import whole

# The largest number of inner products with training features that are computed at once.
PRODUCTS_AT_ONCE = 2**23
# Unit vectors at most this far apart differ only by rounding in float32.
SAME = 1e-6
# Inner products of vectors longer than this, or shorter than its inverse, may not fit float32.
EXTREME = 1e30
# The smallest distance from the training mean that is more than rounding, relative to the length
# of the features.
MIN_DISTANCE = 1e-6


def knn(
    z: Float[Tensor, "b f"],
    neighbors: Float[Tensor, "n f"],
    lengths: Float64[Tensor, " n"],
    k: int,
) -> Float[Tensor, " b"]:
    """KNN: the distance of unit vectors to their k-th nearest neighbor; with fewer, to the farthest.

    Args:
        z: the features of each input, divided by their length.
        neighbors: the training features, not yet divided by their lengths.
        lengths: the lengths of the training features.
        k: the rank of the neighbor whose distance counts, from 1.
    """
    divisors = torch.where(lengths > 0, lengths, 1.0).to(neighbors)
    # A vector of zeros has the distance 1 from every unit vector: ‖z - 0‖² = 2 - 2 · 0.5.
    offsets = torch.where(lengths > 0, 0.0, 0.5).to(neighbors)
    distances: list[Tensor] = []
    for part in z.split(max(1, PRODUCTS_AT_ONCE // len(neighbors))):
        # ‖z - z'‖² = 2 - 2 z·z', so the inner product z·z' is enough to find the neighbor. The
        # distance is computed from the difference: from the inner product it would have only half
        # of the digits.
        nearness = (part @ neighbors.mT).div_(divisors).add_(offsets)
        index = nearness.topk(min(k, len(neighbors)), dim=-1).indices[:, -1]
        difference = part - to_unit(neighbors[index], lengths[index])
        distance = difference.double().norm(dim=-1)
        distances.append(torch.where(distance > SAME, distance, 0.0))
    return torch.cat(distances)


def vector_lengths(features: Float[Tensor, "n f"]) -> Float64[Tensor, " n"]:
    """Compute the length of each feature vector in double precision.

    In this precision the squares of float32 numbers neither underflow nor overflow.
    """
    # A part at a time, since the double-precision copy takes memory.
    return torch.cat([rows.double().norm(dim=-1) for rows in features.split(ROWS)])


def to_unit(
    features: Float[Tensor, "n f"],
    lengths: Float64[Tensor, " n"],
) -> Float[Tensor, "n f"]:
    """Divide vectors by their lengths; a vector of zeros is returned unchanged."""
    divisors = torch.where(lengths > 0, lengths, 1.0)
    return (features.double() / divisors[:, None]).to(features)


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
        """Compute `knn` of the features divided by their lengths."""
        # The key of the cache is the class: methods with different k share the training features.
        neighbors, lengths = context.model_context.get_or_compute(
            KNN, lambda: self._features_and_lengths(context)
        )
        features = context.head.features.to(neighbors)
        return knn(
            to_unit(features, vector_lengths(features)),
            neighbors,
            lengths,
            self.k,
        )

    def _features_and_lengths(
        self,
        context: BatchContext,
    ) -> tuple[Float[Tensor, "n f"], Float64[Tensor, " n"]]:
        """Return the features of the training inputs, and compute the lengths of these vectors.

        The features are converted to double precision if their inner products may not fit float32.

        Returns:
            The features, not divided by their lengths, and the lengths.
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
    """A Gaussian of the features of each class, with one covariance Σ for all classes.

    Attributes:
        means: the mean features of each of the k classes that have training inputs.
        whitening: a matrix A with Σ⁻¹ = A Aᵀ; r is the rank of Σ.
    """

    means: Float64[Tensor, "k f"]
    whitening: Float64[Tensor, "f r"]


def mahalanobis(
    features: Float[Tensor, "b f"],
    classes: ClassGaussians,
) -> Float64[Tensor, " b"]:
    """Compute min_c (h - μ_c)ᵀ Σ⁻¹ (h - μ_c), the squared Mahalanobis distance to the nearest class.

    It is computed as ‖Aᵀ(h - μ_c)‖², which is never negative.

    Args:
        features: the features h of each input.
        classes: the means μ_c of the classes, and A with Σ⁻¹ = A Aᵀ.
    """
    h = features.double()
    distances = [((h - mean) @ classes.whitening).square().sum(-1) for mean in classes.means]
    return torch.stack(distances, dim=1).amin(-1)


def fit_classes(training: TrainingFeatures) -> ClassGaussians:
    """Fit the mean of each class and the shared inverse covariance to training features.

    Directions whose variance is no larger than rounding errors are left out of the inverse.

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
        centered = members - mean
        scatter += centered.mT @ centered
    if scatter.trace().sqrt() <= eps * training.features.norm(dtype=torch.double):
        raise QualmsError(
            f"the {len(training.features)} training inputs do not vary within their classes, so "
            "mahalanobis has no covariance; pass more training inputs per class."
        )
    # The rounding error of a variance relative to the largest one: that of the sums in double
    # precision, or that of the features themselves.
    rounding = max(width * torch.finfo(torch.double).eps, (width * eps) ** 2)
    variances, directions = torch.linalg.eigh(scatter / len(training.features))
    largest = variances[-1]  # eigenvalues ascend
    is_kept = variances > rounding * largest
    whitening = directions[:, is_kept] / variances[is_kept].sqrt()
    return ClassGaussians(torch.stack(means), whitening)


@dataclass(frozen=True)
class Mahalanobis(Method):
    """min_c (h - μ_c)ᵀ Σ⁻¹ (h - μ_c), with the mean features μ_c of each class and one covariance Σ
    for all of them.

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
    """Compute the mean distance of features to the boundaries between the predicted class and others.

    It is the mean over all classes c but the predicted class ĉ of (z_ĉ - z_c) / ‖w_ĉ - w_c‖. Two
    classes with the same weights have no boundary between them; their distance counts as 0.

    Args:
        logits: the logits z.
        weight: the weight of the last linear layer, with rows w_c.
    """
    largest, predicted = logits.max(-1)
    # Only pairs with a predicted class: all pairs of classes may be billions.
    predicted_classes, index = predicted.unique(return_inverse=True)
    rows = weight.double()
    # Without a matrix product, in which rows that are nearly equal would cancel.
    weight_distances = torch.cdist(
        rows[predicted_classes], rows, compute_mode="donot_use_mm_for_euclid_dist"
    )
    divisors = weight_distances[index]  # ‖w_ĉ - w_c‖ of each input: [b, c]
    distances = torch.where(divisors > 0, (largest[:, None] - logits) / divisors, 0)
    # The predicted class adds 0 to the sum.
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
        logits: the logits of the features h.
        features: h, which the last linear layer reads.
        weight: the weight of the last linear layer.
        mean: μ, the mean of the training features.
        min_distance: a lower bound of the divisor: smaller distances ‖h - μ‖ count as this one.
    """
    distance_from_mean = (features.double() - mean).norm(dim=-1).clamp_min(min_distance)
    return -boundary_distance(logits, weight) / distance_from_mean


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
        model_context = context.model_context
        mean, min_distance = model_context.get_or_compute(
            self, lambda: self._mean_and_min_distance(context)
        )
        head = context.head
        return fdbd(context.logits, head.features, head.weight, mean, min_distance)

    def _mean_and_min_distance(self, context: BatchContext) -> tuple[Float64[Tensor, " f"], float]:
        """Compute the mean of the training features, and the smallest distance from it that counts.

        Returns:
            The mean, and the distance; smaller ones are rounding errors.
        """
        features = training_features(context, self.name).features
        # The root mean square of the lengths of the feature vectors; 1 if all features are zero.
        length = float(features.norm(dtype=torch.double)) / len(features) ** 0.5 or 1.0
        return features.mean(0, dtype=torch.double), MIN_DISTANCE * length
