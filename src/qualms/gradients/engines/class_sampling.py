"""Estimates Σ_c w_c ‖g_c‖ⁿ from the classes that count most and a random sample of the others.

Each class of each sample has a size s_c = |w_c| ℓ_cⁿ, with ℓ_c an estimate of its gradient's length
up to a factor. Behind a linear classifier with rows w_c, all gradients but the classifier's own are
∇ log p_c = J_hᵀ(w_c - w̄), w̄ = Σ_k p_k w_k, and their lengths follow ‖w_c - w̄‖; the classifier's
own follow ‖e_c - p‖. So ℓ_c² is ‖w_c - w̄‖², in units of its mean, and a part of ‖e_c - p‖²; for
other models it is ‖e_c - p‖² alone. On ImageNet networks the ratio of ‖g_c‖ to ℓ_c varies little
among the classes of an image with layer weights, and two or three times as much without.

m classes are measured for each sample. Largest first, a class is certain to be drawn if its size is
at least 1/j of the sizes not yet taken, with j classes still to draw; the others are drawn with
probabilities π_c proportional to their sizes, by systematic sampling: one walk over the classes in
steps of equal size. Its order and start are the same for all samples, so that most of the noise is
common to them. Then

    Σ_{c drawn} w_c ‖g_c‖ⁿ / π_c

has the right mean whatever the norms are (Horvitz & Thompson, J. ASA 1952). Its standard error
comes from the spread of its terms (Hájek, Ann. Math. Stat. 1964). A few terms estimate a spread
poorly, so a spread smaller than usual is averaged with the usual one, which counts as four more
terms; and the error is widened by Student's t: the true sum is within two such errors in about 95 %
of all cases. If the norms are proportional to the sizes, the estimate is exact.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qualms.gradients.directions import (
    Directions,
    Logits,
    direction_of_class,
    scale_to_unit,
    sum_of_others,
)
from qualms.gradients.precision import at_least_float32
from qualms.random import generator

# Makes the draws of classes independent of other draws with the same seed.
STREAM = 1_000_000_009
# For a model with fewer classes, all classes are measured.
MIN_CLASSES = 25
# The usual standard deviation of ‖g_c‖ / ℓ_c among a sample's classes, relative to its mean: for
# gradients of late layers, or with layer weights; and for gradients of all layers alike.
LATE_SPREAD = 0.045
WHOLE_SPREAD = 0.10
# How many drawn terms the usual spread counts as, where it is averaged with an observed spread.
PRIOR_TERMS = 4
# The weight of ‖e_c - p‖² in ℓ_c².
CLASSIFIER_SHARE = 0.25
# Maps the probabilities p of each sample to the sizes s_c of its classes.
Sizes = Callable[[Float[Tensor, "b c"]], Float[Tensor, "b c"]]


# The sizes of classes, and the probabilities with which they are drawn.


def class_lengths(
    probs: Float[Tensor, "b c"],
    weight: Float[Tensor, "c d"] | None = None,
) -> Float[Tensor, "b c"]:
    """Guess the length ℓ_c of each class's gradient ∇θ log p_c, up to a factor common to all classes.

    With the weights w_c of a final linear layer, ℓ_c² = ‖w_c - w̄‖² / unit
    + CLASSIFIER_SHARE · ‖e_c - p‖², with w̄ = Σ_k p_k w_k, e_c a unit vector, and unit the mean of
    ‖w_c - w̄‖² over the classes for uniform p. Without a final linear layer, ℓ_c = ‖e_c - p‖.

    Args:
        probs: the probabilities p of the c classes for each of b samples.
        weight: the rows w_c of the final linear layer; None if the model has none.
    """
    # ‖e_c - p‖² = (Σ_{k≠c} p_k)² + Σ_{k≠c} p_k².
    from_classifier = sum_of_others(probs).square() + sum_of_others(probs.square())
    if weight is None:
        return from_classifier.sqrt()
    w = at_least_float32(weight.detach())
    squared_norms = w.square().sum(-1)
    likeliest = probs.argmax(-1, keepdim=True)  # the class l of each sample, [b, 1]
    w_likeliest = w[likeliest[:, 0]]
    # w̄ = w_l + u with u = Σ_{k≠l} p_k (w_k - w_l): where p_l is nearly 1, the rounding error of u
    # is small relative to u, while that of w̄ - w_l is not.
    other_probs = probs.scatter(-1, likeliest, 0).to(w)
    u = other_probs @ w - other_probs.sum(-1, keepdim=True) * w_likeliest
    mean = w_likeliest + u
    # ‖w_c - w̄‖²; for the likeliest class it is ‖u‖².
    distances = squared_norms - 2 * mean @ w.T + mean.square().sum(-1, keepdim=True)
    distances = distances.scatter(-1, likeliest, u.square().sum(-1, keepdim=True))
    distances = distances.clamp_min(0)
    # The mean of ‖w_c - mean w‖² over the classes is the mean of ‖w_c‖² minus ‖mean w‖².
    unit = squared_norms.mean() - w.mean(0).square().sum()
    unit = unit.clamp_min(torch.finfo(w.dtype).tiny)
    from_features = (distances / unit).to(from_classifier)
    return (from_features + CLASSIFIER_SHARE * from_classifier).sqrt()


def class_sizes(
    weights: Float[Tensor, "b c"],
    lengths: Float[Tensor, "b c"],
    power: int = 1,
) -> Float[Tensor, "b c"]:
    """Compute s_c = |w_c| ℓ_cⁿ, scaled so that Σ_c s_c = 1.

    s_c is the guessed size of the term of class c in a score Σ_c w_c ‖g_c‖ⁿ.

    Args:
        weights: w_c, the weight of each class in the score.
        lengths: ℓ_c, a guess of ‖g_c‖ up to a common factor, from `class_lengths`.
        power: the exponent n.
    """
    sizes = weights.abs() * lengths**power
    return sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)


def inclusion_chances(
    sizes: Float[Tensor, "b c"],
    number: int,
) -> Float[Tensor, "b c"]:
    """Compute the probability π_c with which each class is drawn; they sum to `number`.

    Largest size first, a class is certain to be drawn (π_c = 1) if its size is at least 1/j of the
    sum of the sizes from it on, with j classes still to draw. For the other classes, π_c is
    proportional to the size.

    Args:
        sizes: the sizes s_c of the classes; the scale does not matter.
        number: the number of classes to draw for each sample.
    """
    ordered, order = sizes.sort(dim=-1, descending=True)
    # The sum of the sizes from each class on, in this order.
    sum_from_here = ordered.flip(-1).cumsum(-1).flip(-1)
    place = torch.arange(sizes.shape[-1], device=sizes.device)
    left_to_draw = (number - place).clamp_min(0)
    is_large = (ordered * left_to_draw >= sum_from_here) & (left_to_draw > 0)
    # `cumprod` is 1 up to the first class that is not large, then 0.
    is_certain = is_large.long().cumprod(-1).bool()
    num_certain = is_certain.sum(-1, keepdim=True)
    uncertain_size = torch.where(is_certain, 0, ordered).sum(-1, keepdim=True)
    uncertain_size = uncertain_size.clamp_min(torch.finfo(sizes.dtype).tiny)
    proportional = ((number - num_certain) * ordered / uncertain_size).clamp_max(1)
    ordered_chances = torch.where(is_certain, 1.0, proportional)
    # Back to the order of the classes.
    return torch.zeros_like(ordered_chances).scatter(-1, order, ordered_chances)


def draw_systematically(
    chances: Float[Tensor, "b c"],
    number: int,
    noise: torch.Generator,
) -> Int[Tensor, "b m"]:
    """Draw m classes of each sample by systematic sampling, class c with probability π_c.

    The classes are laid end to end in a random order, each as an interval of length π_c. The points
    u, u + 1, …, u + m - 1, with u random in [0, 1), lie in the intervals of the classes drawn.

    Args:
        chances: the probabilities π_c of each sample, which sum to m.
        number: the number m of classes to draw.
        noise: the generator of the order and of u, which all samples share.

    Returns:
        The indices of the classes drawn.
    """
    # A random order: the points would hit regularly spaced large classes too often or too rarely.
    mixed = torch.randperm(chances.shape[-1], generator=noise).to(chances.device)
    # Classes with π_c = 1 go to the front: each of the first points then lies in one of them.
    order = mixed[(chances[:, mixed] < 1).long().argsort(dim=-1, stable=True)]
    interval_ends = chances.gather(-1, order).cumsum(-1)
    u = float(torch.rand((), generator=noise, dtype=torch.double))
    points = (torch.arange(number, device=chances.device) + u).to(interval_ends)
    points_of_samples = points.expand(len(chances), -1).contiguous()
    # A point lies in the first interval whose end exceeds it; rounding may put it beyond the last.
    places = torch.searchsorted(interval_ends, points_of_samples, right=True)
    return order.gather(-1, places.clamp_max(chances.shape[-1] - 1))


# Directions of some classes.


@dataclass(frozen=True)
class SampledClasses(Directions):
    """Directions e_c - p for random classes c of each sample, drawn by sizes computed from its logits.

    p are the probabilities of the classes, and e_c is a unit vector. The classes drawn depend only
    on the logits and the seed. So the caller learns which classes an engine has measured by calling
    `draw` with the logits that the engine returns.

    Args:
        sizes: maps probabilities [b, c] to the sizes s_c, to which the probabilities of drawing the
            classes are proportional.
        num_drawn: the number of classes drawn for each sample.
        seed: the random seed of the draws.
    """

    sizes: Sizes
    num_drawn: int
    seed: int

    def num_directions(self, classes: int) -> int:
        """Return the number of directions of each sample, whatever the model's number of classes."""
        return self.num_drawn

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pair (v, s) for each drawn class c: its direction e_c - p, divided by r, is s·v.

        Args:
            logits: the logits [b, r, c]: b samples of r rows. Those of a sample's row 0, the sample
                without noise, decide which classes are drawn.
            block_bytes: not used, as every block is a single direction.
        """
        classes, _ = self.draw(logits[:, 0])
        for class_of_samples in classes.T:
            yield _scale_to_block(direction_of_class(logits, class_of_samples))

    def draw(
        self,
        logits: Float[Tensor, "b c"],
    ) -> tuple[Int[Tensor, "b m"], Float[Tensor, "b m"]]:
        """Draw m classes for each of b samples; the same ones in every call with the same logits.

        Returns:
            The indices of the classes drawn, and the probabilities π_c of drawing them.
        """
        noise = generator(self.seed, STREAM)
        return _draw_classes(self.chances(logits), self.num_drawn, noise)

    def chances(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Compute the probability π_c of drawing each class: in proportion to its size, at most 1."""
        probs = logits.detach().double().softmax(-1)
        return inclusion_chances(self.sizes(probs), self.num_drawn)


