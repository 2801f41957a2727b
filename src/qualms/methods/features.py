"""Scores of the features h that the last linear layer reads: one plain forward pass, no data.

Each is a function of tensors and a class that registers it. The models' logits are W h + b. SCALE,
ASH-S and LTS read how widely the activation is spread over the features:

    r = Σ_i h_i / Σ of the h_i above their p-th percentile.

Their papers have features behind a ReLU. Elsewhere (GELU), negative features count as zero in r.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.precision import at_least_float32
from qualms.methods.context import BatchContext
from qualms.methods.divergence import distance_from_uniform
from qualms.methods.logits import energy
from qualms.methods.method import LOGITS, Method
from qualms.parameters import PERCENTILE

MAX_SPREAD = 80.0  # exp(r) must fit float32


def largest_features(
    features: Float[Tensor, "b f"],
    percentile: float,
) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
    """Select the features above a percentile of each input's features; at least one.

    Args:
        features: the features of each input.
        percentile: p, from 0 to 100; the largest (100 - p) % of the features are selected.

    Returns:
        The values and the indices of the selected features, the largest first.
    """
    num_features = features.shape[1]
    num_selected = max(1, num_features - round(num_features * percentile / 100))
    return torch.topk(features, num_selected, dim=1)


def activation_spread(
    features: Float[Tensor, "b f"],
    percentile: float,
) -> Float[Tensor, " b"]:
    """Compute r: the sum of all features of an input, divided by that of the largest ones.

    Negative features count as zero, so r is at least 1 and finite. It is 1 without a positive
    feature.

    Args:
        features: the features of each input.
        percentile: from 0 to 100; features above this percentile of an input's features are the
            largest ones.
    """
    active = features.double().relu()
    total = active.sum(1)
    largest_values, _ = largest_features(active, percentile)
    largest_total = largest_values.sum(1)
    return torch.where(largest_total > 0, total / largest_total, 1.0)


def scale_features(
    logits: Float[Tensor, "b c"],
    bias: Float[Tensor, " c"] | None,
    spreads: Float[Tensor, " b"],
) -> Float[Tensor, "b c"]:
    """Compute the logits that the features exp(r) h would have: exp(r) (z - b) + b.

    Args:
        logits: z, the logits of the features h of each input.
        bias: b, the bias of the last linear layer; None if it has none.
        spreads: r, the `activation_spread` of each input.
    """
    b = 0.0 if bias is None else bias.double()
    # So that exp(r) does not overflow. r exceeds MAX_SPREAD only at percentiles that leave fewer
    # than one feature in eighty.
    factors = spreads.clamp(max=MAX_SPREAD).exp()
    return (logits.double() - b) * factors[:, None] + b


def scale(
    logits: Float[Tensor, "b c"],
    bias: Float[Tensor, " c"] | None,
    features: Float[Tensor, "b f"],
    percentile: float = 85.0,
) -> Float[Tensor, " b"]:
    """SCALE: energy of the logits of exp(r) h, with r the `activation_spread` of the features h.

    Args:
        logits: the logits of h.
        bias: the bias of the last linear layer; None if it has none.
        features: h, which the last linear layer reads.
        percentile: from 0 to 100; r compares all features with those above this percentile.
    """
    spreads = activation_spread(features, percentile)
    return energy(scale_features(logits, bias, spreads))


@dataclass(frozen=True)
class SCALE(Method):
    """Energy of the logits after the features h of the last layer are multiplied by exp(r).

    r is the `activation_spread`: the sum of the positive features, divided by that of the largest.
    Features whose activation is spread widely are made larger; nothing is pruned. Negative features
    are scaled like the rest. The percentile is the paper's for ImageNet.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import SCALE

        model, x = torch.nn.Linear(20, 3), torch.rand(5, 20)
        print(qualms.score(model, x, SCALE(percentile=85.0)))
        ```
    """

    percentile: float = 85.0

    name = "scale"
    paper = (
        "Xu et al., Scaling for Training Time and Post-hoc Out-of-distribution Detection "
        "Enhancement, ICLR 2024"
    )
    needs = (LOGITS,)
    cost = "1"
    rules: ClassVar = {"percentile": PERCENTILE}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute the energy of the logits of exp(r) h, r the spread of the features h."""
        head = context.head
        return scale(context.logits, head.bias, head.features, self.percentile)


def prune_features(
    features: Float[Tensor, "b f"],
    percentile: float,
) -> Float[Tensor, "b f"]:
    """Keep the features of each input above a percentile, at least one; set the others to zero."""
    values, index = largest_features(features, percentile)
    return torch.zeros_like(features).scatter(1, index, values)


def ash_s(
    features: Float[Tensor, "b f"],
    weight: Float[Tensor, "c f"],
    bias: Float[Tensor, " c"] | None,
    percentile: float = 90.0,
) -> Float[Tensor, " b"]:
    """ASH-S: energy of the logits of exp(r) h, with all h_i up to the percentile set to zero.

    r is the `activation_spread` of the features h before they are pruned.

    Args:
        features: h, which the last linear layer reads.
        weight: the weight of the last linear layer.
        bias: the bias of the last linear layer; None if it has none.
        percentile: from 0 to 100; features above this percentile are kept, and r compares all
            features with them.
    """
    logits = F.linear(prune_features(features, percentile), weight, bias)
    return energy(scale_features(logits, bias, activation_spread(features, percentile)))


@dataclass(frozen=True)
class ASHS(Method):
    """Energy of the logits after the last layer's features are pruned and the rest multiplied by
    exp(r), with r the `activation_spread` of all features.

    The largest features are kept whatever their sign. The percentile is the paper's for ImageNet.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ASHS

        model, x = torch.nn.Linear(20, 3), torch.rand(5, 20)
        print(qualms.score(model, x, ASHS(percentile=90.0)))
        ```
    """

    percentile: float = 90.0

    name = "ash-s"
    paper = (
        "Djurisic et al., Extremely Simple Activation Shaping for Out-of-Distribution Detection, "
        "ICLR 2023"
    )
    needs = (LOGITS,)
    cost = "1"
    rules: ClassVar = {"percentile": PERCENTILE}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute the energy of the logits of the pruned and scaled features."""
        head = context.head
        return ash_s(head.features, head.weight, head.bias, self.percentile)


