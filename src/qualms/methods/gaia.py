"""GAIA-Z: how dense the gradients of the largest logit by inner feature maps are; the mean over
channels of density².

The density of a channel is the share of its positions at which ∂ max_c z_c by the feature map is
not zero. The paper finds more zeros where a network knows an input. The maps are the results of all
normalization layers, as the authors' code takes them on CIFAR (of a larger ResNet it takes the last
block's); a model without such layers is asked for the maps of its convolutions.

Of the paper's two scores we chose this one: it needs one gradient and no linear head, and on small
networks for digits its direction was right (AUROC 0.56 to 0.69 in five trainings), unlike that of
GAIA-A (0.29 to 0.55). Smooth activations such as GELU have no zero gradients, so that this score
says nothing there: an error, if all densities are the same for inputs of noise. It ranks backwards
on most networks of our study (the page on heat).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, num_samples, parts_of
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import BatchContext
from qualms.methods.feature_maps import InnerMaps
from qualms.methods.method import GRADIENTS, Method
from qualms.methods.noise import noise_inputs

NOISE_INPUTS = 8


@dataclass(frozen=True)
class GAIA(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import GAIA
        from qualms.models.cnn import mnist_cnn

        print(qualms.score(mnist_cnn(), torch.rand(5, 1, 28, 28), GAIA()))
        ```
    """

    name = "gaia"
    paper = "Chen et al., GAIA: Delving into Gradient-based Attribution Abnormality for OOD Detection, NeurIPS 2023"
    needs = (GRADIENTS,)
    cost = "1, and 1 backward"

    @property
    def extra_passes(self) -> float:
        """A forward and a backward pass."""
        return 3.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted = context.model_context.fitted
        with all_parameters_differentiable(context.model):
            found = [_densities(context, part) for part in context.chunks_with_graph(times=2)]
            if self not in fitted:
                fitted[self] = _tells(context, any(flat for _, flat in found))
        if not fitted[self]:
            raise QualmsError(
                "gradients with respect to the model's feature maps are zero equally often for all inputs of noise, as "
                "with GELU, SiLU or LeakyReLU, so gaia says nothing; use energy, gradnorm-huang, odin or regrad."
            )
        return torch.cat([of_part for of_part, _ in found]).square().mean(1)


def _tells(context: BatchContext, flat: bool) -> bool:
    """Whether inputs of noise have different densities; where there is no noise, whether an
    operation is `flat`.
    """
    try:
        noise = noise_inputs(context, NOISE_INPUTS, GAIA.name)
    except QualmsError:
        return flat
    size = context.model_context.rows_with_graph(noise, times=2)
    densities = torch.cat([_densities(context, part)[0] for part in parts_of(noise, size)])
    return bool((densities != densities[0]).any())


def _densities(context: BatchContext, part: Batch) -> tuple[Float[Tensor, "b channels"], bool]:
    """The densities of all channels, and whether an operation of the model has zero gradients."""
    maps = InnerMaps(num_samples(part))
    logits = forward_logits(context.model, ModelInput(part), maps)
    edges = maps.edges()
    found = torch.autograd.grad(logits.amax(1).sum(), edges, allow_unused=True) if edges else ()
    channels = [
        (gradient != 0).mean((2, 3), dtype=torch.double)
        for gradient in found
        if gradient is not None
    ]
    if not channels:
        raise QualmsError(
            "the model has no feature maps of normalization layers or convolutions, which gaia needs; "
            "use energy, gradnorm-huang, odin or regrad."
        )
    return torch.cat(channels, dim=1), maps.flat
