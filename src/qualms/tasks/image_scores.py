"""Scores of images for tasks, kept in a journal: no batch is scored twice by the same method."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.method import TRAINING_DATA, Method
from qualms.progress import ProgressFn
from qualms.result import Scored
from qualms.stream.image_scorer import ImageScorer, make_scorer
from qualms.stream.network import Network
from qualms.stream.sink import report_to, score_stream
from qualms.stream.sizes import FORWARD_BATCH
from qualms.stream.source import ImageBatch, batches_in_memory
from qualms.tasks.journal import Journal
from qualms.tasks.rows import AccuracyKey, AccuracyRow, LeftOutRow
from qualms.tasks.score_rows import Methods, ScoreRows, keep_usable

# What random draws follow, beside the seed: an image's pixels. Rows say so, since draws followed an
# image's position in earlier versions.
DRAWS = "by pixels"


@dataclass(frozen=True)
class ScoredImages:
    """The scores of n images, and what the network predicts for them.

    Args:
        scores: [n], by method.
        predicted: the most probable class, [n].
        confidence: its probability, [n].
        labels: the true class, [n]; None if it is not known.
    """

    scores: dict[str, np.ndarray]
    predicted: np.ndarray
    confidence: np.ndarray
    labels: np.ndarray | None

    @property
    def correct(self) -> np.ndarray:
        """Whether each prediction is right, [n]."""
        if self.labels is None:
            raise QualmsError(
                "these images have no labels, so it is not known which predictions are right."
            )
        return self.predicted == self.labels


def score_images(
    network: Network,
    images: Images,
    methods: Methods,
    journal: Journal,
    *,
    seed: int = 0,
    engine: Engine | Sketch = "exact",
    tolerance: float | None = None,
    train: Images | None = None,
    progress: ProgressFn | None = None,
) -> ScoredImages:
    """Return the scores of all images by all methods; compute those that the journal lacks.

    Args:
        network: what scores them.
        images: in a fixed order.
        methods: by name.
        journal: rows of scores, which are not computed again.
        seed: of all random draws.
        engine: of the gradient scores.
        tolerance: as for `Scorer`; None for its default.
        train: images that methods learn from.
        progress: called with the number of images that are scored.
    """
    about = {
        "data": images.name,
        "seed": seed,
        "engine": engine_label(engine, tolerance),
        "draws": DRAWS,
    }
    exactly = {name: parameters(method, train) for name, method in methods.items()}
    rows = _ImageRows(journal, about, exactly)
    scorers: dict[tuple[str, ...], ImageScorer] = {}

    def score(batch: ImageBatch) -> Scored:
        names = rows.missing(batch)
        if names not in scorers:
            wanted = {name: methods[name] for name in names}
            scorer = make_scorer(
                network, wanted, train, engine=engine, seed=seed, tolerance=tolerance
            )
            scorers[names] = ImageScorer(network, scorer)
        return scorers[names].score(batch.images, batch.first)

    report = report_to(progress, images.name, len(images))
    report(0)
    score_stream(batches_in_memory(images), score, rows, report)
    return rows.collect(network, images)


class _ImageRows(ScoreRows[ImageBatch]):
    """The rows of scores of one dataset."""

    def __init__(
        self, journal: Journal, about: Mapping[str, Any], exactly: Mapping[str, str]
    ) -> None:
        super().__init__(journal, about, exactly)
        self.probs: dict[int, Tensor] = {}  # of the batches that were scored now, by first image

    def key(self, batch: ImageBatch) -> Mapping[str, Any]:
        images = batch.images.fingerprint()
        return {"row": "scores", **self.about, "first": batch.first, "images": images}

    def measures(self, batch: ImageBatch, scored: Scored) -> dict[str, Any]:
        self.probs[batch.first] = scored.probs.cpu()
        return {"scores": {name: values.tolist() for name, values in scored.scores.items()}}

    def collect(self, network: Network, images: Images) -> ScoredImages:
        """Return all scores, once all batches have passed.

        Args:
            network: predicts the classes of batches that an earlier run has scored.
            images: that passed.
        """
        probs: list[Tensor] = []
        parts: dict[str, list[float]] = {name: [] for name in self.exactly}
        for batch in batches_in_memory(images):
            if batch.first not in self.probs:
                self.probs[batch.first] = network.logits(batch.images).double().softmax(1)
            probs.append(self.probs[batch.first])
            scores = self.scores(batch)
            for name, values in parts.items():
                values.extend(scores[name])
        confidence, predicted = torch.cat(probs).double().max(1)
        found = {name: np.array(values) for name, values in parts.items()}
        labels = None if images.labels is None else images.labels.numpy()
        return ScoredImages(found, predicted.numpy(), confidence.numpy(), labels)


def engine_label(engine: Engine | Sketch, tolerance: float | None) -> str:
    """Return the engine's name in rows, which includes the tolerance."""
    return f"{engine}, tolerance {tolerance:g}" if tolerance else str(engine)


def choose_engine(
    network: Network,
    images: Images,
    methods: Methods,
    engine: Engine | Sketch,
    tolerance: float | None = None,
) -> tuple[Engine | Sketch, float | None]:
    """Resolve `auto` on the first image, so that rows can name the engine.

    Args:
        network: what scores the images.
        images: of which the first decides.
        methods: by name.
        engine: that was asked for.
        tolerance: as for `Scorer`; None for its default.

    Returns:
        The engine and the tolerance that scores will have.
    """
    scorer = make_scorer(network, methods, engine=engine, tolerance=tolerance)
    settings = scorer.choose_engine(network.inputs(images.take(slice(1))))
    return settings.engine, settings.tolerance


def accuracy_row(network: Network, images: Images, journal: Journal) -> AccuracyRow:
    """Return the network's accuracy on labeled images, computed once."""
    key: AccuracyKey = {
        "row": "accuracy",
        "data": images.name,
        "n": len(images),
        "images": images.fingerprint(),
    }
    return journal.get_or_add(key, lambda: AccuracyRow(**key, accuracy=network.accuracy(images)))


def select_usable(
    network: Network, images: Images, methods: Methods, train: Images | None
) -> tuple[dict[str, Method], list[LeftOutRow]]:
    """Try each method, cheaply, on two images.

    Args:
        network: what scores them.
        images: at least two.
        methods: by name.
        train: images that methods learn from; None if there are none.

    Returns:
        The methods that work, and a row with the reason for each other one.
    """
    x = network.inputs(images.take(slice(0, 2)))
    few = None if train is None else train.take(slice(0, 2 * FORWARD_BATCH))

    def try_method(name: str, method: Method) -> None:
        make_scorer(network, {name: method.quick()}, few)(x)

    return keep_usable(methods, try_method)


def parameters(method: Method, train: Images | None) -> str:
    """Return as text what decides a method's scores besides network, image and seed."""
    if train is not None and TRAINING_DATA in method.needs:
        return f"{method!r} on {train.fingerprint()}"
    return repr(method)
