"""Scores of predictions for changed inputs: by random noise, or along the sign of a gradient.

Discrete inputs, such as token ids, are changed at their embeddings. The size of a change is in the
units of the tensor that the model receives: one number, or one for each channel.
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


def perturb_x(
    log_q: Float[Tensor, "b n c"],
    log_p: Float[Tensor, "b c"],
) -> Float[Tensor, " b"]:
    """Perturb x: E_n KL(q_n ‖ p), q_n the prediction for the n-th perturbed input.

    Args:
        log_q: log q_n = log p(y | x + Δx_n) of each input b, draw n and class c.
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
        """Compute `perturb_x` in parts that fit the memory budget."""
        noise = Smoothing(self.sigma, self.draws, antithetic=False)
        row_divergences: list[Tensor] = []
        for input_of_row, log_q in context.perturbed_log_probs(noise):
            row_divergences.append(kl(log_q, context.log_probs[input_of_row]))
        # The rows of an input are consecutive: [inputs, 1 + draws].
        divergences = torch.cat(row_divergences).unflatten(0, (-1, self.draws + 1))
        # The first row of each input is the unperturbed input itself.
        return divergences[:, 1:].mean(1)

    def in_units(self, scale: Scale) -> "PerturbX":
        """Return the method with σ converted to the units of the model's input.

        Args:
            scale: converts a noise level in pixels to these units.
        """
        return replace(self, sigma=convert_noise(self.sigma, scale))


# Steps along the sign of a gradient.


def loss_gradient_sign(
    context: BatchContext,
    part: Batch,
    temperature: float = 1.0,
) -> Float[Tensor, "b ..."]:
    """Compute sign(∇x L) with L = -log p_ŷ the loss of the predicted class ŷ.

    Args:
        context: the context that holds the model.
        part: the inputs x. Token ids have no derivative: it is taken at their embeddings.
        temperature: the number by which logits are divided.

    Returns:
        The signs, in the shape of the inputs or of their embeddings.
    """
    x, *others = batch_tensors(part)
    # A list of one tensor: of embeddings, the shape is only known during the forward pass.
    variables: list[Tensor] = []
    if x.is_floating_point():
        variables.append(x.detach().clone().requires_grad_())
        rows = with_tensors(part, [variables[0], *others])
        logits = forward_logits(context.model, ModelInput(rows))
    else:

        def create_zeros(shape: tuple[int, ...]) -> Tensor:
            """Create zeros to add to the embeddings, and to differentiate by; called in the pass."""
            parameter = next(context.model.parameters())
            zeros = torch.zeros(
                num_samples(part),
                *shape,
                dtype=parameter.dtype,
                device=parameter.device,
            )
            variables.append(zeros.requires_grad_())
            return zeros

        logits = forward_logits(context.model, ModelInput(part, embedding_noise=create_zeros))
    # The derivative of L with respect to the logits is p - e_ŷ. It is scaled to a size near 1: for
    # a confident prediction it would be lost to rounding, or zero in float32.
    z = logits.detach().double()[:, None] / temperature  # [b, 1, c]: one row for each input
    predicted = z[:, 0].argmax(-1)
    # `direction_of_class` is e_ŷ - p: [1, b, 1, c].
    logit_gradient = -direction_of_class(z, predicted)[:, :, 0]
    (scaled_gradient,), _ = scale_to_unit(logit_gradient, len(z))
    (gradient,) = torch.autograd.grad(logits, variables, scaled_gradient.to(logits.dtype))
    return gradient.sign()


def add_step(part: Batch, steps: Float[Tensor, "rows ..."]) -> ModelInput:
    """Add steps to inputs, or to the embeddings of token ids.

    Args:
        part: the inputs.
        steps: one step for each input; or k steps for each input, consecutively, to get k moved
            copies of it.
    """
    steps_per_input = len(steps) // num_samples(part)
    x, *others = (t.repeat_interleave(steps_per_input, dim=0) for t in batch_tensors(part))
    if x.is_floating_point():
        return ModelInput(with_tensors(part, [x + steps, *others]))
    # The steps already have the shape of the embeddings, so it is ignored here.
    return ModelInput(with_tensors(part, [x, *others]), embedding_noise=lambda _: steps)


