"""RankFeat: the energy of the logits after the rank-1 part is subtracted from the last feature map.

The map before pooling is a matrix A of channels by positions; A - σ₁ u₁ v₁ᵀ, with the largest
singular value and its vectors, goes through the rest of the network. The paper finds larger σ₁ for
inputs of unknown classes, which lose more. This is its variant on the last block; averaging the
logits with those of the block before is left out.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.feature_maps import with_last_map_changed
from qualms.methods.method import SEVERAL_PASSES, Method


@dataclass(frozen=True)
class RankFeat(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import RankFeat
        from qualms.models.cnn import mnist_cnn

        print(qualms.score(mnist_cnn(), torch.rand(5, 1, 28, 28), RankFeat()))
        ```
    """

    name = "rankfeat"
    paper = "Song et al., RankFeat: Rank-1 Feature Removal for Out-of-distribution Detection, NeurIPS 2022"
    needs = (SEVERAL_PASSES,)
    cost = "2"

    @property
    def extra_passes(self) -> float:
        """A forward pass from the features without their first direction."""
        return 1.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        parts = [
            with_last_map_changed(context.model, part, without_rank_1, self.name)
            for part in context.chunks(context.batch)
        ]
        return -torch.cat(parts).double().logsumexp(-1)


def without_rank_1(maps: Float[Tensor, "b c p"]) -> Float[Tensor, "b c p"]:
    """Each matrix without the part of its largest singular value."""
    left, values, right = torch.linalg.svd(maps.double(), full_matrices=False)
    return maps - (values[:, 0, None, None] * left[:, :, :1] * right[:, :1]).to(maps)
