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

# What decides random draws, besides the seed: an image's pixels. Rows say so, since an image's
# position decided them in earlier versions.
DRAWS = "by pixels"


@dataclass(frozen=True)
class ScoredImages:
    """The scores of n images, and what the network predicts for them.

    Args:
        scores: by method, the score of each image, [n].
        predicted: the most probable class of each image, [n].
        confidence: the probability of the predicted class, [n].
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
    """Score all images by all methods; only scores that the journal lacks are computed.

    Args:
        network: the network whose uncertainty is scored.
        images: n images, in a fixed order.
        methods: the methods by name.
        journal: saves the scores; scores that it has are not computed again.
        seed: the seed of all random draws.
        engine: the engine of the gradient scores.
        tolerance: the tolerance of the engine, as for `Scorer`; None for its default.
        train: images that methods learn from.
        progress: called with the number of images scored so far, and of all images.

    Returns:
        The scores of all images, old and new, and the network's predictions.
    """
    about = {
        "data": images.name,
        "seed": seed,
        "engine": engine_label(engine, tolerance),
        "draws": DRAWS,
    }
    exactly = {name: describe_parameters(method, train) for name, method in methods.items()}
    rows = _ImageRows(journal, about, exactly)
    # The scorers made so far, by the names of their methods. Usually one is enough; if the journal
    # has some of the scores, batches may lack scores by different methods.
    scorers: dict[tuple[str, ...], ImageScorer] = {}

    def score(batch: ImageBatch) -> Scored:
        """Score a batch by those methods of which the journal has no scores for it."""
        names = rows.missing(batch)
        if names not in scorers:
            missing_methods = {name: methods[name] for name in names}
            scorer = make_scorer(
                network,
                missing_methods,
                train,
                engine=engine,
                seed=seed,
                tolerance=tolerance,
            )
            scorers[names] = ImageScorer(network, scorer)
        return scorers[names].score(batch.images, batch.first)

    report = report_to(progress, images.name, len(images))
    report(0)  # shows the progress bar before the first, slow batch
    score_stream(batches_in_memory(images), score, rows, report)
    return rows.collect(network, images)


class _ImageRows(ScoreRows[ImageBatch]):
    """The rows of one dataset's scores in a journal: a sink to which each batch adds a row."""

    def __init__(
        self, journal: Journal, about: Mapping[str, Any], exactly: Mapping[str, str]
    ) -> None:
        """Store the arguments; no batch is scored yet.

        Args:
            journal: Keeps the rows.
            about: The entries that all rows share: dataset, seed, engine and draws.
            exactly: The description of each method by `describe_parameters`, by name.
        """
        super().__init__(journal, about, exactly)
        # The class probabilities of each batch, [images, classes], by the position of the batch's
        # first image. Batches whose scores were all in the journal are added by `collect`.
        self.probs: dict[int, Tensor] = {}

    def key(self, batch: ImageBatch) -> Mapping[str, Any]:
        """Return the entries that identify a batch's rows, with a fingerprint of its images."""
        images = batch.images.fingerprint()
        return {"row": "scores", **self.about, "first": batch.first, "images": images}

    def measures(self, batch: ImageBatch, scored: Scored) -> dict[str, Any]:
        """Return a batch's scores by method, for its row; keep its probabilities for `collect`."""
        self.probs[batch.first] = scored.probs.cpu()
        return {"scores": {name: values.tolist() for name, values in scored.scores.items()}}

    def collect(self, network: Network, images: Images) -> ScoredImages:
        """Join the scores and predictions of all batches, once all are in the journal.

        Args:
            network: the network; predicts again for batches that an earlier run scored.
            images: all images, as they were passed to `score_images`.
        """
        probs: list[Tensor] = []
        scores_by_method: dict[str, list[float]] = {name: [] for name in self.exactly}
        for batch in batches_in_memory(images):
            # The journal has scores, but no probabilities.
            if batch.first not in self.probs:
                self.probs[batch.first] = network.logits(batch.images).double().softmax(1)
            probs.append(self.probs[batch.first])
            batch_scores = self.scores(batch)
            for name, scores in scores_by_method.items():
                scores.extend(batch_scores[name])
        confidence, predicted = torch.cat(probs).double().max(1)
        return ScoredImages(
            scores={name: np.array(scores) for name, scores in scores_by_method.items()},
            predicted=predicted.numpy(),
            confidence=confidence.numpy(),
            labels=None if images.labels is None else images.labels.numpy(),
        )


def engine_label(engine: Engine | Sketch, tolerance: float | None) -> str:
    """Return the engine's name in rows; it ends with the tolerance, unless that is None or 0."""
    return f"{engine}, tolerance {tolerance:g}" if tolerance else str(engine)


def choose_engine(
    network: Network,
    images: Images,
    methods: Methods,
    engine: Engine | Sketch,
    tolerance: float | None = None,
) -> tuple[Engine | Sketch, float | None]:
    """Find out which engine `auto` stands for, on the first image, so that rows can name it.

    Args:
        network: the network whose uncertainty is scored.
        images: the images to score; the engine is chosen for the first image.
        methods: the methods by name.
        engine: the requested engine, which may be `auto`.
        tolerance: the requested tolerance, as for `Scorer`; None for its default.

    Returns:
        The engine and the tolerance that scores are computed with.
    """
    scorer = make_scorer(network, methods, engine=engine, tolerance=tolerance)
    first_input = network.inputs(images.take(slice(1)))
    settings = scorer.choose_engine(first_input)
    return settings.engine, settings.tolerance


def measure_accuracy(network: Network, images: Images, journal: Journal) -> AccuracyRow:
    """Return the row with the network's accuracy on images; compute it if the journal lacks it."""
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
    """Try each method on two images, with few draws, and keep the methods that work.

    Args:
        network: the network whose uncertainty is scored.
        images: at least two images.
        methods: the methods by name.
        train: images that methods learn from; None if there are none.

    Returns:
        The methods that work, by name, and a row with the reason for each method that does not.
    """
    two_inputs = network.inputs(images.take(slice(0, 2)))
    # Methods learn batch by batch: two batches try that, and take little time.
    few_train_images = None if train is None else train.take(slice(0, 2 * FORWARD_BATCH))

    def try_method(name: str, method: Method) -> None:
        """Score two images by a method; raise a QualmsError if the network does not support it."""
        scorer = make_scorer(network, {name: method.quick()}, few_train_images)
        scorer(two_inputs)

    return keep_usable(methods, try_method)


def describe_parameters(method: Method, train: Images | None) -> str:
    """Describe a method with all its parameters, as a text that tells when to compute again.

    A saved score is used again only if its row has an equal description. A method that learns from
    training images is described with their fingerprint, as other images give other scores.

    Args:
        method: the method.
        train: images that methods learn from; None if there are none.
    """
    if train is not None and TRAINING_DATA in method.needs:
        return f"{method!r} on {train.fingerprint()}"
    return repr(method)
