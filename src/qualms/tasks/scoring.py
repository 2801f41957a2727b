"""Scores of images for tasks, kept in a journal: no batch is scored twice by the same method."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.functional import compare
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.method import TRAINING_DATA, Method
from qualms.progress import ProgressFn
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import InputBatches, Network
from qualms.stream.sink import report_to, score_stream
from qualms.stream.sizes import FORWARD_BATCH
from qualms.stream.source import ImageBatch, batches_in_memory
from qualms.tasks.journal import Journal
from qualms.tasks.rows import (
    AccuracyKey,
    AccuracyRow,
    LeftOutRow,
    ScoresKey,
    ScoresRow,
)

# What random draws follow, beside the seed: an image's pixels. Rows say so, since draws followed an
# image's position in earlier versions.
DRAWS = "by pixels"
Methods = Mapping[str, Method]  # by their names in rows; noise is for pixels in [0, 1]


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
    """The scores of all images by all methods; those that the journal lacks are computed.

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
    rows = _ScoreRows(
        journal,
        {
            "row": "scores",
            "data": images.name,
            "seed": seed,
            "engine": engine_label(engine, tolerance),
            "draws": DRAWS,
            "first": 0,
            "images": "",
        },
        {name: parameters(method, train) for name, method in methods.items()},
    )
    scorers: dict[tuple[str, ...], ImageScorer] = {}

    def score(batch: ImageBatch) -> Scored:
        names = rows.missing(batch)
        if names not in scorers:
            scorers[names] = make_scorer(names)
        return scorers[names].score(batch.images, batch.first)

    def make_scorer(names: tuple[str, ...]) -> ImageScorer:
        wanted = {name: network.scale_noise(methods[name]) for name in names}
        learns = any(TRAINING_DATA in method.needs for method in wanted.values())
        scorer = Scorer(
            network.model,
            wanted,
            train=InputBatches(network, train) if train is not None and learns else None,
            models=network.members,
            engine=engine,
            seed=seed,
            tolerance=tolerance,
        )
        return ImageScorer(network, scorer)

    report = report_to(progress, images.name, len(images))
    report(0)
    score_stream(batches_in_memory(images), score, rows, report)
    return rows.collect(network, images)


class _ScoreRows:
    """The rows of scores in a journal, as a sink: a row for each batch.

    Args:
        journal: holds the rows.
        about: the key of all rows, but for the batch.
        exactly: all parameters of each method, by name. Rows of other parameters are not used.
    """

    def __init__(self, journal: Journal, about: ScoresKey, exactly: dict[str, str]) -> None:
        self.journal, self.about, self.exactly = journal, about, exactly
        self.scores: dict[int, dict[str, list[float]]] = {}  # by first image, then by method
        self.probs: dict[int, Tensor] = {}  # by first image, of the batches that were scored now
        self.began = 0.0

    def missing(self, batch: ImageBatch) -> tuple[str, ...]:
        """The methods by which a batch has no scores yet."""
        if batch.first not in self.scores:
            self.scores[batch.first] = self._read(batch)
        known = self.scores[batch.first]
        return tuple(name for name in self.exactly if name not in known)

    def has(self, batch: ImageBatch) -> bool:
        """Whether a batch has scores by all methods."""
        self.began = time.perf_counter()
        return not self.missing(batch)

    def write(self, batch: ImageBatch, scored: Scored | None) -> None:
        """Add the row of a batch."""
        assert scored is not None
        seconds = round(time.perf_counter() - self.began, 3)
        scores = {name: values.tolist() for name, values in scored.scores.items()}
        methods = {name: self.exactly[name] for name in scores}
        key = self._key(batch)
        self.journal.add(ScoresRow(**key, methods=methods, seconds=seconds, scores=scores))
        self.scores[batch.first] |= scores
        self.probs[batch.first] = scored.probs.cpu()

    def collect(self, network: Network, images: Images) -> ScoredImages:
        """All scores, once all batches have passed.

        Args:
            network: predicts the classes of batches that an earlier run has scored.
            images: that passed.
        """
        probs = []
        for batch in batches_in_memory(images):
            if batch.first not in self.probs:
                self.probs[batch.first] = network.logits(batch.images).double().softmax(1)
            probs.append(self.probs[batch.first])
        confidence, predicted = torch.cat(probs).double().max(1)
        scores = {}
        for name in self.exactly:
            parts = [np.array(self.scores[first][name]) for first in sorted(self.scores)]
            scores[name] = np.concatenate(parts)
        labels = None if images.labels is None else images.labels.numpy()
        return ScoredImages(scores, predicted.numpy(), confidence.numpy(), labels)

    def _key(self, batch: ImageBatch) -> ScoresKey:
        return {**self.about, "first": batch.first, "images": batch.images.fingerprint()}

    def _read(self, batch: ImageBatch) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for row in self.journal.where(**self._key(batch)):
            for name, scores in row["scores"].items():
                if row["methods"][name] == self.exactly.get(name):
                    found[name] = scores
        return found


def engine_label(engine: Engine | Sketch, tolerance: float | None) -> str:
    """The engine's name in rows: scores within another tolerance are other scores."""
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
    own = {name: network.scale_noise(method) for name, method in methods.items()}
    scorer = Scorer(network.model, own, engine=engine, tolerance=tolerance)
    settings = scorer.choose_engine(network.inputs(images.take(slice(1))))
    return settings.engine, settings.tolerance


def accuracy_row(network: Network, images: Images, journal: Journal) -> AccuracyRow:
    """The network's accuracy on labeled images, computed once."""
    key: AccuracyKey = {
        "row": "accuracy",
        "data": images.name,
        "n": len(images),
        "images": images.fingerprint(),
    }
    known = journal.where(**key)
    if known:
        return known[0]
    return journal.add(AccuracyRow(**key, accuracy=network.accuracy(images)))


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
    usable: dict[str, Method] = {}
    rows: list[LeftOutRow] = []
    x = network.inputs(images.take(slice(0, 2)))
    batches = None
    if train is not None:
        batches = InputBatches(network, train.take(slice(0, 2 * FORWARD_BATCH)))
    for name, method in methods.items():
        try:
            quick = network.scale_noise(method).quick()
            compare(network.model, x, [quick], train=batches, models=network.members)
            usable[name] = method
        except QualmsError as error:
            rows.append({"row": "left out", "method": name, "why": str(error)})
    if not usable:
        raise QualmsError(f"no method can be used: {rows[0]['method']}: {rows[0]['why']}")
    return usable, rows


def parameters(method: Method, train: Images | None) -> str:
    """All that decides a method's scores beside network, image and seed, as text."""
    if train is not None and TRAINING_DATA in method.needs:
        return f"{method!r} on {train.fingerprint()}"
    return repr(method)
