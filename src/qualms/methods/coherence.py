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

from qualms.gradients.directions import classes
from qualms.gradients.engines.class_sampling import (
    ContrastedClasses,
    class_lengths,
    class_sizes,
    estimate,
)
from qualms.methods.blocks import blocks_of
from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.method import GRADIENTS, Method

SAMPLED = 48  # classes whose pairs tell κ, where there are many
DRAWN = 8  # classes of each input that tell the sum over all


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
    cost = "2, and C (at most 58) backward through the last two blocks"
    always_exact = True

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return self._estimate(context)[0]

    def error(self, context: BatchContext) -> Float[Tensor, " b"]:
        """The standard error of an estimate from some of many classes; 0 elsewhere."""
        return self._estimate(context)[1]

    def late(self, context: BatchContext) -> frozenset[str]:
        """The parameters of the last two blocks."""
        return frozenset(name for block in blocks_of(context, self.name)[-2:] for name in block)

    def directions_needed(self, classes: int) -> int:
        """How many backward passes there are: one for each class, or those for contrasts of some."""
        return min(classes, 2 + SAMPLED + DRAWN)

    def _estimate(self, context: BatchContext) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
        late = self.late(context)
        classes = context.logits.shape[1]
        if self.directions_needed(classes) == classes:
            found = coherence(context.logits, context.gram(late)[0].sum(1))
            return found, torch.zeros_like(found)
        sizes = partial(_sizes, context.head_weight)
        if (
            self not in context.model_context.fitted
        ):  # one object for all batches: what is computed is kept by it
            context.model_context.fitted[self] = ContrastedClasses(
                ("contrasted",), sizes, DRAWN, context.seed, SAMPLED
            )
        directions: ContrastedClasses = context.model_context.fitted[self]
        gram, logits = context.gram(late, directions)
        return estimate_coherence(logits, gram.sum(1), directions)


def _sizes(head: Float[Tensor, "c d"] | None, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
    return class_sizes(probs.sqrt(), class_lengths(probs, head))


def estimate_coherence(
    logits: Float[Tensor, "b c"], gram: Float[Tensor, "b m m"], directions: ContrastedClasses
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Coherence from inner products along some contrasts of classes, and its standard error.

    κ is the mean over pairs of classes that were drawn alike, its error that of leaving out one
    class at a time; the sum is that over the classes that were drawn for each input. Both errors
    are relative ones, κ's counted four times.
    """
    sample = slice(2, 2 + directions.sample)
    drawn = slice(2 + directions.sample, None)
    # ⟨J_c, J_c'⟩ with J_c = d + b_c: d the likeliest logit's gradient, b_c what another one's
    # differs by.
    across = gram[:, 1, sample]
    of_logits = (
        gram[:, 1, 1][:, None, None]
        + across[:, :, None]
        + across[:, None, :]
        + gram[:, sample, sample]
    )
    kappa, without = collinearity(of_logits), leave_one_out(of_logits)
    n = directions.sample
    kappa_error = ((n - 1) / n * (without - without.mean(1, keepdim=True)).square().sum(1)).sqrt()
    squares = (
        gram[:, 0, 0][:, None] + 2 * gram[:, 0, drawn] + gram.diagonal(dim1=1, dim2=2)[:, drawn]
    )
    classes, chances = directions.draw(logits)
    terms = _weights(logits).gather(-1, classes) * squares.clamp_min(0).sqrt()
    total, total_error = estimate(terms, chances)
    value = kappa**4 * total
    tiny = torch.finfo(torch.double).tiny
    relative = torch.hypot(
        4 * kappa_error / kappa.clamp_min(tiny), total_error / total.clamp_min(tiny)
    )
    return value, value * relative


def coherence(logits: Float[Tensor, "b c"], gram: Float[Tensor, "b c c"]) -> Float[Tensor, " b"]:
    """κ⁴ Σ_c sqrt(p_c) ‖g_c‖ / sqrt(Z) from the logits and G = J Jᵀ."""
    away = classes(logits[:, None])[:, :, 0]  # e_c - p: [c, b, c]
    norms = torch.einsum("cbi,bij,cbj->bc", away, gram, away).clamp_min(0).sqrt()
    return collinearity(gram) ** 4 * (_weights(logits) * norms).sum(-1)


def _weights(logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
    """sqrt(p / Z) by logarithms: one of the two may be beyond 64 bits where their ratio is not."""
    return ((log_softmax(logits) - logits.logsumexp(-1, keepdim=True)) / 2).exp()


def collinearity(gram: Float[Tensor, "b c c"]) -> Float[Tensor, " b"]:
    """κ: the mean squared cosine between the gradients of two different logits; a zero gradient has
    no direction.
    """
    c = gram.shape[-1]
    return _squared_cosines(gram).sum((1, 2)) / (c * (c - 1))


def leave_one_out(gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c"]:
    """κ without each of the classes."""
    cosines, c = _squared_cosines(gram), gram.shape[-1]
    return (cosines.sum((1, 2))[:, None] - 2 * cosines.sum(2)) / ((c - 1) * (c - 2))


def _squared_cosines(gram: Float[Tensor, "b c c"]) -> Float[Tensor, "b c c"]:
    """Between two different gradients; 0 on the diagonal."""
    lengths = (
        gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
    )  # not their squares: products may not fit 64 bits
    some = (lengths[:, :, None] > 0) & (lengths[:, None, :] > 0)
    cosines = torch.where(some, gram / lengths[:, :, None] / lengths[:, None, :], 0).square()
    return cosines - torch.diag_embed(cosines.diagonal(dim1=1, dim2=2))
