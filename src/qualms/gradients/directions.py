"""Directions v in logit space whose pullback Jᵀv is a gradient that some score needs.

Logits are [b, r, c]: samples, rows of a sample (the sample itself, then its perturbed copies),
classes. A direction may differ from row to row. Where classes are weighted by p_c, it is that of the
sample itself, row 0.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.gradients.precision import power_of_two

BLOCK_BYTES = (
    2**22
)  # bytes of directions that exist at once: all C directions have C² entries a row
DOUBLE = 8  # bytes of an entry
CONTRASTS = 16  # the largest number of contrasts
Logits = Float[Tensor, "b r c"]


# The sets of directions. Each function takes logits [b, r, c] and returns directions [m, b, r, c].


def classes(logits: Logits, some: slice = slice(None)) -> Float[Tensor, "m b r c"]:
    """e_c - p for the classes c in the slice `some`: the gradient of log p_c in the logits.

    The entry 1 - p_c is computed as the sum of the other probabilities, which does not cancel when
    p_c is nearly 1.
    """
    p = logits.double().softmax(-1)
    start, stop, _ = some.indices(p.shape[-1])
    directions = (-p).expand(stop - start, *p.shape).clone()
    directions.diagonal(offset=start, dim1=0, dim2=-1).copy_(sum_of_others(p)[..., start:stop])
    return directions


def of_class(logits: Logits, chosen: Int[Tensor, " b"]) -> Float[Tensor, "1 b r c"]:
    """e_c - p for one class c of each sample, given in `chosen`."""
    p = logits.double().softmax(-1)
    place = chosen[:, None, None].expand(*p.shape[:2], 1)
    return (-p).scatter(-1, place, sum_of_others(p).gather(-1, place))[None]


def sum_of_others(parts: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
    """Σ_{k≠c} parts_k for each class c (parts ≥ 0), without cancellation where parts_c dominates
    the total.
    """
    largest = parts.argmax(-1, keepdim=True)
    without_largest = parts.scatter(-1, largest, 0).sum(-1, keepdim=True)
    others = without_largest + parts.gather(-1, largest) - parts
    return others.scatter(-1, largest, without_largest)


def logits(logits: Logits, some: slice = slice(None)) -> Float[Tensor, "m b r c"]:
    """e_c for the classes c in the slice `some`: the gradient of the logit z_c itself."""
    start, stop, _ = some.indices(logits.shape[-1])
    directions = torch.zeros(stop - start, *logits.shape, dtype=torch.double, device=logits.device)
    directions.diagonal(offset=start, dim1=0, dim2=-1).fill_(1)
    return directions


def uniform(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """(1/C) Σ_c (e_c - p) = 1/C - p: the mean over classes of the gradients of log p_c."""
    z = logits.double()
    # exp(z - max z) - 1, which keeps its digits where all logits are nearly equal
    odds = (z - z.amax(-1, keepdim=True)).expm1()
    total = (odds + 1).sum(-1, keepdim=True)
    return ((odds.mean(-1, keepdim=True) - odds) / total)[None]


def expectation(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Σ_c p_c (e_c - p') = p - p', with p of the sample itself and p' of each row.

    Exactly zero without smoothing. Added up term by term, it would leave rounding errors, which
    grow with the gradients and so rank samples like them although the score is zero. Probabilities
    near 1 are subtracted as the sums of the others, so that nothing cancels.
    """
    p = logits.double().softmax(-1)
    p_0 = p[:, :1]
    near_one = p + p_0 > 1
    return torch.where(near_one, sum_of_others(p) - sum_of_others(p_0), p_0 - p)[None]


