"""Estimates Σ_c w_c ‖g_c‖ⁿ from the classes that count most and a random sample of the others.

Each class of each sample has a size s_c = |w_c| ℓ_cⁿ, with ℓ_c an estimate of its gradient's length
up to a factor. Behind a linear classifier with rows w_c, all gradients but the classifier's own are
∇ log p_c = J_hᵀ(w_c - w̄), w̄ = Σ_k p_k w_k, and their lengths follow ‖w_c - w̄‖; the classifier's
own follow ‖e_c - p‖. So ℓ_c² is ‖w_c - w̄‖², in units of its mean, and a part of ‖e_c - p‖²; for
other models it is ‖e_c - p‖² alone. On ImageNet networks the ratio of ‖g_c‖ to ℓ_c varies little
among the classes of an image with layer weights, and two or three times as much without.

m classes are measured. Largest first, a class is certain to be taken if its size is at least 1/j of
the sizes not yet taken, with j classes still to draw; the others are taken with probabilities π_c
proportional to their sizes, by systematic sampling: one walk over the classes in steps of equal
size. Its order and start are the same for all samples, so that most of the noise is common to them.
Then

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

# Separates the start of the walk from other draws.
STREAM = 1_000_000_009
MIN_CLASSES = 25  # a model with fewer classes has all of them measured
# The usual standard deviation of ‖g_c‖ / ℓ_c among a sample's classes, relative to its mean: for
# gradients of late layers, or with layer weights; and for gradients of all layers alike.
LATE_SPREAD = 0.045
WHOLE_SPREAD = 0.10
PRIOR_TERMS = 4  # the number of terms that the usual spread counts as
CLASSIFIER_SHARE = 0.25  # the weight of ‖e_c - p‖² in ℓ_c²
# Maps the probabilities p of each sample to the sizes s_c of its classes.
Sizes = Callable[[Float[Tensor, "b c"]], Float[Tensor, "b c"]]


# The sizes of classes, and the probabilities with which they are drawn.


def class_lengths(
    probs: Float[Tensor, "b c"],
    weight: Float[Tensor, "c d"] | None = None,
) -> Float[Tensor, "b c"]:
    """Guess ‖g_c‖ of each class, up to a factor that all classes of a sample share: ℓ_c.

    g_c = ∇θ log p_c. With final weights, ℓ_c² = ‖w_c - w̄‖² / (its mean over classes for uniform p)
    + CLASSIFIER_SHARE · ‖e_c - p‖², with w̄ = Σ_k p_k w_k; without them ℓ_c = ‖e_c - p‖.

    Args:
        probs: the probabilities p of the classes.
        weight: the rows w_c of the final linear layer; None if the model has none.
    """
    # ‖e_c - p‖²: the squared gradient of the final layer itself, up to a factor.
    squares = sum_of_others(probs).square() + sum_of_others(probs.square())
    if weight is None:
        return squares.sqrt()
    rows = at_least_float32(weight.detach())
    norms = rows.square().sum(-1)
    best = probs.argmax(-1)
    # w̄ = w_best + u with u = Σ_{k≠best} p_k (w_k - w_best): measured from the likeliest class,
    # nothing cancels where its probability is nearly 1.
    other_probs = probs.scatter(-1, best[:, None], 0).to(rows)
    u = other_probs @ rows - other_probs.sum(-1, keepdim=True) * rows[best]
    mean = rows[best] + u
    distances = norms - 2 * mean @ rows.T + mean.square().sum(-1, keepdim=True)  # ‖w_c - w̄‖²
    distances = distances.scatter(-1, best[:, None], u.square().sum(-1, keepdim=True)).clamp_min(0)
    # The mean of ‖w_c - mean w‖² over the classes, by which distances are divided.
    # It is the mean of ‖w_c‖² minus ‖mean w‖².
    unit = (norms.mean() - rows.mean(0).square().sum()).clamp_min(torch.finfo(rows.dtype).tiny)
    return ((distances / unit).to(squares) + CLASSIFIER_SHARE * squares).sqrt()


def class_sizes(
    weights: Float[Tensor, "b c"],
    lengths: Float[Tensor, "b c"],
    power: int = 1,
) -> Float[Tensor, "b c"]:
    """Compute s_c = |w_c| ℓ_cⁿ, the guessed size of a class's term, scaled so that Σ_c s_c = 1.

    Args:
        weights: w_c, the weight of each class in the score Σ_c w_c ‖g_c‖ⁿ.
        lengths: ℓ_c, from `class_lengths`.
        power: n.
    """
    sizes = weights.abs() * lengths**power
    return sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)


def inclusion_chances(
    sizes: Float[Tensor, "b c"],
    number: int,
) -> Float[Tensor, "b c"]:
    """Compute the probability π_c with which each class is drawn; they sum to `number`.

    Largest first, a class is certain (π_c = 1) if its size is at least 1/j of the sizes not yet
    taken, with j classes still to draw. For the other classes π_c is proportional to the size.

    Args:
        sizes: the sizes s_c of the classes; the scale does not matter.
        number: the number of classes to draw for each sample.
    """
    ordered, order = sizes.sort(dim=-1, descending=True)
    # The sum of the sizes from each place on.
    left = ordered.flip(-1).cumsum(-1).flip(-1)
    to_draw = (number - torch.arange(sizes.shape[-1], device=sizes.device)).clamp_min(0)
    is_large = (ordered * to_draw >= left) & (to_draw > 0)
    # Ends at the first class that is not large.
    certain = is_large.long().cumprod(-1).bool()
    taken = certain.sum(-1, keepdim=True)
    uncertain_size = torch.where(certain, 0, ordered).sum(-1, keepdim=True)
    uncertain_size = uncertain_size.clamp_min(torch.finfo(sizes.dtype).tiny)
    proportional = ((number - taken) * ordered / uncertain_size).clamp_max(1)
    chances = torch.where(certain, 1.0, proportional)
    return torch.zeros_like(chances).scatter(-1, order, chances)


def walk(
    chances: Float[Tensor, "b c"],
    number: int,
    noise: torch.Generator,
) -> Int[Tensor, "b m"]:
    """Draw m classes of each sample by systematic sampling with probabilities π_c.

    The classes are laid end to end, each as long as its π_c, in a random order; the class at every
    step of length 1 from a random start is drawn.

    Args:
        chances: π_c of each sample, which sum to m.
        number: m, the number of classes drawn.
        noise: the generator of the order and the start, which all samples share.
    """
    # A random order: regularly spaced large classes would fall into step with the walk.
    mixed = torch.randperm(chances.shape[-1], generator=noise).to(chances.device)
    # Certain classes (π_c = 1) come first: each of the first steps then draws one of them.
    order = mixed[(chances[:, mixed] < 1).long().argsort(dim=-1, stable=True)]
    reached = chances.gather(-1, order).cumsum(-1)
    start = float(torch.rand((), generator=noise, dtype=torch.double))
    steps = (torch.arange(number, device=chances.device) + start).to(reached)
    # The first place whose cumulated π_c exceeds a step is the class that the step draws.
    places = torch.searchsorted(reached, steps.expand(len(reached), -1).contiguous(), right=True)
    return order.gather(-1, places.clamp_max(chances.shape[-1] - 1))


# Directions of some classes.


@dataclass(frozen=True)
class SampledClasses(Directions):
    """Directions e_c - p for random classes c of each sample, drawn by sizes computed from its logits.

    Both draws and probabilities depend on the logits and the seed alone, so that the caller can
    call `draw` later, with the logits that the engine returns, to learn which classes were
    measured.

    Args:
        sizes: maps probabilities [b, c] to the sizes s_c, to which the chances of the classes are
            proportional.
        number: the number of classes drawn for each sample.
        seed: the random seed of the draws.
    """

    sizes: Sizes
    number: int
    seed: int

    def num_directions(self, classes: int) -> int:
        """The number of directions for each sample; the model's number of classes does not matter."""
        return self.number

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the directions as the pairs (v, s) of `Cotangents`, one direction a block.

        The logits of a sample's row 0, the sample without noise, decide which classes are drawn.
        """
        classes, _ = self.draw(logits[:, 0])
        for column in classes.T:
            yield _block(direction_of_class(logits, column), logits)

    def draw(self, logits: Float[Tensor, "b c"]) -> tuple[Int[Tensor, "b m"], Float[Tensor, "b m"]]:
        """Draw m classes for each sample; the same ones in every call with the same logits.

        Returns:
            The indices of the classes drawn, and the probabilities π_c of drawing them.
        """
        return _draw(self.chances(logits), self.number, generator(self.seed, STREAM))

    def chances(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Compute the probability π_c of drawing each class, in float64 (`inclusion_chances`)."""
        return inclusion_chances(self.sizes(logits.detach().double().softmax(-1)), self.number)


