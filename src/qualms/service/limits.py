"""What every request passes before its body is read: the token, the limits, the deadline; and what
is counted of it.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from qualms.service.decoding import VISIT, RequestState
from qualms.service.metrics import Metrics
from qualms.service.settings import Settings

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Probes of a cluster carry no token, and neither does a browser that opens a page. These tell what
# is served, by which method and rule, but no class, score or threshold.
OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")
LOCAL = (
    b"",
    b"127.0.0.1",
    b"localhost",
)  # names of this machine; programs need not say one, browsers do
RETRY_AFTER = 1  # seconds; when a place will be free is not known, and to ask again costs little
log = logging.getLogger(__name__)


class LimitsMiddleware:
    """ASGI middleware around all routes."""

    def __init__(self, app: App, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.taken = 0  # requests with a body that are being read, waiting or being scored
        # What is still decoded or scored for requests that are answered already: memory holds it,
        # so it has a place.
        self.late: list[Future[Any] | asyncio.Future[Any]] = []
        metrics.waiting.set_function(lambda: self.inside)

    @property
    def inside(self) -> int:
        """How many requests have a place."""
        self.late = [work for work in self.late if not work.done()]
        return self.taken + len(self.late)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _Answer(send)
        began = time.perf_counter()
        try:
            problem = self._problem(scope)
            if problem is not None:
                await problem(scope, receive, answer)
            elif scope["method"] == "POST":
                await self._within_limits(scope, receive, answer)
            else:
                await self.app(scope, receive, answer)
        except (
            ClientDisconnect
        ):  # in the middle of its body: nobody is there to be told, and nothing is wrong here
            pass
        except Exception:
            if answer.status is not None:
                raise
            log.exception("a request could not be answered")
            words = "something went wrong; the service's log has the details."
            await problem_answer(500, words)(scope, receive, answer)
        finally:
            self.metrics.answered(scope, answer.status, time.perf_counter() - began)

    def _problem(self, scope: Scope) -> JSONResponse | None:
        """What is wrong with a request, as far as its headers tell."""
        headers = {name.lower(): value for name, value in scope["headers"]}
        hosts = {
            value.partition(b":")[0] for name, value in scope["headers"] if name.lower() == b"host"
        }
        if self.settings.token is None and not hosts.issubset(LOCAL):
            # A page on the web whose name was made to point here: its browser takes it for the
            # service's own.
            words = "only 127.0.0.1 and localhost are answered; use one, or start the service with QUALMS_TOKEN set."
            return problem_answer(403, words)
        if self.settings.token is not None and scope["path"] not in OPEN:
            scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
            same = hmac.compare_digest(
                token.strip(), self.settings.token.encode()
            )  # in constant time
            if not same or scheme.lower() != b"bearer":
                words = "the token is missing or wrong; send it as `Authorization: Bearer …`."
                return problem_answer(401, words, {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.settings.body:
            return problem_answer(413, self._too_large())
        if scope["method"] == "POST" and self.inside >= self.settings.waiting:
            words = f"{self.inside} requests are waiting already; try again later."
            return problem_answer(429, words, {"Retry-After": str(RETRY_AFTER)})
        return None

    async def _within_limits(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        read, complete = 0, False

        async def counted() -> MutableMapping[str, Any]:
            nonlocal read, complete
            message = await receive()
            read += len(message.get("body", b""))
            complete = complete or not message.get("more_body", False)
            if read > self.settings.body:
                raise HTTPException(413, self._too_large())
            return message

        visit = scope[VISIT] = RequestState(time.monotonic())
        self.taken += 1
        try:
            async with asyncio.timeout(self.settings.deadline) as limit:
                await self.app(scope, counted, answer)
        except TimeoutError:
            if answer.status is not None or not limit.expired():
                raise
            seconds = f"{self.settings.deadline:g} s"
            late = (
                504,
                f"the scores did not come within {seconds}; send fewer images, or try again later.",
            )
            slow = (408, f"the body did not arrive within {seconds}; send less, or faster.")
            await problem_answer(*(late if complete else slow))(scope, receive, answer)
        finally:
            self.taken -= 1
            if visit.work is not None and not visit.work.done():  # it keeps its place until that is
                self.late.append(visit.work)

    def _too_large(self) -> str:
        return f"the body has more than {self.settings.body:,} bytes; send fewer or smaller images."


class _Answer:
    """Passes an answer on, and remembers its status."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.status: int | None = None

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.send(message)


def problem_answer(status: int, words: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """One sentence, as JSON."""
    return JSONResponse({"error": words}, status, headers)
