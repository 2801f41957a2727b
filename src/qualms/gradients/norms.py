"""The two public functions of this folder: class-gradient norms and Gram matrices, layer by layer."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.exact import class_directions, exact, logit_directions
from qualms.gradients.guard import untouched
from qualms.gradients.inputs import batches, count, tensors
from qualms.gradients.layers import GRANULARITIES, Granularity, Params, grouped, select
from qualms.gradients.measured import Measured
from qualms.gradients.memory import default_budget
from qualms.gradients.reference import reference
from qualms.gradients.smoothing import Smoothing

ENGINES = ("exact", "reference")
NORMS = ("l2", "l1")


@dataclass(frozen=True)
class ClassGradientNorms:
    """‖∇θ_l log p_c‖ for every input, class and layer."""

    norms: Float[Tensor, "b c l"]
    probs: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]  # layers that no fast rule covered


@dataclass(frozen=True)
class ClassGradientGram:
    """G_l = J_l J_lᵀ, the inner products between the gradients of the logits, for every input and layer."""

    gram: Float[Tensor, "b l c c"]
    logits: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]


def class_gradient_norms(
    model: nn.Module,
    x: Any,
    *,
    layers: Granularity = "module",
    norm: Literal["l2", "l1"] = "l2",
    smoothing: Smoothing | float | tuple[Any, ...] | None = None,
    engine: str = "exact",
    params: Params = None,
    budget: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> ClassGradientNorms:
    """The norms of ∇θ_l log p_c(x) for every input, class c and layer l.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used inside.
        x: a tensor, a tuple or dict of tensors, or an iterable of batches (labels are ignored).
        layers: what a layer is: the `module` that owns the parameters, a `tensor`, or a `block` of repeated modules.
        norm: `l2` or `l1`.
        smoothing: average each gradient over perturbed inputs before the norm is taken.
        engine: `exact`, or `reference` (one input, one class, one backward pass: slow and obviously right).
        params: which parameters count: a pattern such as `"layer4.*"`, or a function of names; all by default.
        budget: bytes that the work on one chunk of inputs may take; a share of what is free by default.
        batch_size: at most so many inputs at once.
        seed: decides the perturbations of smoothing, together with an input's number.
    """
    _require(layers=(layers, GRANULARITIES), norm=(norm, NORMS), engine=(engine, ENGINES))
    smooth = Smoothing.of(smoothing)
    done: list[Measured] = []
    with untouched(model) as inner:
        selected = select(inner, params)
        for first, batch in _numbered(x):
            if engine == "reference":
                part = reference(inner, batch, selected, kind=norm, smoothing=smooth, first_index=first, seed=seed)
            else:
                part = exact(
                    inner,
                    batch,
                    selected,
                    kind=norm,
                    directions=class_directions,
                    smoothing=smooth,
                    first_index=first,
                    seed=seed,
                    budget=budget or default_budget(tensors(batch)[0].device),
                    batch_size=batch_size,
                )
            done.append(part)
        whole = Measured.joined(done)
        groups = grouped(inner, list(whole.values), layers)
    columns = [torch.stack([whole.values[name] for name in names]).sum(0) for names in groups.values()]
    norms = torch.stack(columns, dim=-1)
    return ClassGradientNorms(
        norms=norms if norm == "l1" else norms.sqrt(),
        probs=whole.logits.softmax(-1),
        layers=list(groups),
        general=[layer for layer, names in groups.items() if not whole.general.isdisjoint(names)],
    )


def class_gradient_gram(
    model: nn.Module,
    x: Any,
    *,
    layers: Granularity = "module",
    params: Params = None,
    budget: int | None = None,
    batch_size: int | None = None,
) -> ClassGradientGram:
    """The matrices G_l = J_l J_lᵀ [C, C] of the logits for every input and layer.

    Every squared L2 norm of a gradient score is a quadratic form of them: ‖∇θ_l log p_c‖² = (e_c - p)ᵀ G_l (e_c - p).
    With `params` restricted to late layers the backward pass stops there. Arguments as for `class_gradient_norms`.
    """
    _require(layers=(layers, GRANULARITIES))
    done: list[Measured] = []
    with untouched(model) as inner:
        selected = select(inner, params)
        for first, batch in _numbered(x):
            part = exact(
                inner,
                batch,
                selected,
                kind="gram",
                directions=logit_directions,
                smoothing=None,
                first_index=first,
                seed=0,
                budget=budget or default_budget(tensors(batch)[0].device),
                batch_size=batch_size,
            )
            done.append(part)
        whole = Measured.joined(done)
        groups = grouped(inner, list(whole.values), layers)
    matrices = [torch.stack([whole.values[name] for name in names]).sum(0) for names in groups.values()]
    return ClassGradientGram(
        gram=torch.stack(matrices, dim=1),
        logits=whole.logits,
        layers=list(groups),
        general=[layer for layer, names in groups.items() if not whole.general.isdisjoint(names)],
    )


def _require(**choices: tuple[str, tuple[str, ...]]) -> None:
    for argument, (value, known) in choices.items():
        if value not in known:
            raise QualmsError(f"{argument}={value!r} is not known; choose one of {', '.join(known)}.")


def _numbered(x: Any) -> Any:
    """Batches with the number of their first input."""
    first = 0
    for batch in batches(x):
        yield first, batch
        first += count(batch)
