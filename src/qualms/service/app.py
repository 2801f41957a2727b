"""The routes: a request is checked and decoded here, asked at the desk, and answered."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException

from qualms.errors import QualmsError
from qualms.service.answers import PROBLEMS, About, Answer, NotReady, Result
from qualms.service.decoding import Decoding, visit_of
from qualms.service.limits import LimitsMiddleware, problem_answer
from qualms.service.metrics import Metrics
from qualms.service.protocol import add_protocol
from qualms.service.requests import Arrays, kind_of, problem, score_body
from qualms.service.scoring import Question, Reply
from qualms.service.settings import Settings
from qualms.service.startup import Startup
from qualms.service.upload_page import docs_page, front_page
from qualms.service.uploads import Intake, Pixels
from qualms.version import __version__

Ask = Callable[[Question], Awaitable[Reply]]
RETRY = {
    "Retry-After": "5"
}  # seconds; a start takes some, or minutes, and a network that hangs is ended
FIELDS = 8  # of a form, beside its files; none is read
PLAIN = {  # where the router has no sentence
    404: "there is nothing at this address; /docs lists what there is.",
    405: "this address does not take this HTTP method; /docs lists those it takes.",
}
log = logging.getLogger(__name__)


def add_service(
    app: FastAPI, startup: Startup, settings: Settings, ask: Ask, hangs: Callable[[], bool]
) -> None:
    """Everything that the service answers to.

    Args:
        app: to which the routes are added.
        startup: what is served, and how far it is from being ready.
        settings: the limits.
        ask: sends a question to the process with the model.
        hangs: whether that process does not come back from what it was asked.
    """
    metrics, decode = Metrics(), Decoding()
    app.title, app.version = f"qualms: {startup.about.model}", __version__
    app.description = (
        "How far an image is beyond what a network knows, and whether to trust its prediction."
    )
    app.router.redirect_slashes = False  # to an address with the name by which the client calls us
    app.add_middleware(LimitsMiddleware, settings=settings, metrics=metrics)
    _add_problems(app)
    token = (
        [] if settings.token is None else [Security(HTTPBearer(auto_error=False))]
    )  # for OpenAPI; `LimitsMiddleware` checks it

    def require_ready() -> None:
        progress = startup.progress()
        if progress.status != "ready":
            raise HTTPException(503, progress.sentence, RETRY)
        if hangs():
            raise HTTPException(503, "the network hangs; try again in a few seconds.", RETRY)

    def intake() -> Intake:
        require_ready()  # else it is not known how images become inputs
        return Intake(startup.fit, settings)

    async def answered(
        request: Request, images: list[Pixels], layers: bool
    ) -> list[dict[str, object]]:
        visit = visit_of(request)
        # It goes on if nobody waits any more, so the door is told of it.
        visit.work = asyncio.ensure_future(ask(Question(images, layers, visit.came)))
        reply: Reply = await asyncio.shield(visit.work)
        if reply.late:
            raise HTTPException(504, "the request waited too long to be scored; try again later.")
        if reply.broken:
            raise HTTPException(
                500, "the images could not be scored; the service's log has the details."
            )
        if reply.results is None:
            sizes = ", ".join(sorted({f"{image.shape[2]} x {image.shape[1]}" for image in images}))
            raise HTTPException(
                422, f"the network cannot score these images of {sizes} pixels; try another size."
            )
        metrics.scored(reply.results, reply.together)
        return reply.results

    @app.post(
        "/v1/score",
        responses=PROBLEMS,
        openapi_extra={"requestBody": score_body(settings.images)},
        dependencies=token,
    )
    async def score(
        request: Request,
        layers: Annotated[
            bool, Query(description="Say which layers the score comes from.")
        ] = False,
    ) -> Answer:
        """Score one image or several, as files or as numbers."""
        names, images = await _images(request, intake(), decode)
        found = await answered(request, images, layers)
        about = startup.about
        return Answer(
            model=about.model,
            model_hash=about.model_hash,
            method=about.methods[0],
            threshold=about.threshold,
            seconds=round(time.monotonic() - visit_of(request).came, 6),
            results=[
                Result.model_validate({"id": name, **r})
                for name, r in zip(names, found, strict=True)
            ],
        )

    @app.get("/v1/model", responses={401: PROBLEMS[401], 503: PROBLEMS[503]}, dependencies=token)
    async def model() -> About:
        """What is served: the network, the methods, the threshold and the scores that it was set
        on.
        """
        require_ready()
        return startup.about

    not_yet = {"model": NotReady, "description": "The network is not ready: how far the start is."}

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the service runs."""
        return {"status": "ok"}

    @app.get("/readyz", response_model=dict[str, str], responses={503: not_yet})
    async def readyz() -> Response:
        """Whether the network is loaded, and answers."""
        progress = startup.progress()
        if progress.status == "ready" and not hangs():
            return JSONResponse({"status": "ready"})
        return JSONResponse(progress.not_ready().model_dump(), 503, RETRY)

    plain = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    text: dict[int | str, dict[str, Any]] = {200: plain, 401: PROBLEMS[401]}

    @app.get("/metrics", responses=text, response_class=Response, dependencies=token)
    async def counts() -> Response:
        """What is counted, for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")

    add_protocol(app, startup, intake, decode, answered, require_ready, token)

    @cache
    def front(ready: bool) -> str:
        return front_page(startup.about, token=settings.token is not None, ready=ready)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(front(startup.progress().status == "ready"))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    for route in app.routes:
        if isinstance(route, APIRoute):
            route.response_description = "The answer."
    app.add_api_route("/openapi.json", lambda: JSONResponse(app.openapi()), include_in_schema=False)


async def _images(
    request: Request, intake: Intake, decode: Decoding
) -> tuple[list[str], list[Pixels]]:
    """The images of a request, by name."""
    kind = kind_of(request)
    if kind == "application/json":
        images = await decode(request, _of_json, await request.body(), intake)
        return [str(i) for i in range(len(images))], images
    if kind != "multipart/form-data":
        raise HTTPException(
            415, "the body's type is not known; send multipart/form-data or application/json."
        )
    files = await _files(request, intake)
    return [name for name, _ in files], await decode(request, intake.of_files, files)


async def _files(request: Request, intake: Intake) -> list[tuple[str, bytes]]:
    """The files of a form, by name."""
    most = intake.settings.images
    try:
        async with request.form(max_files=most, max_fields=FIELDS) as form:
            parts = [
                (key, part) for key, part in form.multi_items() if isinstance(part, UploadFile)
            ]
            if len(parts) < len(form.multi_items()) or any(key != "images" for key, _ in parts):
                raise HTTPException(
                    422, "the form has parts that are not files named `images`; leave them out."
                )
            return [
                (part.filename or f"image {i}", await part.read())
                for i, (_, part) in enumerate(parts)
            ]
    except StarletteHTTPException as error:
        if error.status_code == 400 and "Too many files" in error.detail:
            raise HTTPException(
                413, f"the request holds more than {most} images; send fewer."
            ) from None
        if error.status_code == 400:
            raise HTTPException(
                400, "the form cannot be read; send multipart/form-data with its boundary."
            ) from None
        raise


def _of_json(body: bytes, intake: Intake) -> list[Pixels]:
    found = Arrays.model_validate_json(body)
    return intake.of_numbers(found.images, found.white)


def _add_problems(app: FastAPI) -> None:
    """Every error is one sentence in JSON; `LimitsMiddleware` has one for what nobody foresaw."""

    @app.exception_handler(StarletteHTTPException)
    async def http(_: Request, error: StarletteHTTPException) -> Response:
        words = PLAIN.get(error.status_code, str(error.detail))
        return problem_answer(error.status_code, words, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def request_invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]  # of the address: bodies are read by the routes
        return problem_answer(422, f"{first['loc'][-1]} is not as it should be: {first['msg']}.")

    @app.exception_handler(ValidationError)
    async def invalid(_: Request, error: ValidationError) -> Response:
        return problem_answer(*problem(error))

    @app.exception_handler(QualmsError)
    async def ours(_: Request, error: QualmsError) -> Response:
        log.warning("a request cannot be answered: %s", error)
        return problem_answer(
            422, "these images cannot be scored; the service's log has the details."
        )
