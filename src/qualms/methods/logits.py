"""Scores of the logits alone: one plain forward pass.

Each is a function of logits z [b, c], or of log p = log_softmax(z), and a class that registers it.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.divergence import distance_from_uniform, log_complements
from qualms.methods.method import LOGITS, Method
from qualms.parameters import POSITIVE, whole


def entropy(log_probs: Float[Tensor, "*b c"]) -> Float[Tensor, "*b"]:
    """Entropy of the prediction: -Σ_c p_c log p_c.

    Total uncertainty: it cannot distinguish ignorance from ambiguity.
    """
    return -(log_probs.exp() * log_probs).sum(-1)


@dataclass(frozen=True)
class Entropy(Method):
    """Entropy of the prediction: -Σ_c p_c log p_c.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Entropy

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Entropy()))
        ```
    """

    name = "entropy"
    paper = "Shannon, A Mathematical Theory of Communication, 1948"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute -Σ_c p_c log p_c from the log-probabilities."""
        return entropy(context.log_probs)


def msp(log_probs: Float[Tensor, "*b c"]) -> Float[Tensor, "*b"]:
    """Maximum softmax probability, as uncertainty: 1 - max_c p_c.

    It is computed from log p_c without cancellation, so it is accurate for confident predictions.
    """
    return -(log_probs.amax(-1)).expm1()


@dataclass(frozen=True)
class MSP(Method):
    """Maximum softmax probability, as uncertainty: 1 - max_c p_c.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MSP

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, MSP()))
        ```
    """

    name = "msp"
    paper = (
        "Hendrycks & Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution "
        "Examples, ICLR 2017"
    )
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute 1 - max_c p_c from the log-probabilities."""
        return msp(context.log_probs)


def max_logit(logits: Float[Tensor, "*b c"]) -> Float[Tensor, "*b"]:
    """Largest logit, as uncertainty: -max_c z_c. Adding a constant to all logits changes it."""
    return -logits.amax(-1)


@dataclass(frozen=True)
class MaxLogit(Method):
    """Largest logit, as uncertainty: -max_c z_c. Adding a constant to all logits changes it.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MaxLogit

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, MaxLogit()))
        ```
    """

    name = "max-logit"
    paper = (
        "Hendrycks et al., Scaling Out-of-Distribution Detection for Real-World Settings, ICML 2022"
    )
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute -max_c z_c from the logits z."""
        return max_logit(context.logits)


def energy(logits: Float[Tensor, "*b c"]) -> Float[Tensor, "*b"]:
    """Energy: -log Σ_c exp z_c. Adding a constant to all logits changes it."""
    return -logits.logsumexp(-1)


@dataclass(frozen=True)
class Energy(Method):
    """Energy: -log Σ_c exp z_c. Adding a constant to all logits changes it.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Energy

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Energy()))
        ```
    """

    name = "energy"
    paper = "Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute -log Σ_c exp z_c from the logits z."""
        return energy(context.logits)


def gen(
    log_probs: Float[Tensor, "*b c"],
    gamma: float = 0.1,
    top: int = 100,
) -> Float[Tensor, "*b"]:
    """GEN, a generalized entropy: Σ p^γ (1 - p)^γ over the M largest probabilities.

    Args:
        log_probs: log p_c of each class.
        gamma: γ; below 1 it makes the score sensitive to small deviations from certainty.
        top: M, the number of largest probabilities that count; it keeps a long tail of classes out.
    """
    likeliest, index = log_probs.topk(min(top, log_probs.shape[-1]), dim=-1)
    # In log space: as p → 1, 1 - p loses all its digits while (1 - p)^γ is still well above 0.
    complements = log_complements(log_probs).gather(-1, index)
    return (gamma * (likeliest + complements)).exp().sum(-1)


@dataclass(frozen=True)
class GEN(Method):
    """A generalized entropy: Σ p^γ (1 - p)^γ over the M = `top` largest probabilities.

    γ < 1 makes it sensitive to small deviations from certainty; M keeps a long tail of classes out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import GEN

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, GEN(gamma=0.1, top=10)))
        ```
    """

    gamma: float = 0.1
    top: int = 100

    name = "gen"
    paper = "Liu et al., GEN: Pushing the Limits of Softmax-Based OOD Detection, CVPR 2023"
    needs = (LOGITS,)
    cost = "1"
    rules: ClassVar = {"gamma": POSITIVE, "top": whole(1)}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute Σ p^γ (1 - p)^γ over the M largest probabilities, M = `top`."""
        return gen(context.log_probs, self.gamma, self.top)


def exgrad_v(logits: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """ExGrad V: minus Σ_c |p_c - 1/C|, the distance of the prediction from a uniform one.

    The paper's formula is the distance itself, which is high for confident predictions. Its table
    of results ranks by uncertainty, so the sign is reversed here.
    """
    return -distance_from_uniform(logits)


@dataclass(frozen=True)
class ExGradV(Method):
    """ExGrad V: minus Σ_c |p_c - 1/C|, the distance of the prediction from a uniform one.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ExGradV

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ExGradV()))
        ```
    """

    name = "exgrad-v"
    paper = "Igoe et al., How Useful are Gradients for OOD Detection?, 2022"
    needs = (LOGITS,)
    cost = "1"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute -Σ_c |p_c - 1/C| from the logits."""
        return exgrad_v(context.logits)
