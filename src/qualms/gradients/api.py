"""The public functions of `qualms.gradients`: class-gradient norms and Gram matrices, by layer."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, num_samples
from qualms.gradients.directions import Directions
from qualms.gradients.engines.choice import resolve_layer_engine
from qualms.gradients.input_data import numbered_batches
from qualms.gradients.isolation import preserve_state
from qualms.gradients.layer_table import LayerTable, layer_table
from qualms.gradients.layers import Granularity, Norm, Params
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Engine, Settings, Sketch, Smoothing


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
        print(g.layers, g.norms[0], g.probs[0])  # norms [classes, layers], probs [classes]
        ```
    """

    norms: Float[Tensor, "b c l"]
    probs: Float[Tensor, "b c"]
    layers: list[str]
    # The layers that have a parameter without a fast gradient rule.
    general: list[str]
    # The engine that computed the norms.
    engine: Engine = "exact"
    # Standard errors of the norms; None unless they are sketched.
    error: Float[Tensor, "b c l"] | None = None


@dataclass(frozen=True)
class ClassGradientGram:
    """G_l = J_l J_lᵀ, the inner products between the gradients of the logits, for every input and
    layer.

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
    norm: Norm = "l2",
    smoothing: Smoothing | float | tuple[Any, ...] | None = None,
    engine: Engine | Sketch = "exact",
    params: Params = None,
    budget: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> ClassGradientNorms:
    """The norms of ∇θ_l log p_c(x) for every input, class c and layer l.

    Args:
        model: any classifier that returns logits. It is left unchanged; inside, evaluation mode is
            used.
        x: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
            (labels are ignored).
        layers: what a layer is: the `module` that owns the parameters, a `tensor`, or a `block` of
            repeated modules.
        norm: `l2` or `l1`.
        smoothing: average each gradient over perturbed inputs before the norm is taken.
        engine: `exact`; `sketch` (estimates from random tangents, k passes for every layer whatever
            the number of classes; `qualms.Sketch` sets k); `auto` (the cheaper of the two, see
            `.engine`); or `reference` (one input, one class, one backward pass: slow and obviously
            right).
        params: which parameters count: a pattern such as `"layer4.*"`, or a function of names; all
            by default.
        budget: bytes that the work on one chunk of inputs may take; a share of what is free by
            default.
        batch_size: the most inputs to run at once.
        seed: decides the perturbations of smoothing, together with an input's number, and the
            tangents of the sketch.

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
        engine=engine,
        granularity=layers,
        norm=norm,
        params=params,
        budget=budget,
        batch_size=batch_size,
        seed=seed,
    )
    perturbation = Smoothing.of(smoothing)
    with preserve_state(model) as inner:
        batches = numbered_batches(x, inner)
        # `engine="auto"` is decided by the first batch.
        first_number, first_batch = next(batches)
        settings = resolve_layer_engine(settings, inner, first_batch)
        all_batches = chain([(first_number, first_batch)], batches)
        directions = Directions(("classes",))
        table = _table_of_batches(inner, all_batches, settings, directions, perturbation)
    return ClassGradientNorms(
        norms=table.values,
        probs=table.logits.softmax(-1),
        layers=table.layers,
        general=table.general,
        engine=settings.engine_name,
        error=table.error,
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

    Every squared L2 norm of a gradient score is a quadratic form of them: ‖∇θ_l log p_c‖² = (e_c -
    p)ᵀ G_l (e_c - p). With `params` restricted to late layers the backward pass stops there.
    Arguments as for `class_gradient_norms`.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model, x = torch.nn.Linear(4, 3), torch.rand(2, 4)
        gram, p = qualms.class_gradient_gram(model, x).gram[0, 0], model(x)[0].softmax(0)
        toward = torch.eye(3) - p  # row c is e_c - p
        squares = (toward @ gram @ toward.T).diagonal()
        assert torch.allclose(squares.sqrt(), qualms.class_gradient_norms(model, x).norms[0, :, 0])
        ```
    """
    settings = Settings(
        granularity=layers,
        params=params,
        budget=budget,
        batch_size=batch_size,
    )
    with preserve_state(model) as inner:
        batches = numbered_batches(x, inner)
        table = _table_of_batches(inner, batches, settings, Directions(("logits",)), gram=True)
    return ClassGradientGram(
        gram=table.values,
        logits=table.logits,
        layers=table.layers,
        general=table.general,
    )


def _table_of_batches(
    model: nn.Module,
    batches: Iterable[tuple[int, Batch]],
    settings: Settings,
    directions: Directions,
    smoothing: Smoothing | None = None,
    gram: bool = False,
) -> LayerTable:
    """Compute one table of norms or inner products for all batches.

    Its values are in the precision of the logits, but at least in float32.

    Args:
        model: the model, inside `preserve_state`.
        batches: the batches, each with the index of its first sample in the whole data.
        settings: how gradients are computed.
        directions: the directions v of the gradients Jᵀv, with J the Jacobian of the logits.
        smoothing: the perturbations that gradients are averaged over; None for none.
        gram: whether to compute inner products in place of norms.

    Raises:
        QualmsError: if norms or inner products overflow.
    """
    cache = PlanCache()
    # A generator, as all batches together need not fit into memory.
    requests = (
        GradientRequest(
            model=model,
            batch=batch,
            numbers=range(first, first + num_samples(batch)),
            settings=settings,
            directions=directions,
            smoothing=smoothing,
            gram=gram,
        )
        for first, batch in batches
    )
    table = layer_table(requests, cache)
    cache.warn_of_probabilities(table.logits)
    dtype = at_least_float32(table.logits).dtype
    values = table.values.to(dtype)
    finite = values.isfinite()
    if not bool(finite.all()):
        first_bad = int((~finite).nonzero()[0, 0])
        precision = str(dtype).removeprefix("torch.")
        raise QualmsError(
            f"the gradients of input {first_bad} overflow {precision}; check the scale of the "
            "input and of the model's weights, or pass both in float64."
        )
    return replace(table, values=values)