@dataclass(frozen=True, eq=False)
class ChosenClasses(Directions):
    """Directions e_c - p for classes c that are given, m classes for each sample.

    Args:
        chosen: the indices of the m classes, for each of the b samples of the request.
    """

    chosen: Int[Tensor, "b m"]

    def num_directions(self, classes: int) -> int:
        """The number of directions m; the model's number of classes does not matter."""
        return self.chosen.shape[1]

    def of_samples(self, some: slice) -> "ChosenClasses":
        """Select the directions of the samples in the slice `some`, as their classes differ."""
        return ChosenClasses(self.names, self.chosen[some])

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the directions as the pairs (v, s) of `Cotangents`, one direction a block."""
        for column in self.chosen.to(logits.device).T:
            yield _block(direction_of_class(logits, column), logits)


@dataclass(frozen=True)
class ContrastedClasses(SampledClasses):
    """Directions e_b - p, e_b, and e_c - e_b for some classes c; b is the likeliest class.

    The classes c are first `sample` classes that are the same for all samples, and for all models
    with as many classes; then `number` classes drawn for each sample. Inner products along e_c and
    e_c - p follow from inner products along these directions, and nothing cancels:
    e_c = e_b + (e_c - e_b), and e_c - p = (e_b - p) + (e_c - e_b).

    Args:
        sample: the number of classes that all samples share.
    """

    sample: int

    def num_directions(self, classes: int) -> int:
        """The number of directions: e_b - p and e_b, the shared classes, and the drawn classes."""
        return 2 + self.sample + self.number

    def sampled(self, classes: int) -> Int[Tensor, " n"]:
        """Choose the n = `sample` classes that all samples share.

        The choice is random, but the same for all models with this number of classes.
        """
        mixed = torch.randperm(classes, generator=torch.Generator().manual_seed(classes))
        return mixed[: self.sample]

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the directions as the pairs (v, s) of `Cotangents`, one direction a block.

        The logits of a sample's row 0, the sample without noise, decide b and the drawn classes.
        """
        best = logits[:, 0].argmax(-1)
        shared = self.sampled(logits.shape[-1]).to(best).expand(len(best), -1)
        drawn, _ = self.draw(logits[:, 0])
        of_best = _one_hot(best, logits)
        yield _block(direction_of_class(logits, best), logits)
        yield _block(of_best, logits)
        for column in torch.cat([shared, drawn], dim=1).T:
            yield _block(_one_hot(column, logits) - of_best, logits)


