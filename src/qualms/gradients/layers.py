"""Selecting parameters, grouping them into layers, and weighting layers in a score."""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.precision import root_of_squares

Granularity = Literal["module", "tensor", "block"]
Norm = Literal["l2", "l1"]
# The user's choice of parameters: a pattern of names, a predicate of a name, or None for all.
Params: TypeAlias = str | Callable[[str], bool] | None

# The name of the layer that consists of parameters that no submodule owns.
WHOLE_MODEL = "(model)"


def select_parameters(model: nn.Module, params: Params) -> dict[str, Tensor]:
    """Select the parameters whose gradients are wanted, by name, in the model's order.

    Frozen parameters are selected too; integer ones never are.

    Args:
        model: the model whose parameters are selected.
        params: a pattern such as `"layer4.*"`, or a function from a name to whether it is selected;
            None for all.

    Raises:
        QualmsError: if nothing is selected, or a complex parameter is.
    """
    candidates: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if p.is_floating_point() or p.is_complex():
            candidates[name] = p
    if params is None:
        chosen = candidates
    elif callable(params):
        chosen = {name: p for name, p in candidates.items() if params(name)}
    elif isinstance(params, str):
        chosen = {name: p for name, p in candidates.items() if fnmatchcase(name, params)}
    else:
        raise QualmsError(
            f"params is a {type(params).__name__}; pass a pattern such as 'layer4.*', or a "
            "function."
        )
    for name, chosen_parameter in chosen.items():
        if chosen_parameter.is_complex():
            raise QualmsError(
                f"the parameter {name} is complex, which is not supported; exclude it with "
                "`params`."
            )
    if not candidates:
        raise QualmsError("the model has no parameters, so there are no gradients to compute.")
    if not chosen:
        some = ", ".join(list(candidates)[:3])
        raise QualmsError(f"no parameter matches params={params!r}; names look like {some}.")
    return chosen


def layer_of(model: nn.Module, name: str, granularity: Granularity) -> str:
    """Return the name of the layer that a parameter belongs to.

    Args:
        model: the model that has the parameter.
        name: the name of the parameter.
        granularity: `tensor` for the parameter itself; `module` for the module that owns it (a
            parametrized module owns what its parametrizations hold); `block` for the innermost
            module around the parameter that is one of several siblings of the same class, all of
            which have children, such as a stage of a ResNet or a layer of a transformer.
    """
    if granularity == "tensor":
        return name
    owner = name.rpartition(".")[0].partition(".parametrizations.")[0]
    # The model itself is parametrized.
    if owner.startswith("parametrizations."):
        owner = ""
    if granularity == "module":
        return owner or WHOLE_MODEL
    path = owner.split(".") if owner else []
    # From the innermost module outward.
    for depth in range(len(path), 0, -1):
        container = model.get_submodule(".".join(path[: depth - 1]))
        if _is_repeated(list(container.children())):
            return ".".join(path[:depth])
    return owner or WHOLE_MODEL


def _is_repeated(children: list[nn.Module]) -> bool:
    """Whether a container's children are blocks: modules of one class that all have children."""
    if len(children) < 2 or len({type(child) for child in children}) > 1:
        return False
    return all(list(child.children()) for child in children)


def group_by_layer(
    model: nn.Module,
    names: list[str],
    granularity: Granularity,
) -> dict[str, list[str]]:
    """Group the names of parameters by layer, layers in order of first use.

    Args:
        model: the model that has the parameters.
        names: the names of parameters, in order of use.
        granularity: what a layer is: `tensor`, `module` or `block` (see `layer_of`).

    Returns:
        A dict from each layer's name to the names of its parameters.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(model, name, granularity), []).append(name)
    return groups


def total_norms(
    norms: Float[Tensor, "b m l"],
    lam: float | None,
    norm: Norm,
) -> Float[Tensor, "b m"]:
    """Combine the norms of layers into a norm, or a weighted sum of norms, for all layers together.

    Args:
        norms: ‖g_l‖ for b samples, m gradients of each and l layers.
        lam: None for ‖g‖ of the whole gradient g; otherwise λ, for the sum Σ_l a_l ‖g_l‖ with the
            weights a_l of `layer_weights` (λ = 0 gives Σ_l ‖g_l‖, which is not the L2 norm).
        norm: whether `norms` are L1 or L2 norms; not used if `lam` is given.
    """
    if lam is not None:
        return norms @ layer_weights(norms.shape[-1], lam).to(norms)
    if norm == "l1":
        return norms.sum(-1)
    return root_of_squares(norms).to(norms)


def layer_weights(layers: int, lam: float) -> Float[Tensor, " l"]:
    """Compute the weights a_l = exp(λ(l - L)) of the layers l = 1..L in a score.

    The last weight is 1. These are the paper's weights exp(λl) times a constant, so samples rank
    the same, but they cannot overflow.

    Args:
        layers: L, the number of layers.
        lam: λ.
    """
    return (lam * (torch.arange(1, layers + 1, dtype=torch.double) - layers)).exp()
