"""The OpenAPI schema is true: what it allows is answered as it describes, anything else is refused."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.helpers import services

schemathesis = pytest.importorskip(
    "schemathesis", reason="schemathesis is not installed; run `make test-serve`"
)

pytestmark = pytest.mark.serve
HERE = {"Host": "127.0.0.1"}
REFUSED = [400, 404, 405, 413, 415, 422]
CONFIG = schemathesis.config.SchemathesisConfig.from_dict(
    {"headers": HERE, "checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}}
)
SCHEMA = schemathesis.openapi.from_asgi(
    "/openapi.json", services.client(max_images=4).app, config=CONFIG, headers=HERE
)


def test_every_route_is_in_the_schema() -> None:
    paths = services.client().get("/openapi.json").json()["paths"]
    v2 = {"/v2", "/v2/health/live", "/v2/health/ready"}
    model = {f"/v2/models/{services.NAME}{end}" for end in ("", "/ready", "/infer")}
    assert set(paths) == {"/v1/score", "/v1/model", "/healthz", "/readyz", "/metrics"} | v2 | model


@SCHEMA.parametrize()
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_schemathesis_finds_nothing(case: Any) -> None:
    # A schema cannot say that the rows of an image are equally long, or that a file is a PNG: 422
    # is an answer to both.
    case.call_and_validate(excluded_checks=[schemathesis.checks.positive_data_acceptance])
