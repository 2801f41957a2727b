"""`select`: which inputs of a pool to label next: the most uncertain ones, or uncertain ones that
differ.

Uncertain inputs are often near duplicates of each other, so that one label gives away what the
others would. Diversity picks among the most uncertain by the distances between their gradients, the
updates that their labels could ask for (as in Ash et al., Deep Batch Active Learning by Diverse,
Uncertain Gradient Lower Bounds, ICLR 2020), by greedy k-center (Sener & Savarese, Active Learning
for Convolutional Neural Networks: A Core-Set Approach, ICLR 2018).
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from qualms.errors import QualmsError
from qualms.functional import ScorerOptions, require_options, score
from qualms.gradients.batch import Batch, batch_tensors, num_samples, take_samples, with_tensors
from qualms.gradients.directions import Directions
from qualms.gradients.engines.sketch import project_gradients
from qualms.gradients.input_data import numbered_batches
from qualms.gradients.isolation import preserve_state
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings, Sketch
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, in_pixels, parse
from qualms.progress import Progress

# With 64 tangents the standard error of a distance between gradients is 1/sqrt(2 * 64) or 9 %, or
# less if the errors of the classes are independent.
DIVERSITY_TANGENTS = 64
SHUFFLING_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def select(
    model: nn.Module,
    pool: Any,
    k: int,
    method: str | Method = DEFAULT,
    *,
    diversity: int | float | None = None,
    progress: Progress = False,
    **options: Unpack[ScorerOptions],
) -> Int[Tensor, " k"]:
    """Select the k inputs of a pool to label next.

    Args:
        model: any classifier that returns logits. It is left unchanged; evaluation mode is used
            inside.
        pool: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
            (labels are ignored).
        k: the number of inputs to select.
        method: a spec or a method object; the paper's REGrad* by default.
        diversity: None takes the k most uncertain, the most uncertain first, equal ones in the
            pool's order. A number r >= 1 makes the r·k most uncertain candidates, of which k are
            picked: the most uncertain, then always the candidate whose gradients are farthest from
            those of all picked so far. It needs a gradient score and `norm="l2"`, reads the pool
            twice, runs 64 forward-mode passes over the candidates, and holds 64 numbers for each of
            them and each class.
        progress: as for `score`.
        options: as for `score`.

    Returns:
        Indices in the pool's order, from 0.

    Example:
        ```python
        import torch
        import qualms

        model, pool = torch.nn.Linear(4, 3), torch.randn(50, 4)
        print(qualms.select(model, pool, k=5))
        print(qualms.select(model, pool, 5, "regrad+layers", diversity=2))
        ```
    """
    require_options("select", options)
    parsed = parse(method) if isinstance(method, str) else method
    parsed = in_pixels(parsed, options.get("pixel_std"))
    _require_pool(pool, k)
    if diversity is not None:
        _require_diversity(diversity, pool, parsed, options.get("norm", "l2"))
    if isinstance(pool, Tensor):
        # Before the scores, which may take long.
        _require_size(k, len(pool))
    scores = score(model, pool, method, progress=progress, **options)
    order = scores.argsort(descending=True, stable=True).cpu()
    _require_size(k, len(order))
    if diversity is None or not isinstance(parsed, GradientScore):
        return order[:k]
    # The rounding guard keeps 1.1 * 10 from asking for 12.
    candidates = order[: max(k, math.ceil(diversity * k - 1e-9))]
    settings = Settings(
        Sketch(DIVERSITY_TANGENTS),
        options.get("layers", "module"),
        params=options.get("params"),
        budget=options.get("budget"),
        batch_size=options.get("batch_size"),
        seed=options.get("seed", 0),
    )
    features = gradient_features(model, pool, candidates.tolist(), parsed, settings)
    if not bool(features.any()):
        raise QualmsError(
            f"the gradients of {parsed.name} are all zero, so they do not differ; "
            "use another score for diversity."
        )
    return candidates[k_center(features, k)]


def _require_pool(pool: Any, k: int) -> None:
    """Raise an error if k is not a positive integer, or if the pool is a loader that shuffles."""
    if not isinstance(k, int) or k < 1:
        raise QualmsError(f"k={k!r} is invalid; pass the number of inputs to select, 1 or more.")
    if isinstance(pool, DataLoader):
        samplers = (pool.sampler, getattr(pool.batch_sampler, "sampler", None))
        if any(isinstance(sampler, SHUFFLING_SAMPLERS) for sampler in samplers):
            raise QualmsError(
                "the pool's loader shuffles, so indices would not identify inputs; "
                "create the loader with shuffle=False."
            )


def _require_diversity(diversity: int | float, pool: Any, method: Method, norm: str) -> None:
    """Raise an error if a diverse selection is impossible.

    Args:
        diversity: the number of candidates for each pick.
        pool: the pool, which has to be readable twice.
        method: the method, which has to be a gradient score.
        norm: the norm of the gradients, which has to be l2.
    """
    if not isinstance(diversity, (int, float)) or not 1 <= diversity < math.inf:
        raise QualmsError(
            f"diversity={diversity} is invalid; pass the number of candidates per pick, 1 or more."
        )
    if isinstance(pool, Iterator):
        raise QualmsError(
            "the pool can be read only once, but diversity reads it twice; pass a list or a loader."
        )
    if norm != "l2":
        raise QualmsError(
            f"diversity measures L2 distances between gradients, not {norm}; leave norm out."
        )
    require_gradients(method)


def require_gradients(method: Method) -> None:
    """Raise an error unless a method is a gradient score, whose gradients can be compared."""
    if not isinstance(method, GradientScore):
        raise QualmsError(
            f"diversity needs a gradient score, such as {DEFAULT!r}, but {method.name} is not one."
        )


def _require_size(k: int, num_inputs: int) -> None:
    """Raise an error if more inputs are to be selected than the pool has."""
    if k > num_inputs:
        raise QualmsError(f"k is {k}, but the pool has only {num_inputs} inputs; pass a smaller k.")


def gradient_features(
    model: nn.Module, pool: Any, chosen: Sequence[int], method: GradientScore, settings: Settings
) -> Float[Tensor, "n f"]:
    """Compute a feature vector for each chosen input; distances between these vectors estimate
    those between the inputs' gradients.

    φ(x) = [w_c ⟨s_j, g_c(x)⟩]_{c,j} / sqrt(k), with s_j the k random tangents of the sketch.

    ‖φ(x) - φ(x')‖² estimates Σ_c ‖w_c g_c(x) - w'_c g_c(x')‖², w_c the weight that the score gives
    to the gradient g_c of class c (a score of a single gradient has one g). `+layers` weights the
    layers of each g_c; `+smooth` averages g_c over perturbed inputs.

    Args:
        model: the classifier.
        pool: the pool, as `select` takes it.
        chosen: the indices of the inputs in the pool, in any order.
        method: the score whose gradients are compared.
        settings: how gradients are computed, with a sketch as the engine.

    Returns:
        A row of features for each index in `chosen`, in this order.
    """
    numbers: list[int] = []
    parts: list[Tensor] = []
    cache, directions = PlanCache(), Directions((method.direction,))
    with preserve_state(model) as inner:
        for batch_numbers, batch in _gather(pool, inner, set(chosen)):
            request = GradientRequest(
                inner, batch, batch_numbers, settings, directions, method.smooth
            )
            for projected, logits in project_gradients(request, method.layers, cache):
                weights = method.weights_at(logits)
                projections = weights * projected.values / math.sqrt(len(projected.values))
                parts.append(projections.movedim(0, -1).flatten(1).float())
            numbers += batch_numbers
    rows = {number: row for row, number in enumerate(numbers)}
    return torch.cat(parts)[[rows[number] for number in chosen]]


def _gather(pool: Any, model: nn.Module, chosen: set[int]) -> Iterator[tuple[list[int], Batch]]:
    """Collect the chosen inputs of a pool, those of equal shapes in one batch.

    Args:
        pool: the pool, as `select` takes it.
        model: the classifier, which decides how batches are read.
        chosen: the indices of the inputs in the pool.

    Yields:
        The indices in the pool of the inputs of a batch, and the batch.
    """
    by_shape: dict[Any, tuple[list[int], list[Batch]]] = {}
    for first, batch in numbered_batches(pool, model):
        in_batch = [i for i in range(num_samples(batch)) if first + i in chosen]
        if not in_batch:
            continue
        part = take_samples(batch, in_batch)
        shapes = tuple(t.shape[1:] for t in batch_tensors(part))
        numbers, parts = by_shape.setdefault(shapes, ([], []))
        numbers.extend(first + i for i in in_batch)
        parts.append(part)
    for numbers, parts in by_shape.values():
        columns = zip(*map(batch_tensors, parts), strict=True)
        yield numbers, with_tensors(parts[0], map(torch.cat, columns))


def k_center(features: Float[Tensor, "n f"], k: int) -> list[int]:
    """Pick k rows by greedy k-center: row 0, then always the row farthest from all picked so far.

    Of equally far rows the first is picked.

    Args:
        features: the rows.
        k: the number of rows to pick, at most n.
    """

    def distances(row: int) -> Float[Tensor, " n"]:
        """Compute the distances of all rows from one row."""
        return torch.linalg.vector_norm(features - features[row], dim=1, dtype=torch.double)

    # nearest: the distance of each row from the nearest picked row.
    picked, nearest = [0], distances(0)
    while len(picked) < k:
        # So that no row is picked twice, even if others equal it.
        nearest[picked[-1]] = -1
        picked.append(int((nearest == nearest.max()).nonzero()[0]))
        nearest = torch.minimum(nearest, distances(picked[-1]))
    return picked
