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
        # Checked now, since scoring may take long. Other pools are counted while they are scored.
        _require_size(k, len(pool))
    # `score` converts noise by `pixel_std` itself, so it gets the method as the user passed it.
    scores = score(model, pool, method, progress=progress, **options)
    order = scores.argsort(descending=True, stable=True).cpu()
    _require_size(k, len(order))
    if diversity is None or not isinstance(parsed, GradientScore):
        return order[:k]
    # 1.1 * 10 is slightly above 11 in floating point, and would be rounded up to 12.
    num_candidates = max(k, math.ceil(diversity * k - 1e-9))
    candidates = order[:num_candidates]
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
    """Raise an error if k is not a positive integer, or if the pool is a loader that shuffles.

    Args:
        pool: the pool, as `select` takes it.
        k: the number of inputs to select.
    """
    if not isinstance(k, int) or k < 1:
        raise QualmsError(f"k={k!r} is invalid; pass the number of inputs to select, 1 or more.")
    if isinstance(pool, DataLoader):
        # A loader with a `batch_sampler` shuffles there, if it does.
        samplers = (pool.sampler, getattr(pool.batch_sampler, "sampler", None))
        if any(isinstance(sampler, SHUFFLING_SAMPLERS) for sampler in samplers):
            raise QualmsError(
                "the pool's loader shuffles, so indices would not identify inputs; "
                "create the loader with shuffle=False."
            )


def _require_diversity(diversity: int | float, pool: Any, method: Method, norm: str) -> None:
    """Raise an error if the arguments of `select` do not allow a diverse selection.

    Args:
        diversity: the number of candidates for each input to select, at least 1.
        pool: the pool, which has to be readable twice, so no iterator.
        method: the method, which has to be a gradient score.
        norm: the norm of the gradients, which has to be "l2".
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
    """Raise an error unless a method is a gradient score: others have no gradients to compare."""
    if not isinstance(method, GradientScore):
        raise QualmsError(
            f"diversity needs a gradient score, such as {DEFAULT!r}, but {method.name} is not one."
        )


def _require_size(k: int, num_inputs: int) -> None:
    """Raise an error if k, the number of inputs to select, exceeds the number in the pool."""
    if k > num_inputs:
        raise QualmsError(f"k is {k}, but the pool has only {num_inputs} inputs; pass a smaller k.")


def gradient_features(
    model: nn.Module,
    pool: Any,
    chosen: Sequence[int],
    method: GradientScore,
    settings: Settings,
) -> Float[Tensor, "n f"]:
    """Compute a feature vector for each chosen input, such that distances between the vectors
    estimate distances between the inputs' gradients.

    φ(x) = [w_c ⟨s_j, g_c(x)⟩]_{c,j} / sqrt(k), with g_c(x) the gradient of class c, w_c the weight
    that the score gives to it, and s_1, …, s_k the random tangents of the sketch. Then
    ‖φ(x) - φ(x')‖² estimates Σ_c ‖w_c g_c(x) - w'_c g_c(x')‖². A score of a single gradient has one
    g; `+layers` weights the layers of each g_c; `+smooth` averages g_c over perturbed inputs.

    Args:
        model: the classifier.
        pool: the pool, as `select` takes it.
        chosen: the indices of the inputs in the pool, in any order.
        method: the score whose gradients are compared.
        settings: how gradients are computed, with a sketch as the engine.

    Returns:
        A row of f features for each of the n indices in `chosen`, in this order.
    """
    # The indices in the pool whose features are computed, in the order of the computation.
    computed_indices: list[int] = []
    feature_blocks: list[Tensor] = []
    cache = PlanCache()  # what the engine learns about the model on the first batch
    directions = Directions((method.direction,))
    with preserve_state(model) as inner:
        for indices, batch in _gather_by_shape(pool, inner, set(chosen)):
            request = GradientRequest(inner, batch, indices, settings, directions, method.smooth)
            for projected, logits in project_gradients(request, method.layers, cache):
                weights = method.weights_at(logits)
                # [tangents, inputs, gradients], flattened to [inputs, f].
                projections = weights * projected.values / math.sqrt(len(projected.values))
                feature_blocks.append(projections.movedim(0, -1).flatten(1).float())
            computed_indices += indices
    # From the order of the computation to the order of `chosen`.
    row_of_index = {index: row for row, index in enumerate(computed_indices)}
    return torch.cat(feature_blocks)[[row_of_index[index] for index in chosen]]


def _gather_by_shape(
    pool: Any,
    model: nn.Module,
    chosen: set[int],
) -> Iterator[tuple[list[int], Batch]]:
    """Collect the chosen inputs of a pool, and join those of equal shapes to one batch.

    Args:
        pool: the pool, as `select` takes it.
        model: the classifier, which decides how batches are read.
        chosen: the indices of the inputs in the pool.

    Yields:
        The indices of a batch's inputs in the pool, and the batch.
    """
    # Indices in the pool, and the batches that hold these inputs, by the shapes of an input.
    by_shape: dict[Any, tuple[list[int], list[Batch]]] = {}
    for first, batch in numbered_batches(pool, model):
        in_batch = [i for i in range(num_samples(batch)) if first + i in chosen]
        if not in_batch:
            continue
        part = take_samples(batch, in_batch)
        shapes = tuple(t.shape[1:] for t in batch_tensors(part))
        indices, parts = by_shape.setdefault(shapes, ([], []))
        indices.extend(first + i for i in in_batch)
        parts.append(part)
    for indices, parts in by_shape.values():
        # An input may be several tensors: joins the first of all parts, the second, …
        tensors_to_join = zip(*map(batch_tensors, parts), strict=True)
        yield indices, with_tensors(parts[0], map(torch.cat, tensors_to_join))


def k_center(features: Float[Tensor, "n f"], k: int) -> list[int]:
    """Pick k rows by greedy k-center: row 0, then always the row farthest from all picked so far.

    Of equally far rows the first is picked.

    Args:
        features: the n rows.
        k: the number of rows to pick, at most n.
    """

    def distances_from(row: int) -> Float[Tensor, " n"]:
        """Compute the Euclidean distance of each of the n rows of `features` from one row."""
        return torch.linalg.vector_norm(features - features[row], dim=1, dtype=torch.double)

    picked = [0]
    # The distance of each row from the nearest picked row.
    nearest_distances = distances_from(0)
    while len(picked) < k:
        # Below all distances, so that no row is picked twice, even if all others equal it.
        nearest_distances[picked[-1]] = -1
        # The first of the farthest rows, which `argmax` does not promise.
        farthest = int((nearest_distances == nearest_distances.max()).nonzero()[0])
        picked.append(farthest)
        nearest_distances = torch.minimum(nearest_distances, distances_from(farthest))
    return picked
