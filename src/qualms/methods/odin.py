"""ODIN: -(max_c log p_c + log C) at temperature T, after a step of ε that makes the predicted class
more likely.

The step is x - ε sign(∇x of -log p_ŷ at temperature T). The paper finds that known inputs answer to
it more than others do. Discrete inputs are moved at their embeddings. The paper's score is max_c
p_c, which is next to 1 / C at its temperature, so that rounding would make most inputs equal; the
logarithm ranks alike.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import batch_tensors
from qualms.methods.context import BatchContext
from qualms.methods.divergence import log_softmax
from qualms.methods.input_steps import attack_direction, length, moved
from qualms.methods.method import GRADIENTS, Method, Noise, Scale, converted
from qualms.parameters import NOISE, POSITIVE, check_parameters


@dataclass(frozen=True)
class ODIN(Method):
    """ε in the units of the tensor that the model receives, or one per channel; the paper's is in
    pixels.

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

    def __post_init__(self) -> None:
        check_parameters(self, self.name, temperature=POSITIVE, epsilon=NOISE)

    @property
    def extra_passes(self) -> float:
        """A forward and a backward pass for the step, and a forward pass after it."""
        return 4.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        parts, lost = [], []
        for part in context.chunks_with_graph():
            sign = attack_direction(context, part, self.temperature)
            step = length(self.epsilon, sign, self.name, "epsilon") * sign
            x, near = batch_tensors(part)[0], moved(part, -step)
            lost.append(
                x.is_floating_point()
                and bool(step.any())
                and torch.equal(batch_tensors(near.batch)[0], x)
            )
            parts.append(context.forward(near).double() / self.temperature)
        if all(lost):
            raise QualmsError(
                f"odin's step of epsilon = {self.epsilon} is lost to rounding in every number of x, which is "
                f"{x.dtype}; pass a larger epsilon, or the model and x in float32.".replace(
                    "torch.", ""
                )
            )
        log_p = log_softmax(torch.cat(parts))
        return -(log_p.amax(-1) + math.log(log_p.shape[1]))

    def in_units(self, scale: Scale) -> "ODIN":
        """The same with ε in the units of the model's input."""
        return replace(self, epsilon=converted(self.epsilon, scale))
