"""`score`, `score_with_error` and `compare`: a `Scorer` for a single call."""

from collections.abc import Iterable
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from qualms.gradients.input_data import DATASET_BATCH
from qualms.gradients.layers import Granularity, Norm, Params
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, Methods, PixelStd
from qualms.progress import Progress, ProgressLine
from qualms.scorer import Scorer


class ScorerOptions(TypedDict, total=False):
    """The keyword arguments that `score`, `compare`, `score_with_error` and `select` pass on to
    `Scorer`, which documents them.
    """

    train: Any
    models: Iterable[nn.Module]
    engine: Engine | Sketch
    layers: Granularity
    norm: Norm
    params: Params
    seed: int
    batch_size: int | None
    budget: int | None
    tolerance: float | None
    pixel_std: PixelStd


def score(
    model: nn.Module,
    x: Any,
    method: str | Method = DEFAULT,
    *,
    progress: Progress = False,
    **options: Unpack[ScorerOptions],
) -> Float[Tensor, " b"]:
    """Compute how uncertain the model is about each input; higher always means more uncertain.

    Args:
        model: any classifier that returns logits. It is left unchanged; evaluation mode is used
            inside.
        x: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
            (labels are ignored).
        method: a spec such as `"exgrad+layers(0.4)"`, or a method object; the paper's REGrad* by
            default.
        progress: True to show count, rate and time left on the terminal, or a function that is
            called with the number of inputs that are done.
        options: `train`, `models`, `engine`, `layers`, `norm`, `params`, `seed`, `batch_size`,
            `budget`, `tolerance` and `pixel_std`, as for `Scorer`.

    Returns:
        One number for each input, in their order.

    Example:
        ```python
        import torch
        import qualms

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x))
        print(qualms.score(model, x, "exgrad+layers(0.4)"))
        ```
    """
    require_options("score", options)
    scorer = Scorer(model, method, **options)
    return next(iter(_score_all(scorer, x, progress).values()))


def score_with_error(
    model: nn.Module,
    x: Any,
    method: str | Method = DEFAULT,
    **options: Unpack[ScorerOptions],
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Compute scores with their standard errors, if they are estimated: by `engine="sketch"`, or
    within a `tolerance`.

    The random tangents of a sketch are shared by all inputs, so most of the error is common to the
    inputs: rankings are more reliable than the errors suggest.

    Args:
        model: as for `score`.
        x: as for `score`.
        method: as for `score`.
        options: as for `score`.

    Returns:
        The scores, and their standard errors; 0 where scores are exact.

    Example:
        ```python
        import torch
        import qualms

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        scores, errors = qualms.score_with_error(model, x, engine="sketch")
        print(errors / scores)
        ```
    """
    require_options("score_with_error", options)
    scored = Scorer(model, method, **options)(x)
    return next(iter(scored.scores.values())), next(iter(scored.errors.values()))


def compare(
    model: nn.Module,
    x: Any,
    methods: Methods,
    *,
    progress: Progress = False,
    **options: Unpack[ScorerOptions],
) -> dict[str, Float[Tensor, " b"]]:
    """Compute several scores of the same inputs, sharing each expensive pass among the scores that
    need it.

    Args:
        model: as for `score`.
        x: as for `score`.
        methods: specs or method objects; a dict gives them names of your own.
        progress: as for `score`.
        options: as for `score`.

    Returns:
        The scores by spec, or by your names, in the order of `methods`.

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
    require_options("compare", options)
    return _score_all(Scorer(model, methods, **options), x, progress)


def require_options(function: str, options: ScorerOptions) -> None:
    """Raise a TypeError, as Python would, for a keyword argument that is not a `ScorerOptions`.

    Without this check `Scorer` would take arguments that the function does not have, or would raise
    the error in its own name.

    Args:
        function: the name of the function that the user called, for the error.
        options: the keyword arguments that the user passed.
    """
    for name in options:
        if name not in ScorerOptions.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _score_all(scorer: Scorer, x: Any, progress: Progress) -> dict[str, Float[Tensor, " b"]]:
    """Return the scores of all inputs by method, and report progress.

    Only the scores of a batch are kept, not its probabilities, which may need much memory.

    Args:
        scorer: the scorer of the model.
        x: the inputs, as `score` takes them.
        progress: as for `score`.
    """
    batch_scores: list[dict[str, Tensor]] = []
    num_done = 0
    line = ProgressLine(progress, total=_count_inputs(x))
    line.start()
    for scored in scorer.stream(_split(x) if progress else x):
        batch_scores.append(scored.scores)
        num_done += len(scored)
        line.update(num_done)
    line.end()
    scores_by_method: dict[str, Tensor] = {}
    for name in scorer.methods:
        scores_by_method[name] = torch.cat([scores[name] for scores in batch_scores])
    return scores_by_method


def _split(x: Any) -> Any:
    """Split an array into batches, after each of which progress is reported; return others as is."""
    if not isinstance(x, (Tensor, np.ndarray)) or x.ndim == 0 or len(x) <= DATASET_BATCH:
        return x
    return [x[start : start + DATASET_BATCH] for start in range(0, len(x), DATASET_BATCH)]


def _count_inputs(x: Any) -> int | None:
    """Return the number of inputs in `x`, as `score` takes it; None if it is not known yet."""
    try:
        if isinstance(x, DataLoader):
            # The sampler may leave out or repeat inputs of the dataset.
            return len(x.sampler)  # type: ignore[arg-type]
        if isinstance(x, (Tensor, np.ndarray, Dataset)):
            return len(x)  # type: ignore[arg-type]
        if isinstance(x, list) and all(isinstance(b, (Tensor, np.ndarray)) for b in x):
            return sum(len(batch) for batch in x)
    except TypeError:
        # Datasets and samplers of streams have no length.
        pass
    return None
