"""Questions in, answers out: the images of several requests in one batch, each scored as if it were alone."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.models.fingerprint import fingerprint
from qualms.report.layers import has_layers, layer_sums
from qualms.scored import Scored
from qualms.scorer import Scorer
from qualms.service.answers import About, finite, results
from qualms.service.images import Pixels
from qualms.tasks.network import Network
from qualms.tasks.scoring import scored_images

NAME = "the request"  # what errors call its images
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A network, which knows how images become its inputs, and the scorer of its model."""

    name: str
    network: Network
    scorer: Scorer

    @property
    def about(self) -> About:
        """What the web side tells of it."""
        threshold, names = self.scorer.threshold, self.network.class_names
        return About(
            model=self.name,
            model_hash=fingerprint(self.network.model),
            methods=list(self.scorer.methods),
            class_names=list(names) or None,
            threshold=None if threshold is None else finite(threshold.value),
            rule=None if threshold is None else threshold.rule,
            reference=[] if threshold is None else list(threshold.reference),
            layers=has_layers(self.decides[1]),
        )

    @property
    def decides(self) -> tuple[str, Method]:
        """The first method."""
        return next(iter(self.scorer.methods.items()))

    def warm_up(self) -> Scored | None:
        """Score a grey image, so that what is wrong is told now, and the first request does not wait."""
        fit = self.network.fit
        if fit is None:
            return None
        channels = len(self.network.normalisation.mean)
        return self.score(torch.full((1, channels, *fit.size), 128, dtype=torch.uint8))

    def score(self, pixels: torch.Tensor) -> Scored:
        """Scores of images of one size. Draws follow the pixels, so an image's company does not change its score."""
        return scored_images(self.network, self.scorer, Images(NAME, pixels, None))


@dataclass(frozen=True)
class Question:
    """The images of one request, and whether the answer says which layers their scores come from."""

    images: list[Pixels]
    layers: bool = False
    came: float = field(default_factory=time.monotonic)  # when the request's headers did


@dataclass(frozen=True)
class Reply:
    """For each image of a question what `Result` holds; None if the network cannot score them."""

    results: list[dict[str, Any]] | None
    together: int = 0  # images that were scored in the same batch
    broken: bool = False  # there are no results by a defect, and not by the images


def replies(served: Served, questions: Sequence[Question]) -> list[Reply]:
    """The answers to several requests. One that cannot be answered does not keep the others from it."""
    try:
        return _together(served, questions)
    except Exception as error:  # whatever a network raises
        if len(questions) > 1:
            return [reply for question in questions for reply in replies(served, [question])]
        if isinstance(error, QualmsError):
            log.warning("images of a request cannot be scored: %s", error)
            return [Reply(None)]
        log.exception("images of a request could not be scored")
        return [Reply(None, broken=True)]


def _together(served: Served, questions: Sequence[Question]) -> list[Reply]:
    found: list[list[dict[str, Any]]] = [[{}] * len(question.images) for question in questions]
    same: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for q, question in enumerate(questions):
        for i, image in enumerate(question.images):
            same.setdefault(image.shape, []).append((q, i))
    for places in same.values():
        pixels = torch.from_numpy(np.stack([questions[q].images[i] for q, i in places]))
        scored = served.score(pixels)
        for (q, i), result in zip(places, results(scored), strict=True):
            found[q][i] = result
        asked = [(q, i, place) for place, (q, i) in enumerate(places) if questions[q].layers]
        if asked and has_layers(served.decides[1]):
            shares = _shares(served, pixels[[place for _, _, place in asked]])
            for (q, i, _), layers in zip(asked, shares, strict=True):
                found[q][i] = {**found[q][i], "layers": layers}
    total = sum(len(question.images) for question in questions)
    return [Reply(rows, total) for rows in found]


def _shares(served: Served, pixels: torch.Tensor) -> list[list[dict[str, Any]]]:
    """For each image what part of the first method's score each layer has, without smoothing."""
    name, method = served.decides
    x = served.network.inputs(Images(NAME, pixels, None))
    names, sums = layer_sums(served.network.model, x, {name: method}, served.scorer.settings)
    whole = sums[name].sum(1, keepdims=True)
    shares = np.divide(sums[name], whole, out=np.zeros_like(sums[name]), where=whole > 0)
    return [[{"name": n, "share": float(s)} for n, s in zip(names, row, strict=True)] for row in shares]