@dataclass(frozen=True, eq=False)
class ChosenClasses(Directions):
    """Directions e_c - p for given classes c, m classes for each sample.

    p are the probabilities of the classes, and e_c is a unit vector.

    Args:
        chosen: the indices of the m classes, for each of the b samples of the request.
    """

    chosen: Int[Tensor, "b m"]

    def num_directions(self, classes: int) -> int:
        """Return the number m of directions, whatever the model's number of classes."""
        return self.chosen.shape[1]

    def of_samples(self, some: slice) -> "ChosenClasses":
        """Select the directions of the samples in the slice `some`: each sample has its own classes."""
        return ChosenClasses(self.names, self.chosen[some])

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pair (v, s) for each chosen class c: its direction e_c - p, divided by r, is s·v.

        Args:
            logits: the logits [b, r, c]: b samples of r rows.
            block_bytes: not used, as every block is a single direction.
        """
        for class_of_samples in self.chosen.to(logits.device).T:
            yield _scale_to_block(direction_of_class(logits, class_of_samples))


@dataclass(frozen=True)
class ContrastedClasses(SampledClasses):
    """Directions e_l - p, e_l, and e_c - e_l for some classes c; l is the likeliest class.

    p are the probabilities of the classes, and e_c is a unit vector. The classes c are first
    `num_shared` classes that are the same for all samples, and for all models with as many classes;
    then `num_drawn` classes drawn for each sample. Inner products along e_c and e_c - p follow from
    inner products along these directions without loss of digits: e_c = e_l + (e_c - e_l), and
    e_c - p = (e_l - p) + (e_c - e_l).

    Args:
        num_shared: the number of classes that all samples share.
    """

    num_shared: int

    def num_directions(self, classes: int) -> int:
        """Return the number of directions: e_l - p, e_l, and one for each shared or drawn class."""
        return 2 + self.num_shared + self.num_drawn

    def shared_classes(self, classes: int) -> Int[Tensor, " n"]:
        """Choose the n = `num_shared` classes that all samples share.

        The choice is random, but the same for all models with this number of classes.
        """
        noise = torch.Generator().manual_seed(classes)
        return torch.randperm(classes, generator=noise)[: self.num_shared]

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a pair (v, s) for each direction, which is s·v: e_l - p, e_l, and all e_c - e_l.

        l is the likeliest class, and c are the shared and the drawn classes. Directions are divided
        by the number of rows.

        Args:
            logits: the logits [b, r, c]: b samples of r rows. Those of a sample's row 0, the sample
                without noise, decide l and the drawn classes.
            block_bytes: not used, as every block is a single direction.
        """
        likeliest = logits[:, 0].argmax(-1)
        shared = self.shared_classes(logits.shape[-1]).to(likeliest)
        shared = shared.expand(len(likeliest), -1)  # the same for all samples
        drawn, _ = self.draw(logits[:, 0])
        e_likeliest = _one_hot(likeliest, logits)
        yield _scale_to_block(direction_of_class(logits, likeliest))
        yield _scale_to_block(e_likeliest)
        for class_of_samples in torch.cat([shared, drawn], dim=1).T:
            yield _scale_to_block(_one_hot(class_of_samples, logits) - e_likeliest)


