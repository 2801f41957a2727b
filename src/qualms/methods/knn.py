"""KNN: ‖z - z₍ₖ₎‖, the distance of an input's feature vector to its k-th nearest one in the
training data.

z is what the last linear layer reads, divided by its length.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.training_features import training_features
from qualms.parameters import check_parameters, whole

AT_ONCE = 2**23  # inner products
ROWS = 4096  # of the training features that are in double precision at once
SAME = 1e-6  # unit vectors that are no farther apart are the same but for rounding in 32 bits
EXTREME = 1e30  # a length whose inner products, or those of its inverse, may not fit 32 bits


@dataclass(frozen=True)
class KNN(Method):
    """The paper's k: 50 on CIFAR-10, 200 on CIFAR-100, 1000 on ImageNet. Of fewer training inputs,
    the farthest counts.

    Keeps the training features, 2 KiB for each training input of a network with 512 of them in
    float32.

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

    def __post_init__(self) -> None:
        check_parameters(self, self.name, k=whole(1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted = context.model_context.fitted
        if KNN not in fitted:
            fitted[KNN] = _known(training_features(context, self.name).features)
        known, lengths = fitted[KNN]
        features = context.head.features.to(known)
        return kth_distances(_unit(features, _lengths(features)), known, lengths, self.k)


def kth_distances(
    z: Float[Tensor, "b f"], known: Float[Tensor, "n f"], lengths: Float64[Tensor, " n"], k: int
) -> Float[Tensor, " b"]:
    """‖z - z₍ₖ₎‖ from unit vectors z to known ones, divided by their lengths; of fewer than k, the
    farthest.
    """
    divisors = torch.where(lengths > 0, lengths, 1.0).to(known)
    shorter = torch.where(lengths > 0, 0.0, 0.5).to(
        known
    )  # vectors of zeros, which stay near to all others
    found = []
    for part in z.split(max(1, AT_ONCE // len(known))):
        # Inner products tell who the neighbor is; how near it is they would tell with half the
        # digits only.
        nearness = (
            (part @ known.mT).div_(divisors).add_(shorter)
        )  # ‖z - z'‖² is a constant minus twice that
        neighbor = nearness.topk(min(k, len(known)), dim=-1).indices[:, -1]
        apart = (part - _unit(known[neighbor], lengths[neighbor])).double().norm(dim=-1)
        found.append(torch.where(apart > SAME, apart, 0.0))
    return torch.cat(found)


def _known(features: Float[Tensor, "n f"]) -> tuple[Float[Tensor, "n f"], Float64[Tensor, " n"]]:
    """The training features and their lengths; in double precision if 32 bits do not hold their
    inner products.
    """
    lengths = _lengths(features)
    some = lengths[lengths > 0]
    extreme = len(some) > 0 and (float(some.max()) > EXTREME or float(some.min()) < 1 / EXTREME)
    return features.double() if extreme else features, lengths


def _lengths(features: Float[Tensor, "n f"]) -> Float64[Tensor, " n"]:
    """In double precision, where no square is zero or infinite."""
    return torch.cat([some.double().norm(dim=-1) for some in features.split(ROWS)])


def _unit(features: Float[Tensor, "n f"], lengths: Float64[Tensor, " n"]) -> Float[Tensor, "n f"]:
    """The features divided by their lengths; a vector of zeros stays as it is."""
    return (features.double() / torch.where(lengths > 0, lengths, 1.0)[:, None]).to(features)
