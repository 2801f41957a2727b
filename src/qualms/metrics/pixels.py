"""Detection of unknown objects by scores of pixels, over the pixels of all images together."""

from collections.abc import Collection
from typing import Any

import numpy as np

from qualms.errors import QualmsError
from qualms.metrics.checks import Bools, Floats, array
from qualms.metrics.ranking import aupr, auroc, fpr95


def pixel_metrics(
    scores: Any,
    labels: Any,
    unknown: int | Collection[int],
    ignore_index: int = 255,
) -> dict[str, float]:
    """Compute how well scores separate pixels of unknown objects from others: `auroc`, `aupr` and
    `fpr95`, with unknown pixels as the positive class.

    The pixels of all images are ranked together, so large objects count for more than small ones.

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
    pixel_scores, is_unknown = _select_pixels(scores, labels, unknown, ignore_index)
    known_scores, unknown_scores = pixel_scores[~is_unknown], pixel_scores[is_unknown]
    return {
        "auroc": auroc(known_scores, unknown_scores),
        "aupr": aupr(known_scores, unknown_scores),
        "fpr95": fpr95(known_scores, unknown_scores),
    }


def _select_pixels(
    scores: Any,
    labels: Any,
    unknown: int | Collection[int],
    ignore_index: int,
) -> tuple[Floats, Bools]:
    """Select the pixels that are not ignored.

    Args:
        scores: A number per pixel.
        labels: The class of each pixel, of the same shape.
        unknown: The label, or the labels, of unknown objects.
        ignore_index: The label of pixels that are ignored.

    Returns:
        The scores of the selected pixels, and whether each is unknown, both of shape [n].

    Raises:
        QualmsError: If one of these scores is not finite, or if all or none of the selected pixels
            are unknown.
    """
    pixel_scores = array(scores, "scores").astype(np.float64)
    classes = array(labels, "labels")
    if pixel_scores.shape != classes.shape or classes.dtype.kind == "f":
        raise QualmsError(
            f"scores have shape {pixel_scores.shape}, and labels have shape {classes.shape} and "
            f"type {classes.dtype}; pass one score and one integer class per pixel."
        )
    unknown_labels = list(unknown) if isinstance(unknown, Collection) else [unknown]
    if ignore_index in unknown_labels:
        raise QualmsError(
            f"label {ignore_index} is both unknown and ignored; choose another ignore_index."
        )
    is_selected = classes != ignore_index
    is_bad = is_selected & ~np.isfinite(pixel_scores)
    if is_bad.any():
        pixel = tuple(np.argwhere(is_bad)[0].tolist())
        raise QualmsError(
            f"the score of pixel {pixel} is NaN or infinite, and its label {classes[pixel]} is not "
            f"ignored; label such pixels {ignore_index}."
        )
    is_unknown = np.isin(classes[is_selected], unknown_labels)
    if is_unknown.all() or not is_unknown.any():
        missing = f"no pixels labeled {unknown_labels}"
        # `all` is also true of an empty array, which has a size of 0.
        if is_unknown.size and is_unknown.all():
            missing = "no known pixels"
        raise QualmsError(f"there are {missing}, so AUROC is undefined; pass more images.")
    return pixel_scores[is_selected], is_unknown