def confounding(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """The gradient of (1/C) Σ_c -log σ(z_c), the binary cross-entropy with all labels 1."""
    return (-torch.sigmoid(-logits.double()) / logits.shape[-1])[None]


def contrasts(
    logits: Logits,
    some: slice = slice(None),
) -> Float[Tensor, "m b r c"]:
    """Directions v_m with Σ_m v_m v_mᵀ = P = I - 11ᵀ/C, in expectation if m < C - 1.

    So Σ_m ‖Jᵀv_m‖² is tr(P J Jᵀ P), the squared size of the logits' gradients without the part that
    shifts all logits alike. Up to 17 classes the v_m are an orthonormal basis of the v with
    Σ_c v_c = 0; for more classes, 16 random orthogonal vectors, always the same.

    Args:
        logits: [b, r, c]; only the shape is used.
        some: which of the directions to return.
    """
    c = logits.shape[-1]
    basis = _zero_sum_basis(c, contrast_count(c))[some].to(logits.device)
    return basis[:, None, None, :].expand(-1, *logits.shape).clone()


def contrast_count(classes: int) -> int:
    """How many contrasts there are for a number of classes."""
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
IN_BLOCKS = (*PER_CLASS, "contrasts")  # sets of many directions, whose functions take a slice


# Several sets together, a block at a time.


@dataclass(frozen=True)
class Cotangents:
    """Directions [m, rows, c] to be pulled back, a block at a time, scaled to a size near 1.

    Unscaled, the squares of a confident prediction's gradients (1e-26, say) underflow to 0 in
    float32. So a block is a pair (v, s) that stands for the cotangents s·v: v [k, rows, c], and s
    [k, b] powers of two.

    Args:
        number: m, the number of directions.
        blocks: called to iterate over the pairs, as often as needed.
    """

    number: int
    blocks: Callable[[], Iterable[tuple[Float[Tensor, "k rows c"], Float[Tensor, "k b"]]]]

    @classmethod
    def of(
        cls,
        cotangents: Float[Tensor, "m rows c"],
        samples: int,
    ) -> "Cotangents":
        """Scale given cotangents, as a single block; rows belong to `samples` samples in order."""
        return cls(len(cotangents), lambda: [scale_to_unit(cotangents, samples)])


def scale_to_unit(
    cotangents: Float[Tensor, "k rows c"],
    samples: int,
) -> tuple[Float[Tensor, "k rows c"], Float[Tensor, "k b"]]:
    """Split cotangents into (v, s) with s·v the cotangents and max |v| of a sample between 1/2 and 1.

    s is a power of two, so that nothing is rounded.

    Args:
        cotangents: k cotangents; the rows of a sample are consecutive.
        samples: the number of samples b.
    """
    by_sample = cotangents.unflatten(1, (samples, -1))
    largest = torch.linalg.vector_norm(by_sample.flatten(2).double(), torch.inf, dim=2)
    size = power_of_two(largest)
    return (by_sample / size[:, :, None, None].to(cotangents)).flatten(1, 2), size


@dataclass(frozen=True)
class Directions:
    """Several sets of directions, one after the other.

    Args:
        names: the names of the sets, keys of `DIRECTIONS`.
    """

    names: tuple[str, ...]

    def size(self, classes: int) -> int:
        """The total number of directions."""
        return sum(_size(name, classes) for name in self.names)

    def columns(self, name: str, classes: int) -> slice:
        """The indices of the directions of one set."""
        place = self.names.index(name)
        start = Directions(self.names[:place]).size(classes)
        return slice(start, start + _size(name, classes))

    def of_samples(self, some: slice) -> "Directions":
        """The directions of some samples; `self`, unless directions differ from sample to sample."""
        return self

    def along(self, logits: Logits, block_bytes: int = BLOCK_BYTES) -> Cotangents:
        """The directions of all sets for given logits, in the order of `names`, divided by r.

        Thanks to the division, the gradient summed over a sample's rows is the mean over its rows.

        Args:
            logits: the logits [b, r, c].
            block_bytes: the bytes of directions that exist at once.
        """
        number = self.size(logits.shape[-1])
        return Cotangents(number, partial(self._blocks, logits.detach(), block_bytes))

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pairs (v, s) of `Cotangents`; subclasses override this."""
        samples, rows_per_sample, classes = logits.shape
        step = max(1, block_bytes // (DOUBLE * logits.numel()))
        for name in self.names:
            for start in range(0, _size(name, classes), step):
                some = (slice(start, start + step),) if name in IN_BLOCKS else ()
                block: Tensor = DIRECTIONS[name](logits, *some)
                yield scale_to_unit(block.flatten(1, 2).div_(rows_per_sample), samples)


def _size(name: str, classes: int) -> int:
    """How many directions a set has."""
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

    These are the projections of the samples' (smoothed) gradients Jᵀv on the tangent s.

    Args:
        names: the names of the sets, keys of `DIRECTIONS`.
        logits: the logits of all rows.
        tangents: J s for all rows.
    """
    each = [project_one_set(name, logits, tangents).mean(1) for name in names]
    return torch.cat(each, dim=-1)


def project_one_set(
    name: str,
    logits: Float[Tensor, "b _ c"],
    tangents: Float[Tensor, "b _ c"],
) -> Float[Tensor, "b _ m"]:
    """v·y for every direction v of one set, with y = J s.

    Args:
        name: the name of the set, a key of `DIRECTIONS`.
        logits: the logits of each row; or of one row, which is broadcast over several tangents.
        tangents: y for each row, or for each tangent.
    """
    y = tangents.double()
    if name == "logits":
        return y
    if name != "classes":
        return (DIRECTIONS[name](logits) * y).sum(-1).movedim(0, -1)
    # (e_c - p)·y = Σ_k p_k (y_c - y_k). The likeliest class's y is subtracted from all y first, so
    # that nothing cancels when its p is nearly 1.
    likeliest = logits.argmax(-1, keepdim=True).expand(*y.shape[:-1], 1)
    y = y - y.gather(-1, likeliest)
    return y - (logits.double().softmax(-1) * y).sum(-1, keepdim=True)