def _draw_classes(
    chances: Float[Tensor, "b c"],
    number: int,
    noise: torch.Generator,
) -> tuple[Int[Tensor, "b m"], Float[Tensor, "b m"]]:
    """Draw m classes for each sample, and look up the probabilities with which they were drawn.

    Args:
        chances: the probability π_c of drawing each class; those of a sample sum to m.
        number: the number m of classes to draw for each sample.
        noise: the generator of the draws.

    Returns:
        The indices of the classes drawn, and their π_c.
    """
    classes = draw_systematically(chances, number, noise)
    return classes, chances.gather(-1, classes)


def _one_hot(
    classes: Int[Tensor, " b"],
    logits: Logits,
) -> Float[Tensor, "1 b r c"]:
    """Build the unit vector e_c of one class c per sample, repeated for all rows of the sample.

    Args:
        classes: the class c of each sample.
        logits: the logits [samples, rows, classes]; only the shape and the device are used.
    """
    class_of_rows = classes[:, None, None].expand(*logits.shape[:2], 1)
    one_hot = torch.zeros_like(logits, dtype=torch.double).scatter(-1, class_of_rows, 1)
    return one_hot[None]  # with an axis of directions


def _scale_to_block(direction: Float[Tensor, "1 b r c"]) -> tuple[Tensor, Tensor]:
    """Divide one direction per sample by its number of rows r; return the result as (v, s).

    It is s·v, with v scaled to a size near 1. Divided by r, gradients of a sample's rows add up to
    their mean.
    """
    _, num_samples, num_rows, _ = direction.shape
    return scale_to_unit(direction.flatten(1, 2) / num_rows, num_samples)


