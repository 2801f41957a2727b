"""Which layers carry the uncertainty of some inputs."""

from collections.abc import Sequence

import numpy as np
import torch

from qualms.gradients.norms import class_gradient_norms
from qualms.report.content import Group, LayerContributions
from qualms.tasks.network import Network

EACH = 24  # images of each group in the heat map


def layers_of(network: Network, groups: Sequence[Group]) -> LayerContributions:
    """Σ_c sqrt(p_c) ‖∇ log p_c‖ of each layer by itself, for the first images of each group."""
    images = [group.images.take(slice(0, EACH)) for group in groups]
    g = class_gradient_norms(network.model, torch.cat([network.inputs(some) for some in images]))
    shares = torch.einsum("bc,bcl->bl", g.probs.sqrt(), g.norms).double().cpu().numpy()
    names = [group.name for group, some in zip(groups, images, strict=True) for _ in range(len(some))]
    return LayerContributions(g.layers, shares, names, np.concatenate([np.arange(len(some)) for some in images]))
