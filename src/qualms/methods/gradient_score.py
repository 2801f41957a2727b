"""What the gradient scores share: Σ_m w_m ‖g_m‖, or Σ_m w_m ‖g_m‖², over the gradients g_m along
some directions.

With `+layers(λ)` ‖g‖ becomes Σ_l exp(λ(l - L)) ‖g_l‖, in which deeper layers count more, and with
`+smooth(σ, N)` each g is averaged over perturbed inputs before any norm is taken (Wang & Ji, CVPR
2024, sections 4.2 and 4.3).
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.gradients.settings import Smoothing
from qualms.methods.context import BatchContext
from qualms.methods.method import FEW, GRADIENTS, Method, Scale, converted
from qualms.parameters import FINITE_OR_NONE, Rule, check_parameters

LAMBDA = 0.3


@dataclass(frozen=True)
class GradientScore(Method):
    """Σ_m w_m ‖g_m‖ over the gradients along its directions.

    Parameters: λ of `+layers(λ)` (not the `layers=` of `score`, which says what a layer is) and the
    perturbations of `+smooth(σ, N)`; None leaves the modifier out.

    Example:
        ```python
        from dataclasses import dataclass

        import torch
        import qualms


        @dataclass(frozen=True)
        class Surest(qualms.methods.GradientScore):  # ‖∇ log p(predicted class)‖
            name = "surest"
            paper = "none"
            cost = "2, and C backward"
            direction = "classes"

            def weights(self, probs):
                return (probs == probs.amax(-1, keepdim=True)).to(probs)


        print(qualms.score(torch.nn.Linear(4, 3), torch.randn(5, 4), Surest(layers=0.3)))
        ```
    """

    layers: float | None = None
    smooth: Smoothing | None = None

    needs = (GRADIENTS,)
    direction: ClassVar[str]
    power: ClassVar[int] = 1  # of the norms: 1, or 2 for Σ_m w_m ‖g_m‖²

    def __post_init__(self) -> None:
        check_parameters(self, self.name, layers=FINITE_OR_NONE, smooth=SMOOTHING)

    @abstractmethod
    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """What the norm of each gradient counts."""

    def weights_at(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b m"]:
        """The same from the logits, in double precision."""
        return self.weights(logits.double().softmax(-1))

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return context.gradient_score(self)[0]

    def error(self, context: BatchContext) -> Float[Tensor, " b"]:
        """The standard error of a score from random tangents, or from some of many classes."""
        return context.gradient_score(self)[1]

    def note(self, context: BatchContext) -> str | None:
        """That the scores are estimates from some of the classes, and how good they are."""
        if not context.draws_classes(self):
            return None
        tolerance = context.model_context.settings.tolerance or 0.0
        late = ", skipping early layers with a negligible contribution" if self.layers else ""
        return (
            f"{self.spec} is estimated from some of the {context.logits.shape[1]} classes{late}; the standard error is "
            f"at most {100 * tolerance:g} % of each score. Use engine='exact' for all classes and layers."
        )

    @property
    def spec(self) -> str:
        """The name with its modifiers, as in `regrad+layers(λ)+smooth(σ,N)`; if σ is per channel,
        only the first.
        """
        spec = self.name
        if self.layers is not None:
            spec += f"+layers({self.layers:g})"
        if self.smooth is not None:
            sigma = (
                self.smooth.sigma[0] if isinstance(self.smooth.sigma, tuple) else self.smooth.sigma
            )
            spec += f"+smooth({sigma:g},{self.smooth.draws})"
        return spec

    def in_units(self, scale: Scale) -> "GradientScore":
        """The same with σ of smoothing in the units of the model's input."""
        if self.smooth is None:
            return self
        return replace(self, smooth=replace(self.smooth, sigma=converted(self.smooth.sigma, scale)))

    def quick(self) -> "GradientScore":
        """The same with two draws of smoothing at most."""
        if self.smooth is None:
            return self
        return replace(self, smooth=replace(self.smooth, draws=min(self.smooth.draws, FEW)))


def _smoothing(value: Any) -> Smoothing | None:
    if value is not None and not isinstance(value, Smoothing):
        raise ValueError
    return value


SMOOTHING = Rule("a qualms.Smoothing, or None", _smoothing)
