"""The process with the model: scores the images of several requests together.

An image's score does not depend on the images it shares a batch with, and a request that fails does
not affect the others.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from qualms.data import Images
from qualms.errors import QualmsError, explain_failure, reason
from qualms.methods.method import Method
from qualms.methods.pricing import Price
from qualms.models.fingerprint import fingerprint
from qualms.report.layer_chart import has_layers, layer_sums
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.service.schemas import ModelInfo
from qualms.service.uploads import Pixels
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network
from qualms.stream.sizes import SERVICE_BATCH
from qualms.threshold import Threshold

IMAGES_NAME = "the request"  # the name of images in error messages
GRAY = 128  # the value of all pixels of the image that a network is tried on
# Called with a number of images; returns the context manager in which they are scored.
WatchFn = Callable[[int], AbstractContextManager[None]]
log = logging.getLogger(__name__)


class ModelError(QualmsError):
    """The model raised something other than a `QualmsError`.

    Args:
        original: The error that the model raised.
    """

    def __init__(self, original: Exception) -> None:
        """Keep the original error, and describe it in one sentence."""
        self.original = original
        super().__init__(f"the model raised {type(original).__name__} ({reason(original)}).")


@dataclass(frozen=True)
class ScoringService:
    """A network, and the scorer of its model.

    Args:
        name: The model's name in answers and paths.
        network: The model, and how images become its inputs.
        scorer: The scorer of the model, with the methods and the threshold.
    """

    name: str
    network: Network
    scorer: Scorer

    @property
    def model_info(self) -> ModelInfo:
        """The description of the model, with all fields, as `/v1/model` returns it."""
        info = describe_unloaded(self.name, self.scorer.methods, self.scorer.threshold)
        fields_of_loaded_model = {
            "model_hash": fingerprint(self.network.model),
            "class_names": list(self.network.class_names) or None,
            "tolerance": self.scorer.settings.tolerance,
        }
        return info.model_copy(update=fields_of_loaded_model)

    @property
    def first_method(self) -> tuple[str, Method]:
        """The scorer's first method, as `(name, method)`.

        The service accepts a prediction, or abstains, by comparing this method's score with the
        threshold.
        """
        return next(iter(self.scorer.methods.items()))

    def make_gray_image(self) -> UInt8[Tensor, "1 c h w"] | None:
        """Make one gray image to try the network on; None if its input size is unknown."""
        transform = self.network.transform
        if transform is None:
            return None
        channels = len(self.network.normalization.mean)
        return torch.full((1, channels, *transform.size), GRAY, dtype=torch.uint8)

    def price(self) -> Price | None:
        """Measure what it costs to score an image: the forward passes, and the seconds.

        Returns:
            The price; None if the network's input size is unknown.
        """
        image = self.make_gray_image()
        if image is None:
            return None
        inputs = self.network.inputs(_as_images(image))
        return self.scorer.price(inputs)

    def warm_up(self) -> Scored | None:
        """Score a gray image, so that an invalid setup fails now and the first request is not slow.

        Returns:
            The scores of the image; None if the network's input size is unknown.
        """
        image = self.make_gray_image()
        if image is None:
            return None
        return self.score(image)

    def score(self, pixels: UInt8[Tensor, "n c h w"]) -> Scored:
        """Score n images of one size.

        Random draws are decided by an image's pixels, so its score does not depend on its batch.
        """
        return ImageScorer(self.network, self.scorer).score(_as_images(pixels))

    def layer_shares(self, pixels: UInt8[Tensor, "n c h w"]) -> list[list[dict[str, Any]]]:
        """Compute each layer's share of the first method's score, without smoothing.

        Args:
            pixels: n images of one size.

        Returns:
            For each image, the fields of a `LayerShare` (`name` and `share`) for each layer.
        """
        method_name, method = self.first_method
        inputs = self.network.inputs(_as_images(pixels))
        settings = self.scorer.settings
        layer_names, sums_by_method = layer_sums(
            self.network.model, inputs, {method_name: method}, settings
        )
        shares = _normalize_rows(sums_by_method[method_name])
        fields_of_images = []
        for image_shares in shares.tolist():
            pairs = zip(layer_names, image_shares, strict=True)
            fields_of_images.append([{"name": name, "share": share} for name, share in pairs])
        return fields_of_images


def describe_unloaded(
    name: str,
    methods: Mapping[str, Method],
    threshold: Threshold | None,
) -> ModelInfo:
    """Describe a model before it is loaded: without its hash, class names and tolerance.

    Args:
        name: The model's name in answers and paths.
        methods: The methods by name; the score of the first one is compared with the threshold.
        threshold: The threshold; None if the service has none.
    """
    first_method = next(iter(methods.values()))
    info = ModelInfo(
        model=name,
        model_hash="",
        methods=list(methods),
        class_names=None,
        threshold=None,
        rule=None,
        reference=[],
        layers=has_layers(first_method),
        tolerance=None,
    )
    if threshold is None:
        return info
    is_finite = math.isfinite(threshold.value)
    threshold_fields = {
        "threshold": threshold.value if is_finite else None,  # JSON has no infinity
        "rule": threshold.rule,
        "reference": list(threshold.reference),
    }
    return info.model_copy(update=threshold_fields)


@dataclass(frozen=True)
class ScoreRequest:
    """The images of one request.

    Args:
        images: The images, which may differ in size.
        with_layers: Whether the results hold each layer's share of the score.
        received_at: When the request's headers arrived, by `time.monotonic`.
    """

    images: list[Pixels]
    with_layers: bool = False
    received_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class ScoreResponse:
    """The results of one request, or why there are none.

    Args:
        results: For each image the fields of a `Result`, without its id. None if the images were
            not scored.
        batch_images: The number of images of all requests in the batch.
        failed: Whether the model raised an unexpected error.
        timed_out: Whether the deadline passed before the images were scored.

    If `results` is None, and neither `failed` nor `timed_out` is true, the network cannot score
    images of these sizes.
    """

    results: list[dict[str, Any]] | None
    batch_images: int = 0
    failed: bool = False
    timed_out: bool = False


def score_requests(
    service: ScoringService,
    requests: Sequence[ScoreRequest],
    deadline: float = math.inf,
    watch: WatchFn = lambda _: nullcontext(),
) -> list[ScoreResponse]:
    """Score the images of several requests, in batches of images of one size.

    Before each batch, requests whose deadline has passed are dropped, because nobody waits for
    their scores.

    Args:
        service: The network and its scorer.
        requests: The requests, in order of arrival.
        deadline: Seconds from the arrival of a request to its deadline.
        watch: Called with the number of images in a batch; returns the context manager in which
            the batch is scored.

    Returns:
        A response to each request.
    """
    batch = _RequestBatch(service, requests, watch)
    for keys in batch.split_by_size():
        batch.drop_expired(keys, deadline)
        unanswered = batch.keep_unanswered(keys)
        if unanswered:
            batch.score(unanswered)
    return batch.responses


class _ImageKey(NamedTuple):
    """Which image: the position of its request in the batch, and its position in the request."""

    request_index: int
    image_index: int


class _RequestBatch:
    """Requests that are scored together, and their responses.

    Args:
        service: The network and its scorer.
        requests: The requests, in order of arrival.
        watch: Called with a number of images; returns the context manager in which they are scored.

    Attributes:
        responses: A response for each request. At first each image has an empty result, which
            `score` replaces.
    """

    def __init__(
        self,
        service: ScoringService,
        requests: Sequence[ScoreRequest],
        watch: WatchFn,
    ) -> None:
        """Store the arguments, and give each image an empty result."""
        self.service = service
        self.requests = requests
        self.watch = watch
        batch_images = sum(len(request.images) for request in requests)
        self.responses = []
        for request in requests:
            empty_results: list[dict[str, Any]] = [{}] * len(request.images)
            self.responses.append(ScoreResponse(empty_results, batch_images))

    def split_by_size(self) -> Iterator[list[_ImageKey]]:
        """Yield the images in batches that can be stacked: at most `SERVICE_BATCH`, of one size."""
        keys_by_shape: dict[tuple[int, ...], list[_ImageKey]] = {}
        for request_index, request in enumerate(self.requests):
            for image_index, image in enumerate(request.images):
                key = _ImageKey(request_index, image_index)
                keys_by_shape.setdefault(image.shape, []).append(key)
        for keys in keys_by_shape.values():
            for start in range(0, len(keys), SERVICE_BATCH):
                yield keys[start : start + SERVICE_BATCH]

    def drop_expired(self, keys: list[_ImageKey], deadline: float) -> None:
        """Let requests whose deadline has passed be answered so, instead of being scored.

        Args:
            keys: The images that are about to be scored; only their requests are checked.
            deadline: Seconds from the arrival of a request to its deadline.
        """
        for index in {key.request_index for key in keys}:
            if time.monotonic() > self.requests[index].received_at + deadline:
                self.responses[index] = ScoreResponse(None, timed_out=True)

    def keep_unanswered(self, keys: list[_ImageKey]) -> list[_ImageKey]:
        """Return the images among `keys` whose requests have neither failed nor timed out."""
        return [key for key in keys if self.responses[key.request_index].results is not None]

    def score(self, keys: list[_ImageKey]) -> None:
        """Score images of one size together, and store their results in `responses`.

        If they cannot be scored together, the images of each request are scored on their own.

        Args:
            keys: Which images to score.
        """
        try:
            with self.watch(len(keys)), explain_failure(ModelError):
                results = self._compute_results(keys)
        except QualmsError as error:
            self._handle_failure(keys, error)
            return
        for key, result in zip(keys, results, strict=True):
            # Only requests that have results are scored (`keep_unanswered`).
            self.responses[key.request_index].results[key.image_index] = result  # type: ignore[index]

    def _handle_failure(self, keys: list[_ImageKey], error: QualmsError) -> None:
        """After a failure, score each request on its own; if there was only one, it has failed.

        Args:
            keys: The images that could not be scored together, sorted by request.
            error: The error of scoring them together.
        """
        first_request_index = keys[0].request_index
        has_several_requests = first_request_index != keys[-1].request_index
        if has_several_requests:
            for _, keys_of_request in groupby(keys, attrgetter("request_index")):
                self.score(list(keys_of_request))
        elif isinstance(error, ModelError):
            log.error("the images of a request could not be scored", exc_info=error.original)
            self.responses[first_request_index] = ScoreResponse(None, failed=True)
        else:
            log.warning("the images of a request cannot be scored: %s", error)
            self.responses[first_request_index] = ScoreResponse(None)

    def _compute_results(self, keys: list[_ImageKey]) -> list[dict[str, Any]]:
        """Score images of one size together, with the shares of layers where these were requested.

        Args:
            keys: Which images to score.

        Returns:
            The fields of a `Result` for each image, without its id.
        """
        images = [self.requests[key.request_index].images[key.image_index] for key in keys]
        pixels = torch.from_numpy(np.stack(images))
        results = _to_results(self.service.score(pixels))
        _, method = self.service.first_method
        if not has_layers(method):
            return results
        # The positions in the batch of the images whose requests ask for layers.
        positions = [
            p for p, key in enumerate(keys) if self.requests[key.request_index].with_layers
        ]
        if positions:
            shares = self.service.layer_shares(pixels[positions])
            for position, layers in zip(positions, shares, strict=True):
                results[position]["layers"] = layers
        return results


def _to_results(scored: Scored) -> list[dict[str, Any]]:
    """Convert scores to values for JSON, a dict for each image.

    Args:
        scored: The scores of n images.

    Returns:
        The fields of a `Result` for each image, without its id; `layers` is None.
    """
    threshold = scored.threshold
    percentiles: list[float | None] = [None] * len(scored)
    decisions: list[str | None] = [None] * len(scored)
    if threshold is not None:
        is_accepted = scored.accepted.tolist()
        decisions = ["accepted" if accepted else "abstain" for accepted in is_accepted]
        if threshold.reference:
            percentiles = scored.percentile.tolist()
    class_names = scored.class_names
    results = []
    for i, prediction in enumerate(scored.prediction.tolist()):
        scores = {method: float(values[i]) for method, values in scored.scores.items()}
        result = {
            "prediction": prediction,
            "class_name": class_names[prediction] if class_names else None,
            "confidence": float(scored.confidence[i]),
            "scores": scores,
            "percentile": percentiles[i],
            "decision": decisions[i],
            "layers": None,
        }
        results.append(result)
    return results


def _as_images(pixels: UInt8[Tensor, "n c h w"]) -> Images:
    """Wrap pixels as `Images` without labels; error messages call them "the request"."""
    return Images(IMAGES_NAME, pixels, None)


def _normalize_rows(sums: Float[np.ndarray, "n layers"]) -> Float[np.ndarray, "n layers"]:
    """Divide each row by its sum; leave rows of zeros unchanged."""
    totals = sums.sum(1, keepdims=True)
    # Where `where` is false, the zeros of `out` stay.
    return np.divide(sums, totals, out=np.zeros_like(sums), where=totals > 0)
