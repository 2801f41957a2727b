"""Scores of predictions for changed inputs: by random noise, or along the sign of a gradient.

Discrete inputs, such as token ids, are changed at their embeddings. Sizes are in the units of the
tensor that the model receives, or one per channel.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import (
    Batch,
    batch_tensors,
    num_samples,
    take_samples,
    with_tensors,
)
from qualms.gradients.directions import direction_of_class, scale_to_unit
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.settings import Smoothing
from qualms.methods.context import BatchContext
from qualms.methods.divergence import expected_kl, kl, log_softmax
from qualms.methods.method import (
    GRADIENTS,
    SEVERAL_PASSES,
    WANG_JI,
    Method,
    Noise,
    Scale,
    convert_noise,
)
from qualms.methods.monte_carlo import MonteCarlo, information_over_draws
from qualms.parameters import NOISE, POSITIVE, whole
from qualms.random import generator


def perturb_x(log_q: Float[Tensor, "b n c"], log_p: Float[Tensor, "b c"]) -> Float[Tensor, " b"]:
    """Perturb x: E_n KL(q_n ‖ p), q_n the prediction for the n-th perturbed input.

    Args:
        log_q: log p(y | x + Δx_n) of each input b, draw n and class c.
        log_p: log p(y | x) for the unchanged inputs.
    """
    return expected_kl(log_q, log_p)


@dataclass(frozen=True)
class PerturbX(MonteCarlo):
    """E_Δx KL( p(y | x + Δx) ‖ p(y | x) ), Δx ~ N(0, σ²I).

    Paper: σ 0.008, CIFAR-100 0.02.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import PerturbX

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, PerturbX(sigma=0.1, draws=20)))
        ```
    """

    sigma: Noise = 0.008
    draws: int = 100

    name = "perturb-x"
    paper = WANG_JI
    needs = (SEVERAL_PASSES,)
    cost = "1 + N"
    rules: ClassVar = {"sigma": NOISE, "draws": whole(1)}

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `perturb_x` in parts that fit the budget."""
        noise = Smoothing(self.sigma, self.draws, antithetic=False)
        parts: list[Tensor] = []
        for samples, log_q in context.perturbed_log_probs(noise):
            parts.append(kl(log_q, context.log_probs[samples]))
        # Rows come input by input, each followed by its draws.
        divergences = torch.cat(parts).unflatten(0, (-1, self.draws + 1))
        # The first row of each input is the input itself.
        return divergences[:, 1:].mean(1)

    def in_units(self, scale: Scale) -> "PerturbX":
        """Return the method with σ converted to the units of the model's input by `scale`."""
        return replace(self, sigma=convert_noise(self.sigma, scale))


# Steps along the sign of a gradient.


def loss_gradient_sign(
    context: BatchContext,
    part: Batch,
    temperature: float = 1.0,
) -> Float[Tensor, "b ..."]:
    """Compute sign(∇x -log p_ŷ), with ŷ the predicted class.

    Args:
        context: the context that holds the model.
        part: the inputs x. Token ids have no derivative: theirs is taken at their embeddings.
        temperature: the number that logits are divided by.

    Returns:
        The signs, in the shape of the inputs or of their embeddings.
    """
    first, *others = batch_tensors(part)
    variables: list[Tensor] = []  # the one tensor to differentiate by
    if first.is_floating_point():
        variables.append(first.detach().clone().requires_grad_())
        rows = with_tensors(part, [variables[0], *others])
        logits = forward_logits(context.model, ModelInput(rows))
    else:

        def zero_shift(shape: tuple[int, ...]) -> Tensor:
            """Create zeros to add to the embeddings, as the variable to differentiate by."""
            parameter = next(context.model.parameters())
            zeros = torch.zeros(
                num_samples(part),
                *shape,
                dtype=parameter.dtype,
                device=parameter.device,
            )
            variables.append(zeros.requires_grad_())
            return variables[0]

        logits = forward_logits(context.model, ModelInput(part, embedding_noise=zero_shift))
    # p - e_ŷ, scaled to a size near 1: for a confident prediction the derivative of the loss would
    # be only rounding, or zero in 32 bits.
    z = logits.detach().double()[:, None] / temperature
    predicted = z[:, 0].argmax(-1)
    (cotangents,), _ = scale_to_unit(-direction_of_class(z, predicted)[:, :, 0], len(z))
    (gradient,) = torch.autograd.grad(logits, variables, cotangents.to(logits.dtype))
    return gradient.sign()


def add_step(part: Batch, step: Float[Tensor, "rows ..."]) -> ModelInput:
    """Add steps to inputs, or to the embeddings of token ids.

    Args:
        part: the inputs.
        step: one step for each input; or k times as many, the k steps of each input consecutive,
            for k moved copies of each input.
    """
    times = len(step) // num_samples(part)
    first, *others = (t.repeat_interleave(times, dim=0) for t in batch_tensors(part))
    if first.is_floating_point():
        return ModelInput(with_tensors(part, [first + step, *others]))
    return ModelInput(with_tensors(part, [first, *others]), embedding_noise=lambda _: step)


def step_size(
    size: Noise,
    direction: Float[Tensor, "b ..."],
    method: str,
    parameter: str,
) -> float | Tensor:
    """Shape the size of a step so that it broadcasts against the step's direction.

    Args:
        size: one number, or a number for each channel.
        direction: the direction of the step.
        method: the name of the method, for the error.
        parameter: the name of the method's parameter that holds the size, for the error.

    Returns:
        The number; or the numbers as a tensor [channels, 1, …].

    Raises:
        QualmsError: if there are several numbers, but not one for each channel.
    """
    if not isinstance(size, tuple):
        return size
    shape = tuple(direction.shape[1:])
    if not shape or len(size) not in (1, shape[0]):
        raise QualmsError(
            f"{method} has {len(size)} values of {parameter}, but an input of shape {shape} has "
            f"{shape[0] if shape else 0} channels; pass one number, or one per channel."
        )
    sizes = torch.tensor(size, dtype=direction.dtype, device=direction.device)
    return sizes.reshape(-1, *[1] * (len(shape) - 1))


@dataclass(frozen=True)
class MCAA(MonteCarlo):
    """MC-AA: mutual information over x + ε·sign(∇x L), ε uniform in [-a, a], L the NLL of the
    predicted class (`divergence.mutual_information`).

    Paper: a 0.0001, CIFAR-100 0.0005.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import MCAA

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, MCAA(a=0.01, draws=20)))
        ```
    """

    a: Noise = 0.0001
    draws: int = 100

    name = "mc-aa"
    paper = "Alarab & Prakoonwit, Adversarial Attack for Uncertainty Estimation, 2022"
    needs = (SEVERAL_PASSES,)
    cost = "3 + N"
    rules: ClassVar = {"a": NOISE, "draws": whole(2)}

    @property
    def extra_passes(self) -> float:
        """A forward and a backward pass for the direction, and a forward pass for each draw."""
        return 3.0 + self.draws

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information over the predictions after the random steps."""
        model_context = context.model_context
        inputs = num_samples(context.batch)
        rows = model_context.rows_at_once(context.batch, inputs * self.draws)
        max_inputs = min(max(1, rows // self.draws), model_context.rows_with_graph(context.batch))

        def log_probs(block: slice) -> Iterator[Tensor]:
            """Yield log p of some inputs after several steps each, [b, d, c]."""
            part = take_samples(context.batch, block)
            # The share of the largest step that each draw takes, in [-1, 1).
            uniform = 2 * self._draw(context, block) - 1
            sign = loss_gradient_sign(context, part)
            step = step_size(self.a, sign, self.name, "a") * sign
            for factors in uniform.split(max(1, rows // len(sign)), dim=1):
                sizes = factors.reshape(*factors.shape, *[1] * (sign.ndim - 1)).to(sign)
                steps = (sizes * step[:, None]).flatten(0, 1)
                logits = context.forward(add_step(part, steps))
                yield log_softmax(logits.double()).unflatten(0, factors.shape)

        return information_over_draws(context, self.draws, log_probs, max_inputs)

    def _draw(self, context: BatchContext, block: slice) -> Float[Tensor, "b n"]:
        """Draw uniform numbers in [0, 1) for a block of inputs b and all draws n."""
        drawn: list[Tensor] = []
        for number in context.numbers[block]:
            drawn.append(torch.rand(self.draws, generator=generator(context.seed, number)))
        return torch.stack(drawn)

    def in_units(self, scale: Scale) -> "MCAA":
        """Return the method with `a` converted to the units of the model's input by `scale`."""
        return replace(self, a=convert_noise(self.a, scale))


def odin(logits: Float[Tensor, "b c"], temperature: float = 1000.0) -> Float[Tensor, " b"]:
    """ODIN: -(max_c log p_c + log C), p = softmax(z / T).

    The paper's score is max_c p_c. At the paper's temperature it differs from 1 / C only in the
    last digits, so rounding would make most inputs equal. The logarithm ranks them alike.

    Args:
        logits: z at x - ε sign(∇x -log p_ŷ).
        temperature: T, which divides the logits.
    """
    log_p = log_softmax(logits.double() / temperature)
    return -(log_p.amax(-1) + math.log(log_p.shape[1]))


@dataclass(frozen=True)
class ODIN(Method):
    """ODIN: -(max_c log p_c + log C) at temperature T, after a step of ε that makes the predicted
    class more likely.

    The step is x - ε sign(∇x -log p_ŷ) at temperature T. The paper finds that known inputs respond
    to it more than others do. The paper's ε is in pixels.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import ODIN

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, ODIN(temperature=1000.0, epsilon=0.0014)))
        ```
    """

    temperature: float = 1000.0
    epsilon: Noise = 0.0014

    name = "odin"
    paper = (
        "Liang et al., Enhancing the Reliability of Out-of-distribution Image Detection, ICLR 2018"
    )
    needs = (GRADIENTS,)
    cost = "2, and 1 backward"
    rules: ClassVar = {"temperature": POSITIVE, "epsilon": NOISE}

    @property
    def extra_passes(self) -> float:
        """A forward and a backward pass for the step, and a forward pass after it."""
        return 4.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `odin` of the logits after the step."""
        logits: list[Tensor] = []
        # Whether rounding removes the step from every input.
        is_lost = True
        for part in context.chunks_with_graph():
            sign = loss_gradient_sign(context, part, self.temperature)
            step = step_size(self.epsilon, sign, self.name, "epsilon") * sign
            moved = add_step(part, -step)
            x = batch_tensors(part)[0]
            is_same = torch.equal(batch_tensors(moved.batch)[0], x)
            is_lost &= x.is_floating_point() and bool(step.any()) and is_same
            logits.append(context.forward(moved))
        if is_lost:
            dtype = str(x.dtype).removeprefix("torch.")
            raise QualmsError(
                f"odin's step of epsilon={self.epsilon} is lost to rounding everywhere in x, which "
                f"is {dtype}; pass a larger epsilon, or the model and x in float32."
            )
        return odin(torch.cat(logits), self.temperature)

    def in_units(self, scale: Scale) -> "ODIN":
        """Return the method with ε converted to the units of the model's input by `scale`."""
        return replace(self, epsilon=convert_noise(self.epsilon, scale))