def _draw(
    chances: Float[Tensor, "b c"],
    number: int,
    noise: torch.Generator,
) -> tuple[Int[Tensor, "b m"], Float[Tensor, "b m"]]:
    """Draw classes for each sample by a `walk`.

    Args:
        chances: the probability π_c of drawing each class; those of a sample sum to m.
        number: m, the number of classes to draw for each sample.
        noise: the generator of the draws.

    Returns:
        The indices of the classes drawn, and their π_c.
    """
    classes = walk(chances, number, noise)
    return classes, chances.gather(-1, classes)


def _one_hot(
    classes: Int[Tensor, " b"],
    logits: Logits,
) -> Float[Tensor, "1 b r c"]:
    """Build the unit vector e_c of one class c per sample, repeated for all rows of the sample.

    Args:
        classes: the class c of each sample.
        logits: the logits [b, r, c]; only the shape and the device are used.
    """
    place = classes[:, None, None].expand(*logits.shape[:2], 1)
    return torch.zeros_like(logits, dtype=torch.double).scatter(-1, place, 1)[None]


def _block(
    directions: Float[Tensor, "1 b r c"],
    logits: Logits,
) -> tuple[Tensor, Tensor]:
    """Turn one direction per sample into a pair (v, s) of `Cotangents`.

    It is divided by the number of rows r, so that the gradients of a sample's rows add up to their
    mean.
    """
    return scale_to_unit(directions.flatten(1, 2) / logits.shape[1], len(logits))


