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
    describe_parameters,
    engine_label,
    score_images,
)
from qualms.tasks.journal import Journal
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

    A method detects the other dataset, the positive class, by high scores; for `aupr_in` the
    positive class is the known dataset. Measures are from 0 to 1, not in percent.

    Args:
        network: The network that is scored.
        inside: Images of the dataset that the network knows.
        outside: Images of other datasets.
        methods: The methods by the names that rows have, with noise levels for pixels in [0, 1].
        journal: Saves the rows; rows that it has are not computed again.
        seed: The seed of all random draws.
        engine: How gradient scores are computed.
        tolerance: The tolerance of the engine, as for `Scorer`; None for its default.
        train: Training images, for the methods that need some.
        progress: Called with the number of images scored so far, and of all images.

    Yields:
        For each other dataset and method, a row with AUROC and its 95 % interval, AUPR with either
        dataset as the positive class, and FPR95.
    """
    # The engine that `auto` stands for, so that rows name it.
    engine, tolerance = choose_engine(network, inside, methods, engine, tolerance)
    resized_outside = [resize_like(network, inside, images) for images in outside]
    scores_of_datasets: list[dict[str, np.ndarray]] = []
    for images in (inside, *resized_outside):
        scored = score_images(
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
        scores_of_datasets.append(scored.scores)
    inside_scores, *outside_scores = scores_of_datasets
    for images, scores in zip(resized_outside, outside_scores, strict=True):
        for name, method in methods.items():
            key: OodKey = {
                "row": "ood",
                "in": inside.name,
                "out": images.name,
                "method": name,
                "exactly": describe_parameters(method, train),
                "seed": seed,
                "engine": engine_label(engine, tolerance),
                "draws": DRAWS,
                "n_in": len(inside),
                "n_out": len(images),
                "images": f"{inside.fingerprint()} {images.fingerprint()}",
            }
            measure = partial(_measure_row, key, inside_scores[name], scores[name])
            yield journal.get_or_add(key, measure)


def resize_like(network: Network, inside: Images, other: Images) -> Images:
    """Give another dataset's images the size of those that the network knows, where that is needed.

    Args:
        network: The network. Its transform, if it has one, resizes images as they are scored.
        inside: Images that the network knows.
        other: The images to resize.

    Returns:
        The resized images; `other` itself if the transform resizes both datasets later.
    """
    if network.transform is None:
        return other.convert(inside.pixels.shape[1], inside.size)
    # `inside` already has the size of the network's inputs, so `other` gets it here.
    if inside.size == network.transform.size:
        return network.transform.apply(other)
    return other


def _measure_row(key: OodKey, inside: np.ndarray, outside: np.ndarray) -> OodRow:
    """Measure how well one method's scores tell two datasets apart.

    Args:
        key: The entries that identify the row, such as the method and the datasets.
        inside: A score for each of the n images of the dataset that the network knows, [n].
        outside: A score for each of the m images of the other dataset, the positive class, [m].

    Returns:
        The entries of `key`, and AUROC with its 95 % interval, AUPR with either dataset as the
        positive class, and FPR95.
    """
    low, high = interval(auroc, inside, outside)
    return OodRow(
        **key,
        auroc=auroc(inside, outside),
        auroc_low=low,
        auroc_high=high,
        aupr_out=aupr(inside, outside),
        aupr_in=aupr(inside, outside, positive="in"),
        fpr95=fpr95(inside, outside),
    )
