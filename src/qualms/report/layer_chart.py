"""The contribution of each layer to the uncertainty of images."""

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

MAX_IMAGES = 24  # images of each group


def layers_of(
    network: Network, groups: Sequence[Group], methods: Mapping[str, Method]
) -> dict[str, LayerContributions]:
    """Compute Σ_c w_c ‖∇ log p_c‖ of each layer for the first `MAX_IMAGES` images of each group.

    p_c is the predicted probability of class c, the gradient is with respect to the layer's
    parameters, and the method decides the weights w_c of the classes. Smoothing is left out. Other
    methods than such sums have no layers.

    Args:
        network: The network that is scored.
        groups: The groups of images.
        methods: The methods by name.

    Returns:
        A dict from the name of each method that has layers to the contributions of its layers.
    """
    if not any(map(has_layers, methods.values())):
        return {}
    inputs = []
    group_names: list[str] = []
    for group in groups:
        images = group.images.take(slice(0, MAX_IMAGES))
        inputs.append(network.inputs(images))
        group_names += [group.name] * len(images)
    names, sums = layer_sums(network.model, torch.cat(inputs), methods)
    contributions = {}
    for method, method_sums in sums.items():
        contributions[method] = LayerContributions(names, method_sums, group_names)
    return contributions


def has_layers(method: Method) -> bool:
    """Whether a method's score is a sum, over layers and classes, of norms of gradients."""
    return isinstance(method, GradientScore) and method.direction == "classes"


def layer_sums(
    model: nn.Module,
    x: Float[Tensor, "b ..."],
    methods: Mapping[str, Method],
    settings: Settings | None = None,
) -> tuple[list[str], dict[str, Float[np.ndarray, "b l"]]]:
    """Compute the contribution of each layer to the scores of a batch, without smoothing.

    A layer's contribution is its term in the sum over layers that is the score.

    Args:
        model: A classifier.
        x: A batch of b inputs of the model, of shape [b, ...].
        methods: The methods by name; methods without layers (see `has_layers`) are left out.
        settings: The settings of the engine, which may sample the classes; by default those of a
            new scorer.

    Returns:
        The names of the layers, and a dict from the name of each method to an array of shape
        [b, layers].
    """
    settings = settings or Settings()
    layers: list[str] = []
    sums_by_method: dict[str, np.ndarray] = {}
    with preserve_state(model) as unwrapped_model:
        model_context = ModelContext(unwrapped_model)
        context = BatchContext(model_context, x)
        num_classes = context.logits.shape[1]
        model_context.settings = resolve_engine(
            settings, unwrapped_model, x, num_classes, model_context.cache
        )
        for name, method in methods.items():
            if not (isinstance(method, GradientScore) and has_layers(method)):
                continue
            layers, sums = replace(method, smooth=None).layer_sums(context)
            sums = sums.cpu()
            # With `+layers`, the score is a weighted sum over layers.
            if method.layers is not None:
                sums = sums * layer_weights(len(layers), method.layers)
            sums_by_method[name] = sums.numpy()
    return [layer_name(model, layer) for layer in layers], sums_by_method


def layer_name(model: nn.Module, name: str) -> str:
    """Return the kind of a layer and its name in the model, such as `Conv 5×5 · conv1`.

    Args:
        model: The model.
        name: The name of a module of the model. Any other name is returned unchanged, except that
            an empty one, for parameters of the model itself, becomes the name of its class.
    """
    module = dict(model.named_modules()).get(name)
    if module is None or not name:
        return name or type(model).__name__
    # Conv2d is shown as Conv.
    kind = re.sub(r"[123]d$", "", type(module).__name__)
    kernel = getattr(module, "kernel_size", None)
    if isinstance(kernel, tuple):
        kind += " " + "×".join(map(str, kernel))
    return f"{kind} · {name}"
