"""Directions in logit space whose pull-back Jᵀv is a gradient that some score needs.

A direction may differ between the perturbed copies of a sample. Logits are [b, r, c]: samples,
rows of a sample, classes. The weights p_c are always those of the sample itself, row 0.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.gradients.precision import power_of_two

BLOCK_BYTES = 2**22  # of directions that exist at once: all C of them have C² entries for every row
DOUBLE = 8  # bytes of an entry
CONTRASTS = 16  # at most
Logits = Float[Tensor, "b r c"]


# The sets of directions. Each function takes logits [b, r, c] and returns directions [m, b, r, c].


def classes(logits: Logits, some: slice = slice(None)) -> Float[Tensor, "m b r c"]:
    """e_c - p for every class c, or for some: the gradient of log p_c with respect to the logits.

    The entry 1 - p_c is the sum of the other probabilities, which does not cancel when p_c is
    nearly 1.
    """
    p = logits.double().softmax(-1)
    start, stop, _ = some.indices(p.shape[-1])
    directions = (-p).expand(stop - start, *p.shape).clone()
    directions.diagonal(offset=start, dim1=0, dim2=-1).copy_(sum_of_others(p)[..., start:stop])
    return directions


def of_class(logits: Logits, chosen: Int[Tensor, " b"]) -> Float[Tensor, "1 b r c"]:
    """e_c - p for one class c of each sample."""
    p = logits.double().softmax(-1)
    place = chosen[:, None, None].expand(*p.shape[:2], 1)
    return (-p).scatter(-1, place, sum_of_others(p).gather(-1, place))[None]


def sum_of_others(parts: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
    """Σ_{k≠c} parts_k for each class c (parts ≥ 0), without cancellation where parts_c dominates
    the total.
    """
    largest = parts.argmax(-1, keepdim=True)
    rest = parts.scatter(-1, largest, 0).sum(-1, keepdim=True)
    return (rest + parts.gather(-1, largest) - parts).scatter(-1, largest, rest)


def logits(logits: Logits, some: slice = slice(None)) -> Float[Tensor, "m b r c"]:
    """e_c for every class c, or for some: the gradient of the logit z_c itself."""
    start, stop, _ = some.indices(logits.shape[-1])
    directions = torch.zeros(stop - start, *logits.shape, dtype=torch.double, device=logits.device)
    directions.diagonal(offset=start, dim1=0, dim2=-1).fill_(1)
    return directions


def uniform(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """(1/C) Σ_c (e_c - p) = 1/C - p: the mean over classes of the gradients of log p_c."""
    z = logits.double()
    # exp(z - max z) - 1: what is left where all logits are nearly equal
    odds = (z - z.amax(-1, keepdim=True)).expm1()
    total = (odds + 1).sum(-1, keepdim=True)
    return ((odds.mean(-1, keepdim=True) - odds) / total)[None]


def expectation(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Σ_c p_c (e_c - p'), with p of the sample itself and p' of a row: p - p'.

    Exactly zero without smoothing. Summed as written, rounding would be left, which grows with the
    gradients and so ranks samples much like them: a signal out of nothing. Probabilities next to 1
    differ by what the others add up to.
    """
    p = logits.double().softmax(-1)
    p_0 = p[:, :1]
    near_one = p + p_0 > 1
    return torch.where(near_one, sum_of_others(p) - sum_of_others(p_0), p_0 - p)[None]


