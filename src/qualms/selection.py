"""`select`: which inputs of a pool to label next, the most uncertain ones, or uncertain ones that
differ.

Uncertain inputs are often near duplicates of each other, and one label then tells what the others
would. Diversity picks among the most uncertain by the distances between their gradients, the
updates that their labels could ask for (as in Ash et al., Deep Batch Active Learning by Diverse,
Uncertain Gradient Lower Bounds, ICLR 2020), by greedy k-center (Sener & Savarese, Active Learning
for Convolutional Neural Networks: A Core-Set Approach, ICLR 2018).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from qualms.errors import QualmsError
from qualms.functional import score
from qualms.gradients.batch import Batch, batch_tensors, num_samples, take_samples, with_tensors
from qualms.gradients.directions import Directions
from qualms.gradients.engines.sketch import sketch_totals
from qualms.gradients.input_data import numbered_batches
from qualms.gradients.isolation import preserve_state
from qualms.gradients.layers import Granularity, Norm, Params
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Engine, Settings, Sketch
from qualms.methods.chosen import PixelStd, in_pixels
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, parse
from qualms.progress import Progress

# a distance between gradients is then off by 1/sqrt(2 * 64) or 9 %, less if classes err
# independently
DIVERSITY_TANGENTS = 64
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def select(
    model: nn.Module,
    pool: Any,
    k: int,
    method: str | Method = DEFAULT,
    *,
    diversity: int | float | None = None,
    train: Any = None,
    models: Iterable[nn.Module] = (),
    engine: Engine | Sketch = "auto",
    layers: Granularity = "module",
    norm: Norm = "l2",
    params: Params = None,
    seed: int = 0,
    batch_size: int | None = None,
    budget: int | None = None,
    tolerance: float | None = None,
    pixel_std: PixelStd = None,
    progress: Progress = False,
) -> Int[Tensor, " k"]:
    """The indices of k inputs of the pool to label next, in the pool's order from 0.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used
            inside.
        pool: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
            (labels ignored).
        k: how many.
        method: a spec or a method object; the paper's REGrad* by default.
        diversity: None takes the k most uncertain, the most uncertain first, equal ones in the
            pool's order. A number r >= 1 makes the r·k most uncertain candidates, of which k are
            picked: the most uncertain, then always the candidate whose gradients are farthest from
                those of all picked so far. It needs a gradient score, reads
            the pool twice, runs 64 forward-mode passes over the candidates, and holds 64 numbers
            for each of them and each class.
        train: training inputs; this and all that follows as for `score`.
        models: further members, for `ensemble`.
        engine: how class gradients are computed.
        layers: what `+layers` counts.
        norm: of the gradients; for diversity it has to be `l2`.
        params: which parameters count.
        seed: decides every random draw.
        batch_size: the most inputs to run at once.
        budget: bytes that the work on one chunk of inputs may take.
        tolerance: the share of its value that a score may be off by, to save passes (see `Scorer`).
        pixel_std: what pixels from 0 to 1 were divided by, if noise in specs is to be in pixels
            (see `Scorer`).
        progress: True for count, rate and time left on the terminal, or a function that is told how
            many are done.

    Example:
        ```python
        import torch
        import qualms

        model, pool = torch.nn.Linear(4, 3), torch.randn(50, 4)
        print(qualms.select(model, pool, k=5))
        print(qualms.select(model, pool, 5, "regrad+layers", diversity=2))
        ```
    """
    chosen = in_pixels(parse(method) if isinstance(method, str) else method, pixel_std)
    _check(pool, k, chosen, diversity, norm)
    if isinstance(pool, Tensor):
        _check_size(k, len(pool))  # before the scores, which may take long
    scores = score(
        model,
        pool,
        method,
        train=train,
        models=models,
        engine=engine,
        layers=layers,
        norm=norm,
        params=params,
        seed=seed,
        batch_size=batch_size,
        budget=budget,
        tolerance=tolerance,
        pixel_std=pixel_std,
        progress=progress,
    )
    order = scores.argsort(descending=True, stable=True).cpu()
    _check_size(k, len(order))
    if diversity is None or not isinstance(chosen, GradientScore):
        return order[:k]
    # The rounding guard keeps 1.1 * 10 from asking for 12.
    candidates = order[: max(k, math.ceil(diversity * k - 1e-9))]
    settings = Settings(Sketch(DIVERSITY_TANGENTS), layers, "l2", params, budget, batch_size, seed)
    features = gradient_features(model, pool, candidates.tolist(), chosen, settings)
    if not bool(features.any()):
        raise QualmsError(
            f"the gradients of {chosen.name} are zero, so none differ; use another score for diversity."
        )
    return candidates[k_center(features, k)]


def _check(pool: Any, k: int, method: Method, diversity: int | float | None, norm: Norm) -> None:
    if not isinstance(k, int) or k < 1:
        raise QualmsError(f"k is {k!r}; it is a number of inputs, 1 or more.")
    if isinstance(pool, DataLoader):
        samplers = (pool.sampler, getattr(pool.batch_sampler, "sampler", None))
        if any(isinstance(sampler, SHUFFLING) for sampler in samplers):
            raise QualmsError(
                "the pool's loader shuffles, so the indices would not identify inputs; make it with shuffle=False."
            )
    if diversity is None:
        return
    if not isinstance(diversity, (int, float)) or not 1 <= diversity < math.inf:
        raise QualmsError(
            f"diversity is {diversity}; it is how many candidates there are for each pick, 1 or more."
        )
    if isinstance(pool, Iterator):
        raise QualmsError(
            "the pool can be read only once, and diversity reads it twice; pass a list or a loader."
        )
    if norm != "l2":
        raise QualmsError(
            f"diversity measures L2 distances between gradients, not {norm}; leave norm out."
        )
    require_gradients(method)


def require_gradients(method: Method) -> None:
    """An error for methods that have no gradients by which inputs could differ."""
    if not isinstance(method, GradientScore):
        raise QualmsError(
            f"diversity needs a gradient score, such as {DEFAULT!r}, and {method.name} is not one."
        )


def _check_size(k: int, inputs: int) -> None:
    if k > inputs:
        raise QualmsError(f"k is {k}, but the pool has {inputs} inputs; ask for fewer.")


def gradient_features(
    model: nn.Module, pool: Any, chosen: Sequence[int], method: GradientScore, settings: Settings
) -> Float[Tensor, "n f"]:
    """φ(x) = [w_c ⟨s_j, g_c(x)⟩]_{c,j} / sqrt(k) for the chosen inputs, s_j the k random tangents
    of the sketch.

    ‖φ(x) - φ(x')‖² estimates Σ_c ‖w_c g_c(x) - w'_c g_c(x')‖², w_c the weight that the score gives
    to the gradient g_c of class c; a score of one gradient has that alone. `+layers` weighs the
    layers of each g_c, `+smooth` averages it.
    """
    numbers: list[int] = []
    parts: list[Tensor] = []
    learnt, directions = PlanCache(), Directions((method.direction,))
    with preserve_state(model) as inner:
        for some, batch in _gathered(pool, inner, set(chosen)):
            job = GradientRequest(inner, batch, some, settings, directions, method.smooth)
            for sample, logits in sketch_totals(job, method.layers, learnt):
                weights = method.weights_at(logits)
                projections = weights * sample.projections / math.sqrt(len(sample.projections))
                parts.append(projections.movedim(0, -1).flatten(1).float())
            numbers += some
    rows = {number: row for row, number in enumerate(numbers)}
    return torch.cat(parts)[[rows[number] for number in chosen]]


def _gathered(pool: Any, model: nn.Module, chosen: set[int]) -> Iterator[tuple[list[int], Batch]]:
    """The chosen inputs with their numbers, those of equal shapes in one batch."""
    found: dict[Any, list[tuple[list[int], Batch]]] = {}
    for first, batch in numbered_batches(pool, model):
        here = [i for i in range(num_samples(batch)) if first + i in chosen]
        if here:
            part = take_samples(batch, here)
            shapes = tuple(t.shape[1:] for t in batch_tensors(part))
            found.setdefault(shapes, []).append(([first + i for i in here], part))
    for parts in found.values():
        columns = zip(*(batch_tensors(part) for _, part in parts), strict=True)
        yield (
            [n for numbers, _ in parts for n in numbers],
            with_tensors(parts[0][1], map(torch.cat, columns)),
        )


def k_center(features: Float[Tensor, "n f"], k: int) -> list[int]:
    """Row 0, then always the row farthest from all picked so far; of equally far ones the first."""

    def distances(row: int) -> Float[Tensor, " n"]:
        return torch.linalg.vector_norm(features - features[row], dim=1, dtype=torch.double)

    picked, nearest = [0], distances(0)
    while len(picked) < k:
        nearest[picked[-1]] = -1  # no row twice, not even among duplicates
        picked.append(int((nearest == nearest.max()).nonzero()[0]))
        nearest = torch.minimum(nearest, distances(picked[-1]))
    return picked
