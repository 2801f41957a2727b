"""Few classes of many: Σ_c w_c ‖g_c‖ from the classes that count most and a few of the others, drawn by known chances.

Each class of each input has a size s_c = |w_c| ‖e_c - p‖, known from the logits: ‖g_c‖ = ‖Jᵀ(e_c - p)‖ follows
‖e_c - p‖ closely. Of m classes that are measured, those whose size is at least an m-th of what is left are certain
to be taken; the others enter with chances π_c proportional to their sizes, drawn systematically, in one walk over the
classes in steps of equal size, in an order and from a start that all inputs share, so that most of the noise is
common to them. Then

    Σ_{c drawn} w_c ‖g_c‖ / π_c

has the right mean whatever the norms are (Horvitz & Thompson, J. ASA 1952), and the spread of its terms tells its
standard error (Hájek, Ann. Math. Stat. 1964). If the norms were proportional to the sizes, there would be none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.gradients.directions import Directions, Logits, of_class, others, unit_sized
from qualms.random import generator

STREAM = 1_000_000_009  # sets the start of the walk apart from other draws
FIRST = 12  # classes that are measured at least
SPREAD = 0.07  # of ‖g_c‖ / ‖e_c - p‖ among an input's classes: a guess to begin with; what is found decides
FEWEST = 4  # drawn classes that tell an error
Sizes = Callable[[Float[Tensor, "b c"]], Float[Tensor, "b c"]]


def class_sizes(weights: Float[Tensor, "b c"], probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
    """|w_c| ‖e_c - p‖, as shares of their sum."""
    squares = probs.square()
    sizes = weights.abs() * (others(probs).square() + others(squares)).sqrt()
    return sizes / sizes.sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)


@dataclass(frozen=True)
class DrawnClasses(Directions):
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
            yield unit_sized(of_class(logits, column).flatten(1, 2) / logits.shape[1], len(logits))

    def draw(self, logits: Float[Tensor, "b c"]) -> tuple[Int[Tensor, "b m"], Float[Tensor, "b m"]]:
        """The classes of each input, and the chances π_c with which they were drawn."""
        chances = self.chances(logits)
        noise = generator(self.seed, STREAM)
        # In a random order: classes in a periodic one would fall into step with the walk.
        mixed = torch.randperm(chances.shape[-1], generator=noise).to(chances.device)
        # Those that are certain stand first, so that every step of the walk before the others meets one of them.
        order = mixed[(chances[:, mixed] < 1).long().argsort(dim=-1, stable=True)]
        reached = chances.gather(-1, order).cumsum(-1)
        start = float(torch.rand((), generator=noise, dtype=torch.double))
        steps = (torch.arange(self.number, device=logits.device) + start).to(reached)
        places = torch.searchsorted(reached, steps.expand(len(reached), -1).contiguous(), right=True)
        classes = order.gather(-1, places.clamp_max(chances.shape[-1] - 1))
        return classes, chances.gather(-1, classes)

    def chances(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """π_c: 1 for the classes that count most, proportional to the sizes of the others."""
        sizes = self.sizes(logits.detach().double().softmax(-1))
        ordered, order = sizes.sort(dim=-1, descending=True)
        left = ordered.flip(-1).cumsum(-1).flip(-1)  # from each on
        to_draw = (self.number - torch.arange(sizes.shape[-1], device=sizes.device)).clamp_min(0)
        certain = ((ordered * to_draw >= left) & (to_draw > 0)).long().cumprod(-1).bool()
        number = certain.sum(-1, keepdim=True)
        rest = torch.where(certain, 0, ordered).sum(-1, keepdim=True).clamp_min(torch.finfo(sizes.dtype).tiny)
        chances = torch.where(certain, 1.0, (self.number - number) * ordered / rest)
        return torch.zeros_like(chances).scatter(-1, order, chances)

    def expected_error(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
        """The relative standard error to expect: SPREAD Σ_c s_c / √n over classes left to chance, n of them drawn."""
        chances, sizes = self.chances(logits), self.sizes(logits.double().softmax(-1))
        drawn = torch.where(chances < 1, sizes, 0).sum(-1)
        return SPREAD * drawn / (self.number - (chances == 1).sum(-1)).clamp_min(1).sqrt()


def estimate(
    terms: Float[Tensor, "b m"], chances: Float[Tensor, "b m"]
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Σ_c t_c / π_c, the sum of the terms t_c of all classes from those that were drawn, and its standard error.

    With n of them left to chance, its square is n / (n - 1) Σ_c (1 - π_c) (t_c / π_c - mean)², the mean weighted by
    1 - π_c. Where n is too small to show a spread, all that they add is called uncertain.
    """
    each = terms / chances.clamp_min(torch.finfo(chances.dtype).tiny)
    doubt = 1 - chances
    number = (doubt > 0).sum(-1)
    mean = (doubt * each).sum(-1, keepdim=True) / doubt.sum(-1, keepdim=True).clamp_min(torch.finfo(doubt.dtype).tiny)
    spread = (number / (number - 1).clamp_min(1) * (doubt * (each - mean).square()).sum(-1)).sqrt()
    added = torch.where(doubt > 0, each, 0).sum(-1).abs()
    return each.sum(-1), torch.where(number >= FEWEST, spread, added)
