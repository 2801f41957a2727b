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

# What a method may need beside the model and the inputs.
LOGITS = "logits"
GRADIENTS = "gradients"
SEVERAL_PASSES = "several passes"
TRAINING_DATA = "training data"
MODELS = "several models"

WANG_JI = (
    "Wang & Ji, Epistemic Uncertainty Quantification For Pre-trained Neural Networks, CVPR 2024"
)
FEW = 2  # draws that show whether a method works

Noise = float | tuple[float, ...]  # one level, or one per channel
# From pixels in [0, 1] to the units of a model's input.
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
        """Convert the standard errors to the dtype of the returned scores; zeros if there are none.

        Args:
            scores: the scores as they are returned, one for each input.
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
        """Compute one number for each input, from the passes that the context runs and shares."""

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute the scores together with their standard errors.

        The scores of a method that does not override this are exact, so have no errors.
        """
        return Estimate(self.score(context))

    def error(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Return the standard error of each score, [b]; zeros for a score without.

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
        """Cost of an input beyond the plain forward pass, in forward passes. A backward pass counts
        as two.
        """
        return 0.0

    @property
    def layers(self) -> float | None:
        """λ, how fast weights fade from layer to layer under the modifier `+layers(λ)`; None
        without it. Only gradient scores can have this modifier, and they override this.
        """
        return None

    @property
    def smooth(self) -> Smoothing | None:
        """The input noise of the modifier `+smooth(σ, N)`; None without it. Only gradient scores
        can have this modifier, and they override this.
        """
        return None

    @property
    def spec(self) -> str:
        """The name with its modifiers, but without parameters such as the number of draws."""
        return self.name

    def in_units(self, scale: Scale) -> "Method":
        """Return the method with its noise converted from pixels in [0, 1] to the units of the model's
        input. Methods without noise return themselves.

        Args:
            scale: converts a level in pixels to these units.
        """
        return self

    def quick(self) -> "Method":
        """Return the same method with two draws at most: enough to see whether it works.

        Methods with draws override it; a method without draws returns itself.
        """
        return self


def estimate_scores(method: Method, context: BatchContext) -> Estimate:
    """Compute the scores of a batch by one method, with their standard errors.

    A subclass of a method that has standard errors may override `score` alone; its values replace
    those of the estimate. An overridden `error` is deprecated, and used as well.

    Args:
        method: the method, perhaps a user's own.
        context: the batch.
    """
    estimate = method.estimate(context)
    has_errors = type(method).estimate is not Method.estimate
    if has_errors and _is_overridden(method, "score"):
        estimate = replace(estimate, values=method.score(context))
    if _is_overridden(method, "error"):
        warn_renamed(f"{type(method).__name__}.error", f"{type(method).__name__}.estimate")
        estimate = replace(estimate, errors=method.error(context))
    return estimate


def _is_overridden(method: Method, name: str) -> bool:
    """Whether a subclass of the class that defines `estimate` defines a method of this name.

    The class of `method` and its bases are searched in order; the first class that defines
    `estimate` ends the search.
    """
    for kind in type(method).__mro__:
        if "estimate" in vars(kind):
            return False
        if name in vars(kind):
            return True
    return False


def convert_noise(noise: Noise, scale: Scale) -> Noise:
    """Convert a noise level in pixels to the units of the model's input.

    Args:
        noise: one level in pixels; or a tuple with a level for each channel, which is in these
            units already and returned unchanged.
        scale: converts one level.
    """
    return noise if isinstance(noise, tuple) else scale(noise)


class NotFinite(QualmsError):
    """Raised if a score is infinite or NaN in the dtype that scores are returned in."""

    def __init__(self, method: str, number: int, score: float, dtype: torch.dtype) -> None:
        """Describe the score.

        Args:
            method: the name of the method.
            number: the number of the input that has this score.
            score: the score in double precision.
            dtype: the dtype that scores are returned in.
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
    """Convert scores to the dtype that they are returned in, and check that they are finite in it.

    Args:
        scores: the scores of a batch in double precision.
        dtype: the dtype to convert to.
        name: the name of the method, for the error.
        numbers: the numbers of the inputs, for the error.

    Raises:
        NotFinite: if a score is NaN, or too large for the dtype.
    """
    converted = scores.detach().to(dtype)
    bad = (~torch.isfinite(converted)).nonzero().flatten().tolist()
    if bad:
        raise NotFinite(name, numbers[bad[0]], float(scores[bad[0]]), dtype)
    return converted
