"""Out-of-distribution detection: can scores detect images of other datasets?"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from qualms.data import Images
from qualms.gradients.settings import Engine, Sketch
from qualms.metrics import aupr, auroc, fpr95, interval
from qualms.progress import ProgressFn
from qualms.stream.network import Network
from qualms.tasks.image_scores import (
    DRAWS,
    choose_engine,
    engine_label,
    parameters,
    score_images,
)
from qualms.tasks.journal import Journal
from qualms.tasks.row_measures import OodMeasures
from qualms.tasks.rows import OodKey, OodRow
from qualms.tasks.score_rows import Methods


def ood(
    network: Network,
    inside: Images,
    outside: Sequence[Images],
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Engine | Sketch = "exact",
    tolerance: float | None = None,
    train: Images | None = None,
    progress: ProgressFn | None = None,
) -> Iterator[OodRow]:
    """Measure how well scores distinguish other datasets from the one that the network knows.

    The other dataset is the positive class, and the score predicts it; `aupr_in` swaps both.
    Measures are shares, not percentages.

    Args:
        network: The network that is scored.
        inside: Images of the dataset that the network knows.
        outside: Images of other datasets.
        methods: The methods by the names that rows have, with noise for pixels in [0, 1].
        journal: Saves the rows; rows that it has are not computed again.
        seed: The seed of all random draws.
        engine: How gradient scores are computed.
        tolerance: The tolerance of the engine, as for `Scorer`; None for its default.
        train: Training images, for the methods that need some.
        progress: Called with the number of images that are scored.

    Yields:
        For each other dataset and method, a row with AUROC and its 95 % interval, AUPR with either
        dataset as the positive class, and FPR95.
    """
    engine, tolerance = choose_engine(network, inside, methods, engine, tolerance)
    scored = []
    others = [resize_like(network, inside, other) for other in outside]
    for images in (inside, *others):
        scored_images = score_images(
            network,
            images,
            methods,
            journal,
            seed=seed,
            engine=engine,
            tolerance=tolerance,
            train=train,
            progress=progress,
        )
        scored.append(scored_images.scores)
    inside_scores = scored[0]
    for images, scores in zip(others, scored[1:], strict=True):
        for name, method in methods.items():
            key: OodKey = {
                "row": "ood",
                "in": inside.name,
                "out": images.name,
                "method": name,
                "exactly": parameters(method, train),
                "seed": seed,
                "engine": engine_label(engine, tolerance),
                "draws": DRAWS,
                "n_in": len(inside),
                "n_out": len(images),
                "images": f"{inside.fingerprint()} {images.fingerprint()}",
            }
            yield journal.get_or_add(key, partial(_row, key, inside_scores[name], scores[name]))


def resize_like(network: Network, inside: Images, other: Images) -> Images:
    """Resize another dataset's images to the size of the images that the network knows.

    Args:
        network: The network. If its transform has yet to resize `inside`, batch by batch, it will
            resize the other images, too, and they are returned unchanged.
        inside: Images that the network knows.
        other: The images to resize.
    """
    if network.transform is None:
        return other.convert(inside.pixels.shape[1], inside.size)
    if inside.size == network.transform.size:
        return network.transform.apply(other)
    return other


def _row(key: OodKey, inside: np.ndarray, outside: np.ndarray) -> OodRow:
    """Measure how well one method's scores tell two datasets apart, as a row.

    Args:
        key: The keys that identify the row.
        inside: A score for each image of the dataset that the network knows, [n].
        outside: A score for each image of the other dataset, [m].
    """
    return OodRow(**key, **_measures(inside, outside))


def _measures(inside: np.ndarray, outside: np.ndarray) -> OodMeasures:
    """Measure how well scores tell two datasets apart.

    Args:
        inside: A score for each image of the dataset that the network knows, [n].
        outside: A score for each image of the other dataset, the positive class, [m].

    Returns:
        AUROC with its 95 % interval, AUPR with either dataset as the positive class, and FPR95.
    """
    low, high = interval(auroc, inside, outside)
    return {
        "auroc": auroc(inside, outside),
        "auroc_low": low,
        "auroc_high": high,
        "aupr_out": aupr(inside, outside),
        "aupr_in": aupr(inside, outside, positive="in"),
        "fpr95": fpr95(inside, outside),
    }