# Estimates of the sum over all classes, and their errors.


def expected_error(
    sizes: Float[Tensor, "b c"],
    chances: Float[Tensor, "b c"],
    number: int,
    spread: float,
) -> Float[Tensor, " b"]:
    """Predict the relative standard error of `estimate` with `number` classes, before any is measured.

    It is spread · Σ_c s_c / √d, summed over the classes that are not certain to be drawn, of which
    d are drawn; widened as in `_widening`.

    Args:
        sizes: s_c, which sum to 1.
        chances: π_c, the probabilities with which classes are drawn.
        number: the number of classes drawn, certain classes included.
        spread: the relative standard deviation of t_c / s_c among the classes, with t_c the terms
            of the sum that is estimated.
    """
    left = torch.where(chances < 1, sizes, 0).sum(-1)
    drawn = (number - (chances == 1).sum(-1)).clamp_min(1)
    return spread * left / drawn.sqrt() * _widening(drawn - 1 + PRIOR_TERMS)


def estimate(
    terms: Float[Tensor, "*m b d"],
    chances: Float[Tensor, "b d"],
    spread: float | Float[Tensor, "m 1"] = LATE_SPREAD,
) -> tuple[Float[Tensor, "*m b"], Float[Tensor, "*m b"]]:
    """Estimate the sum of t_c over all classes from the classes drawn, with its standard error.

    The estimate is Σ_c t_c / π_c over the classes drawn. With d of them not certain (π_c < 1), its
    squared error is v Σ_c (1 - π_c), v the variance of t_c / π_c. v is the mean of the sample
    variance, with d - 1 degrees of freedom, and the usual variance, (spread · mean)², with
    PRIOR_TERMS; but never less than the sample variance. The error is widened for small d
    (`_widening`).

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
    # 0 for certain classes, which thus add nothing to the error.
    doubt = 1 - chances
    total = doubt.sum(-1)
    drawn = (doubt > 0).sum(-1)  # d
    mean = (doubt * ratios).sum(-1) / total.clamp_min(tiny)
    variance = (doubt * (ratios - mean[..., None]).square()).sum(-1) / total.clamp_min(tiny)
    squares = variance * drawn  # with d - 1 degrees of freedom
    freedom = (drawn - 1).clamp_min(0) + PRIOR_TERMS
    usual = (spread * mean).square()
    sample_variance = squares / (drawn - 1).clamp_min(1)
    variance = torch.maximum(sample_variance, (squares + PRIOR_TERMS * usual) / freedom)
    return ratios.sum(-1), (total * variance).sqrt() * _widening(freedom)


@dataclass(frozen=True)
class Tally:
    """Accumulates estimates of Σ_c t_c for b samples and m methods, over rounds of further classes.

    The terms are t_c = w_c ‖g_c‖ⁿ. Classes that were certain to be drawn in the first round are
    summed exactly, once. Every round gives an independent estimate of the sum over the other
    classes; the estimates are averaged, weighted by the number of classes drawn. The methods change
    the tensors in place.

    Attributes:
        sizes: s_c, in proportion to which classes are drawn.
        certain: whether a class was certain to be drawn in the first round (π_c = 1).
        known: the exact sum of the terms of the certain classes.
        drawn: the sum over rounds of (classes drawn) × (estimate for the other classes).
        squares: the sum over rounds of ((classes drawn) × (standard error))².
        number: the number of classes drawn for each sample in all rounds, without the classes that
            were certain in the first round. A class drawn in two rounds counts twice.
        whole: whether all classes were measured (set by `replace`), so that `known` is the sum over
            all classes.
    """

    sizes: Float[Tensor, "b c"]
    certain: Bool[Tensor, "b c"]
    known: Float[Tensor, "m b"]
    drawn: Float[Tensor, "m b"]
    squares: Float[Tensor, "m b"]
    number: Int[Tensor, " b"]
    whole: Bool[Tensor, " b"]

    @classmethod
    def empty(cls, methods: int, sizes: Float[Tensor, "b c"]) -> "Tally":
        """Make a tally with no class measured yet.

        Args:
            methods: the number of methods m.
            sizes: the sizes s_c of the classes of each sample.
        """
        known, drawn, squares = sizes.new_zeros(3, methods, len(sizes))
        certain = torch.zeros_like(sizes, dtype=torch.bool)
        number = torch.zeros(len(sizes), dtype=torch.long, device=sizes.device)
        return cls(sizes, certain, known, drawn, squares, number, whole=number > 0)

    def draw(
        self,
        some: Int[Tensor, " k"],
        number: int,
        noise: torch.Generator,
    ) -> tuple[Int[Tensor, "k d"], Float[Tensor, "k d"]]:
        """Draw further classes for some samples; the tally itself changes only in `add`.

        Classes that were certain in the first round get size 0. They are drawn only if fewer than
        d other classes have a positive size; `add` then ignores them.

        Args:
            some: the indices of k samples.
            number: d, the number of classes to draw for each sample.
            noise: the generator of the draws.

        Returns:
            The classes, and the probabilities with which they were drawn.
        """
        sizes = torch.where(self.certain[some], 0, self.sizes[some])
        return _draw(inclusion_chances(sizes, number), number, noise)

    def add(
        self,
        some: Int[Tensor, " k"],
        classes: Int[Tensor, "k d"],
        chances: Float[Tensor, "k d"],
        terms: Float[Tensor, "m k d"],
        spread: Float[Tensor, "m 1"],
    ) -> None:
        """Add one more round of classes for some samples; changes the tensors in place.

        In the first round, classes with probability 1 go into `known`, and `certain` remembers
        them: if one comes up in a later round, its term counts as 0 there. Later rounds treat other
        classes with probability 1 like the rest, as terms of that round's estimate.

        Args:
            some: the indices of k samples, either all in their first round or none.
            classes: the indices of the d classes drawn for each sample.
            chances: the probabilities with which the classes were drawn.
            terms: the terms t_c of these classes, by each method.
            spread: the usual relative standard deviation of each method's t_c / π_c among a
                sample's classes, as in `estimate`.
        """
        already_summed = self.certain[some].gather(-1, classes)
        sure = chances >= 1
        if bool((self.number[some] > 0).any()):  # a later round
            sure = torch.zeros_like(sure)
        else:
            self.certain[some] = torch.zeros_like(self.certain[some]).scatter(-1, classes, sure)
            self.known[:, some] = torch.where(sure, terms, 0).sum(-1)
        number = (~sure).sum(-1)
        value, error = estimate(torch.where(sure | already_summed, 0, terms), chances, spread)
        self.drawn[:, some] += number * value
        self.squares[:, some] += (number * error).square()
        self.number[some] += number

    def replace(
        self,
        some: Int[Tensor, " k"],
        terms: Float[Tensor, "m k c"],
    ) -> None:
        """Replace the estimates of some samples by the sum over all their classes, now measured.

        Args:
            some: the indices of k samples.
            terms: the terms t_c of all classes of these samples, by each method.
        """
        self.known[:, some] = terms.sum(-1)
        self.drawn[:, some] = 0
        self.squares[:, some] = 0
        self.whole[some] = True

    def total(self, some: Int[Tensor, " k"]) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"]]:
        """Return the estimates of Σ_c t_c of k samples by each method, and their standard errors.

        Args:
            some: the indices of the k samples.
        """
        number = self.number[some].clamp_min(1)
        value = self.known[:, some] + self.drawn[:, some] / number
        return value, self.squares[:, some].sqrt() / number


def _widening(freedom: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """Return the factor that widens a standard error so that ±1.96 of them hold the truth in 95 %.

    It is the 97.5 % quantile of Student's t with `freedom` degrees of freedom, by the
    Cornish-Fisher expansion, divided by the normal quantile 1.96.
    """
    z, n = 1.96, freedom.double()
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return t / z
