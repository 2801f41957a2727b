"""What is counted, for Prometheus. Labels come from the routes and statuses that there are, never
from a request.
"""

from collections.abc import MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One service's own registry."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter(
            "qualms_requests", "Requests, by route and status.", ["route", "status"], registry=own
        )
        self.seconds = Histogram(
            "qualms_request_seconds",
            "Seconds to the answer, by route.",
            ["route"],
            buckets=SECONDS,
            registry=own,
        )
        # Read from the door.
        self.waiting = Gauge(
            "qualms_waiting", "Requests that are read, waiting or being scored.", registry=own
        )
        self.decisions = Counter(
            "qualms_images", "Images scored, by decision.", ["decision"], registry=own
        )
        self.together = Histogram(
            "qualms_batch_images",
            "Images in the batch of each request.",
            buckets=BATCHES,
            registry=own,
        )

    def answered(self, scope: MutableMapping[str, Any], status: int | None, seconds: float) -> None:
        """Count one request; a route is known once the request has reached it."""
        route = getattr(scope.get("route"), "path", "none")
        self.requests.labels(route, str(status or "none")).inc()
        self.seconds.labels(route).observe(seconds)

    def scored(self, results: list[dict[str, Any]], together: int) -> None:
        """Count the images of one request."""
        self.together.observe(together)
        for result in results:
            self.decisions.labels(result["decision"] or "none").inc()

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)
