"""Coherence (ours, experimental): κ⁴ · Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z).

g_c = Jᵀ(e_c - p), Z = Σ_c exp z_c, and κ is the mean over pairs of classes c ≠ c' of the squared cosine
G_cc'² / (G_cc G_c'c') between the gradients of two logits, G = J Jᵀ over the last two blocks alone (the last residual
or transformer block, or hidden layer, and the classifier). There is no pass through the early layers, so it costs less
than REGrad.

Why it works: not because the gradients of unknown inputs are collinear as such. κ follows the ratio of the block's
gradient to the classifier's (a study of 12 networks explains it with R² 0.98 to 1.00), since the classifier's part of G
is a multiple of I and the block's is not; collinearity within the block alone is weak, or ranks backwards. That ratio
is what `heat` is built on.

The study behind it: 12 networks, 46 pairs of datasets, the formula chosen on 14 of them. Means over the other 32
(AUROC/AUPR): coherence 88.7/87.4, GEN 87.6/84.8, energy 87.0/84.1, entropy 86.7/84.3, REGrad with layers 85.9/82.0.
These numbers are from that first study and have not been reproduced by a command of this repository yet.
Where it is weak: near-OOD pairs, and calibration (rAULC), where entropy leads. A shift of all logits changes it. It has
not been reviewed by anybody else: do not rely on it alone.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.directions import classes
from qualms.methods.blocks import heavy_blocks
from qualms.methods.divergence import log_softmax
from qualms.methods.method import GRADIENTS, Method
from qualms.methods.passes import Passes


@dataclass(frozen=True)
class Coherence(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Coherence

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Coherence()))
        ```
    """

    name = "coherence"
    paper = "ours, experimental"
    needs = (GRADIENTS,)
    cost = "2 + C passes through the last two blocks"
    always_exact = True

    def score(self, passes: Passes) -> Float[Tensor, " b"]:
        """One number for each input."""
        late = heavy_blocks(passes, self.name)[-2:]
        return coherence(passes.logits, passes.gram(frozenset(name for block in late for name in block)).sum(1))


def coherence(logits: Float[Tensor, "b c"], gram: Float[Tensor, "b c c"]) -> Float[Tensor, " b"]:
    """κ⁴ Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z) from the logits and G = J Jᵀ."""
    away = classes(logits[:, None])[:, :, 0]  # e_c - p: [c, b, c]
    norms = torch.einsum("cbi,bij,cbj->bc", away, gram, away).clamp_min(0).sqrt()
    # sqrt(p / Z) by logarithms: one of the two may be beyond 64 bits where their ratio is not.
    weights = ((log_softmax(logits) - logits.logsumexp(-1, keepdim=True)) / 2).exp()
    return collinearity(gram) ** 4 * (weights * norms).sum(-1)


def collinearity(gram: Float[Tensor, "b c c"]) -> Float[Tensor, " b"]:
    """κ: the mean squared cosine between the gradients of two different logits; a zero gradient has no direction."""
    lengths = gram.diagonal(dim1=1, dim2=2).sqrt()  # not their squares, of which the products may not fit 64 bits
    some = (lengths[:, :, None] > 0) & (lengths[:, None, :] > 0)
    cosines = torch.where(some, gram / lengths[:, :, None] / lengths[:, None, :], 0).square()
    c = gram.shape[-1]
    return (cosines.sum((1, 2)) - cosines.diagonal(dim1=1, dim2=2).sum(1)) / (c * (c - 1))
