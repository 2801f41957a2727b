"""Detection of unknown objects by scores of pixels, over the pixels of all images together."""

from collections.abc import Collection
from typing import Any

import numpy as np

from qualms.errors import QualmsError
from qualms.metrics.checks import Bools, Floats, array
from qualms.metrics.ranking import aupr, auroc, fpr95


def pixel_metrics(
    scores: Any, labels: Any, unknown: int | Collection[int], ignore_index: int = 255
) -> dict[str, float]:
    """Compute `auroc`, `aupr` and `fpr95` of all pixels in one ranking, unknown pixels positive.

    Nothing is averaged over images, so large objects count for more than small ones.

    Args:
        scores: A number per pixel, such as `Scorer(model, "entropy",
            class_dim=1)(x).scores["entropy"]`.
        labels: The class of each pixel, of the same shape.
        unknown: The label, or the labels, of what the model was not trained on.
        ignore_index: The label of pixels that do not count. Only their scores may be NaN.

    Returns:
        The three measures by name.

    Example:
        ```python
        from qualms.metrics import pixel_metrics

        scores = [[[0.1, 0.2, 0.9], [0.4, float("nan"), 0.3]]]  # one image of two by three pixels
        labels = [[[0, 3, 254], [1, 255, 254]]]
        found = pixel_metrics(scores, labels, unknown=254)
        assert found["auroc"] == 5 / 6 and found["fpr95"] == 1 / 3
        ```
    """
    ranked, positive = rank_pixels(scores, labels, unknown, ignore_index)
    inside, outside = ranked[~positive], ranked[positive]
    return {
        "auroc": auroc(inside, outside),
        "aupr": aupr(inside, outside),
        "fpr95": fpr95(inside, outside),
    }


def rank_pixels(
    scores: Any, labels: Any, unknown: int | Collection[int], ignore_index: int
) -> tuple[Floats, Bools]:
    """Select the scores of all pixels that count, and whether each is unknown, both of shape [n].

    Raises an error if one of these scores is not finite, or if all or no pixels are unknown.

    Args:
        scores: A number per pixel.
        labels: The class of each pixel, of the same shape.
        unknown: The label, or the labels, of unknown objects.
        ignore_index: The label of pixels that do not count.
    """
    given = array(scores, "scores").astype(np.float64)
    classes = array(labels, "labels")
    if given.shape != classes.shape or classes.dtype.kind == "f":
        raise QualmsError(
            f"scores have shape {given.shape}, and labels have shape {classes.shape} and type "
            f"{classes.dtype}; pass one score and one integer class per pixel."
        )
    strange = list(unknown) if isinstance(unknown, Collection) else [unknown]
    if ignore_index in strange:
        raise QualmsError(
            f"label {ignore_index} is both unknown and ignored; choose another ignore_index."
        )
    counts = classes != ignore_index
    bad = counts & ~np.isfinite(given)
    if bad.any():
        place = tuple(np.argwhere(bad)[0].tolist())
        raise QualmsError(
            f"the score of pixel {place} is NaN or infinite, and its label {classes[place]} is not "
            f"ignored; label such pixels {ignore_index}."
        )
    positive = np.isin(classes[counts], strange)
    if positive.all() or not positive.any():
        which = f"no pixels labeled {strange}"
        if positive.size and positive.all():
            which = "no known pixels"
        raise QualmsError(f"there are {which}, so AUROC is undefined; pass more images.")
    return given[counts], positive
