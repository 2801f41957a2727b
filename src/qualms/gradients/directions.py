"""Directions v in logit space whose pullback Jᵀv is a gradient that some score needs.

J is the Jacobian of the logits with respect to the parameters. Logits are [b, r, c]: samples, rows
of a sample (the sample itself, then its perturbed copies), classes. A direction may differ from row
to row. Where classes are weighted by p_c, it is the probability of the sample itself, row 0.
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
    """Directions e_c - p for the classes c in the slice `some`: the gradient of log p_c in the logits.

    The entry 1 - p_c is computed as the sum of the other probabilities, which does not cancel when
    p_c is nearly 1.
    """
    p = logits.double().softmax(-1)
    start, stop, _ = some.indices(p.shape[-1])
    directions = (-p).expand(stop - start, *p.shape).clone()
    directions.diagonal(offset=start, dim1=0, dim2=-1).copy_(sum_of_others(p)[..., start:stop])
    return directions


def of_class(logits: Logits, chosen: Int[Tensor, " b"]) -> Float[Tensor, "1 b r c"]:
    """Direction e_c - p for one class c per sample, given in `chosen`; p differs from row to row."""
    p = logits.double().softmax(-1)
    place = chosen[:, None, None].expand(*p.shape[:2], 1)
    return (-p).scatter(-1, place, sum_of_others(p).gather(-1, place))[None]


def sum_of_others(parts: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
    """Sum the parts of all other classes, Σ_{k≠c} parts_k for each class c, with parts ≥ 0.

    Where one part dominates, total - parts_c would cancel; for the largest part, the others are
    summed instead.
    """
    largest = parts.argmax(-1, keepdim=True)
    without_largest = parts.scatter(-1, largest, 0).sum(-1, keepdim=True)
    others = without_largest + parts.gather(-1, largest) - parts
    return others.scatter(-1, largest, without_largest)


def logits(logits: Logits, some: slice = slice(None)) -> Float[Tensor, "m b r c"]:
    """Directions e_c for the classes c in the slice `some`: the gradient of the logit z_c itself."""
    start, stop, _ = some.indices(logits.shape[-1])
    directions = torch.zeros(stop - start, *logits.shape, dtype=torch.double, device=logits.device)
    directions.diagonal(offset=start, dim1=0, dim2=-1).fill_(1)
    return directions


def uniform(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Direction (1/C) Σ_c (e_c - p) = 1/C - p: the mean over classes of the gradients of log p_c."""
    z = logits.double()
    # exp(z - max z) - 1, which keeps its digits where all logits are nearly equal
    odds = (z - z.amax(-1, keepdim=True)).expm1()
    total = (odds + 1).sum(-1, keepdim=True)
    return ((odds.mean(-1, keepdim=True) - odds) / total)[None]


