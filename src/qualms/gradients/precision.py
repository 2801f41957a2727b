"""Numerical precision: sums that neither underflow nor overflow, and comparisons up to rounding."""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from qualms.gradients.batch import tensors_in
from qualms.gradients.function_modes import CallMode, run_function

# The relative difference that rounding may make, by float type; for 16-bit types it is coarser.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE_TOLERANCE = 0.1
# A logit that is this much smaller than the largest one is masked: its probability is 0.
MASKED_LOGIT = 100.0
# In a smaller sum of squares in float32, some squares may have underflowed.
MIN_SQUARES = 1e-30
# Rounding errors that a row of zeros may have, as a share of the largest row's entries.
ZERO_ROW = 1e-6
# The most numbers of a gradient that are copied to float64 at a time.
MAX_CONVERTED = 2**20
# 16-bit logits look like probabilities only if there are this many rows.
MIN_COARSE_ROWS = 4


class CoarsestCast(CallMode):
    """A function mode that records the coarsest float type that a forward pass casts to.

    Numbers are only as precise as the coarsest type that they have been cast to. Every operation
    counts as a cast whose result has a coarser type than the finest of its arguments.

    Attributes:
        cast_to: the coarsest type so far; None before the first cast.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cast_to: torch.dtype | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`; if it casts to a coarser type than before, keep this type in `cast_to`.

        It casts if its result has a coarser type than the finest of its arguments.

        Args:
            func: the torch function that the model calls.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        result = run_function(func, args, kwargs)
        argument_types = [t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()]
        if not argument_types:
            return result
        finest = min(argument_types, key=_rounding)
        for t in tensors_in(result):
            if t.is_floating_point() and _rounding(t.dtype) > _rounding(finest):
                self.cast_to = coarser(t.dtype, self.cast_to or t.dtype)
        return result

    def precision_of(self, logits: Tensor) -> torch.dtype:
        """Return the coarsest float type of a pass: among its casts and that of its logits."""
        return coarser(logits.dtype, self.cast_to or logits.dtype)


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the float type with the larger rounding error."""
    return max(a, b, key=_rounding)


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative rounding error of a float type."""
    return torch.finfo(dtype).eps


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding may make between results of a float type."""
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)


def close(
    have: Float[Tensor, "rows n"],
    want: Float[Tensor, "rows n"],
    precision: torch.dtype | None = None,
) -> bool:
    """Whether two tensors are equal up to rounding, relative to the largest entry of each row.

    Args:
        have: the tensor to check.
        want: the tensor to compare with, whose entries set the scale.
        precision: the coarsest type that the values have gone through; the type of `want` by
            default.
    """
    if have.shape != want.shape:
        return False
    scale = want.abs().amax(-1, keepdim=True)
    return _is_within(have, want, scale, precision)


def close_logits(
    have: Float[Tensor, "rows c"],
    want: Float[Tensor, "rows c"],
    precision: torch.dtype | None = None,
) -> bool:
    """Whether logits are equal up to rounding, relative to the largest logit of each row.

    "Largest" is by absolute value. Classes that are masked by a huge negative logit are compared
    relative to this logit; they do not loosen the comparison of the other classes.

    Args:
        have: the logits to check.
        want: the logits to compare with.
        precision: the coarsest type that the logits have gone through; the type of `want` by
            default.
    """
    if have.shape != want.shape:
        return False
    is_unmasked = want >= want.amax(-1, keepdim=True) - MASKED_LOGIT
    largest = torch.where(is_unmasked, want, 0.0).abs().amax(-1, keepdim=True)
    scale = largest.maximum(want.abs() * ~is_unmasked)
    return _is_within(have, want, scale, precision)


def _is_within(
    have: Tensor,
    want: Tensor,
    scale: Tensor,
    precision: torch.dtype | None,
) -> bool:
    """Whether two tensors differ by no more than rounding, given the scale of each entry.

    Args:
        have: the tensor to check.
        want: the tensor to compare with.
        scale: the sizes that differences are relative to, broadcast to the shape of `want`.
        precision: the type that sets the tolerance; the type of `want` by default.
    """
    tolerance = tolerance_of(precision or want.dtype)
    # A row of zeros has the scale 0, but may have rounding errors, tiny beside other rows.
    allowed = tolerance * (scale + ZERO_ROW * scale.max())
    return bool(((have - want).abs() <= allowed).all())


@torch.no_grad()
def same_values(have: Tensor, want: Tensor) -> bool:
    """Whether two results of the same operations are equal up to the last digits of their dtype.

    This is stricter than `close`, which allows for the rounding of a whole forward pass. Dtypes
    must be equal, and so must numbers that are not floats.
    """
    if have.dtype != want.dtype or not want.is_floating_point():
        return torch.equal(have, want)
    is_coarse = want.element_size() < 4
    rounding = torch.finfo(want.dtype).eps * (4 if is_coarse else 64)
    # Entries near 0 may have rounding errors from larger terms.
    largest = float(want.abs().max()) if want.numel() else 0.0
    return torch.allclose(have, want, rtol=rounding, atol=rounding / 64 * largest)


