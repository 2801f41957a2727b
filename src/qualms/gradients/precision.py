"""How precise numbers are: what sums are taken in, and when two ways to the same numbers agree but
for rounding.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from qualms.gradients.function_modes import CallMode, run_function
from qualms.gradients.nested import tensors_in

# Rounding, nothing more; 16-bit numbers are coarse.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 0.1
MASKED = 100.0  # below the largest logit: a class without any probability
SMALLEST = 1e-30  # sum of squares of many numbers in 32 bits that has all its digits
AT_ONCE = 2**20  # numbers that are copied into 64 bits at a time
MIN_COARSE_ROWS = 4  # rows of 16-bit numbers that must look like probabilities
NOTHING = 1e-6  # of the largest row, which is rounding in a row of zeros


class Narrowest(CallMode):
    """Watches a forward pass for casts.

    Numbers are only as precise as the narrowest type they have gone through.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cast_to: torch.dtype | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, and note the type of its result if that rounds more than its arguments."""
        out = run_function(func, args, kwargs)
        finest = None
        for t in tensors_in((args, kwargs)):
            if t.is_floating_point():
                finest = t.dtype if finest is None else min(t.dtype, finest, key=_rounding)
        if finest is None:
            return out
        for t in tensors_in(out):
            if t.is_floating_point() and _rounding(t.dtype) > _rounding(finest):
                self.cast_to = t.dtype if self.cast_to is None else coarser(t.dtype, self.cast_to)
        return out

    def of(self, logits: Tensor) -> torch.dtype:
        """The type that tells how precise the logits of the pass are."""
        return logits.dtype if self.cast_to is None else coarser(logits.dtype, self.cast_to)


def coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The one of two types that rounds more."""
    return max(a, b, key=_rounding)


def _rounding(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def tolerance_of(dtype: torch.dtype) -> float:
    """The relative difference that rounding may make."""
    return TOLERANCE.get(dtype, COARSE)


def close(
    have: Float[Tensor, "rows n"],
    want: Float[Tensor, "rows n"],
    precision: torch.dtype | None = None,
) -> bool:
    """Whether two tensors are the same but for rounding, each row measured by its largest entry.

    `precision`: the type that rounds most on the way to them, if it is not their own.
    """
    return have.shape == want.shape and _within(
        have, want, want.abs().amax(-1, keepdim=True), precision
    )


def close_logits(
    have: Float[Tensor, "rows c"],
    want: Float[Tensor, "rows c"],
    precision: torch.dtype | None = None,
) -> bool:
    """The same for logits, where classes that are masked by a huge negative number set no measure
    for the others.
    """
    if have.shape != want.shape:
        return False
    live = want >= want.amax(-1, keepdim=True) - MASKED
    scale = torch.where(live, want, 0.0).abs().amax(-1, keepdim=True).maximum(want.abs() * ~live)
    return _within(have, want, scale, precision)


def _within(have: Tensor, want: Tensor, scale: Tensor, precision: torch.dtype | None) -> bool:
    tolerance = tolerance_of(precision or want.dtype)
    return bool(((have - want).abs() <= tolerance * (scale + NOTHING * scale.max())).all())


def same_values(have: Tensor, want: Tensor) -> bool:
    """Whether two tensors that the same operations gave are equal, but for the last digits of their
    type.
    """
    with torch.no_grad():
        if have.dtype != want.dtype or not want.is_floating_point():
            return torch.equal(have, want)
        eps = torch.finfo(want.dtype).eps * (
            4 if want.element_size() < 4 else 64
        )  # 16 bits are coarse
        largest = float(want.abs().max()) if want.numel() else 0.0
        return torch.allclose(have, want, rtol=eps, atol=eps / 64 * largest)


def same_norms(found: dict[str, Tensor], expected: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether the norms of all parameters along one direction are what plain autograd says."""
    scale = math.hypot(*expected.values())
    tolerance = tolerance_of(dtype)
    for name in found.keys() | expected.keys():
        have = float(found[name]) if name in found else 0.0
        want = expected.get(name, 0.0)
        if abs(have - want) > tolerance * max(have, want) + tolerance * 1e-2 * scale:
            return False
    return True


def at_least_float32(t: Tensor) -> Tensor:
    """Sums over positions of 16-bit numbers are taken in 32 bits."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


def beyond(squares: Float[Tensor, "*n"]) -> Bool[Tensor, "*n"]:
    """Where sums of squares in 32 bits are infinite, or so small that squares may have been lost."""
    return ~((squares >= SMALLEST) & (squares < torch.inf))


def power_of_two(size: Float[Tensor, "*n"]) -> Float64[Tensor, "*n"]:
    """The one that brings a size between 1/2 and 1, or 2 at most; 1 for what is 0 or not finite.

    To divide by it rounds nothing.
    """
    size = size.double()
    found = (size / torch.frexp(size).mantissa).clamp_max(2.0**1023)  # the next is infinite
    return torch.where((size > 0) & size.isfinite(), found, 1.0)


def root_of_squares(sizes: Float[Tensor, "*n l"]) -> Float64[Tensor, "*n"]:
    """(Σ_l s_l²)^½ of sizes that are not negative, also of those below 1e-162, whose squares are
    zero in 64 bits.
    """
    unit = power_of_two(sizes.amax(-1, keepdim=True))
    return (sizes / unit).square().sum(-1).sqrt() * unit.squeeze(-1)


def sum_of_squares(g: Float[Tensor, "n p"]) -> Float64[Tensor, " n"]:
    """Σ g² of each row; where 32 bits do not hold it, from the row divided by its largest entry."""
    found = torch.linalg.vecdot(g, g).double()
    if not g.shape[1]:
        return found
    low, high = (
        found.aminmax()
    )  # asked for every parameter and class: a quarter of the time of `beyond`
    if not (low.item() >= SMALLEST and high.item() < torch.inf):
        size = torch.linalg.vector_norm(g, torch.inf, dim=1)
        odd = beyond(found) & (size > 0)
        some = g[odd] / size[odd, None]
        found[odd] = torch.linalg.vecdot(some, some).double() * size[odd].double().square()
    return found


def inner_products(g: Float[Tensor, "b m p"]) -> Float64[Tensor, "b m m"]:
    """⟨g_m, g_n⟩ of each input's gradients; where 32 bits do not hold them, in 64 bits."""
    found = (g @ g.mT).double()
    squares = found.diagonal(dim1=1, dim2=2)
    odd = beyond(squares)
    if bool(odd.any()):
        odd &= (squares != 0) | g.any(2)  # the square of a gradient of zeros is right
        for b in odd.any(1).nonzero().flatten().tolist():
            found[b] = 0.0
            for part in g[b].split(max(1, AT_ONCE // g.shape[1]), dim=1):
                wide = part.double()
                found[b] += wide @ wide.mT
    return found


def look_like_probabilities(logits: Float[Tensor, "rows c"]) -> bool:
    """Whether all rows add up to 1 and have no negative entry.

    Logits hardly ever do so by chance, up to rounding. In 16 bits rounding is coarse, so several
    rows must agree.
    """
    rounding = torch.finfo(logits.dtype).eps
    if bool((logits < 0).any()):
        return False
    if rounding > 1e-6 and len(logits) < MIN_COARSE_ROWS:
        return False
    away_from_one = (logits.double().sum(1) - 1).abs()
    return bool((away_from_one <= logits.shape[1] * rounding).all())