def expectation(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Direction Σ_c p_c (e_c - p') = p - p': p are the sample's own probabilities, p' each row's.

    Exactly zero without smoothing. Added up term by term, it would leave rounding errors, which
    grow with the gradients and so rank samples like them although the score is zero. Probabilities
    near 1 are subtracted as the sums of the others, so that nothing cancels.
    """
    p = logits.double().softmax(-1)
    p_0 = p[:, :1]
    near_one = p + p_0 > 1
    return torch.where(near_one, sum_of_others(p) - sum_of_others(p_0), p_0 - p)[None]


def confounding(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Direction -σ(-z_c)/C: the gradient of the binary cross-entropy (1/C) Σ_c -log σ(z_c).

    All labels are 1 (confounding labels).
    """
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
    """How many directions `contrasts` has for a number of classes."""
    return min(classes - 1, CONTRASTS)


@cache
def _zero_sum_basis(classes: int, number: int) -> Float[Tensor, "m c"]:
    """Draw `number` orthogonal vectors v with Σ_c v_c = 0, always the same for given arguments.

    Their squared length is (C - 1) / number, so that Σ_m v_m v_mᵀ has trace C - 1, like P in
    `contrasts`.
    """
    generator = torch.Generator().manual_seed(classes)
    noise = torch.randn(classes, number, generator=generator, dtype=torch.double)
    orthonormal = torch.linalg.qr(noise - noise.mean(0)).Q
    return orthonormal.T * ((classes - 1) / number) ** 0.5


# The sets by name: what users of `Directions` put into `names`.
DIRECTIONS: dict[str, Callable[..., Tensor]] = {
    "classes": classes,
    "logits": logits,
    "uniform": uniform,
    "expected": expectation,
    "confounding": confounding,
    "contrasts": contrasts,
}
# Sets with a direction for each class.
PER_CLASS = ("classes", "logits")
# Sets of many directions, whose functions take a slice.
IN_BLOCKS = (*PER_CLASS, "contrasts")


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
        """Wrap given cotangents as a single block, scaled by `scale_to_unit`.

        Args:
            cotangents: m cotangents; the rows of a sample are consecutive.
            samples: the number of samples b, all with the same number of rows.
        """
        return cls(len(cotangents), lambda: [scale_to_unit(cotangents, samples)])


def scale_to_unit(
    cotangents: Float[Tensor, "k rows c"],
    samples: int,
) -> tuple[Float[Tensor, "k rows c"], Float[Tensor, "k b"]]:
    """Split cotangents into (v, s) with s·v the cotangents and max |v| of a sample between 1/2 and 1.

    s [k, b] is a power of two for each cotangent and sample, so that nothing is rounded. Where all
    entries of a sample are 0, s is 1.

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
    """Several sets of directions, one after the other; subclasses choose directions by sample.

    Args:
        names: the names of the sets, keys of `DIRECTIONS`; in subclasses, names of their own.
    """

    names: tuple[str, ...]

    def size(self, classes: int) -> int:
        """The total number of directions of all sets, for a model with `classes` classes."""
        return sum(_size(name, classes) for name in self.names)

    def columns(self, name: str, classes: int) -> slice:
        """The indices of one set's directions among all directions.

        Args:
            name: the name of the set, one of `names`.
            classes: the number of classes of the model.
        """
        place = self.names.index(name)
        start = Directions(self.names[:place]).size(classes)
        return slice(start, start + _size(name, classes))

    def of_samples(self, some: slice) -> "Directions":
        """Restrict the directions to the samples in the slice `some`.

        Here this is `self`, as the formula of a set is the same for all samples; a subclass with
        given directions for each sample overrides it.
        """
        return self

    def along(self, logits: Logits, block_bytes: int = BLOCK_BYTES) -> Cotangents:
        """Return the directions of all sets at given logits, in the order of `names`, as cotangents.

        They are divided by the number of rows r, so that adding up the gradients of a sample's r
        rows gives their mean. They are computed, block by block, when the blocks are iterated over.

        Args:
            logits: the logits [b, r, c]: b samples of r rows with c classes.
            block_bytes: how many bytes of directions are made at once.
        """
        number = self.size(logits.shape[-1])
        return Cotangents(number, partial(self._blocks, logits.detach(), block_bytes))

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pairs (v, s) of `Cotangents`; subclasses override this.

        Args:
            logits: the logits [b, r, c], without graph.
            block_bytes: how many bytes of directions are made at once; at least one direction is.
        """
        samples, rows_per_sample, classes = logits.shape
        step = max(1, block_bytes // (DOUBLE * logits.numel()))
        for name in self.names:
            for start in range(0, _size(name, classes), step):
                some = (slice(start, start + step),) if name in IN_BLOCKS else ()
                block: Tensor = DIRECTIONS[name](logits, *some)
                yield scale_to_unit(block.flatten(1, 2).div_(rows_per_sample), samples)


def _size(name: str, classes: int) -> int:
    """How many directions the set `name` has for a model with `classes` classes."""
    if name in PER_CLASS:
        return classes
    return contrast_count(classes) if name == "contrasts" else 1


# Projections on tangents, from J s.


def project_directions(
    names: Sequence[str],
    logits: Float[Tensor, "b r c"],
    tangents: Float[Tensor, "b r c"],
) -> Float[Tensor, "b m"]:
    """Compute v·(J s) for every direction v of several sets, averaged over a sample's rows.

    s is a tangent on the parameters. As v·(J s) = ⟨Jᵀv, s⟩, these are the projections on s of the
    samples' (smoothed) gradients Jᵀv.

    Args:
        names: the names of the sets, keys of `DIRECTIONS`.
        logits: the logits of all rows.
        tangents: J s for all rows, the derivative of the logits along s.

    Returns:
        The projections on s for each sample and each of the m directions, set after set.
    """
    each = [project_one_set(name, logits, tangents).mean(1) for name in names]
    return torch.cat(each, dim=-1)


def project_one_set(
    name: str,
    logits: Float[Tensor, "b _ c"],
    tangents: Float[Tensor, "b _ c"],
) -> Float[Tensor, "b _ m"]:
    """Compute v·y for every direction v of one set, with y = J s for a tangent s on the parameters.

    Args:
        name: the name of the set, a key of `DIRECTIONS`.
        logits: the logits of each row; or of one row, which is broadcast over several tangents.
        tangents: y for each row, or for each tangent s.
    """
    y = tangents.double()
    if name == "logits":  # v = e_c
        return y
    if name != "classes":
        return (DIRECTIONS[name](logits) * y).sum(-1).movedim(0, -1)
    # (e_c - p)·y = Σ_k p_k (y_c - y_k). The likeliest class's y is subtracted from all y first, so
    # that nothing cancels when its p is nearly 1.
    likeliest = logits.argmax(-1, keepdim=True).expand(*y.shape[:-1], 1)
    y = y - y.gather(-1, likeliest)
    return y - (logits.double().softmax(-1) * y).sum(-1, keepdim=True)
