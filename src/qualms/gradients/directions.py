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

# Bytes of the directions that exist at once: all C directions together have C² entries for a row.
BLOCK_BYTES = 2**22
DOUBLE = 8  # bytes of a float64
CONTRASTS = 16  # the most directions in the set `contrasts`
Logits = Float[Tensor, "b r c"]


# The sets of directions. Each function takes logits [b, r, c] and returns m directions [m, b, r, c].


def class_directions(
    logits: Logits,
    some: slice = slice(None),
) -> Float[Tensor, "m b r c"]:
    """Compute e_c - p, the gradient of log p_c with respect to the logits, for several classes c.

    The entry 1 - p_c is computed as the sum of the other probabilities, which does not cancel when
    p_c is nearly 1.

    Args:
        logits: logits [b, r, c]; p is their softmax, row by row.
        some: the range of classes, all by default.

    Returns:
        Directions [m, b, r, c] for the m classes in `some`.
    """
    p = logits.double().softmax(-1)
    start, stop, _ = some.indices(p.shape[-1])
    directions = (-p).expand(stop - start, *p.shape).clone()
    # The entry of each direction c at class c.
    own_entries = directions.diagonal(offset=start, dim1=0, dim2=-1)
    own_entries.copy_(sum_of_others(p)[..., start:stop])
    return directions


def direction_of_class(
    logits: Logits,
    chosen: Int[Tensor, " b"],
) -> Float[Tensor, "1 b r c"]:
    """Compute e_c - p, the gradient of log p_c with respect to the logits, for a class c per sample.

    Args:
        logits: logits [b, r, c]; p is their softmax, row by row.
        chosen: the class c of each sample.

    Returns:
        One direction [1, b, r, c].
    """
    p = logits.double().softmax(-1)
    class_indices = chosen[:, None, None].expand(*p.shape[:2], 1)
    # 1 - p_c as the sum of the other probabilities, which does not cancel when p_c is nearly 1.
    one_minus_p = sum_of_others(p).gather(-1, class_indices)
    direction = (-p).scatter(-1, class_indices, one_minus_p)
    return direction.unsqueeze(0)


