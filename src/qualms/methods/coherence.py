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

from qualms.gradients.directions import Directions, class_directions
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

PAIRED = 48  # the number of classes from whose pairs κ is estimated, if there are many classes
DRAWN = 8  # the number of classes of each input from which the sum over all is estimated
BLOCKS = 2  # the number of last blocks whose gradients count
TINY = torch.finfo(torch.double).tiny
LOGITS = Directions(("logits",))


def coherence(
    logits: Float[Tensor, "b c"],
    gram: Float[Tensor, "b c c"],
) -> Float[Tensor, " b"]:
    """Compute κ⁴ Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z), with Z = Σ_c exp z_c.

    κ is the `collinearity` of the gradients of the logits, g_c the gradient of log p_c.

    Args:
        logits: the logits z.
        gram: the inner products between the gradients of every two logits.
    """
    # The gradient of log p_c is the combination e_c - p of the gradients of the logits: [c, b, c].
    directions = class_directions(logits[:, None])[:, :, 0]
    norms = torch.einsum("cbi,bij,cbj->bc", directions, gram, directions).clamp_min(0).sqrt()
    return collinearity(gram) ** 4 * (class_weights(logits) * norms).sum(-1)


def class_weights(logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
    """Compute sqrt(p_c / Z) of each class c, with Z = Σ_k exp z_k over the logits z.

    This is done in log space: p_c or Z alone may be out of the range of 64-bit floats where p_c / Z
    is not.
    """
    return ((log_softmax(logits) - logits.logsumexp(-1, keepdim=True)) / 2).exp()


def collinearity(gram: Float[Tensor, "b c c"]) -> Float[Tensor, " b"]:
    """Compute the mean squared cosine between the gradients of two different logits.

    Cosines with a zero gradient, which has no direction, count as 0.

    Args:
        gram: the inner products between the gradients of every two logits.
    """
    num_classes = gram.shape[-1]
    # The diagonal of the cosines is 0.
    return squared_cosines(gram).sum((1, 2)) / (num_classes * (num_classes - 1))


def collinearity_without_each(gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c"]:
    """Compute the `collinearity` without class c, for each class c; the jackknife needs it.

    Args:
        gram: the inner products between the gradients of every two logits.
    """
    num_classes = gram.shape[-1]
    cosines = squared_cosines(gram)
    # Class c has a row and a column in the matrix of cosines, which is symmetric.
    sums = cosines.sum((1, 2))[:, None] - 2 * cosines.sum(2)
    return sums / ((num_classes - 1) * (num_classes - 2))


def squared_cosines(gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
    """Compute the squared cosines between the gradients of every two logits; 0 on the diagonal.

    Args:
        gram: the inner products between the gradients of every two logits.
    """
    lengths = gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    has_cosine = (lengths[:, :, None] > 0) & (lengths[:, None, :] > 0)
    # Divided by one length after the other: the product of two lengths may not fit 64 bits.
    cosines = torch.where(has_cosine, gram / lengths[:, :, None] / lengths[:, None, :], 0)
    squares = cosines.square()
    return squares - torch.diag_embed(squares.diagonal(dim1=1, dim2=2))


def estimate_coherence(
    logits: Float[Tensor, "b c"],
    gram: Float[Tensor, "b m m"],
    directions: ContrastedClasses,
) -> Estimate:
    """Estimate the score κ⁴ Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z), with its error, from a sample of classes.

    κ is the `collinearity` of the sampled classes; its error is the jackknife's, from leaving out
    one class at a time. The sum is estimated from the classes that were drawn for each input. The
    relative error of the product combines that of the sum with that of κ, which counts four times,
    as κ enters to the fourth power.

    Args:
        logits: the logits z.
        gram: inner products between the gradients along the m directions of `directions`. With d
            the likeliest class these are the gradients of, in order: log p_d, z_d, and z_c - z_d
            for the classes c from which κ is estimated, then for those drawn for the sum.
        directions: the directions, which hold the sampled classes c.
    """
    n = directions.num_shared
    # Where the classes for κ and those for the sum are on the axis m.
    paired = slice(2, 2 + n)
    drawn = slice(2 + n, None)
    # Inner products between the gradients of the logits: with J_c = J_d + D_c, D_c the gradient of
    # z_c - z_d, they are ⟨J_d, J_d⟩ + ⟨J_d, D_c⟩ + ⟨J_d, D_c'⟩ + ⟨D_c, D_c'⟩.
    likeliest_square = gram[:, 1, 1][:, None, None]
    across = gram[:, 1, paired]
    sum_of_cross_terms = likeliest_square + across[:, :, None] + across[:, None, :]
    logit_gram = sum_of_cross_terms + gram[:, paired, paired]
    kappa = collinearity(logit_gram)
    without_each = collinearity_without_each(logit_gram)
    deviations = without_each - without_each.mean(1, keepdim=True)
    kappa_error = ((n - 1) / n * deviations.square().sum(1)).sqrt()
    # ‖g_c‖² of the drawn classes, from g_c = ∇ log p_d + ∇(z_c - z_d).
    difference_squares = gram.diagonal(dim1=1, dim2=2)[:, drawn]
    squares = gram[:, 0, 0][:, None] + 2 * gram[:, 0, drawn] + difference_squares
    index, chances = directions.draw(logits)
    terms = class_weights(logits).gather(-1, index) * squares.clamp_min(0).sqrt()
    total, total_error = estimate(terms, chances)
    values = kappa**4 * total
    relative_errors = torch.hypot(
        4 * kappa_error / kappa.clamp_min(TINY),
        total_error / total.clamp_min(TINY),
    )
    return Estimate(values, values * relative_errors)


def guess_class_sizes(
    head: Float[Tensor, "c d"] | None,
    probs: Float[Tensor, "b c"],
) -> Float[Tensor, "b c"]:
    """Guess sqrt(p_c) ‖∇θ log p_c‖ of each class c up to a factor, to draw classes in proportion.

    Args:
        head: the weight of the last linear layer; None if no such layer computes the logits.
        probs: the probabilities p_c of each input.
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
        """Compute `coherence`; with many classes, estimate it from some of them."""
        params = self.late_params(context)
        if self.num_directions(context.num_classes) == context.num_classes:
            table = context.measure_exactly(params, LOGITS, gram=True)
            gram = table.values.double().sum(1)  # from [b, layers, m, m] to all layers together
            return Estimate(coherence(context.logits, gram))
        model_context = context.model_context
        directions = model_context.get_or_compute(self, lambda: self._create_contrasts(context))
        table = context.measure_exactly(params, directions, gram=True)
        gram = table.values.double().sum(1)
        # The table's logits, not the context's: they decided which classes the engine drew.
        return estimate_coherence(table.logits.double(), gram, directions)

    def late_params(self, context: BatchContext) -> frozenset[str]:
        """Return the names of the parameters of the last two blocks."""
        # Run the model once, so that an input that it rejects is reported as such.
        _ = context.logits
        params = context.model_context.settings.params
        blocks = find_blocks(context.model, context.batch, params, self.name)
        return frozenset(name for block in blocks[-BLOCKS:] for name in block)

    def num_directions(self, classes: int) -> int:
        """Count the directions of gradients: all classes, or those that stand in for many classes.

        Args:
            classes: the number of classes of the model.
        """
        # The 2 are the directions of the likeliest class.
        return min(classes, 2 + PAIRED + DRAWN)

    def _create_contrasts(self, context: BatchContext) -> ContrastedClasses:
        """Create the directions of a sample of the classes, for models with many classes."""
        return ContrastedClasses(
            names=("contrasted",),
            sizes=partial(guess_class_sizes, context.head_weight),
            num_drawn=DRAWN,
            seed=context.seed,
            num_shared=PAIRED,
        )
