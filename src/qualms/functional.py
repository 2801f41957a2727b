"""`score`, `score_with_error` and `compare`: a `Scorer` for a single call."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from qualms.gradients.input_data import DATASET_BATCH
from qualms.gradients.layers import Granularity, Norm, Params
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.chosen import Methods, PixelStd
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT
from qualms.progress import Count, Progress
from qualms.scorer import Scorer


def score(
    model: nn.Module,
    x: Any,
    method: str | Method = DEFAULT,
    *,
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
) -> Float[Tensor, " b"]:
    """How uncertain the model is about each input; higher means more uncertain, always.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used
            inside.
        x: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
            (labels are ignored).
        method: a spec such as `"exgrad+layers(0.4)"`, or a method object; the paper's REGrad* by
            default.
        train: training inputs; this and all that follows as for `Scorer`.
        models: further members, for `ensemble`.
        engine: how class gradients are computed: `exact`, `sketch`, `auto` or `reference`.
        layers: what `+layers` counts: `module`, `tensor` or `block`.
        norm: of the gradients, `l2` or `l1`.
        params: which parameters count.
        seed: decides every random draw, together with an input's number.
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

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x))
        print(qualms.score(model, x, "exgrad+layers(0.4)"))
        ```
    """
    scorer = Scorer(
        model,
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
    )
    return next(iter(_all_scores(scorer, x, progress).values()))


def score_with_error(
    model: nn.Module,
    x: Any,
    method: str | Method = DEFAULT,
    *,
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
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Scores, and the standard errors of those that are estimates: by `engine="sketch"`, or within
    a `tolerance`.

    The tangents are shared by all inputs, so most of the error is common to them: rankings are more
    reliable than it suggests. Arguments as for `score`.

    Example:
        ```python
        import torch
        import qualms

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        scores, errors = qualms.score_with_error(model, x, engine="sketch")
        print(errors / scores)
        ```
    """
    found = Scorer(
        model,
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
    )(x)
    return next(iter(found.scores.values())), next(iter(found.errors.values()))


def compare(
    model: nn.Module,
    x: Any,
    methods: Methods,
    *,
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
) -> dict[str, Float[Tensor, " b"]]:
    """Several scores of the same inputs, each expensive pass shared by all that need it.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used
            inside.
        x: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
            (labels are ignored).
        methods: specs or method objects; a dict gives them names of your own.
        train: training inputs; this and all that follows as for `Scorer`.
        models: further members, for `ensemble`.
        engine: how class gradients are computed: `exact`, `sketch`, `auto` or `reference`.
        layers: what `+layers` counts: `module`, `tensor` or `block`.
        norm: of the gradients, `l2` or `l1`.
        params: which parameters count.
        seed: decides every random draw, together with an input's number.
        batch_size: the most inputs to run at once.
        budget: bytes that the work on one chunk of inputs may take.
        tolerance: the share of its value that a score may be off by, to save passes (see `Scorer`).
        pixel_std: what pixels from 0 to 1 were divided by, if noise in specs is to be in pixels
            (see `Scorer`).
        progress: True for count, rate and time left on the terminal, or a function that is told how
            many are done.

    Returns:
        The scores by spec or by your name, in the order given.

    Example:
        ```python
        import torch
        import qualms

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        scores = qualms.compare(model, x, ["regrad+layers", "entropy", "energy"])
        for method, values in scores.items():
            print(method, values)
        ```
    """
    scorer = Scorer(
        model,
        methods,
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
    )
    return _all_scores(scorer, x, progress)


def _all_scores(scorer: Scorer, x: Any, progress: Progress) -> dict[str, Float[Tensor, " b"]]:
    """The scores alone: the probabilities of a large pool and many classes need not be held."""
    parts: list[dict[str, Tensor]] = []
    done, count = 0, Count(progress, _total(x))
    count.start()
    for part in scorer.stream(_in_parts(x) if progress else x):
        parts.append(part.scores)
        done += len(part)
        count.tell(done)
    count.end()
    return {name: torch.cat([part[name] for part in parts]) for name in scorer.methods}


def _in_parts(x: Any) -> Any:
    """One large batch as several, so that there is something to tell; scores do not depend on it."""
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim == 0 or len(x) <= DATASET_BATCH:
        return x
    return [x[start : start + DATASET_BATCH] for start in range(0, len(x), DATASET_BATCH)]


def _total(x: Any) -> int | None:
    """How many inputs there are, where that is known before they are read."""
    try:
        if isinstance(x, DataLoader):
            return len(x.sampler)  # type: ignore[arg-type]
        if isinstance(x, list):
            return (
                sum(len(batch) for batch in x)
                if all(isinstance(b, (Tensor, np.ndarray)) for b in x)
                else None
            )
        if isinstance(x, (Tensor, np.ndarray, Dataset)):
            return len(x)  # type: ignore[arg-type]
        return None
    except TypeError:
        return None
