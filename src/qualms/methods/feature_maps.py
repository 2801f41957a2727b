"""Scores of the feature maps in a convolutional network: the last one changed, and gradients
with respect to all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, num_samples, split_batch
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import BatchContext
from qualms.methods.logits import energy
from qualms.methods.map_modes import MapRecorder, forward_with_changed_map
from qualms.methods.method import GRADIENTS, SEVERAL_PASSES, Method
from qualms.methods.noise import noise_inputs

NOISE_INPUTS = 8
INSTEAD = "energy, gradnorm-huang, odin or regrad"  # the methods that errors advise to use


def remove_rank_1(maps: Float[Tensor, "b c p"]) -> Float[Tensor, "b c p"]:
    """Subtract the rank-1 part of the largest singular value from each matrix: A - σ₁ u₁ v₁ᵀ.

    σ₁ is the largest singular value of A, and u₁ and v₁ are its singular vectors.

    Args:
        maps: a matrix A of c channels by p positions for each sample.
    """
    left, values, right = torch.linalg.svd(maps.double(), full_matrices=False)
    # A slice of length 1 keeps the axis: [b, c, 1] · [b, 1, p].
    rank_1_part = values[:, 0, None, None] * left[:, :, :1] * right[:, :1]
    return maps - rank_1_part.to(maps)


@dataclass(frozen=True)
class RankFeat(Method):
    """Energy of the logits after the rank-1 part is subtracted from the last feature map.

    The map before pooling is a matrix A of channels by positions; A - σ₁ u₁ v₁ᵀ goes through the
    rest of the network. The paper finds larger σ₁ for inputs of unknown classes, which lose more.
    This is its variant on the last block; averaging the logits with those of the block before is
    left out.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import RankFeat
        from qualms.models.cnn import mnist_cnn

        print(qualms.score(mnist_cnn(), torch.rand(5, 1, 28, 28), RankFeat()))
        ```
    """

    name = "rankfeat"
    paper = (
        "Song et al., RankFeat: Rank-1 Feature Removal for Out-of-distribution Detection, NeurIPS "
        "2022"
    )
    needs = (SEVERAL_PASSES,)
    cost = "2"

    @property
    def extra_passes(self) -> float:
        """1: a second forward pass, with the changed map."""
        return 1.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute the energy of the logits after the rank-1 part is subtracted."""
        logits: list[Tensor] = []
        for part in context.chunks(context.batch):
            logits.append(forward_with_changed_map(context.model, part, remove_rank_1, self.name))
        return energy(torch.cat(logits).double())


def gradient_densities(
    gradients: Sequence[Float[Tensor, "b _ _ _"]],
) -> Float[Tensor, "b channels"]:
    """Compute for every channel the share of positions at which the gradient is not zero.

    Args:
        gradients: the gradients with respect to several feature maps of a network, each
            [b, channel, height, width].

    Returns:
        The densities of the channels of all maps.
    """
    densities = [(g != 0).mean((2, 3), dtype=torch.double) for g in gradients]
    return torch.cat(densities, dim=1)


def gaia_z(densities: Float[Tensor, "b channels"]) -> Float[Tensor, " b"]:
    """GAIA-Z: the mean over channels of density².

    Args:
        densities: for each input and channel, the share of positions at which the gradient is not
            zero, as `gradient_densities` computes it.
    """
    return densities.square().mean(1)


@dataclass(frozen=True)
class GAIA(Method):
    """GAIA-Z: the mean over channels of the squared density of gradients with respect to inner
    feature maps.

    The density of a channel is the share of its positions at which ∂ max_c z_c with respect to the
    feature map is not zero. The paper finds more zeros where a network knows an input. The maps are
    the results of all normalization layers, as the authors' code takes them on CIFAR (of a larger
    ResNet it takes the last block's); in a model without such layers, those of its convolutions.

    Of the paper's two scores we chose this one: it needs one gradient and no linear head, and on
    small networks for digits its direction was right (AUROC 0.56 to 0.69 in five trainings), unlike
    that of GAIA-A (0.29 to 0.55). Smooth activations such as GELU have no zero gradients, so the
    score is meaningless there: an error, if all densities are the same for noise inputs. It ranks
    backwards on most networks of our study (the page on heat).

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
    paper = (
        "Chen et al., GAIA: Delving into Gradient-based Attribution Abnormality for OOD "
        "Detection, NeurIPS 2023"
    )
    needs = (GRADIENTS,)
    cost = "1, and 1 backward"

    @property
    def extra_passes(self) -> float:
        """3: a forward pass, and a backward pass that counts as two."""
        return 3.0

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute the mean over channels of density².

        Raises:
            QualmsError: if the densities of noise inputs are all the same, so that those of real
                inputs carry no information.
        """
        densities: list[Tensor] = []
        # Whether an operation, such as a ReLU, can have zero gradients.
        has_flat = False
        with all_parameters_differentiable(context.model):
            for part in context.chunks_with_graph(memory_factor=2):
                part_densities, part_has_flat = _measure_densities(context, part)
                densities.append(part_densities)
                has_flat |= part_has_flat
            is_informative = context.model_context.get_or_compute(
                self, lambda: _densities_vary(context, has_flat)
            )
        if not is_informative:
            raise QualmsError(
                "gradients with respect to the model's feature maps are zero equally often for "
                "all noise inputs, as with GELU, SiLU or LeakyReLU, so gaia is uninformative; "
                f"use {INSTEAD}."
            )
        return gaia_z(torch.cat(densities))


def _densities_vary(context: BatchContext, has_flat: bool) -> bool:
    """Whether the densities of gradients differ between inputs of noise; else GAIA is no use.

    Args:
        context: real inputs, whose shape the noise gets.
        has_flat: whether an operation of the model can have zero gradients; this is the answer if
            noise inputs cannot be created for this model.
    """
    try:
        noise = noise_inputs(context, NOISE_INPUTS, GAIA.name)
    except QualmsError:
        return has_flat
    max_rows = context.model_context.rows_with_graph(noise, memory_factor=2)
    part_densities = [_measure_densities(context, part)[0] for part in split_batch(noise, max_rows)]
    densities = torch.cat(part_densities)
    return bool((densities != densities[0]).any())


def _measure_densities(
    context: BatchContext,
    part: Batch,
) -> tuple[Float[Tensor, "b channels"], bool]:
    """Run some inputs forward and backward, and measure how many gradients are not zero.

    Args:
        context: the context that holds the model.
        part: the inputs.

    Returns:
        For each channel of all feature maps, the share of positions at which the gradient of the
        largest logit is not zero; and whether an operation of the model, such as a ReLU, can have
        zero gradients.
    """
    recorder = MapRecorder(num_samples(part))
    logits = forward_logits(context.model, ModelInput(part), recorder)
    # Where the feature maps enter the autograd graph.
    edges = recorder.edges()
    gradients: list[Tensor] = []
    if edges:
        # The sum over inputs gives each input its own gradient: inputs are independent.
        map_gradients = torch.autograd.grad(logits.amax(1).sum(), edges, allow_unused=True)
        # None for maps that the logits do not depend on.
        gradients = [g for g in map_gradients if g is not None]
    if not gradients:
        raise QualmsError(
            "gaia needs feature maps of normalization layers or convolutions, but the model has "
            f"none; use {INSTEAD}."
        )
    return gradient_densities(gradients), recorder.has_flat
