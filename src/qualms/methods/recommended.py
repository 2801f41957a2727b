"""Recommended (ours): `heat` for classifiers that read features of free length, `gen` for all
others.

Noise inputs tell of which kind a network is (see `heat`), so no data is needed; `Scored.notes` has
what was picked and why. The page on heat has the study behind it, and what was tried behind a
normalization and not taken: REGrad with more noise.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.methods.context import BatchContext
from qualms.methods.gen import GEN
from qualms.methods.heat import Heat
from qualms.methods.method import GRADIENTS, Method


@dataclass(frozen=True)
class Recommended(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        scored = qualms.Scorer(model, "recommended")(torch.randn(5, 4))
        print(scored.scores["recommended"], scored.notes["recommended"])
        ```
    """

    name = "recommended"
    paper = "ours"
    needs = (GRADIENTS,)
    cost = "that of `heat`, or 1"
    always_exact = True

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        return self.picked(context)[0].score(context)

    def note(self, context: BatchContext) -> str | None:
        """What was picked, and why."""
        method, why = self.picked(context)
        return f"recommended picked {method.spec}, because {why}."

    def picked(self, context: BatchContext) -> tuple[Method, str]:
        """The method, and the reason; kept from the first inputs on, for scores of two methods do
        not compare.
        """
        fitted = context.model_context.fitted
        if self not in fitted:
            _ = context.logits  # inputs that the model does not take say nothing of the model
            try:
                why = Heat().unit(context).why
            except QualmsError as error:
                why = str(error).partition(";")[0].replace("this method", "heat").rstrip(".")
            fitted[self] = (
                (GEN(), why) if why else (Heat(), "the classifier reads features of free length")
            )
        picked: tuple[Method, str] = fitted[self]
        return picked

    def error(self, context: BatchContext) -> Float[Tensor, " b"]:
        """That of the method that was picked."""
        return self.picked(context)[0].error(context)
