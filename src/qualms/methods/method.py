"""The base class of scores: parameters, name, source, needs, cost, and the computation."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.deprecated import warn_renamed
from qualms.errors import QualmsError
from qualms.gradients.settings import Smoothing
from qualms.methods.context import BatchContext
from qualms.parameters import Rule, check_parameters

# What a score may be computed from: the values of `Method.needs`.
LOGITS = "logits"
GRADIENTS = "gradients"
SEVERAL_PASSES = "several passes"
TRAINING_DATA = "training data"
MODELS = "several models"

WANG_JI = (
    "Wang & Ji, Epistemic Uncertainty Quantification For Pre-trained Neural Networks, CVPR 2024"
)
FEW = 2  # the number of draws, or of steps, that is enough to see whether a method works

Noise = float | tuple[float, ...]  # one level, or one per channel
# Converts a noise level from pixels in [0, 1] to the units of a model's input.
Scale = Callable[[float], Noise]


@dataclass(frozen=True)
class Estimate:
    """The scores of a batch.

    Attributes:
        values: one number for each input; higher means more uncertain.
        errors: the standard errors of the scores, NaN where unknown; None if the scores are not
            estimates.

    Example:
        ```python
        from dataclasses import dataclass

        import torch
        import qualms


        @dataclass(frozen=True)
        class Noisy(qualms.methods.Method):  # a score whose error is known
            name = "noisy"
            paper = "none"
            needs = ("logits",)
            cost = "1"

            def score(self, context):
                return self.estimate(context).values

            def estimate(self, context):
                draws = context.probs.amax(-1) + 0.1 * torch.randn(100, len(context.probs))
                return qualms.methods.Estimate(-draws.mean(0), draws.std(0) / 10)


        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score_with_error(model, x, Noisy()))
        ```
    """

    values: Float[Tensor, " b"]
    errors: Float[Tensor, " b"] | None = None

    def errors_as(self, scores: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """Return the standard errors in the dtype of the given scores; zeros if there are none.

        Args:
            scores: the scores of the same inputs, in the dtype in which they are returned.
        """
        if self.errors is None:
            return torch.zeros_like(scores)
        return self.errors.detach().to(scores.dtype)


@runtime_checkable
class Method(Protocol):
    """A score: a frozen dataclass of parameters. Higher scores always mean more uncertain. Subclass
    it for a score of your own.

    Attributes:
        name: the name of the method in a spec, such as `regrad`.
        paper: the publication that introduced the method.
        needs: what the score is computed from, such as `("logits",)`.
        cost: the cost in forward passes, in words; C is the number of classes, N of draws.
        rules: the allowed values of each parameter; checked when a method is created.
        direction: the set of directions that gradients are taken along, such as `classes`; None
            unless the method is a gradient score.
        always_exact: whether the method uses the exact engine, whatever engine the gradient scores
            use.

    Example:
        ```python
        from dataclasses import dataclass

        import torch
        import qualms


        @dataclass(frozen=True)
        class Margin(qualms.methods.Method):  # minus the gap between the two largest probabilities
            name = "margin"
            paper = "none"
            needs = ("logits",)
            cost = "1"

            def score(self, context):
                best = context.probs.topk(2).values
                return best[:, 1] - best[:, 0]


        print(qualms.score(torch.nn.Linear(4, 3), torch.randn(5, 4), Margin()))
        ```
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    name: ClassVar[str]
    paper: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    cost: ClassVar[str]
    rules: ClassVar[Mapping[str, Rule]] = {}
    direction: ClassVar[str | None] = None
    always_exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the parameters by `rules`, and convert NumPy numbers to Python's."""
        check_parameters(self, self.name, **self.rules)

    @abstractmethod
    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute one number for each input, such as from `context.logits` or `context.head`.

        Args:
            context: the batch; it runs each pass when the first method asks for its result.
        """

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute the scores together with their standard errors.

        The scores of a method that does not override this are exact, so have no errors.
        """
        return Estimate(self.score(context))

    def error(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Return the standard error of each score, [b]; zeros if scores are exact.

        Deprecated: use the errors of `estimate(context)`.
        """
        warn_renamed("Method.error", "Method.estimate")
        estimate = self.estimate(context)
        return estimate.errors_as(estimate.values)

    def note(self, context: BatchContext) -> str | None:
        """Return a remark for the user if the scores of this model are not what the name suggests,
        such as that they are estimates; None if there is nothing to remark.
        """
        return None

    @property
    def extra_passes(self) -> float:
        """The cost of one input beyond the plain forward pass, in forward passes.

        A backward pass counts as two.
        """
        return 0.0

    @property
    def layers(self) -> float | None:
        """λ of the modifier `+layers(λ)`, which lets deeper layers count more; None without it.

        Only gradient scores can have this modifier, and they override this property.
        """
        return None

    @property
    def smooth(self) -> Smoothing | None:
        """The input noise of the modifier `+smooth(σ, N)`; None without it.

        Only gradient scores can have this modifier, and they override this property.
        """
        return None

    @property
    def spec(self) -> str:
        """The name with its modifiers, but without parameters such as the number of draws."""
        return self.name

    def in_units(self, scale: Scale) -> "Method":
        """Return a copy with the noise level converted to the units of the model's input.

        Methods without noise return themselves.

        Args:
            scale: converts a level in pixels in [0, 1] to these units.
        """
        return self

    def quick(self) -> "Method":
        """Return a copy with two random draws at most: enough to see whether the method works.

        Methods with draws override this; a method without draws returns itself.
        """
        return self


def estimate_scores(method: Method, context: BatchContext) -> Estimate:
    """Compute the scores of a batch by one method, with their standard errors.

    If a user's subclass overrides `score` but inherits an `estimate` with standard errors, the
    values of its `score` replace those of the estimate. If a subclass overrides the deprecated
    method `error`, its errors are used, with a warning.

    Args:
        method: the method, perhaps a user's own.
        context: the batch.
    """
    estimate = method.estimate(context)
    # `Method.estimate` calls `score` itself.
    has_own_estimate = type(method).estimate is not Method.estimate
    if has_own_estimate and _is_overridden(method, "score"):
        estimate = replace(estimate, values=method.score(context))
    if _is_overridden(method, "error"):
        warn_renamed(f"{type(method).__name__}.error", f"{type(method).__name__}.estimate")
        estimate = replace(estimate, errors=method.error(context))
    return estimate


def _is_overridden(method: Method, name: str) -> bool:
    """Whether a class below the one that defines the method's `estimate` overrides `name`.

    The inherited `estimate` may ignore such an override.
    """
    # The class of the method first, then its bases.
    for kind in type(method).__mro__:
        if "estimate" in vars(kind):
            return False
        if name in vars(kind):
            return True
    return False


def convert_noise(noise: Noise, scale: Scale) -> Noise:
    """Convert a noise level in pixels to the units of the model's input.

    Args:
        noise: one level in pixels; or a tuple with a level for each channel, which is already in
            the units of the model's input and returned unchanged.
        scale: converts one level.
    """
    return noise if isinstance(noise, tuple) else scale(noise)


class NotFinite(QualmsError):
    """Raised if a score is infinite or NaN in the dtype that scores are returned in."""

    def __init__(
        self,
        method: str,
        number: int,
        score: float,
        dtype: torch.dtype,
    ) -> None:
        """Write the error message.

        Args:
            method: the name of the method.
            number: the number of the input that has this score.
            score: the infinite or NaN score; or one in double precision that overflows `dtype`.
            dtype: the dtype in which scores are returned.
        """
        if math.isnan(score):
            why = "not a number"
        else:
            type_name = str(dtype).removeprefix("torch.")
            why = f"{score:.3g}, which overflows {type_name}"
        super().__init__(
            f"{method} of input {number} is {why}; check the scale of the input and of the "
            "model's weights, or pass both in float64."
        )
        self.method = method
        self.number = number


def to_finite(
    scores: Float[Tensor, " b"],
    dtype: torch.dtype,
    name: str,
    numbers: Sequence[int],
) -> Float[Tensor, " b"]:
    """Convert scores to the dtype in which they are returned; raise an error if one is not finite.

    Args:
        scores: the scores of a batch in double precision.
        dtype: the dtype to convert to.
        name: the name of the method, for the error.
        numbers: the number of each input, for the error.

    Raises:
        NotFinite: if a score is NaN, or too large for the dtype.
    """
    converted = scores.detach().to(dtype)
    bad_indices = (~torch.isfinite(converted)).nonzero().flatten().tolist()
    if bad_indices:
        first = bad_indices[0]
        raise NotFinite(name, numbers[first], float(scores[first]), dtype)
    return converted
