"""Which parameters count, and which layer each belongs to."""

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
Params: TypeAlias = str | Callable[[str], bool] | None


def selected_parameters(model: nn.Module, params: Params) -> dict[str, Tensor]:
    """The parameters that count: all, those that match a pattern such as `"layer4.*"`, or those a
    function picks.
    """
    named: dict[str, Tensor] = {
        name: p for name, p in model.named_parameters() if p.is_floating_point() or p.is_complex()
    }
    if params is None:
        chosen = named
    elif callable(params):
        chosen = {name: p for name, p in named.items() if params(name)}
    elif isinstance(params, str):
        chosen = {name: p for name, p in named.items() if fnmatchcase(name, params)}
    else:
        raise QualmsError(
            f"params is a {type(params).__name__}; pass a pattern such as 'layer4.*', or a function."
        )
    unsupported = [name for name, p in chosen.items() if p.is_complex()]
    if unsupported:
        raise QualmsError(
            f"the parameter {unsupported[0]} is complex, which is not supported; leave it out by `params`."
        )
    if not named:
        raise QualmsError("the model has no parameters, so there is nothing to take gradients of.")
    if not chosen:
        some = ", ".join(list(named)[:3])
        raise QualmsError(f"no parameter matches params={params!r}; names look like {some}.")
    return chosen


def layer_of(model: nn.Module, name: str, granularity: Granularity) -> str:
    """The layer that a parameter belongs to.

    `module` is the module that owns it directly (a parametrized one owns what its parametrization
    holds), `tensor` the parameter itself, `block` the innermost child of a repeated container: one
    whose children are all of one class and have children themselves, such as the stages of a ResNet
    or the list of a transformer's layers.
    """
    if granularity == "tensor":
        return name
    owner = name.rpartition(".")[0].partition(".parametrizations.")[0]
    if owner.startswith("parametrizations."):
        owner = ""
    if granularity == "module":
        return owner or "(model)"
    path = owner.split(".") if owner else []
    for depth in range(len(path), 0, -1):
        container = list(model.get_submodule(".".join(path[: depth - 1])).children())
        one_class = len({type(child) for child in container}) == 1
        if (
            len(container) > 1
            and one_class
            and all(any(True for _ in child.children()) for child in container)
        ):
            return ".".join(path[:depth])
    return owner or "(model)"


def group_by_layer(
    model: nn.Module, names: list[str], granularity: Granularity
) -> dict[str, list[str]]:
    """Layers in order of first use, each with its parameters."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(model, name, granularity), []).append(name)
    return groups


def total_norms(
    norms: Float[Tensor, "b m l"], lam: float | None, norm: Norm
) -> Float[Tensor, "b m"]:
    """‖g‖ without a λ; with one, Σ_l a_l ‖g_l‖ (λ = 0 is Σ_l ‖g_l‖, which is not the plain L2
    norm).
    """
    if lam is not None:
        return norms @ layer_weights(norms.shape[-1], lam).to(norms)
    return norms.sum(-1) if norm == "l1" else root_of_squares(norms).to(norms)


def layer_weights(layers: int, lam: float) -> Float[Tensor, " l"]:
    """a_l = exp(λ(l - L)), l = 1..L: the paper's exp(λl) up to a constant, which ranks alike and
    cannot overflow.
    """
    return (lam * (torch.arange(1, layers + 1, dtype=torch.double) - layers)).exp()
