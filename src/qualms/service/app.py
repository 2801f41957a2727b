"""The routes of the service, and its two pages.

    /v1/…                        scores, and the model's information
    /v2/…                        the same in the open inference protocol (protocol.py)
    /healthz, /readyz, /metrics  for probes and Prometheus
    /, /docs, /openapi.json      for people, and for programs that generate clients

A request passes `LimitsMiddleware` first. A route then decodes and scores it by `RequestHandler`.
"""

import logging
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import jinja2
from fastapi import FastAPI, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException

from qualms import report
from qualms.errors import QualmsError
from qualms.service.config import ServiceConfig
from qualms.service.lifecycle import Startup
from qualms.service.limits import LimitsMiddleware, error_response, request_state
from qualms.service.metrics import Metrics
from qualms.service.protocol import add_protocol_routes
from qualms.service.requests import RETRY_AFTER, RequestHandler, ScoreFn
from qualms.service.schemas import (
    FORMATS,
    Answer,
    ModelInfo,
    NotReady,
    Result,
    describe_validation_error,
    error_responses,
    score_body_schema,
)
from qualms.version import __version__

DESCRIPTION = "How uncertain a network is about an image, and whether to trust its prediction."
PROMETHEUS_TEXT = "text/plain; version=0.0.4"
ROUTER_MESSAGES = {  # in place of Starlette's own messages
    404: "there is nothing at this path; see /docs for the routes.",
    405: "this path does not support the HTTP method; see /docs for the routes.",
}
log = logging.getLogger(__name__)


def add_service(
    app: FastAPI,
    startup: Startup,
    config: ServiceConfig,
    score: ScoreFn,
    is_hung: Callable[[], bool],
) -> None:
    """Add all routes, the middleware and the error handlers to an app.

    Args:
        app: An app without routes, which is changed.
        startup: The model's description, and the progress of the start.
        config: The token and the limits.
        score: Sends a request to the process with the model.
        is_hung: Whether that process does not respond any more.
    """
    metrics = Metrics()
    handler = RequestHandler(startup, config, metrics, score, is_hung)
    app.title = f"qualms: {startup.model_info.model}"
    app.version = __version__
    app.description = DESCRIPTION
    # A redirect would repeat the host name that the client sent, which may be any.
    app.router.redirect_slashes = False
    app.add_middleware(LimitsMiddleware, config=config, metrics=metrics)
    # The dependencies of routes that need a token. They only serve to describe the routes in
    # OpenAPI: `LimitsMiddleware` checks the token.
    token_dependencies = []
    if config.token is not None:
        token_dependencies = [Security(HTTPBearer(auto_error=False))]
    _add_error_handlers(app)
    _add_score_routes(app, handler, token_dependencies)
    _add_monitoring_routes(app, handler, token_dependencies)
    add_protocol_routes(app, handler, token_dependencies)
    _add_pages(app, startup, has_token=config.token is not None)
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.response_description = "The answer."
    # FastAPI's own route for it was removed with LitServe's routes, by `build_server`.
    app.add_api_route("/openapi.json", lambda: JSONResponse(app.openapi()), include_in_schema=False)


def _add_score_routes(
    app: FastAPI,
    handler: RequestHandler,
    token_dependencies: list[Any],
) -> None:
    """Add the routes below /v1.

    Args:
        app: The app to add the routes to.
        handler: Decodes and scores the requests.
        token_dependencies: The dependencies of the routes that need a token, for OpenAPI.
    """
    score_body = score_body_schema(handler.config.max_images)

    @app.post(
        "/v1/score",
        responses=error_responses(),
        openapi_extra={"requestBody": score_body},
        dependencies=token_dependencies,
    )
    async def score(
        request: Request,
        layers: Annotated[bool, Query(description="Add each layer's share of the score.")] = False,
    ) -> Answer:
        """Score one or more images, sent as files or as numbers."""
        ids, images = await handler.read_images(request)
        fields_of_images = await handler.score(request, images, with_layers=layers)
        results = []
        for image_id, fields in zip(ids, fields_of_images, strict=True):
            results.append(Result.model_validate({"id": image_id, **fields}))
        info = handler.startup.model_info
        seconds = time.monotonic() - request_state(request.scope).received_at
        return Answer(
            model=info.model,
            model_hash=info.model_hash,
            method=info.methods[0],
            threshold=info.threshold,
            seconds=round(seconds, 6),
            results=results,
        )

    @app.get("/v1/model", responses=error_responses(401, 503), dependencies=token_dependencies)
    async def model() -> ModelInfo:
        """Describe the network, the methods, the threshold and its reference scores."""
        handler.require_ready()
        return handler.startup.model_info


