"""Coherence (ours, experimental): κ⁴ · Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z).

g_c = Jᵀ(e_c - p), Z = Σ_c exp z_c, and κ is the mean over pairs of classes c ≠ c' of the squared
cosine G_cc'² / (G_cc G_c'c') between the gradients of two logits, G = J Jᵀ over the last two blocks
alone (the last residual or transformer block, or hidden layer, and the classifier). There is no
pass through the early layers, so it costs less than REGrad.

Why it works: not because the gradients of unknown inputs are collinear as such. κ follows the ratio
of the block's gradient to the classifier's (a study of 12 networks explains it with R² 0.98 to
1.00), since the classifier's part of G is a multiple of I and the block's is not; collinearity
within the block alone is weak, or ranks backwards. That ratio is what `heat` is built on.

The study behind it: 12 networks, 46 pairs of datasets, the formula chosen on 14 of them. Means over
the other 32 (AUROC/AUPR): coherence 88.7/87.4, GEN 87.6/84.8, energy 87.0/84.1, entropy 86.7/84.3,
REGrad with layers 85.9/82.0. These numbers are from that first study and have not been reproduced
by a command of this repository yet. Where it is weak: near-OOD pairs, and calibration (rAULC),
where entropy leads. A shift of all logits changes it. It has not been reviewed by anybody else: do
not rely on it alone.

With more than 58 classes both parts are estimated, the sum from eight classes of each input and κ
from the pairs of 48 classes, which are the same for all inputs.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.directions import Directions, classes
from qualms.gradients.engines.class_sampling import (
    ContrastedClasses,
    class_lengths,
    class_sizes,
    estimate,
)
from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.head import find_blocks
from qualms.methods.method import GRADIENTS, Estimate, Method

PAIRED = 48  # classes whose pairs estimate κ, where there are many
DRAWN = 8  # classes of each input that estimate the sum over all
BLOCKS = 2
TINY = torch.finfo(torch.double).tiny
LOGITS = Directions(("logits",))


def coherence(logits: Float[Tensor, "b c"], gram: Float[Tensor, "b c c"]) -> Float[Tensor, " b"]:
    """Compute κ⁴ Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z).

    Args:
        logits: the logits z.
        gram: G = J Jᵀ, the inner products between the gradients of all logits.
    """
    away = classes(logits[:, None])[:, :, 0]  # e_c - p: [c, b, c]
    norms = torch.einsum("cbi,bij,cbj->bc", away, gram, away).clamp_min(0).sqrt()
    return collinearity(gram) ** 4 * (class_weights(logits) * norms).sum(-1)


def class_weights(logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
    """Compute sqrt(p_c / Z), Z = Σ_k exp z_k.

    This is done in log space: p_c or Z alone may be out of the range of 64-bit floats where p_c / Z
    is not.
    """
    return ((log_softmax(logits) - logits.logsumexp(-1, keepdim=True)) / 2).exp()


def collinearity(gram: Float[Tensor, "b c c"]) -> Float[Tensor, " b"]:
    """Compute κ, the mean squared cosine between the gradients of two different logits.

    Cosines with a zero gradient, which has no direction, count as 0.

    Args:
        gram: the inner products between the gradients of all logits.
    """
    c = gram.shape[-1]
    return squared_cosines(gram).sum((1, 2)) / (c * (c - 1))


def collinearity_without_each(gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c"]:
    """Compute κ without each class c in turn, for the jackknife: over all pairs without class c.

    Args:
        gram: the inner products between the gradients of all logits.
    """
    c = gram.shape[-1]
    cosines = squared_cosines(gram)
    return (cosines.sum((1, 2))[:, None] - 2 * cosines.sum(2)) / ((c - 1) * (c - 2))


def squared_cosines(gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
    """Compute the squared cosines between the gradients of every two logits; 0 on the diagonal.

    Args:
        gram: the inner products between the gradients of all logits.
    """
    # Divided by one length after the other: a product of two lengths may not fit 64 bits.
    lengths = gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    has_cosine = (lengths[:, :, None] > 0) & (lengths[:, None, :] > 0)
    cosines = torch.where(has_cosine, gram / lengths[:, :, None] / lengths[:, None, :], 0).square()
    return cosines - torch.diag_embed(cosines.diagonal(dim1=1, dim2=2))


def estimate_coherence(
    logits: Float[Tensor, "b c"],
    gram: Float[Tensor, "b m m"],
    directions: ContrastedClasses,
) -> Estimate:
    """Estimate coherence and its standard error from a sample of the classes.

    κ is the mean over pairs of the sampled classes; its error is the jackknife's, from leaving out
    one class at a time. The sum is estimated from the classes that were drawn for each input. The
    relative error of the product is that of the sum and, since κ enters to the fourth power, four
    times that of κ.

    Args:
        logits: the logits z.
        gram: inner products between the gradients along the m directions of `directions`. With b
            the likeliest class these are, in order: log p_b, z_b, and z_c - z_b for the classes c
            that estimate κ and for those that estimate the sum.
        directions: knows which classes c were sampled.
    """
    n = directions.num_shared
    paired = slice(2, 2 + n)
    drawn = slice(2 + n, None)
    # ⟨J_c, J_c'⟩ with J_c = d + b_c, where d is the gradient of the likeliest logit, and b_c the
    # difference between the gradient of logit c and d.
    across = gram[:, 1, paired]
    likeliest = gram[:, 1, 1][:, None, None]
    of_logits = likeliest + across[:, :, None] + across[:, None, :] + gram[:, paired, paired]
    kappa = collinearity(of_logits)
    without = collinearity_without_each(of_logits)
    variance = (n - 1) / n * (without - without.mean(1, keepdim=True)).square().sum(1)
    kappa_error = variance.sqrt()
    diagonal = gram.diagonal(dim1=1, dim2=2)[:, drawn]
    # ‖g_c‖² of the drawn classes, from g_c = ∇ log p_b + ∇(z_c - z_b).
    squares = gram[:, 0, 0][:, None] + 2 * gram[:, 0, drawn] + diagonal
    index, chances = directions.draw(logits)
    terms = class_weights(logits).gather(-1, index) * squares.clamp_min(0).sqrt()
    total, total_error = estimate(terms, chances)
    value = kappa**4 * total
    relative = torch.hypot(
        4 * kappa_error / kappa.clamp_min(TINY),
        total_error / total.clamp_min(TINY),
    )
    return Estimate(value, value * relative)


def sizes_of_classes(
    head: Float[Tensor, "c d"] | None,
    probs: Float[Tensor, "b c"],
) -> Float[Tensor, "b c"]:
    """Guess sqrt(p_c) ‖g_c‖ of each class up to a factor; classes are drawn in proportion to it.

    Args:
        head: the weight of the last linear layer; None if the logits come from elsewhere.
        probs: the probabilities p_c for each input.
    """
    return class_sizes(probs.sqrt(), class_lengths(probs, head))


@dataclass(frozen=True)
class Coherence(Method):
    """κ⁴ · Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z) over the last two blocks (experimental).

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
    cost = "2, and C (at most 58) backward through the last two blocks"
    always_exact = True

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `coherence`, or estimate it if there are many classes."""
        return self.estimate(context).values

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute `coherence`, or estimate it with a standard error from a subset of many classes."""
        params = self.late_params(context)
        if self.num_directions(context.num_classes) == context.num_classes:
            table = context.exact_table(params, LOGITS, gram=True)  # values: [b, layer, m, m]
            return Estimate(coherence(context.logits, table.values.double().sum(1)))
        directions = context.model_context.once(self, lambda: self._contrasts(context))
        table = context.exact_table(params, directions, gram=True)
        return estimate_coherence(table.logits.double(), table.values.double().sum(1), directions)

    def late_params(self, context: BatchContext) -> frozenset[str]:
        """Return the names of the parameters of the last two blocks."""
        # An input that the model rejects is reported as such.
        _ = context.logits
        params = context.model_context.settings.params
        blocks = find_blocks(context.model, context.batch, params, self.name)
        return frozenset(name for block in blocks[-BLOCKS:] for name in block)

    def num_directions(self, classes: int) -> int:
        """Count the backward passes: one for each class, or for each contrast of sampled classes.

        Args:
            classes: the number of classes of the model.
        """
        return min(classes, 2 + PAIRED + DRAWN)

    def _contrasts(self, context: BatchContext) -> ContrastedClasses:
        """Create the contrasts of sampled classes, which all batches share."""
        sizes = partial(sizes_of_classes, context.head_weight)
        return ContrastedClasses(("contrasted",), sizes, DRAWN, context.seed, PAIRED)
