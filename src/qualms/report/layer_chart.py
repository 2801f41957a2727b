"""Which layers carry the uncertainty of some inputs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.engines.choice import resolve_engine
from qualms.gradients.isolation import preserve_state
from qualms.gradients.layers import layer_weights
from qualms.gradients.settings import Settings
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.report.content import Group, LayerContributions
from qualms.stream.network import Network

EACH = 24  # images of each group


def layers_of(
    network: Network, groups: Sequence[Group], methods: Mapping[str, Method]
) -> dict[str, LayerContributions]:
    """By method: Σ_c w_c ‖∇ log p_c‖ of each layer, for the first images of each group; without
    smoothing.

    Methods that are not sums of the gradient norms of classes have no layers, and are not among the
    results.
    """
    images = [group.images.take(slice(0, EACH)) for group in groups]
    rows = [
        group.name for group, some in zip(groups, images, strict=True) for _ in range(len(some))
    ]
    if not any(map(has_layers, methods.values())):
        return {}
    names, sums = layer_sums(
        network.model, torch.cat([network.inputs(some) for some in images]), methods
    )
    return {name: LayerContributions(names, values, rows) for name, values in sums.items()}


def has_layers(method: Method) -> bool:
    """Whether a method's score is a sum of the gradient norms of classes, which come from layers."""
    return isinstance(method, GradientScore) and method.direction == "classes"


def layer_sums(
    model: nn.Module,
    x: Float[Tensor, "b ..."],
    methods: Mapping[str, Method],
    how: Settings | None = None,
) -> tuple[list[str], dict[str, Float[np.ndarray, "b l"]]]:
    """The layers in words, and what each adds to the scores of some inputs, by each method that has
    layers.

    Args:
        model: a classifier.
        x: its inputs.
        methods: by name; those that have no layers are left out.
        how: a scorer's own settings, by which some of many classes may stand for all; else what the
            default settles on.
    """
    how = how or Settings()
    layers: list[str] = []
    found: dict[str, np.ndarray] = {}
    with preserve_state(model) as inner:
        passes = BatchContext(ModelContext(inner), x)
        subject, classes = passes.model_context, passes.logits.shape[1]
        subject.settings = resolve_engine(how, inner, x, classes, subject.cache)
        for name, method in methods.items():
            if isinstance(method, GradientScore) and has_layers(method):
                layers, sums = passes.layer_sums(replace(method, smooth=None))
                weights = (
                    layer_weights(len(layers), method.layers) if method.layers is not None else 1.0
                )
                found[name] = (sums.cpu() * weights).numpy()
    return [layer_name(model, layer) for layer in layers], found


def layer_name(model: nn.Module, name: str) -> str:
    """What a layer is, and what the model calls it: `Conv 5×5 · conv1`."""
    module = dict(model.named_modules()).get(name)
    if module is None or not name:
        return name or type(model).__name__
    kind = re.sub(r"[123]d$", "", type(module).__name__)  # Conv, and not Conv2d
    kernel = getattr(module, "kernel_size", None)
    size = " " + "×".join(map(str, kernel)) if isinstance(kernel, tuple) else ""
    return f"{kind}{size} · {name}"
