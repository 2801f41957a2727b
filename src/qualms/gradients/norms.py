"""The two public functions of this folder: class-gradient norms and Gram matrices, layer by layer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.gradients.choice import settled
from qualms.gradients.directions import Directions
from qualms.gradients.exact.early_layers import Cutoff
from qualms.gradients.exact.engine import exact
from qualms.gradients.exact.measure import Kind
from qualms.gradients.guard import untouched
from qualms.gradients.inputs import Batch, batches, count, tensors
from qualms.gradients.layers import Granularity, Params, grouped, select
from qualms.gradients.measured import Measured
from qualms.gradients.memory import default_budget
from qualms.gradients.reference import reference
from qualms.gradients.settings import Settings, Sketch
from qualms.gradients.sketch.engine import sketch_layers
from qualms.gradients.smoothing import Smoothing
from qualms.gradients.watch.pieces import accurate


@dataclass(frozen=True)
class ClassGradientNorms:
    """‖∇θ_l log p_c‖ for every input, class and layer.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
        g = qualms.class_gradient_norms(model, torch.rand(2, 4))
        print(g.layers, g.norms[0], g.probs[0])  # for the first input: [classes, layers] and [classes]
        ```
    """

    norms: Float[Tensor, "b c l"]
    probs: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]  # layers that no fast rule covered
    engine: str = "exact"  # that computed them
    error: Float[Tensor, "b c l"] | None = None  # standard error of the norms, if they are sketched


@dataclass(frozen=True)
class ClassGradientGram:
    """G_l = J_l J_lᵀ, the inner products between the gradients of the logits, for every input and layer.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        k = qualms.class_gradient_gram(torch.nn.Linear(4, 3), torch.rand(2, 4))
        assert k.gram.shape == (2, 1, 3, 3)  # inputs, layers, classes, classes
        ```
    """

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
    engine: str | Sketch = "exact",
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
        engine: `exact`; `sketch` (estimates from random tangents, k passes for every layer whatever the number of
            classes; `qualms.Sketch` sets k); `auto` (the cheaper of the two, see `.engine`); or `reference` (one input,
            one class, one backward pass: slow and obviously right).
        params: which parameters count: a pattern such as `"layer4.*"`, or a function of names; all by default.
        budget: bytes that the work on one chunk of inputs may take; a share of what is free by default.
        batch_size: at most so many inputs at once.
        seed: decides the perturbations of smoothing, together with an input's number, and the tangents of the sketch.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 3), torch.rand(2, 4)
        g = qualms.class_gradient_norms(model, x)
        assert g.norms.shape == (2, 3, 1)  # inputs, classes, layers
        slow = qualms.class_gradient_norms(model, x, engine="reference")
        assert torch.allclose(g.norms, slow.norms)
        ```
    """
    settings = Settings(
        engine=engine, layers=layers, norm=norm, params=params, budget=budget, batch_size=batch_size, seed=seed
    )
    smooth = Smoothing.of(smoothing)
    with untouched(model) as inner:
        inputs = numbered_batches(x)
        if settings.engine == "auto":
            begin = next(inputs)
            settings = settled(settings, inner, begin[1], ("classes",), smooth, each_layer=True)
            inputs = chain([begin], inputs)
        table = layer_table(inner, inputs, settings, ("classes",), smooth)
    used = settings.engine if isinstance(settings.engine, str) else "sketch"
    return ClassGradientNorms(table.values, table.logits.softmax(-1), table.layers, table.general, used, table.error)


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

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 3), torch.rand(2, 4)
        gram, p = qualms.class_gradient_gram(model, x).gram[0, 0], model(x)[0].softmax(0)
        towards = torch.eye(3) - p  # row c is e_c - p
        squares = (towards @ gram @ towards.T).diagonal()
        assert torch.allclose(squares.sqrt(), qualms.class_gradient_norms(model, x).norms[0, :, 0])
        ```
    """
    settings = Settings(layers=layers, params=params, budget=budget, batch_size=batch_size)
    with untouched(model) as inner:
        table = layer_table(inner, numbered_batches(x), settings, ("logits",), None, gram=True)
    return ClassGradientGram(table.values, table.logits, table.layers, table.general)


@dataclass(frozen=True)
class LayerTable:
    """[b, m, l] norms of the gradients along m directions, or [b, l, m, m] of inner products."""

    values: Tensor
    logits: Float[Tensor, "b c"]
    layers: list[str]
    general: list[str]
    error: Tensor | None = None


def layer_table(
    model: nn.Module,
    numbered: Iterable[tuple[int, Batch]],
    settings: Settings,
    directions: Sequence[str],
    smoothing: Smoothing | None,
    gram: bool = False,
    lam: float | None = None,
) -> LayerTable:
    """Runs the engine on each batch, and adds up parameters to layers. The model must be under `untouched`.

    `lam` is the smallest λ of the scores that the norms are for; None if any of them takes all layers alike.
    """
    if settings.sketch is not None:
        return _sketched_table(model, numbered, settings, directions, smoothing)
    selected = select(model, settings.params)
    kind: Kind = "gram" if gram else "l1" if settings.norm == "l1" else "l2"
    cutoff = None
    if settings.tolerance > 0 and lam is not None and lam > 0 and not gram:
        cutoff = Cutoff(
            settings.tolerance, lam, lambda names: list(grouped(model, names, settings.layers).values()), kind
        )
    done: list[Measured] = []
    for first, batch in numbered:
        common: dict[str, Any] = {"kind": kind, "smoothing": smoothing, "first_index": first, "seed": settings.seed}
        if settings.engine == "reference":
            done.append(reference(model, batch, selected, directions=directions, **common))
            continue
        budget = settings.budget or default_budget(tensors(batch)[0].device)
        more: dict[str, Any] = {"budget": budget, "batch_size": settings.batch_size, "cutoff": cutoff}
        done.append(exact(model, batch, selected, directions=Directions(tuple(directions)), **common, **more))
    whole = Measured.joined(done)
    groups = grouped(model, list(whole.values), settings.layers)
    sums = [torch.stack([whole.values[name] for name in names]).sum(0) for names in groups.values()]
    values = torch.stack(sums, dim=1) if gram else torch.stack(sums, dim=-1)
    general = [layer for layer, names in groups.items() if not whole.general.isdisjoint(names)]
    return LayerTable(values.sqrt() if kind == "l2" else values, whole.logits, list(groups), general)


def _sketched_table(
    model: nn.Module,
    numbered: Iterable[tuple[int, Batch]],
    settings: Settings,
    directions: Sequence[str],
    smoothing: Smoothing | None,
) -> LayerTable:
    """Estimated norms and their standard errors."""
    values, errors = [], []
    for first, batch in numbered:
        numbers = range(first, first + count(batch))
        found, logits = sketch_layers(model, batch, numbers, settings, directions, smoothing)
        values.append(Measured({layer: norms for layer, (norms, _) in found.items()}, logits, set()))
        errors.append(Measured({layer: error for layer, (_, error) in found.items()}, logits, set()))
    whole, error = Measured.joined(values), Measured.joined(errors)
    dtype = accurate(whole.logits).dtype
    tables = [torch.stack(list(m.values.values()), dim=-1).to(dtype) for m in (whole, error)]
    return LayerTable(tables[0], whole.logits, list(whole.values), [], tables[1])


def numbered_batches(x: Any) -> Iterator[tuple[int, Batch]]:
    """Batches with the number of their first input."""
    first = 0
    for batch in batches(x):
        yield first, batch
        first += count(batch)