# Estimates of the sum over all classes, and their errors.


def expected_error(
    sizes: Float[Tensor, "b c"],
    chances: Float[Tensor, "b c"],
    number: int,
    spread: float,
) -> Float[Tensor, " b"]:
    """Predict the relative standard error of `estimate` with `number` classes, before any is measured.

    It is spread · Σ_c s_c / √d, summed over the classes that are not certain to be drawn, of which
    d are drawn; times `_widening_factor`.

    Args:
        sizes: the sizes s_c of the classes, which sum to 1 for each sample.
        chances: the probabilities π_c with which classes are drawn.
        number: the number of classes drawn, certain classes included.
        spread: the relative standard deviation of t_c / s_c among the classes, with t_c the terms
            of the sum that is estimated.
    """
    uncertain_size = torch.where(chances < 1, sizes, 0).sum(-1)
    d = (number - (chances == 1).sum(-1)).clamp_min(1)
    return spread * uncertain_size / d.sqrt() * _widening_factor(d - 1 + PRIOR_TERMS)


def estimate(
    terms: Float[Tensor, "*m b d"],
    chances: Float[Tensor, "b d"],
    spread: float | Float[Tensor, "m 1"] = LATE_SPREAD,
) -> tuple[Float[Tensor, "*m b"], Float[Tensor, "*m b"]]:
    """Estimate the sum of t_c over all classes from the classes drawn, with its standard error.

    The estimate is Σ_c t_c / π_c over the classes drawn. With d of them not certain (π_c < 1), its
    squared error is v Σ_c (1 - π_c), with v the variance of t_c / π_c. v is the mean of the sample
    variance, with d - 1 degrees of freedom, and the usual variance, (spread · mean)², with
    PRIOR_TERMS degrees; but never less than the sample variance. `_widening_factor` widens the
    error for small d.

    Args:
        terms: the terms t_c = w_c ‖g_c‖ⁿ of the d classes drawn for each of b samples, by m
            methods.
        chances: the probabilities π_c with which these classes were drawn.
        spread: the usual relative standard deviation of t_c / π_c among a sample's classes, one
            number or one per method.

    Returns:
        The estimates of each sample, and their standard errors.
    """
    tiny = torch.finfo(chances.dtype).tiny
    ratios = terms / chances.clamp_min(tiny)  # t_c / π_c
    # 1 - π_c is 0 for certain classes, which thus add nothing to the error.
    weights = 1 - chances
    total_weight = weights.sum(-1)
    d = (weights > 0).sum(-1)
    mean = (weights * ratios).sum(-1) / total_weight.clamp_min(tiny)
    squares = weights * (ratios - mean[..., None]).square()
    mean_square = squares.sum(-1) / total_weight.clamp_min(tiny)
    sum_of_squares = mean_square * d  # with d - 1 degrees of freedom
    sample_variance = sum_of_squares / (d - 1).clamp_min(1)
    usual_variance = (spread * mean).square()
    freedom = (d - 1).clamp_min(0) + PRIOR_TERMS
    mean_variance = (sum_of_squares + PRIOR_TERMS * usual_variance) / freedom
    variance = torch.maximum(sample_variance, mean_variance)
    error = (total_weight * variance).sqrt() * _widening_factor(freedom)
    return ratios.sum(-1), error


