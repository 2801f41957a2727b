"""Few classes of many: Σ_c w_c ‖g_c‖ⁿ from the classes that count most and a few of the others,
drawn by known chances.

Each class of each input has a size s_c = |w_c| ℓ_cⁿ, with ℓ_c a guess at the length of its gradient
up to a factor. Behind a linear classifier with rows w_c, all gradients but the classifier's own are
∇ log p_c = J_hᵀ(w_c - w̄), w̄ = Σ_k p_k w_k, and their lengths follow ‖w_c - w̄‖; the classifier's
own follow ‖e_c - p‖. So ℓ_c² is ‖w_c - w̄‖², in units of its mean, and a part of ‖e_c - p‖²; for
other models it is ‖e_c - p‖² alone. On ImageNet networks the ratio of ‖g_c‖ to ℓ_c varies little
among the classes of an image with layer weights, and two or three times as much without.

Of m classes that are measured, those whose size is at least an m-th of what is left are certain to
be taken; the others enter with chances π_c proportional to their sizes, drawn systematically, in
one walk over the classes in steps of equal size, in an order and from a start that all inputs
share, so that most of the noise is common to them. Then

    Σ_{c drawn} w_c ‖g_c‖ⁿ / π_c

has the right mean whatever the norms are (Horvitz & Thompson, J. ASA 1952). Its standard error
comes from the spread of its terms (Hájek, Ann. Math. Stat. 1964). A handful of terms tells a spread
poorly, so it is averaged with what the classes of an input usually show, counted as four more
terms, unless it is larger, and widened by Student's t: the true sum is within two such errors in
about 95 % of all cases. There is none if the norms are proportional to the sizes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qualms.gradients.directions import Directions, Logits, of_class, scale_to_unit, sum_of_others
from qualms.gradients.precision import at_least_float32
from qualms.random import generator

STREAM = 1_000_000_009  # sets the start of the walk apart from other draws
MIN_CLASSES = 25  # of a model: with fewer, all of them are measured
# of ‖g_c‖ / ℓ_c among an input's classes, usually: of the late layers, or with layer weights
LATE_SPREAD = 0.045
WHOLE_SPREAD = 0.10  # of the same, all layers alike
PRIOR_TERMS = 4  # that the usual spread counts for
OWN_SHARE = 0.25  # of ‖e_c - p‖² in ℓ_c²
Sizes = Callable[[Float[Tensor, "b c"]], Float[Tensor, "b c"]]


def class_lengths(
    probs: Float[Tensor, "b c"], weight: Float[Tensor, "c d"] | None = None
) -> Float[Tensor, "b c"]:
    """ℓ_c, a guess at ‖g_c‖ up to a factor: from the rows of a linear classifier if there is one."""
    own = sum_of_others(probs).square() + sum_of_others(probs.square())  # ‖e_c - p‖²
    if weight is None:
        return own.sqrt()
    rows = at_least_float32(weight.detach())
    norms = rows.square().sum(-1)
    best = probs.argmax(-1)
    # From the likeliest class, so that nothing cancels where its probability is nearly 1: w̄ =
    # w_best + u.
    rest = probs.scatter(-1, best[:, None], 0).to(rows)
    u = rest @ rows - rest.sum(-1, keepdim=True) * rows[best]
    mean = rows[best] + u
    apart = norms - 2 * mean @ rows.T + mean.square().sum(-1, keepdim=True)  # ‖w_c - w̄‖²
    apart = apart.scatter(-1, best[:, None], u.square().sum(-1, keepdim=True)).clamp_min(0)
    unit = (norms.mean() - rows.mean(0).square().sum()).clamp_min(torch.finfo(rows.dtype).tiny)
    return ((apart / unit).to(own) + OWN_SHARE * own).sqrt()


def class_sizes(
    weights: Float[Tensor, "b c"], lengths: Float[Tensor, "b c"], power: int = 1
) -> Float[Tensor, "b c"]:
    """|w_c| ℓ_cⁿ, as shares of their sum."""
    sizes = weights.abs() * lengths**power
    return sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)


@dataclass(frozen=True)
class SampledClasses(Directions):
    """e_c - p for `number` classes c of each input, a function of its logits."""

    sizes: Sizes
    number: int
    seed: int

    def size(self, classes: int) -> int:
        """How many directions there are."""
        return self.number

    def _blocks(self, logits: Logits, block_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The directions in logit space; the classes are those of the input itself, row 0."""
        classes, _ = self.draw(logits[:, 0])
        for column in classes.T:
            yield scale_to_unit(
                of_class(logits, column).flatten(1, 2) / logits.shape[1], len(logits)
            )

    def draw(self, logits: Float[Tensor, "b c"]) -> tuple[Int[Tensor, "b m"], Float[Tensor, "b m"]]:
        """The classes of each input, and the chances π_c with which they were drawn."""
        chances = self.chances(logits)
        classes = walk(chances, self.number, generator(self.seed, STREAM))
        return classes, chances.gather(-1, classes)

    def chances(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """π_c: 1 for the classes that count most, proportional to the sizes of the others."""
        return inclusion_chances(self.sizes(logits.detach().double().softmax(-1)), self.number)


@dataclass(frozen=True, eq=False)
class ChosenClasses(Directions):
    """e_c - p for classes c that were chosen beforehand, of each input its own."""

    chosen: Int[Tensor, "b m"]

    def size(self, classes: int) -> int:
        """How many directions there are."""
        return self.chosen.shape[1]

    def of_inputs(self, some: slice) -> "ChosenClasses":
        """Those of some of the inputs."""
        return ChosenClasses(self.names, self.chosen[some])

    def _blocks(self, logits: Logits, block_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        for column in self.chosen.to(logits.device).T:
            yield scale_to_unit(
                of_class(logits, column).flatten(1, 2) / logits.shape[1], len(logits)
            )


def inclusion_chances(sizes: Float[Tensor, "b c"], number: int) -> Float[Tensor, "b c"]:
    """π_c of so many classes: 1 for those that count most, proportional to the sizes of the others."""
    ordered, order = sizes.sort(dim=-1, descending=True)
    left = ordered.flip(-1).cumsum(-1).flip(-1)  # from each on
    to_draw = (number - torch.arange(sizes.shape[-1], device=sizes.device)).clamp_min(0)
    certain = ((ordered * to_draw >= left) & (to_draw > 0)).long().cumprod(-1).bool()
    taken = certain.sum(-1, keepdim=True)
    rest = (
        torch.where(certain, 0, ordered)
        .sum(-1, keepdim=True)
        .clamp_min(torch.finfo(sizes.dtype).tiny)
    )
    chances = torch.where(certain, 1.0, ((number - taken) * ordered / rest).clamp_max(1))
    return torch.zeros_like(chances).scatter(-1, order, chances)


def walk(chances: Float[Tensor, "b c"], number: int, noise: torch.Generator) -> Int[Tensor, "b m"]:
    """Classes drawn systematically: one walk over them, in steps of 1, from a start that all inputs
    share.
    """
    # In a random order: classes in a periodic one would fall into step with the walk.
    mixed = torch.randperm(chances.shape[-1], generator=noise).to(chances.device)
    # Those that are certain stand first, so that every step of the walk before the others meets one
    # of them.
    order = mixed[(chances[:, mixed] < 1).long().argsort(dim=-1, stable=True)]
    reached = chances.gather(-1, order).cumsum(-1)
    start = float(torch.rand((), generator=noise, dtype=torch.double))
    steps = (torch.arange(number, device=chances.device) + start).to(reached)
    places = torch.searchsorted(reached, steps.expand(len(reached), -1).contiguous(), right=True)
    return order.gather(-1, places.clamp_max(chances.shape[-1] - 1))


def expected_error(
    sizes: Float[Tensor, "b c"], chances: Float[Tensor, "b c"], number: int, spread: float
) -> Float[Tensor, " b"]:
    """The relative standard error to expect: spread Σ_c s_c / √m over classes left to chance, m of
    them drawn.

    Args:
        sizes: s_c, which sum to 1.
        chances: with which so many classes are drawn.
        number: of classes.
        spread: of what is summed, over its size.
    """
    left = torch.where(chances < 1, sizes, 0).sum(-1)
    drawn = (number - (chances == 1).sum(-1)).clamp_min(1)
    return spread * left / drawn.sqrt() * _widened(drawn - 1 + PRIOR_TERMS)


@dataclass(frozen=True)
class ContrastedClasses(SampledClasses):
    """Directions whose inner products tell of some classes: e_b - p, e_b, and e_c - e_b, b the
    likeliest class.

    First for `sample` classes c drawn alike, the same for all inputs of all models with as many
    classes, then for the classes drawn for each input. All else is a sum of these, in which nothing
    cancels: e_c = e_b + (e_c - e_b), and e_c - p = (e_b - p) + (e_c - e_b).
    """

    sample: int

    def size(self, classes: int) -> int:
        """How many directions there are."""
        return 2 + self.sample + self.number

    def sampled(self, classes: int) -> Int[Tensor, " n"]:
        """The classes that are drawn alike."""
        return torch.randperm(classes, generator=torch.Generator().manual_seed(classes))[
            : self.sample
        ]

    def _blocks(self, logits: Logits, block_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
        best = logits[:, 0].argmax(-1)
        alike = self.sampled(logits.shape[-1]).to(best).expand(len(best), -1)
        classes = torch.cat([alike, self.draw(logits[:, 0])[0]], dim=1)
        one = torch.zeros_like(logits, dtype=torch.double)
        of_best = one.scatter(-1, _place(best, logits), 1)
        yield self._block(of_class(logits, best), logits)
        yield self._block(of_best[None], logits)
        for column in classes.T:
            yield self._block((one.scatter(-1, _place(column, logits), 1) - of_best)[None], logits)

    def _block(self, directions: Float[Tensor, "1 b r c"], logits: Logits) -> tuple[Tensor, Tensor]:
        return scale_to_unit(directions.flatten(1, 2) / logits.shape[1], len(logits))


def _place(classes: Int[Tensor, " b"], logits: Logits) -> Int[Tensor, "b r 1"]:
    return classes[:, None, None].expand(*logits.shape[:2], 1)


def estimate(
    terms: Float[Tensor, "*m b d"],
    chances: Float[Tensor, "b d"],
    spread: float | Float[Tensor, "m 1"] = LATE_SPREAD,
) -> tuple[Float[Tensor, "*m b"], Float[Tensor, "*m b"]]:
    """Σ_c t_c / π_c, the sum of the terms t_c of all classes from those that were drawn, and its
    standard error.

    With d of them left to chance, its square is v Σ_c (1 - π_c), v the variance of t_c / π_c. That
    is the mean of the one found, with d - 1 degrees of freedom, and the usual one, (spread ·
    mean)², with PRIOR_TERMS; but never less than the one found.
    """
    tiny = torch.finfo(chances.dtype).tiny
    each = terms / chances.clamp_min(tiny)
    doubt = 1 - chances
    total = doubt.sum(-1)
    drawn = (doubt > 0).sum(-1)
    mean = (doubt * each).sum(-1) / total.clamp_min(tiny)
    squares = (
        (doubt * (each - mean[..., None]).square()).sum(-1) / total.clamp_min(tiny) * drawn
    )  # d - 1 degrees
    freedom = (drawn - 1).clamp_min(0) + PRIOR_TERMS
    usual = (spread * mean).square()
    variance = torch.maximum(
        squares / (drawn - 1).clamp_min(1), (squares + PRIOR_TERMS * usual) / freedom
    )
    return each.sum(-1), (total * variance).sqrt() * _widened(freedom)


@dataclass(frozen=True)
class Tally:
    """Sums of terms by several methods, gathered in turns: each adds an estimate from further
    classes.

    Classes that were certain to be taken in the first turn are counted as they are, and not drawn
    again. Of the others' sum every turn gives an estimate; the turns are independent, and count by
    their numbers of classes.
    """

    sizes: Float[Tensor, "b c"]  # s_c, by which classes are drawn
    certain: Bool[Tensor, "b c"]  # classes
    known: Float[Tensor, "m b"]  # the sum of their terms
    drawn: Float[
        Tensor, "m b"
    ]  # estimates of the others' sum, times their numbers of classes, added up
    squares: Float[Tensor, "m b"]  # of the errors of those
    number: Int[Tensor, " b"]  # of classes drawn
    whole: Bool[Tensor, " b"]  # all classes were measured

    @classmethod
    def empty(cls, methods: int, sizes: Float[Tensor, "b c"]) -> "Tally":
        """Nothing measured yet."""
        known, drawn, squares = sizes.new_zeros(3, methods, len(sizes))
        number = torch.zeros(len(sizes), dtype=torch.long, device=sizes.device)
        return cls(
            sizes,
            torch.zeros_like(sizes, dtype=torch.bool),
            known,
            drawn,
            squares,
            number,
            number > 0,
        )

    def draw(
        self, some: Int[Tensor, " k"], number: int, noise: torch.Generator
    ) -> tuple[Int[Tensor, "k d"], Float[Tensor, "k d"]]:
        """Further classes of some inputs, and the chances with which they were drawn."""
        chances = inclusion_chances(torch.where(self.certain[some], 0, self.sizes[some]), number)
        classes = walk(chances, number, noise)
        return classes, chances.gather(-1, classes)

    def add(
        self,
        some: Int[Tensor, " k"],
        classes: Int[Tensor, "k d"],
        chances: Float[Tensor, "k d"],
        terms: Float[Tensor, "m k d"],
        spread: Float[Tensor, "m 1"],
    ) -> None:
        """One more turn of some inputs.

        Args:
            some: of the inputs, all in the same turn.
            classes: that were drawn.
            chances: with which they were drawn.
            terms: of these classes.
            spread: as for `estimate`, of each method.
        """
        again = self.certain[some].gather(-1, classes)
        sure = chances >= 1
        if bool((self.number[some] > 0).any()):
            sure = torch.zeros_like(sure)
        else:
            self.certain[some] = torch.zeros_like(self.certain[some]).scatter(-1, classes, sure)
            self.known[:, some] = torch.where(sure, terms, 0).sum(-1)
        number = (~sure).sum(-1)
        value, error = estimate(torch.where(sure | again, 0, terms), chances, spread)
        self.drawn[:, some] += number * value
        self.squares[:, some] += (number * error).square()
        self.number[some] += number

    def replace(self, some: Int[Tensor, " k"], terms: Float[Tensor, "m k c"]) -> None:
        """All classes of some inputs, measured."""
        self.known[:, some] = terms.sum(-1)
        self.drawn[:, some] = 0
        self.squares[:, some] = 0
        self.whole[some] = True

    def total(self, some: Int[Tensor, " k"]) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"]]:
        """The sums of some inputs, and their standard errors."""
        number = self.number[some].clamp_min(1)
        return self.known[:, some] + self.drawn[:, some] / number, self.squares[
            :, some
        ].sqrt() / number


def _widened(freedom: Int[Tensor, " b"]) -> Float[Tensor, " b"]:
    """By what a standard error with so many degrees of freedom is multiplied, so that two of them
    hold in 95 %.

    The quantile of Student's t over the normal one, by the Cornish-Fisher expansion.
    """
    z, n = 1.96, freedom.double()
    t = z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
    return t / z
