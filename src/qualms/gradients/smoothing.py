"""Smoothing: class gradients averaged over small perturbations of the input, before any norm is
taken.

g_c becomes (1/(N+1)) Σ_{i=0..N} ∇θ log p_c(x_i), with x_0 the input and x_i = x_0 + N(0, σ²I)
(Wang & Ji, CVPR 2024, section 4.3). With antithetic draws the perturbations come in pairs ±Δ, whose
odd terms cancel: eight of them rank inputs like a hundred independent ones.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.parameters import NOISE, check_parameters, whole
from qualms.random import generator


@dataclass(frozen=True)
class Smoothing:
    """How to perturb.

    Args:
        sigma: standard deviation in the units of the tensor that the model receives; a number, or
            one per channel.
        draws: N, the number of perturbed inputs beside the input itself.
        antithetic: draw in pairs ±Δ (an odd last draw stands alone).

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
        x = torch.rand(2, 4)
        noise = qualms.Smoothing(sigma=0.1, draws=4)
        smoothed = qualms.class_gradient_norms(model, x, smoothing=noise)
        print(smoothed.norms)
        ```
    """

    sigma: float | tuple[float, ...] = 0.02
    draws: int = 8
    antithetic: bool = True

    def __post_init__(self) -> None:
        check_parameters(self, "smoothing", sigma=NOISE, draws=whole(1))

    @classmethod
    def of(cls, value: Any) -> "Smoothing | None":
        """The Smoothing itself, or one made from σ or from (σ, N); None stays None."""
        if value is None or isinstance(value, Smoothing):
            return value
        given = value if isinstance(value, tuple) else (value,)
        numbers = given[0] if isinstance(given[0], tuple) else given[:1]
        if len(given) > 2 or not all(
            isinstance(v, (int, float)) and not isinstance(v, bool) for v in numbers
        ):
            raise QualmsError(
                f"smoothing={value!r} is not known; pass qualms.Smoothing, a number σ, or the pair (σ, N)."
            )
        return cls(*given)

    def noise(self, shape: tuple[int, ...], number: int, seed: int) -> Float[Tensor, "rows ..."]:
        """Perturbations of one input: zero for x_0, then N draws. The seed and its number alone
        decide them.
        """
        half = -(-self.draws // 2) if self.antithetic else self.draws
        drawn = torch.randn((half, *shape), generator=generator(seed, number))
        if self.antithetic:
            drawn = torch.stack([drawn, -drawn], dim=1).flatten(0, 1)[: self.draws]
        return torch.cat([torch.zeros(1, *shape), drawn]).mul_(self._scale(shape))

    def _scale(self, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(self.sigma, tuple):
            return torch.tensor(self.sigma)
        if not shape or len(self.sigma) not in (1, shape[0]):
            raise QualmsError(
                f"smoothing has {len(self.sigma)} values of sigma, but an input of shape {shape} "
                f"has {shape[0] if shape else 0} channels; give one number, or one per channel."
            )
        return torch.tensor(self.sigma).reshape(-1, *[1] * (len(shape) - 1))