def same_norms(
    norms: dict[str, Tensor],
    expected: dict[str, float],
    dtype: torch.dtype,
) -> bool:
    """Whether the norms of all parameters along one direction are those of plain autograd.

    Args:
        norms: the norms to check, by the parameter's name; a missing norm counts as zero.
        expected: the norms by plain autograd, by the parameter's name.
        dtype: the coarsest float type that the forward pass casts to.
    """
    total = math.hypot(*expected.values())
    tolerance = tolerance_of(dtype)
    for name in norms.keys() | expected.keys():
        have = float(norms[name]) if name in norms else 0.0
        want = expected.get(name, 0.0)
        # The second term allows rounding errors in norms that should be zero.
        if abs(have - want) > tolerance * max(have, want) + tolerance * 1e-2 * total:
            return False
    return True


def at_least_float32(t: Tensor) -> Tensor:
    """Convert a 16-bit float tensor to float32, whose sums keep enough digits; keep any other."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def outside_float32_range(squares: Float[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
    """Return a mask of sums of squares that float32 cannot represent well.

    They are not finite, or so small that squares in the sum may have underflowed.
    """
    # Negated, so that NaN, for which all comparisons are false, is in the mask.
    return ~((squares >= MIN_SQUARES) & (squares < torch.inf))


def power_of_two(size: Float[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """Compute for each size s ≥ 0 the power of two 2ⁿ for which s / 2ⁿ is at least 1/2 and below 1.

    Dividing by a power of two does not round. The power is 1 for sizes that are 0 or not finite.
    For sizes from 2¹⁰²³ on it is 2¹⁰²³, as the next power is infinite.
    """
    size = size.double()
    power = size / torch.frexp(size).mantissa
    power = power.clamp_max(2.0**1023)
    return torch.where((size > 0) & size.isfinite(), power, 1.0)


def root_of_squares(sizes: Float[Tensor, "*n l"]) -> Float64[Tensor, "*n"]:
    """Compute (Σ_l s_l²)^½ of sizes s_l ≥ 0 along the last axis, without underflow of the squares.

    The squares of sizes below 1e-162 are zero in float64, so sizes are scaled first.
    """
    unit = power_of_two(sizes.amax(-1, keepdim=True))
    return (sizes / unit).square().sum(-1).sqrt() * unit.squeeze(-1)


def sum_of_squares(g: Float[Tensor, "n p"]) -> Float64[Tensor, " n"]:
    """Compute Σ g² of each row in float64, without underflow or overflow.

    Where float32 cannot represent the sum, it is computed from the row divided by its largest
    entry.
    """
    sums = torch.linalg.vecdot(g, g).double()
    if not g.shape[1]:
        return sums
    # The usual case. This function is called for every parameter and class, and `aminmax` takes a
    # quarter of the time of `outside_float32_range`.
    low, high = sums.aminmax()
    if low.item() >= MIN_SQUARES and high.item() < torch.inf:
        return sums
    largest = torch.linalg.vector_norm(g, torch.inf, dim=1)
    # For rows of zeros, 0 is exact.
    redo = outside_float32_range(sums) & (largest > 0)
    scaled = g[redo] / largest[redo].unsqueeze(1)
    squares = torch.linalg.vecdot(scaled, scaled).double()
    sums[redo] = squares * largest[redo].double().square()
    return sums


def inner_products(g: Float[Tensor, "b m p"]) -> Float64[Tensor, "b m m"]:
    """Compute the inner products of all pairs of each sample's gradients.

    Samples for which float32 under- or overflows are computed in float64.

    Args:
        g: m gradients of each of b samples, flattened to p entries.
    """
    products = (g @ g.mT).double()
    squares = products.diagonal(dim1=1, dim2=2)
    redo = outside_float32_range(squares)
    if not bool(redo.any()):
        return products
    # For a gradient of zeros, 0 is exact.
    redo &= (squares != 0) | g.any(2)
    # A block of entries at a time, as a copy of all gradients in float64 would take much memory.
    block_size = max(1, MAX_CONVERTED // g.shape[1])
    for b in redo.any(1).nonzero().flatten().tolist():
        products[b] = 0.0
        for block in g[b].split(block_size, dim=1):
            in_double = block.double()
            products[b] += in_double @ in_double.mT
    return products


def look_like_probabilities(logits: Float[Tensor, "rows c"]) -> bool:
    """Whether a model's outputs look like probabilities: none is negative, and each row sums to 1.

    Logits hardly ever look so by chance. Sums may differ from 1 by rounding. As rounding is coarse
    in 16 bits, at least `MIN_COARSE_ROWS` rows are needed there.
    """
    rounding = torch.finfo(logits.dtype).eps
    if bool((logits < 0).any()):
        return False
    is_16_bit = rounding > 1e-6
    if is_16_bit and len(logits) < MIN_COARSE_ROWS:
        return False
    away_from_one = (logits.double().sum(1) - 1).abs()
    return bool((away_from_one <= logits.shape[1] * rounding).all())