def step_size(
    size: Noise,
    direction: Float[Tensor, "b ..."],
    method: str,
    parameter: str,
) -> float | Tensor:
    """Reshape the size of a step so that it broadcasts against the direction of the step.

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
    # One axis of length 1 for each axis after the channels.
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
        """A forward and a backward pass (3 in all) for the direction, and a forward pass per draw."""
        return 3.0 + self.draws

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute mutual information over the predictions after the random steps."""
        model_context = context.model_context
        num_inputs = num_samples(context.batch)
        max_rows = model_context.rows_at_once(context.batch, num_inputs * self.draws)
        # As many as fit with all their draws, and in the pass with a graph for the direction.
        max_inputs = min(
            max(1, max_rows // self.draws),
            model_context.rows_with_graph(context.batch),
        )

        def log_probs(block: slice) -> Iterator[Tensor]:
            """Yield log p of a block of inputs after d random steps at a time, [b, d, c]."""
            part = take_samples(context.batch, block)
            # The share of the largest step that each draw takes, in [-1, 1).
            shares = 2 * self._draw_uniform(context, block) - 1
            sign = loss_gradient_sign(context, part)
            largest_step = step_size(self.a, sign, self.name, "a") * sign
            for some_shares in shares.split(max(1, max_rows // len(sign)), dim=1):
                # Axes of length 1, to broadcast against the axes of an input.
                factors = some_shares.reshape(*some_shares.shape, *[1] * (sign.ndim - 1)).to(sign)
                steps = (factors * largest_step[:, None]).flatten(0, 1)
                logits = context.forward(add_step(part, steps))
                yield log_softmax(logits.double()).unflatten(0, some_shares.shape)

        return information_over_draws(context, self.draws, log_probs, max_inputs)

    def _draw_uniform(
        self,
        context: BatchContext,
        block: slice,
    ) -> Float[Tensor, "b n"]:
        """Draw n = `draws` uniform numbers in [0, 1) for each input of a block.

        The numbers of an input depend on the seed and the number of this input alone.
        """
        uniform: list[Tensor] = []
        for number in context.numbers[block]:
            uniform.append(torch.rand(self.draws, generator=generator(context.seed, number)))
        return torch.stack(uniform)

    def in_units(self, scale: Scale) -> "MCAA":
        """Return the method with `a` converted to the units of the model's input.

        Args:
            scale: converts a size in pixels to these units.
        """
        return replace(self, a=convert_noise(self.a, scale))


def odin(
    logits: Float[Tensor, "b c"],
    temperature: float = 1000.0,
) -> Float[Tensor, " b"]:
    """ODIN: -(max_c log p_c + log C), with p = softmax(z / T) over C classes.

    The paper's score is max_c p_c. At the paper's temperature it differs from 1 / C only in the
    last digits, so rounding would make most inputs equal. The logarithm ranks inputs in the same
    order.

    Args:
        logits: the logits z for the moved inputs x - ε sign(∇x -log p_ŷ), ŷ the predicted class.
        temperature: T, by which the logits are divided.
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
        """A forward and a backward pass (3 in all) for the step, and a forward pass after it."""
        return 4.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute `odin` of the logits after the step.

        Raises:
            QualmsError: if rounding removes the step from every input.
        """
        logits: list[Tensor] = []
        is_lost = True  # until a step changes an input
        for part in context.chunks_with_graph():
            sign = loss_gradient_sign(context, part, self.temperature)
            step = step_size(self.epsilon, sign, self.name, "epsilon") * sign
            moved = add_step(part, -step)
            x = batch_tensors(part)[0]
            is_unchanged = torch.equal(batch_tensors(moved.batch)[0], x)
            # Token ids never change: their steps are added to their embeddings.
            is_lost &= x.is_floating_point() and bool(step.any()) and is_unchanged
            logits.append(context.forward(moved))
        if is_lost:
            dtype = str(x.dtype).removeprefix("torch.")
            raise QualmsError(
                f"odin's step of epsilon={self.epsilon} is lost to rounding everywhere in x, which "
                f"is {dtype}; pass a larger epsilon, or the model and x in float32."
            )
        return odin(torch.cat(logits), self.temperature)

    def in_units(self, scale: Scale) -> "ODIN":
        """Return the method with ε converted to the units of the model's input.

        Args:
            scale: converts a size in pixels to these units.
        """
        return replace(self, epsilon=convert_noise(self.epsilon, scale))
