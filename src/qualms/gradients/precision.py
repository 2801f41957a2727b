"""How precise numbers are: what sums are taken in, and when two ways to the same numbers agree but for rounding."""

import torch
from jaxtyping import Float
from torch import Tensor

# Rounding, nothing more; 16-bit numbers are coarse.
TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}
COARSE = 0.1
MASKED = 100.0  # below the largest logit: a class without any probability
NOTHING = 1e-6  # of the largest row, which is rounding in a row of zeros


def close(have: Float[Tensor, "rows n"], want: Float[Tensor, "rows n"]) -> bool:
    """Whether two tensors are the same but for rounding, each row measured by its largest entry."""
    return have.shape == want.shape and _within(have, want, want.abs().amax(-1, keepdim=True))


def close_logits(have: Float[Tensor, "rows c"], want: Float[Tensor, "rows c"]) -> bool:
    """The same for logits, where classes that are masked by a huge negative number set no measure for the others."""
    if have.shape != want.shape:
        return False
    live = want >= want.amax(-1, keepdim=True) - MASKED
    return _within(have, want, torch.where(live, want, 0.0).abs().amax(-1, keepdim=True).maximum(want.abs() * ~live))


def _within(have: Tensor, want: Tensor, scale: Tensor) -> bool:
    tolerance = TOLERANCE.get(want.dtype, COARSE)
    return bool(((have - want).abs() <= tolerance * (scale + NOTHING * scale.max())).all())


def same_values(have: Tensor, want: Tensor) -> bool:
    """Whether two tensors that the same operations gave are equal, but for the last digits of their type."""
    with torch.no_grad():
        if have.dtype != want.dtype or not want.is_floating_point():
            return torch.equal(have, want)
        eps = torch.finfo(want.dtype).eps * (4 if want.element_size() < 4 else 64)
        largest = float(want.abs().max()) if want.numel() else 0.0
        return torch.allclose(have, want, rtol=eps, atol=eps / 64 * largest)


def same_norms(found: dict[str, Tensor], expected: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether the squared norms of all parameters are what plain autograd says."""
    scale = sum(expected.values()) ** 0.5
    tolerance = TOLERANCE.get(dtype, COARSE)
    for name in found.keys() | expected.keys():
        have = float(found[name].sum()) ** 0.5 if name in found else 0.0
        want = expected.get(name, 0.0) ** 0.5
        if abs(have - want) > tolerance * max(have, want) + tolerance * 1e-2 * scale:
            return False
    return True


def accurate(t: Tensor) -> Tensor:
    """Sums over positions of 16-bit numbers are taken in 32 bits."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
