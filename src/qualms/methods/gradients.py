"""The gradient scores: sums of gradient norms ‖g_c‖, g_c = ∇θ log p_c, over all parameters θ.

Each is a function of tensors and a class that registers it. A function that sums over classes takes
the norms [b, c] of all class gradients, such as `qualms.class_gradient_norms` returns, with the
probabilities p or log p. A function of a single gradient takes the gradients themselves. The
classes hold only the weights of the sum: engines compute the norms, or estimate the sum from some
of the classes or from random tangents.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.divergence import log_softmax
from qualms.methods.gradient_score import GradientScore, weighted_sum
from qualms.methods.method import WANG_JI


def regrad(
    norms: Float[Tensor, "b c"],
    log_probs: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """REGrad: Σ_c sqrt(p_c) ‖∇θ log p_c‖.

    Args:
        norms: ‖∇θ log p_c‖ of each input and class.
        log_probs: log p_c.
    """
    return weighted_sum(norms, (log_probs / 2).exp())


@dataclass(frozen=True)
class REGrad(GradientScore):
    """REGrad, the paper's score: Σ_c sqrt(p_c ‖∇θ log p_c‖²) (section 4.1).

    The square root of a class's probability weights its gradient: more than ExGrad gives to classes
    that the model considers unlikely, less than UNGrad. With `+layers+smooth` it is REGrad*, the
    paper's method.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import REGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, REGrad(layers=0.3, smooth=qualms.Smoothing(0.02))))  # REGrad*
        ```
    """

    name = "regrad"
    paper = WANG_JI
    cost = "2, and C backward"
    direction = "classes"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Compute the weight sqrt(p_c) of each class c from its probability."""
        return probs.sqrt()

    def weights_at(self, logits: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Compute the weight sqrt(p_c) of each class c, in log space.

        It can be positive where p_c itself underflows.
        """
        return (log_softmax(logits.double()) / 2).exp()


def exgrad(
    norms: Float[Tensor, "b c"],
    probs: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """ExGrad: Σ_c p_c ‖∇θ log p_c‖.

    Args:
        norms: ‖∇θ log p_c‖ of each input and class.
        probs: p_c.
    """
    return weighted_sum(norms, probs)


@dataclass(frozen=True)
class ExGrad(GradientScore):
    """ExGrad, the expected gradient norm: Σ_c p_c ‖∇θ log p_c‖.

    It bounds the KL divergence of small weight perturbations from above (Wang & Ji, CVPR 2024,
    proposition 4).

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ExGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ExGrad(layers=0.4)))
        ```
    """

    name = "exgrad"
    paper = "Igoe et al., How Useful are Gradients for OOD Detection?, 2022"
    cost = "2, and C backward"
    direction = "classes"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Return the weight p_c of each class c, which is its probability."""
        return probs