def _add_monitoring_routes(
    app: FastAPI,
    handler: RequestHandler,
    token_dependencies: list[Any],
) -> None:
    """Add the probes `/healthz` and `/readyz`, and the metrics for Prometheus.

    Args:
        app: The app to add the routes to.
        handler: Knows whether the network is ready.
        token_dependencies: The dependencies of the routes that need a token, for OpenAPI.
    """
    not_ready = {
        "model": NotReady,
        "description": "The network is not ready; the body shows the progress of startup.",
    }

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Check that the service runs."""
        return {"status": "ok"}

    @app.get("/readyz", response_model=dict[str, str], responses={503: not_ready})
    async def readyz() -> Response:
        """Check that the network is loaded and responds."""
        if handler.is_ready():
            return JSONResponse({"status": "ready"})
        body = handler.startup.progress().describe_not_ready().model_dump()
        return JSONResponse(body, 503, RETRY_AFTER)

    responses = error_responses(401)
    responses[200] = {"content": {"text/plain": {"schema": {"type": "string"}}}}

    @app.get(
        "/metrics",
        responses=responses,
        response_class=Response,
        dependencies=token_dependencies,
    )
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        return Response(handler.metrics.render(), media_type=PROMETHEUS_TEXT)


def _add_pages(app: FastAPI, startup: Startup, has_token: bool) -> None:
    """Add the page to try an image on, and the list of the routes.

    Both are HTML without external resources. They need no token: the first one asks for it.

    Args:
        app: The app to add the routes to.
        startup: The model's description, and whether the network is ready.
        has_token: Whether the routes need a token.
    """

    @cache
    def upload_page(is_ready: bool) -> str:
        """Render the page to try an image on, once before the network is ready and once after."""
        return render_upload_page(startup.model_info, has_token, is_ready)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """Return the page to try an image on."""
        return HTMLResponse(upload_page(startup.progress().status == "ready"))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        """Return the list of the routes."""
        return HTMLResponse(render_docs_page(app.openapi()))


def _add_error_handlers(app: FastAPI) -> None:
    """Answer each expected error of a route with one sentence of JSON.

    Unexpected errors are answered by `LimitsMiddleware`.

    Args:
        app: The app to add the handlers to.
    """

    @app.exception_handler(StarletteHTTPException)
    async def answer_http_error(_: Request, error: StarletteHTTPException) -> Response:
        """Answer an error that a route or the router raises."""
        message = ROUTER_MESSAGES.get(error.status_code, str(error.detail))
        return error_response(error.status_code, message, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def answer_invalid_query(_: Request, error: RequestValidationError) -> Response:
        """Answer a mistake in a query string, which FastAPI parses; routes parse the bodies."""
        first = error.errors()[0]
        # `loc` is such as ("query", "layers").
        return error_response(422, f"{first['loc'][-1]} is invalid: {first['msg']}.")

    @app.exception_handler(ValidationError)
    async def answer_invalid_body(_: Request, error: ValidationError) -> Response:
        """Answer a mistake that Pydantic found in a body."""
        status, message = describe_validation_error(error)
        return error_response(status, message)

    @app.exception_handler(QualmsError)
    async def answer_qualms_error(_: Request, error: QualmsError) -> Response:
        """Answer images that cannot be scored; log the error, which may name files."""
        log.warning("a request could not be answered: %s", error)
        return error_response(422, "the images cannot be scored; see the service's log.")


def render_upload_page(
    info: ModelInfo,
    has_token: bool,
    is_ready: bool,
) -> str:
    """Render the HTML of the page that scores an image and shows the decision.

    Its script requests scores from the routes, with the token that the user enters. While the
    network is not ready, the page shows the progress of startup.

    Args:
        info: The model's description.
        has_token: Whether the routes need a token.
        is_ready: Whether the network is ready.
    """
    scripts = [_read_report_asset("page.values.js"), _read_report_asset("page.charts.js")]
    scripts.append(_read_asset("page.js"))
    return _render(
        "page.html.jinja",
        title=f"{info.model}: score an image",
        info=info,
        has_token=has_token,
        is_ready=is_ready,
        js="".join(scripts),
    )


def render_docs_page(schema: dict[str, Any]) -> str:
    """Render the HTML page that lists the routes.

    Args:
        schema: The OpenAPI schema of the app.
    """
    return _render("docs.html.jinja", title=schema["info"]["title"], schema=schema)


def _render(template: str, **values: Any) -> str:
    """Render a template in this folder to HTML, with the styles of the report's page.

    Args:
        template: The name of the template's file.
        values: The values of the template's variables, which are escaped.
    """
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    css = _read_report_asset("page.css")
    page = environment.from_string(_read_asset(template))
    return page.render(
        css=css,
        version=__version__,
        formats=", ".join(FORMATS),
        **values,
    )


def _read_asset(name: str) -> str:
    """Return the text of a file in this folder."""
    return (files(__package__) / name).read_text("utf-8")


def _read_report_asset(name: str) -> str:
    """Return the text of a file in the folder of the report's page."""
    return (files(report) / name).read_text("utf-8")
