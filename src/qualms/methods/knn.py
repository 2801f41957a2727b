"""KNN: ‖z - z₍ₖ₎‖, the distance of an input's feature vector to its k-th nearest one in the training data.

z is what the last linear layer reads, divided by its length.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.passes import Passes
from qualms.methods.training_features import training_features
from qualms.parameters import check_parameters, whole

AT_ONCE = 2**23  # inner products
NO_LENGTH = 1e-12  # of a feature vector of zeros, which stays as it is


@dataclass(frozen=True)
class KNN(Method):
    """The paper's k: 50 on CIFAR-10, 200 on CIFAR-100, 1000 on ImageNet. Of fewer training inputs, the farthest counts.

    Keeps the training features, 2 KiB for each training input of a network with 512 of them in float32.

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

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted, known = passes.subject.fitted, training_features(passes, self.name).features
        if KNN not in fitted:
            fitted[KNN] = known.norm(dim=-1)
        return kth_distances(F.normalize(passes.head.features.to(known), dim=-1), known, fitted[KNN], self.k)


def kth_distances(
    z: Float[Tensor, "b f"], known: Float[Tensor, "n f"], norms: Float[Tensor, " n"], k: int
) -> Float[Tensor, " b"]:
    """‖z - z₍ₖ₎‖ from unit vectors z to known ones, which are divided by their norms; of fewer than k, the farthest."""
    lengths = norms.clamp_min(NO_LENGTH)
    shorter = (1 - (norms / lengths).square()) / 2  # not 0 for vectors of zeros, which stay near to all others
    found = []
    for part in z.split(max(1, AT_ONCE // len(known))):
        # Inner products tell who the neighbour is; how near it is they would tell with half the digits only.
        nearness = (part @ known.mT).div_(lengths).add_(shorter)  # ‖z - z'‖² is a constant minus twice that
        neighbour = nearness.topk(min(k, len(known)), dim=-1).indices[:, -1]
        found.append((part - known[neighbour] / lengths[neighbour, None]).double().norm(dim=-1))
    return torch.cat(found)
