"""The features that the last linear layer reads for every training input, and the scores that fit a
threshold or a subspace to them.

One pass over the training inputs (`train=`) serves all methods that need their features. h are
features, W and b the weight and the bias of the last linear layer.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples, slices, take_samples
from qualms.gradients.precision import at_least_float32
from qualms.methods.context import BatchContext
from qualms.methods.head import Head, forward_with_head, require_head
from qualms.methods.logits import energy
from qualms.methods.method import TRAINING_DATA, Method
from qualms.parameters import SHARE, whole

ROWS = 4096  # the number of training inputs whose features are in double precision at once


@dataclass(frozen=True)
class TrainingFeatures:
    """The features and labels of n training inputs.

    Floating-point numbers are in float32 at least, so the f features take 4 n f bytes or more.

    Attributes:
        features: the features that the last linear layer reads.
        max_logits: the largest logit of each input.
        labels: the labels from the training data; the model's predictions if it has none.
    """

    features: Float[Tensor, "n f"]
    max_logits: Float[Tensor, " n"]
    labels: Int[Tensor, " n"]


def training_features(
    context: BatchContext,
    method: str,
) -> TrainingFeatures:
    """Return the features of all training inputs; computed at the first call for a model.

    Args:
        context: the context that holds the model and its training data.
        method: the name of the method, for the error if there is no training data.
    """
    model_context = context.model_context
    # All methods share the features, so the key is no method.
    return model_context.get_or_compute(
        TrainingFeatures, lambda: _compute_features(context, method)
    )


def _compute_features(
    context: BatchContext,
    method: str,
) -> TrainingFeatures:
    """Run the model over all training inputs, in parts that fit the budget.

    The predicted classes stand in for labels that are not given.

    Args:
        context: the context that holds the model and its training data.
        method: the name of the method, for the error if there is no training data.
    """
    features: list[Tensor] = []
    max_logits: list[Tensor] = []
    labels: list[Tensor] = []
    for batch, batch_labels in context.model_context.labeled_training_batches(method):
        max_rows = context.model_context.rows_at_once(batch)
        for rows in slices(num_samples(batch), max_rows):
            logits, head = forward_with_head(context.model, take_samples(batch, rows))
            features.append(at_least_float32(require_head(head).features))
            max_logits.append(at_least_float32(logits).amax(-1))
            if batch_labels is None:
                labels.append(logits.argmax(-1))
            else:
                row_labels = batch_labels[rows].to(logits.device)
                labels.append(_require_valid_labels(row_labels, logits.shape[1]))
    return TrainingFeatures(
        features=torch.cat(features),
        max_logits=torch.cat(max_logits),
        labels=torch.cat(labels),
    )


def _require_valid_labels(
    labels: Int[Tensor, " b"],
    classes: int,
) -> Int[Tensor, " b"]:
    """Return the labels unchanged; raise an error if one is not from 0 to `classes` - 1.

    Args:
        labels: the labels of some training inputs.
        classes: the number of classes of the model.
    """
    low, high = (int(label) for label in labels.aminmax())
    if low < 0 or high >= classes:
        raise QualmsError(
            f"the labels in train= range from {low} to {high}, but the model has {classes} "
            "classes, numbered from 0; correct the labels, or pass only inputs."
        )
    return labels


def react(
    features: Float[Tensor, "b f"],
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
    threshold: float,
) -> Float[Tensor, " b"]:
    """ReAct: energy of the logits of min(h, threshold), the features h clipped at a threshold.

    Args:
        features: h, which the last linear layer reads.
        weight: the weight of the last linear layer.
        bias: the bias of the last linear layer; None if it has none.
        threshold: such as a quantile of all the numbers in the training features.
    """
    return energy(F.linear(features.clamp(max=threshold), weight, bias).double())


@dataclass(frozen=True)
class ReAct(Method):
    """Energy of the logits of features clipped at a quantile of the training features.

    One threshold for all features: the paper's 90th percentile of all the numbers in the training
    features.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ReAct

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ReAct(quantile=0.9), train=[torch.randn(50, 4)]))
        ```
    """

    quantile: float = 0.9

    name = "react"
    paper = (
        "Sun et al., ReAct: Out-of-distribution Detection With Rectified Activations, NeurIPS 2021"
    )
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"
    rules: ClassVar = {"quantile": SHARE}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `react` with the quantile of the training features as threshold."""
        head = context.head
        threshold = context.model_context.get_or_compute(
            self, lambda: self._find_threshold(context)
        )
        return react(head.features, head.weight, head.bias, threshold)

    def _find_threshold(self, context: BatchContext) -> float:
        """Compute the quantile of all the numbers in the training features."""
        # NumPy's quantile, since torch's takes 16 million numbers at most.
        features = training_features(context, self.name).features
        return float(np.quantile(features.cpu(), self.quantile))


@dataclass(frozen=True)
class Residual:
    """What ViM fits to training features: the subspace that they hardly span, and a scale.

    Attributes:
        origin: o = -W⁺b, the features at which all logits are zero; W and b are the weight and the
            bias of the last linear layer.
        directions: R, an orthonormal basis of r directions: all but the principal directions of the
            training features around o.
        alpha: α, the scale of the virtual logit α ‖Rᵀ(h - o)‖.
    """

    origin: Float64[Tensor, " f"]
    directions: Float64[Tensor, "f r"]
    alpha: float

    def virtual_logit(self, features: Float[Tensor, "b f"]) -> Float64[Tensor, " b"]:
        """Compute α ‖Rᵀ(h - o)‖ of features h.

        α is the scale `alpha`, R are the `directions`, and o is the `origin`.
        """
        return self.alpha * ((features.double() - self.origin) @ self.directions).norm(dim=-1)


def vim(
    logits: Float[Tensor, "b c"],
    features: Float[Tensor, "b f"],
    residual: Residual,
) -> Float[Tensor, " b"]:
    """ViM: α ‖Rᵀ(h - o)‖ - log Σ_c exp z_c, a virtual logit against the energy of the logits.

    Args:
        logits: the logits z.
        features: h, which the last linear layer reads.
        residual: the origin o, directions R and scale α that `fit_residual` fits to training
            features.
    """
    return residual.virtual_logit(features) - logits.logsumexp(-1)


@dataclass(frozen=True)
class ViM(Method):
    """ViM: α ‖Rᵀ(h - o)‖ - log Σ_c exp z_c, a virtual logit for what the training features do not
    span, against the energy.

    o = -W⁺b is the origin at which all logits are zero. R projects onto all but the D principal
    directions of the training features around o, and α makes the mean of the virtual logit over the
    training data that of the largest logit. It ranks like the probability of the virtual class
    among all logits. The paper's α takes it for granted that this mean is positive: a negative one
    would turn the score around, and is an error.

    D = 0 takes the paper's 1000 from 2048 features on and 512 from 768 on, half below.

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
    rules: ClassVar = {"dimensions": whole(0)}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `vim`, with a residual that is fitted to the training features."""
        residual = context.model_context.get_or_compute(self, lambda: self._fit_residual(context))
        return vim(context.logits, context.head.features, residual)

    def _fit_residual(self, context: BatchContext) -> Residual:
        """Fit the residual to the training features, with `dimensions`, or the paper's if it is 0."""
        training = training_features(context, self.name)
        dimensions = self.dimensions or default_dimensions(training.features.shape[1])
        return fit_residual(training, context.head, dimensions)

    def quick(self) -> "ViM":
        """Return a copy with one principal direction, which works with few training inputs."""
        return replace(self, dimensions=1)


def default_dimensions(width: int) -> int:
    """Choose ViM's number of principal directions for features of this width.

    From 768 features on, it is that of the paper's code. The paper has no network with fewer
    features; for these it is half of the width.
    """
    if width >= 2048:
        return 1000
    return 512 if width >= 768 else width // 2


def fit_residual(
    training: TrainingFeatures,
    head: Head,
    dimensions: int,
) -> Residual:
    """Fit ViM's residual to the training features, in double precision.

    Args:
        training: the training features.
        head: the last linear layer.
        dimensions: the number of principal directions, which the residual leaves out.

    Raises:
        QualmsError: if the training features do not vary outside of the principal directions, or
            the scale of the virtual logit would not be positive.
    """
    weight = head.weight.double()
    width = weight.shape[1]
    if dimensions >= width:
        raise QualmsError(
            f"vim has dimensions={dimensions}, but there are only {width} features; "
            "pass fewer dimensions."
        )
    bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias.double()
    # The features whose logits are zero, or as near to zero as possible.
    origin = -torch.linalg.pinv(weight) @ bias
    scatter = weight.new_zeros(width, width)
    for rows in training.features.split(ROWS):
        centered = rows.double() - origin
        scatter += centered.mT @ centered
    vectors = torch.linalg.eigh(scatter).eigenvectors  # eigenvalues ascend
    directions = vectors[:, : width - dimensions]
    unscaled = Residual(origin, directions, alpha=1.0)
    norms = [unscaled.virtual_logit(rows) for rows in training.features.split(ROWS)]
    mean_norm = torch.cat(norms).mean()
    # The relative rounding error of the features themselves, or of the sums of squares that the
    # directions come from, whichever is larger.
    rounding = max(
        width * torch.finfo(training.features.dtype).eps,
        (width * torch.finfo(torch.double).eps) ** 0.5,
    )
    # The trace is the sum of the squared distances from the origin.
    root_mean_square = (scatter.trace() / len(training.features)).sqrt()
    if mean_norm <= rounding * root_mean_square:
        raise QualmsError(
            f"vim needs training features that vary in more than {dimensions} dimensions, but "
            f"these {len(training.features)} do not; pass more training inputs, or fewer "
            "dimensions."
        )
    mean_max = float(training.max_logits.double().mean())
    if mean_max <= 0:
        raise QualmsError(
            f"the mean of the training inputs' largest logits is {mean_max:.3g}, but vim needs a "
            "positive one to scale its virtual logit; use knn, mahalanobis or energy."
        )
    # On average the virtual logit is then as large as the largest logit.
    return Residual(origin, directions, alpha=mean_max / float(mean_norm))