def confounding(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """The gradient of the binary cross-entropy with every label on, (1/C) Σ_c -log σ(z_c)."""
    return (-torch.sigmoid(-logits.double()) / logits.shape[-1])[None]


def contrasts(
    logits: Logits,
    some: slice = slice(None),
) -> Float[Tensor, "m b r c"]:
    """Vectors v_m with Σ_m v_m v_mᵀ = P = I - 11ᵀ/C, on average if there are fewer than C - 1.

    So Σ_m ‖Jᵀv_m‖² is tr(P J Jᵀ P), the size of the gradients of the logits beyond a shift of all
    logits. Up to 17 classes they are an orthonormal basis of all v with Σ_c v_c = 0, beyond that 16
    random vectors of one, always the same.
    """
    c = logits.shape[-1]
    basis = _zero_sum_basis(c, contrast_count(c))[some].to(logits.device)
    return basis[:, None, None, :].expand(-1, *logits.shape).clone()


def contrast_count(classes: int) -> int:
    """The number of contrasts."""
    return min(classes - 1, CONTRASTS)


@cache
def _zero_sum_basis(classes: int, number: int) -> Float[Tensor, "m c"]:
    generator = torch.Generator().manual_seed(classes)
    noise = torch.randn(classes, number, generator=generator, dtype=torch.double)
    orthonormal = torch.linalg.qr(noise - noise.mean(0)).Q
    return orthonormal.T * ((classes - 1) / number) ** 0.5


DIRECTIONS: dict[str, Callable[..., Tensor]] = {
    "classes": classes,
    "logits": logits,
    "uniform": uniform,
    "expected": expectation,
    "confounding": confounding,
    "contrasts": contrasts,
}
PER_CLASS = ("classes", "logits")  # sets with a direction for each class
IN_BLOCKS = (*PER_CLASS, "contrasts")  # sets of many directions, of which some can be asked for


# Several sets together, a block at a time.


@dataclass(frozen=True)
class Cotangents:
    """Directions [m, rows, c] to be pulled back, a block at a time, scaled to a size near 1.

    The square of a gradient of size 1e-26, that of a confident prediction, is zero in 32 bits. So a
    block is a pair (v, s), v [k, rows, c] and s [k, b] powers of two, and stands for the cotangents
    s v.

    Args:
        number: m.
        blocks: makes the pairs.
    """

    number: int
    blocks: Callable[[], Iterable[tuple[Float[Tensor, "k rows c"], Float[Tensor, "k b"]]]]

    @classmethod
    def of(
        cls,
        cotangents: Float[Tensor, "m rows c"],
        samples: int,
    ) -> "Cotangents":
        """A few that exist already, scaled."""
        return cls(len(cotangents), lambda: [scale_to_unit(cotangents, samples)])


def scale_to_unit(
    cotangents: Float[Tensor, "k rows c"],
    samples: int,
) -> tuple[Float[Tensor, "k rows c"], Float[Tensor, "k b"]]:
    """(v, s) with s v the cotangents, and the largest entry of a sample's v between 1/2 and 1.

    s is a power of two, so that nothing is rounded.
    """
    of_sample = cotangents.unflatten(1, (samples, -1))
    largest = torch.linalg.vector_norm(of_sample.flatten(2).double(), torch.inf, dim=2)
    size = power_of_two(largest)
    return (of_sample / size[:, :, None, None].to(cotangents)).flatten(1, 2), size


@dataclass(frozen=True)
class Directions:
    """Several sets of directions, one after the other.

    Args:
        names: of the sets, keys of `DIRECTIONS`.
    """

    names: tuple[str, ...]

    def size(self, classes: int) -> int:
        """The total number of directions."""
        return sum(_size(name, classes) for name in self.names)

    def columns(self, name: str, classes: int) -> slice:
        """Which of them belong to one set."""
        place = self.names.index(name)
        start = Directions(self.names[:place]).size(classes)
        return slice(start, start + _size(name, classes))

    def of_samples(self, some: slice) -> "Directions":
        """The directions of some of the samples: the same, unless each sample has its own."""
        return self

    def along(self, logits: Logits, block_bytes: int = BLOCK_BYTES) -> Cotangents:
        """The directions of all sets, in the order of `names`, divided by r.

        So a sum over rows is a mean of gradients.

        Args:
            logits: [b, r, c].
            block_bytes: of directions that exist at once.
        """
        number = self.size(logits.shape[-1])
        return Cotangents(number, partial(self._blocks, logits.detach(), block_bytes))

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        samples, rows_per_sample, classes = logits.shape
        step = max(1, block_bytes // (DOUBLE * logits.numel()))
        for name in self.names:
            for start in range(0, _size(name, classes), step):
                some = (slice(start, start + step),) if name in IN_BLOCKS else ()
                block: Tensor = DIRECTIONS[name](logits, *some)
                yield scale_to_unit(block.flatten(1, 2).div_(rows_per_sample), samples)


def _size(name: str, classes: int) -> int:
    if name in PER_CLASS:
        return classes
    return contrast_count(classes) if name == "contrasts" else 1


# Projections on tangents, from J s.


def project_directions(
    names: Sequence[str],
    logits: Float[Tensor, "b r c"],
    tangents: Float[Tensor, "b r c"],
) -> Float[Tensor, "b m"]:
    """v·(J s) for every direction v of several sets, averaged over a sample's rows.

    These are the projections of smoothed gradients on s.

    Args:
        names: of the sets.
        logits: of all rows.
        tangents: J s of all rows.
    """
    each = [project_one_set(name, logits, tangents).mean(1) for name in names]
    return torch.cat(each, dim=-1)


def project_one_set(
    name: str,
    logits: Float[Tensor, "b _ c"],
    tangents: Float[Tensor, "b _ c"],
) -> Float[Tensor, "b _ m"]:
    """v·y for every direction v of one set and each y = J s.

    Args:
        name: of the set.
        logits: of each row, or of one row for several tangents.
        tangents: y.
    """
    y = tangents.double()
    if name == "logits":
        return y
    if name != "classes":
        return (DIRECTIONS[name](logits) * y).sum(-1).movedim(0, -1)
    # (e_c - p)·y = Σ_k p_k (y_c - y_k); measured from the likeliest class, nothing cancels when its
    # p is nearly 1.
    likeliest = logits.argmax(-1, keepdim=True).expand(*y.shape[:-1], 1)
    y = y - y.gather(-1, likeliest)
    return y - (logits.double().softmax(-1) * y).sum(-1, keepdim=True)