@dataclass(frozen=True)
class Tally:
    """Accumulates estimates of Σ_c t_c for b samples and m methods, over rounds of further classes.

    The terms of a method are t_c = w_c ‖g_c‖ⁿ. Terms of classes that were certain to be drawn in the
    first round are summed exactly, once. Every round gives an independent estimate of the sum over
    the other classes; the estimates are averaged, weighted by the number of classes drawn. The
    methods of this class change its tensors in place.

    Attributes:
        sizes: the sizes s_c of the classes, to which the probabilities of drawing are proportional.
        is_certain: whether a class was certain to be drawn in the first round.
        exact_sum: the sum of the terms of the certain classes; of all classes once these were
            measured.
        weighted_estimates: the sum over rounds of (number of classes drawn) × (estimate of the sum
            over the other classes).
        weighted_squared_errors: the sum over rounds of ((number of classes drawn) × (standard error
            of the estimate))².
        num_drawn: the number of classes drawn for each sample in all rounds, without the classes
            that were certain in the first round. A class drawn in two rounds counts twice.
        is_complete: whether `replace` was called with the terms of all classes.
    """

    sizes: Float[Tensor, "b c"]
    is_certain: Bool[Tensor, "b c"]
    exact_sum: Float[Tensor, "m b"]
    weighted_estimates: Float[Tensor, "m b"]
    weighted_squared_errors: Float[Tensor, "m b"]
    num_drawn: Int[Tensor, " b"]
    is_complete: Bool[Tensor, " b"]

    @classmethod
    def empty(cls, methods: int, sizes: Float[Tensor, "b c"]) -> "Tally":
        """Make a tally with no class measured yet.

        Args:
            methods: the number of methods m.
            sizes: the sizes s_c of the classes of each sample.
        """
        exact_sum, estimates, squared_errors = sizes.new_zeros(3, methods, len(sizes))
        num_drawn = torch.zeros(len(sizes), dtype=torch.long, device=sizes.device)
        return cls(
            sizes,
            is_certain=torch.zeros_like(sizes, dtype=torch.bool),
            exact_sum=exact_sum,
            weighted_estimates=estimates,
            weighted_squared_errors=squared_errors,
            num_drawn=num_drawn,
            is_complete=torch.zeros_like(num_drawn, dtype=torch.bool),
        )

    def draw(
        self,
        indices: Int[Tensor, " k"],
        number: int,
        noise: torch.Generator,
    ) -> tuple[Int[Tensor, "k d"], Float[Tensor, "k d"]]:
        """Draw further classes for k of the samples, which the caller measures and passes to `add`.

        Classes that were certain in the first round get size 0. They are drawn only if fewer than
        d other classes have a positive size; `add` then ignores them.

        Args:
            indices: the indices of the k samples.
            number: the number d of classes to draw for each sample.
            noise: the generator of the draws.

        Returns:
            The classes, and the probabilities with which they were drawn.
        """
        sizes = torch.where(self.is_certain[indices], 0, self.sizes[indices])
        return _draw_classes(inclusion_chances(sizes, number), number, noise)

    def add(
        self,
        indices: Int[Tensor, " k"],
        classes: Int[Tensor, "k d"],
        chances: Float[Tensor, "k d"],
        terms: Float[Tensor, "m k d"],
        spread: Float[Tensor, "m 1"],
    ) -> None:
        """Add one more round of classes for k of the samples; changes the tensors in place.

        In the first round, terms of classes with probability 1 are added to `exact_sum`; if such a
        class is drawn again in a later round, its term counts as 0 there. Later rounds treat other
        classes with probability 1 like the rest, as terms of that round's estimate.

        Args:
            indices: the indices of the k samples, either all in their first round or none.
            classes: the indices of the d classes drawn for each sample.
            chances: the probabilities with which the classes were drawn.
            terms: the terms t_c of these classes, by each method.
            spread: the usual relative standard deviation of each method's t_c / π_c among a
                sample's classes, as in `estimate`.
        """
        # Classes whose terms the first round has added to `exact_sum`.
        was_certain = self.is_certain[indices].gather(-1, classes)
        is_later_round = bool((self.num_drawn[indices] > 0).any())
        if is_later_round:
            is_certain = torch.zeros_like(was_certain)
        else:
            is_certain = chances >= 1
            none_certain = torch.zeros_like(self.is_certain[indices])
            self.is_certain[indices] = none_certain.scatter(-1, classes, is_certain)
            self.exact_sum[:, indices] = torch.where(is_certain, terms, 0).sum(-1)
        num_drawn = (~is_certain).sum(-1)
        other_terms = torch.where(is_certain | was_certain, 0, terms)
        value, error = estimate(other_terms, chances, spread)
        # Rounds are averaged, weighted by their number of classes; `total` divides by the weights.
        self.weighted_estimates[:, indices] += num_drawn * value
        self.weighted_squared_errors[:, indices] += (num_drawn * error).square()
        self.num_drawn[indices] += num_drawn

    def replace(
        self,
        indices: Int[Tensor, " k"],
        terms: Float[Tensor, "m k c"],
    ) -> None:
        """Replace the estimates of k of the samples by exact sums over all their classes.

        Args:
            indices: the indices of the k samples.
            terms: the measured terms t_c of all classes of these samples, by each method.
        """
        self.exact_sum[:, indices] = terms.sum(-1)
        self.weighted_estimates[:, indices] = 0
        self.weighted_squared_errors[:, indices] = 0
        self.is_complete[indices] = True

    def total(
        self,
        indices: Int[Tensor, " k"],
    ) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"]]:
        """Return the estimates of Σ_c t_c of k samples by each method, and their standard errors.

        Args:
            indices: the indices of the k samples.
        """
        num_drawn = self.num_drawn[indices].clamp_min(1)  # not 0: it divides
        estimates = self.weighted_estimates[:, indices] / num_drawn
        errors = self.weighted_squared_errors[:, indices].sqrt() / num_drawn
        return self.exact_sum[:, indices] + estimates, errors


def _widening_factor(freedom: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return the factor that widens a standard error so that ±1.96 of them hold the truth in 95 %.

    It is the 97.5 % quantile of Student's t with `freedom` degrees of freedom, by the
    Cornish-Fisher expansion, divided by 1.96, the normal quantile z.
    """
    z, n = 1.96, freedom.double()
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return t / z