def sum_of_others(terms: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
    """Compute for each class c the sum over all other classes, Σ_{k≠c} terms_k, with terms ≥ 0.

    It is the total minus terms_c. For the largest term this would cancel, so the other terms are
    added up instead.
    """
    largest = terms.argmax(-1, keepdim=True)
    without_largest = terms.scatter(-1, largest, 0).sum(-1, keepdim=True)
    sums = without_largest + terms.gather(-1, largest) - terms
    return sums.scatter(-1, largest, without_largest)


def logit_directions(
    logits: Logits,
    some: slice = slice(None),
) -> Float[Tensor, "m b r c"]:
    """Build e_c, the gradient of the logit z_c with respect to the logits, for several classes c.

    Args:
        logits: logits [b, r, c]; only the shape is used.
        some: the range of classes, all by default.

    Returns:
        Directions [m, b, r, c] for the m classes in `some`.
    """
    start, stop, _ = some.indices(logits.shape[-1])
    directions = torch.zeros(
        stop - start,
        *logits.shape,
        dtype=torch.double,
        device=logits.device,
    )
    # The entry of each direction c at class c.
    own_entries = directions.diagonal(offset=start, dim1=0, dim2=-1)
    own_entries.fill_(1)
    return directions


def uniform_direction(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Compute (1/C) Σ_c (e_c - p) = 1/C - p, the mean over C classes of the gradients of log p_c.

    p is the softmax of the logits [b, r, c]. The result is one direction [1, b, r, c].
    """
    z = logits.double()
    # u = exp(z - max z) - 1 keeps its digits where all logits are nearly equal. With total =
    # Σ_c (u_c + 1), p is (u + 1) / total and 1/C is (mean u + 1) / total; the ones cancel.
    u = (z - z.amax(-1, keepdim=True)).expm1()
    total = (u + 1).sum(-1, keepdim=True)
    direction = (u.mean(-1, keepdim=True) - u) / total
    return direction.unsqueeze(0)


def expected_direction(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Compute Σ_c p0_c (e_c - p) = p0 - p, the mean of the gradients of log p_c, weighted by p0.

    p are the probabilities of each row (a sample or one of its perturbed copies), p0 those of the
    unperturbed sample, row 0. Without perturbed copies the direction is exactly zero; if its terms
    were added up one by one, rounding errors would remain, grow with the gradients and rank samples
    like them.

    Args:
        logits: logits [b, r, c].

    Returns:
        One direction [1, b, r, c].
    """
    p = logits.double().softmax(-1)
    p0 = p[:, :1]
    # Near 1, p0 - p = (1 - p) - (1 - p0) keeps more digits.
    near_one = p + p0 > 1
    direction = torch.where(near_one, sum_of_others(p) - sum_of_others(p0), p0 - p)
    return direction.unsqueeze(0)


def confounding_direction(logits: Logits) -> Float[Tensor, "1 b r c"]:
    """Compute -σ(-z_c)/C, the gradient of the binary cross-entropy (1/C) Σ_c -log σ(z_c).

    z are the logits [b, r, c] of C classes, whose labels are all 1 (confounding labels). The result
    is one direction [1, b, r, c].
    """
    direction = -torch.sigmoid(-logits.double()) / logits.shape[-1]
    return direction.unsqueeze(0)


def contrast_directions(
    logits: Logits,
    some: slice = slice(None),
) -> Float[Tensor, "m b r c"]:
    """Return directions v_i whose entries sum to 0 and with Σ_i v_i v_iᵀ = P = I - 11ᵀ/C.

    So Σ_i ‖Jᵀv_i‖² is tr(P J Jᵀ P), the squared size of the logits' gradients without the part that
    shifts all C logits alike. Up to 17 classes the v_i are an orthonormal basis of the vectors with
    sum 0; for more classes they are 16 random orthogonal vectors, always the same, and the formula
    holds in expectation.

    Args:
        logits: logits [b, r, c]; only the shape is used.
        some: which of the directions to return, all by default.

    Returns:
        Directions [m, b, r, c], equal for all samples and rows.
    """
    num_classes = logits.shape[-1]
    basis = _zero_sum_basis(num_classes, contrast_count(num_classes))[some].to(logits.device)
    return basis[:, None, None, :].expand(-1, *logits.shape).clone()


def contrast_count(classes: int) -> int:
    """Return how many directions the set `contrasts` has for a number of classes."""
    return min(classes - 1, CONTRASTS)


@cache
def _zero_sum_basis(num_classes: int, num_vectors: int) -> Float[Tensor, "m c"]:
    """Draw orthogonal vectors whose entries sum to 0, always the same ones for given arguments.

    With C classes and m vectors v_i, their squared length is (C - 1) / m, so that Σ_i v_i v_iᵀ has
    trace C - 1, like P = I - 11ᵀ/C.
    """
    generator = torch.Generator().manual_seed(num_classes)
    noise = torch.randn(
        num_classes,
        num_vectors,
        generator=generator,
        dtype=torch.double,
    )
    orthonormal = torch.linalg.qr(noise - noise.mean(0)).Q
    return orthonormal.T * ((num_classes - 1) / num_vectors) ** 0.5


# The functions above by the names that `Directions.names` accepts.
DIRECTIONS: dict[str, Callable[..., Tensor]] = {
    "classes": class_directions,
    "logits": logit_directions,
    "uniform": uniform_direction,
    "expected": expected_direction,
    "confounding": confounding_direction,
    "contrasts": contrast_directions,
}
# Names of sets with one direction for each class.
PER_CLASS = ("classes", "logits")
# Names of sets of many directions, whose functions take a slice as the second argument.
IN_BLOCKS = (*PER_CLASS, "contrasts")


# Several sets together, a block at a time.


@dataclass(frozen=True)
class Cotangents:
    """Directions [m, rows, c] in logit space, in blocks of k, scaled to a size near 1.

    Unscaled, the squares of a confident prediction's gradients (1e-26, say) underflow to 0 in
    float32. So a block is a pair (v, s) that stands for the cotangents s·v: v [k, rows, c], and a
    power of two for each direction and sample, s [k, b].

    Args:
        num_directions: m, the number of directions.
        blocks: returns an iterator over the pairs; it may be called several times.
    """

    num_directions: int
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
    """Divide each sample's cotangents by a power of two, so that their largest entry is in [1/2, 1).

    Squares of tiny gradients would underflow otherwise.

    Args:
        cotangents: k cotangents; the rows of a sample are consecutive.
        samples: the number of samples b.

    Returns:
        The scaled cotangents v and the scales s [k, b]: s·v are the given cotangents, without
        rounding. Where all entries of a sample are 0, s is 1.
    """
    by_sample = cotangents.unflatten(1, (samples, -1))  # [k, b, r, c]
    largest = torch.linalg.vector_norm(by_sample.flatten(2).double(), torch.inf, dim=2)
    scales = power_of_two(largest)
    scaled = by_sample / scales[:, :, None, None].to(cotangents)
    return scaled.flatten(1, 2), scales


@dataclass(frozen=True)
class Directions:
    """Several sets of directions in logit space, one after the other.

    Here a set is a formula, the same for all samples. Subclasses have directions that were chosen
    for each sample.

    Args:
        names: the names of the sets, keys of `DIRECTIONS`; subclasses define further names.
    """

    names: tuple[str, ...]

    def num_directions(self, classes: int) -> int:
        """Return the number of directions in all sets, for a model with `classes` classes."""
        return sum(_num_directions(name, classes) for name in self.names)

    def indices_of(self, name: str, classes: int) -> slice:
        """Return the range of indices of one set's directions among the directions of all sets.

        Args:
            name: the name of the set, one of `names`.
            classes: the number of classes of the model.
        """
        names_before = self.names[: self.names.index(name)]
        start = Directions(names_before).num_directions(classes)
        return slice(start, start + _num_directions(name, classes))

    def of_samples(self, some: slice) -> "Directions":
        """Return the directions for the samples in the slice `some`.

        Here this is `self`, as the formula of a set is the same for all samples. Subclasses whose
        directions were chosen for each sample override it.
        """
        return self

    def cotangents_at(
        self,
        logits: Logits,
        block_bytes: int = BLOCK_BYTES,
    ) -> Cotangents:
        """Return the directions of all sets at given logits, in the order of `names`.

        They are divided by the number of rows r, so that adding up the gradients of a sample's r
        rows gives their mean. Nothing is computed before the blocks of the result are iterated
        over.

        Args:
            logits: the logits [b, r, c]: b samples of r rows with c classes.
            block_bytes: how many bytes of directions are computed at once.
        """
        num_directions = self.num_directions(logits.shape[-1])
        blocks = partial(self._blocks, logits.detach(), block_bytes)
        return Cotangents(num_directions, blocks)

    def _blocks(
        self,
        logits: Logits,
        block_bytes: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the directions of all sets in blocks; subclasses override this.

        Args:
            logits: the logits [b, r, c], without graph.
            block_bytes: how many bytes of directions are computed at once; a block has at least one
                direction.

        Yields:
            Pairs (v, s) for k directions each: v [k, rows, c] of size near 1, and scales s [k, b].
        """
        samples, rows_per_sample, num_classes = logits.shape
        step = max(1, block_bytes // (DOUBLE * logits.numel()))
        for name in self.names:
            for start in range(0, _num_directions(name, num_classes), step):
                some = slice(start, start + step)
                # Only functions of large sets take a slice.
                arguments = (logits, some) if name in IN_BLOCKS else (logits,)
                block: Tensor = DIRECTIONS[name](*arguments)
                yield scale_to_unit(block.flatten(1, 2).div_(rows_per_sample), samples)


def _num_directions(name: str, num_classes: int) -> int:
    """Return how many directions the set `name` has for a model with `num_classes` classes."""
    if name in PER_CLASS:
        return num_classes
    return contrast_count(num_classes) if name == "contrasts" else 1


# Projections on tangents, from J s.


def project_directions(
    names: Sequence[str],
    logits: Float[Tensor, "b r c"],
    tangents: Float[Tensor, "b r c"],
) -> Float[Tensor, "b m"]:
    """Compute v·(J s) for every direction v of several sets, averaged over a sample's r rows.

    J is the Jacobian of the logits and s a tangent on the parameters. As v·(J s) = ⟨Jᵀv, s⟩, these
    are the projections on s of the samples' (smoothed) gradients Jᵀv.

    Args:
        names: the names of the sets, keys of `DIRECTIONS`.
        logits: the logits of all rows.
        tangents: J s for all rows, the derivative of the logits along s.

    Returns:
        The projections on s for each sample and each of the m directions, set after set.
    """
    projections = [project_one_set(name, logits, tangents).mean(1) for name in names]
    return torch.cat(projections, dim=-1)


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

    Returns:
        The m products of each row, or of each tangent.
    """
    y = tangents.double()
    if name == "logits":  # v = e_c
        return y
    if name != "classes":
        products = (DIRECTIONS[name](logits) * y).sum(-1)  # [m, b, _]
        return products.movedim(0, -1)
    # (e_c - p)·y = Σ_k p_k (y_c - y_k). The likeliest class's y is subtracted from all y first, so
    # that nothing cancels when its p is nearly 1.
    likeliest = logits.argmax(-1, keepdim=True).expand(*y.shape[:-1], 1)
    y = y - y.gather(-1, likeliest)
    return y - (logits.double().softmax(-1) * y).sum(-1, keepdim=True)
