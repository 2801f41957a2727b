"""Which layers carry the uncertainty of some inputs."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from qualms.gradients.layers import layer_weights
from qualms.gradients.norms import class_gradient_norms
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.report.content import Group, LayerContributions
from qualms.tasks.network import Network

EACH = 24  # images of each group


def layers_of(
    network: Network, groups: Sequence[Group], methods: Mapping[str, Method]
) -> dict[str, LayerContributions]:
    """By method: Σ_c w_c ‖∇ log p_c‖ of each layer, for the first images of each group; without smoothing.

    Methods that are not sums of the gradient norms of classes have no layers, and are not among the results.
    """
    made = {name: m for name, m in methods.items() if isinstance(m, GradientScore) and m.direction == "classes"}
    if not made:
        return {}
    images = [group.images.take(slice(0, EACH)) for group in groups]
    g = class_gradient_norms(network.model, torch.cat([network.inputs(some) for some in images]))
    names = [layer_name(network.model, layer) for layer in g.layers]
    rows = [group.name for group, some in zip(groups, images, strict=True) for _ in range(len(some))]
    found = {}
    for name, method in made.items():
        sums = torch.einsum("bc,bcl->bl", method.weights(g.probs), g.norms).double().cpu()
        if method.layers is not None:
            sums = sums * layer_weights(len(names), method.layers)
        found[name] = LayerContributions(names, sums.numpy(), rows)
    return found


def layer_name(model: nn.Module, name: str) -> str:
    """What a layer is, and what the model calls it: `Conv 5×5 · conv1`."""
    module = dict(model.named_modules()).get(name)
    if module is None or not name:
        return name or type(model).__name__
    kind = re.sub(r"[123]d$", "", type(module).__name__)  # Conv, and not Conv2d
    kernel = getattr(module, "kernel_size", None)
    size = " " + "×".join(map(str, kernel)) if isinstance(kernel, tuple) else ""
    return f"{kind}{size} · {name}"