def ungrad(norms: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """UNGrad: (1/C) Σ_c ‖∇θ log p_c‖, the mean over C classes.

    Args:
        norms: ‖∇θ log p_c‖ of each input and class.
    """
    return norms.mean(-1)


@dataclass(frozen=True)
class UNGrad(GradientScore):
    """UNGrad: (1/C) Σ_c ‖∇θ log p_c‖, all classes with equal weight (a baseline of the paper).

    It ranks backwards on many pairs of datasets: a confident model has large gradients for the
    classes that it rules out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import UNGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, UNGrad()))
        ```
    """

    name = "ungrad"
    paper = WANG_JI
    cost = "2, and C backward"
    direction = "classes"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Return 1/C for each of the C classes, whatever the probabilities."""
        return torch.full_like(probs, 1 / probs.shape[-1])


def fisher(
    norms: Float[Tensor, "b c"],
    probs: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """Fisher: Σ_c p_c ‖∇θ log p_c‖².

    Args:
        norms: ‖∇θ log p_c‖ of each input and class.
        probs: p_c.
    """
    return weighted_sum(norms.square(), probs)


@dataclass(frozen=True)
class Fisher(GradientScore):
    """The trace of the Fisher information of one input: Σ_c p_c ‖∇θ log p_c‖².

    It is twice the limit of `perturb-theta` for small σ, divided by σ²:
    E KL = σ²/2 · Σ_c p_c ‖∇θ log p_c‖² + O(σ⁴). From a sketch, one random tangent gives an estimate
    of the whole sum, however many classes there are.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Fisher

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Fisher()))
        ```
    """

    name = "fisher"
    paper = "Fisher, Theory of Statistical Estimation, 1925"
    cost = "2, and C backward"
    direction = "classes"
    power = 2

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Return the weight p_c of each class c, which is its probability."""
        return probs


def isotropic(
    norms: Float[Tensor, "b c"],
    probs: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """Isotropic: Σ_c ‖∇θ p_c‖² = Σ_c p_c² ‖∇θ log p_c‖².

    Args:
        norms: ‖∇θ log p_c‖ of each input and class.
        probs: p_c.
    """
    return weighted_sum(norms.square(), probs.square())


@dataclass(frozen=True)
class Isotropic(GradientScore):
    """How much probabilities change with the weights: Σ_c ‖∇θ p_c‖² = Σ_c p_c² ‖∇θ log p_c‖².

    It is the total variance of the prediction, divided by σ², if the weights vary by N(0, σ²I) with
    a small σ.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Isotropic

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Isotropic()))
        ```
    """

    name = "isotropic"
    paper = "arXiv 2603.29466"
    cost = "2, and C backward"
    direction = "classes"
    power = 2

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b c"]:
        """Compute the weight p_c² of each class c from its probability."""
        return probs.square()


# Scores of a single gradient: the mean is taken before the norm.


def gradnorm(gradients: Float[Tensor, "b c p"]) -> Float[Tensor, " b"]:
    """GradNorm: ‖(1/C) Σ_c g_c‖, the norm of the mean gradient over C classes.

    Args:
        gradients: g_c = ∇θ log p_c of each input and class, over all p parameters.
    """
    return gradients.mean(1).norm(dim=-1)


@dataclass(frozen=True)
class GradNorm(GradientScore):
    """GradNorm as in the paper's tables: ‖(1/C) Σ_c ∇θ log p_c‖, over all parameters.

    Huang et al. use it as a confidence, over the last layer and with the L1 norm: that is
    `gradnorm-huang`. Read as uncertainty it ranks backwards, in the paper's table too (AUROC 11 to
    28 %).

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import GradNorm

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, GradNorm()))
        ```
    """

    name = "gradnorm"
    paper = (
        "Huang et al., On the Importance of Gradients for Detecting Distributional Shifts in the "
        "Wild, NeurIPS 2021"
    )
    cost = "2, and 1 backward"
    direction = "uniform"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b 1"]:
        """Return 1 for the only gradient: the score is its norm."""
        return torch.ones_like(probs[:, :1])


def negrad(
    gradients: Float[Tensor, "b c p"],
    probs: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """NEGrad: ‖Σ_c p_c g_c‖, the norm of the expected gradient.

    This is zero if the probabilities and the gradients are those of the same input. With smoothing
    they are not: gradients are averaged over perturbed inputs.

    Args:
        gradients: g_c = ∇θ log p_c of each input and class, over all p parameters.
        probs: p_c, the probability of each class.
    """
    return (probs[:, :, None] * gradients).sum(1).norm(dim=-1)


@dataclass(frozen=True)
class NEGrad(GradientScore):
    """NEGrad, the norm of the expected gradient: ‖Σ_c p_c ∇θ log p_c‖ (a baseline of the paper).

    The expectation of ∇θ log p_c is zero, so this is zero in exact arithmetic, and it is zero here.
    A sum as written would leave rounding errors of the order of 1e-16, which grow with the
    gradients and so rank inputs much like them: a signal out of nothing. With smoothing the score
    is not zero, because the weights p_c are those of the unperturbed input.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import NEGrad

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, NEGrad()))  # zeros
        ```
    """

    name = "negrad"
    paper = WANG_JI
    cost = "2, and 1 backward"
    direction = "expected"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b 1"]:
        """Return 1 for the only gradient: the score is its norm."""
        return torch.ones_like(probs[:, :1])


def confounding_label(
    gradient: Float[Tensor, "b p"],
) -> Float[Tensor, " b"]:
    """Compute -‖∇θ L‖, with L the binary cross-entropy of the logits if every class is true.

    Args:
        gradient: ∇θ L of each input, over all p parameters.
    """
    return -gradient.norm(dim=-1)


@dataclass(frozen=True)
class ConfoundingLabel(GradientScore):
    """Minus ‖∇θ L‖, with L the binary cross-entropy of the logits with every class on.

    The label that turns every class on at once was never seen in training, and the weight update
    that it asks for depends on what the model knows of the input. Lee & AlRegib train a detector on
    such magnitudes, which leaves their sign to training. On classifiers trained with softmax a
    confident input asks for the larger update, since all other logits are far down: hence the
    minus. A shift of all logits changes it.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ConfoundingLabel

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ConfoundingLabel()))
        ```
    """

    name = "confounding-label"
    paper = "Lee & AlRegib, Gradients as a Measure of Uncertainty in Neural Networks, ICIP 2020"
    cost = "2, and 1 backward"
    direction = "confounding"

    def weights(self, probs: Float[Tensor, "b c"]) -> Float[Tensor, "b 1"]:
        """Return -1 for the only gradient: the score is minus its norm."""
        return -torch.ones_like(probs[:, :1])
