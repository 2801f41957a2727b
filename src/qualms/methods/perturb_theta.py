"""Perturb θ: E_Δθ KL( p(y | x, θ + Δθ) ‖ p(y | x, θ) ), Δθ ~ N(0, σ²I), one draw shared by all
inputs.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.batch import each_tensor
from qualms.gradients.memory import free_bytes, require_room
from qualms.methods.context import BatchContext
from qualms.methods.divergence import kl, log_softmax
from qualms.methods.method import SEVERAL_PASSES, WANG_JI
from qualms.methods.monte_carlo import MonteCarlo
from qualms.parameters import POSITIVE, check_parameters, whole
from qualms.random import generator

NOISE_COPIES = 3  # of the largest weight, while its noise is drawn, scaled and added


@dataclass(frozen=True)
class PerturbTheta(MonteCarlo):
    """σ of every weight. Paper: 0.008, CIFAR-100 0.0003.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import PerturbTheta

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, PerturbTheta(sigma=0.01, draws=20)))
        ```
    """

    sigma: float = 0.008
    draws: int = 100

    name = "perturb-theta"
    paper = WANG_JI
    needs = (SEVERAL_PASSES,)
    cost = "1 + N"

    def __post_init__(self) -> None:
        check_parameters(self, self.name, sigma=POSITIVE, draws=whole(1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        parameters = [p for p in context.model.parameters() if p.is_floating_point()]
        given = context.model_context.settings.budget
        held = sum(p.nbytes for p in parameters)
        needed = held + NOISE_COPIES * max((p.nbytes for p in parameters), default=0)
        require_room(
            needed, given or free_bytes(context.device), "perturbed weights", "or use perturb-x"
        )
        total = torch.zeros_like(context.log_probs[:, 0])
        for draw in range(self.draws):
            noise = generator(context.seed, draw)
            moved = {
                id(p): p.detach() + self.sigma * torch.randn(p.shape, generator=noise).to(p)
                for p in parameters
            }
            with Replaced(moved) as replaced:
                total += kl(log_softmax(context.forward_all(held=held).double()), context.log_probs)
            if not replaced.seen:
                raise QualmsError(
                    "the model's operations are hidden from torch's function modes (a scripted module?), so its "
                    "weights cannot be perturbed; use perturb-x or regrad."
                )
        return total / self.draws


class Replaced(TorchFunctionMode):
    """Every operation sees other tensors in place of the parameters; the parameters themselves stay
    as they are.
    """

    def __init__(self, instead: dict[int, Tensor]) -> None:
        super().__init__()
        self.instead = instead
        self.seen: set[int] = set()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = each_tensor((args, kwargs or {}), self._other)
        return func(*args, **kwargs)

    def _other(self, t: Tensor) -> Tensor:
        if id(t) not in self.instead:
            return t
        self.seen.add(id(t))
        return self.instead[id(t)]
