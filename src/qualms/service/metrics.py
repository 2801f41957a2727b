"""Counters and histograms of the service, for Prometheus.

Labels are routes and status codes, never text from a request. So the number of time series is
bounded.
"""

from collections.abc import Iterable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
IMAGES_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
# The label of a request that reached no route, and of an image without a decision.
NO_LABEL = "none"


class Metrics:
    """The metrics of one service, in a registry of their own.

    `LimitsMiddleware` sets the gauge `waiting` and counts requests; routes that score count images.
    """

    def __init__(self) -> None:
        """Create all metrics, at zero."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "qualms_requests",
            "Requests, by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "qualms_request_seconds",
            "Response time in seconds, by route.",
            ["route"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self.waiting = Gauge(
            "qualms_waiting",
            "Requests that are being received, queued or scored.",
            registry=self.registry,
        )
        self.images = Counter(
            "qualms_images",
            "Scored images, by decision.",
            ["decision"],
            registry=self.registry,
        )
        self.batch_images = Histogram(
            "qualms_batch_images",
            "Images in the batch that a request was scored in.",
            buckets=IMAGES_BUCKETS,
            registry=self.registry,
        )

    def count_request(
        self,
        scope: MutableMapping[str, Any],
        status: int | None,
        seconds: float,
    ) -> None:
        """Count a request that has ended, by its route and status, and observe its duration.

        Args:
            scope: The ASGI scope; it holds the route if the request has reached one.
            status: The status of the answer. None if the client left before it.
            seconds: The time from the headers of the request to the end of the answer.
        """
        # The path as it was declared: the same for all requests to the route. Without a route, it
        # is asked of None, which gives the default.
        path = getattr(scope.get("route"), "path", NO_LABEL)
        self.requests.labels(path, str(status or NO_LABEL)).inc()
        self.seconds.labels(path).observe(seconds)

    def count_images(self, decisions: Iterable[str | None], batch_images: int) -> None:
        """Count the images of a request that was scored.

        Args:
            decisions: "accepted", "abstain" or None, for each image of the request.
            batch_images: The number of images of all requests in the batch.
        """
        self.batch_images.observe(batch_images)
        for decision in decisions:
            self.images.labels(decision or NO_LABEL).inc()

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)