def lts(
    logits: Float[Tensor, "b c"],
    features: Float[Tensor, "b f"],
    percentile: float = 95.0,
) -> Float[Tensor, " b"]:
    """LTS: energy of r² z, -log Σ_c exp(r² z_c), with r the `activation_spread` of the features.

    Args:
        logits: the logits z.
        features: the features that the last linear layer reads.
        percentile: from 0 to 100; r compares all features with those above this percentile.
    """
    factors = activation_spread(features, percentile) ** 2
    return energy(logits * factors[:, None])


@dataclass(frozen=True)
class LTS(Method):
    """Energy of the logits multiplied by r², with r the `activation_spread` of the features.

    The 95th percentile compares with the largest 5 % of the features. Negative features count as
    zero in r, as in the authors' code.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import LTS

        model, x = torch.nn.Linear(20, 3), torch.rand(5, 20)
        print(qualms.score(model, x, LTS(percentile=95.0)))
        ```
    """

    percentile: float = 95.0

    name = "lts"
    paper = "Djurisic et al., Logit Scaling for Out-of-Distribution Detection, 2024"
    needs = (LOGITS,)
    cost = "1"
    rules: ClassVar = {"percentile": PERCENTILE}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute the energy of the logits times r², r the spread of the last layer's features."""
        return lts(context.logits, context.head.features, self.percentile)


def gradnorm_huang(
    logits: Float[Tensor, "b c"],
    features: Float[Tensor, "b f"],
) -> Float[Tensor, " b"]:
    """Compute -‖∇_W KL(uniform ‖ p)‖₁ = -Σ_c |p_c - 1/C| · ‖h‖₁, as the gradient is (p - 1/C) hᵀ.

    Args:
        logits: the logits of C classes, whose softmax is p.
        features: h, which the last linear layer reads; W is this layer's weight.
    """
    return -distance_from_uniform(logits) * features.double().abs().sum(-1)


@dataclass(frozen=True)
class GradNormHuang(Method):
    """GradNorm as published: minus ‖∇_W KL(uniform ‖ p)‖₁ over the last layer's weight W.

    Large gradients mean confidence, hence the sign. `gradnorm` is the row of the paper's tables.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import GradNormHuang

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, GradNormHuang()))
        ```
    """

    name = "gradnorm-huang"
    paper = (
        "Huang et al., On the Importance of Gradients for Detecting Distributional Shifts in the "
        "Wild, NeurIPS 2021"
    )
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute -Σ_c |p_c - 1/C| · ‖h‖₁ from the probabilities p and the features h."""
        return gradnorm_huang(context.logits, context.head.features)


def row_space(weight: Float[Tensor, "c f"]) -> Float[Tensor, "r f"]:
    """Compute an orthonormal basis of the row space of a weight: its r right singular vectors.

    Singular vectors whose singular values are no larger than rounding errors are left out.

    Raises:
        QualmsError: if the weight is zero, or its rows span the whole space of features.
    """
    _, values, vectors = torch.linalg.svd(weight.double(), full_matrices=False)
    rounding = max(weight.shape) * torch.finfo(at_least_float32(weight).dtype).eps
    basis = vectors[values > values.amax() * rounding]
    if not len(basis):
        raise QualmsError(
            "the weights of the last layer are all zero, so clafr is the same for every input; "
            "check the model's weights."
        )
    num_classes, num_features = weight.shape
    if len(basis) == num_features:
        raise QualmsError(
            f"the last layer has {num_classes} classes for {num_features} features, so its weights "
            "span all features and clafr is always zero; use energy, scale or regrad."
        )
    return basis


def clafr(
    features: Float[Tensor, "b f"],
    basis: Float[Tensor, "r f"],
) -> Float[Tensor, " b"]:
    """ClaFR: ‖h - V Vᵀ h‖ / ‖h‖, the share of the norm outside of a subspace; 0 for a zero vector.

    Args:
        features: h, the features of each input.
        basis: Vᵀ, an orthonormal basis of the subspace, with the r basis vectors as rows; such as
            the `row_space` of the last layer's weight.
    """
    h = features.double()
    norm = h.norm(dim=1)
    norm_outside = (h - h @ basis.T @ basis).norm(dim=1)
    return torch.where(norm > 0, norm_outside / norm, 0.0)


@dataclass(frozen=True)
class ClaFR(Method):
    """The share of the features' norm that the last layer's weights do not reconstruct.

    ‖h - V Vᵀ h‖ / ‖h‖, with V an orthonormal basis of the weight's row space. What lies outside
    of that space has no influence on any class.

    The paper's abstract: an orthogonal decomposition of the classifier's weights, the features
    mapped into the space that it spans, their reconstruction error as the score. This is our
    reading, as we had no access to its formulas: all singular vectors are kept, nothing is
    centered, and the error is divided by the features' norm, without which it mostly measures how
    large features are.

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
    paper = (
        "Wang et al., Frustratingly Easy Feature Reconstruction for Out-of-Distribution "
        "Detection, PRCV 2025"
    )
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `clafr`, with the row space of the last layer's weight as the subspace."""
        head = context.head
        basis = context.model_context.get_or_compute(self, lambda: row_space(head.weight))
        return clafr(head.features, basis)
