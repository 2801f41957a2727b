"""What every request passes before its body is read: the token, the limits and the deadline.

Written by hand, because the libraries' own limits answer otherwise. uvicorn's `limit_concurrency`
also counts probes and idle connections, and answers 503 without `Retry-After`. Starlette's
`max_body_size` (of recent versions) and `TrustedHostMiddleware` answer in plain text, and the
latter reads only the first of several `Host` headers. LitServe's `timeout` drops queued requests,
but neither slow uploads nor slow scoring, and its API key guards its own routes.
"""

import asyncio
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from qualms.service.config import ServiceConfig
from qualms.service.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# A cluster's probes send no token, and neither does a browser that opens a page. These paths tell
# the model's name, the method and the threshold's rule, but no class, score or threshold.
PUBLIC_PATHS = frozenset(
    {
        "/",
        "/docs",
        "/openapi.json",
        "/healthz",
        "/readyz",
        "/v2/health/live",
        "/v2/health/ready",
    }
)
# Programs may omit it, browsers do not.
LOCAL_HOSTS = frozenset({b"", b"127.0.0.1", b"localhost"})
# Seconds: the wait is unknown, and a retry is cheap.
RETRY_AFTER = {"Retry-After": "1"}
# Of the `RequestState` in a request's ASGI scope.
STATE_KEY = "qualms.state"
log = logging.getLogger(__name__)


@dataclass
class RequestState:
    """What the middleware and the routes know of one request with a body.

    Args:
        received_at: When the headers arrived, by `time.monotonic`.
        work: The decoding or scoring that runs for the request. It goes on after a 504.
    """

    received_at: float
    work: Future[Any] | asyncio.Future[Any] | None = None


class LimitsMiddleware:
    """ASGI middleware around all routes: checks the limits and counts the requests.

    Args:
        app: The next ASGI application.
        config: The token and the limits.
        metrics: Counts the requests.

    Attributes:
        active: The number of requests with a body that have no answer yet.
        unfinished: What is still decoded or scored for requests that were answered 504. It takes
            memory and time, so it counts as waiting.
    """

    def __init__(
        self,
        app: App,
        config: ServiceConfig,
        metrics: Metrics,
    ) -> None:
        """Begin without requests; the gauge `waiting` calls `count_waiting` from now on."""
        self.app = app
        self.config = config
        self.metrics = metrics
        self.active = 0
        self.unfinished: list[Future[Any] | asyncio.Future[Any]] = []
        metrics.waiting.set_function(self.count_waiting)

    def count_waiting(self) -> int:
        """Count the requests that are being received, queued or scored, also after their 504."""
        self.unfinished = [work for work in self.unfinished if not work.done()]
        return self.active + len(self.unfinished)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or refuse it; count it, and answer 500 if a route has a bug.

        The arguments are ASGI's. What is not HTTP, such as the lifespan, is passed on unchanged.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = _ResponseSender(send)
        began = time.perf_counter()
        try:
            await self._handle(scope, receive, response)
        except ClientDisconnect:
            pass  # during the upload: nobody waits for an answer
        # A bug in a route: its traceback goes to the log, not to the client.
        except Exception:
            if response.status is not None:
                raise
            log.exception("a request failed because of an unexpected error")
            message = "an unexpected error occurred; see the service's log."
            await error_response(500, message)(scope, receive, response)
        finally:
            seconds = time.perf_counter() - began
            self.metrics.count_request(scope, response.status, seconds)

    async def _handle(
        self,
        scope: Scope,
        receive: Receive,
        response: "_ResponseSender",
    ) -> None:
        """Refuse a request, or run its route: with a deadline for a POST, which has a body.

        Args:
            scope: The ASGI scope.
            receive: ASGI's function to receive the body.
            response: Sends the answer.
        """
        refusal = self._check_headers(scope)
        if refusal is not None:
            await refusal(scope, receive, response)
        elif scope["method"] == "POST":
            await self._run_with_limits(scope, receive, response)
        else:
            await self.app(scope, receive, response)

    def _check_headers(self, scope: Scope) -> JSONResponse | None:
        """Check all that can be checked before the body is read: token or host, size and waiting.

        Returns:
            The response with 401, 403, 413 or 429, or None if the request is accepted.
        """
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        if self.config.token is None:
            refusal = _check_hosts(headers)
        else:
            refusal = _check_token(scope["path"], dict(headers), self.config.token)
        if refusal is not None:
            return refusal
        length = dict(headers).get(b"content-length", b"0")
        # Twenty digits are more than any limit, and int() of thousands takes long.
        if length.isdigit() and int(length[:20]) > self.config.max_body:
            return error_response(413, self._too_large())
        waiting = self.count_waiting()
        if scope["method"] == "POST" and waiting >= self.config.waiting:
            message = f"too many requests are waiting ({waiting}); retry later."
            return error_response(429, message, RETRY_AFTER)
        return None

    async def _run_with_limits(
        self,
        scope: Scope,
        receive: Receive,
        response: "_ResponseSender",
    ) -> None:
        """Run a route that reads a body, up to the deadline.

        Args:
            scope: The ASGI scope, where the request's state is stored.
            receive: ASGI's function to receive the body.
            response: Sends the answer; at the deadline 408 or 504, unless another has begun.
        """
        body = _BodyReader(receive, self.config.max_body, self._too_large())
        state = RequestState(time.monotonic())
        scope[STATE_KEY] = state
        self.active += 1
        try:
            async with asyncio.timeout(self.config.deadline) as timeout:
                await self.app(scope, body, response)
        except TimeoutError:
            if response.status is not None or not timeout.expired():
                raise
            refusal = self._describe_timeout(body.is_complete)
            await refusal(scope, receive, response)
        finally:
            self.active -= 1
            if state.work is not None and not state.work.done():
                self.unfinished.append(state.work)

    def _describe_timeout(self, is_body_complete: bool) -> JSONResponse:
        """Return the response at the deadline: 504 if scoring was too slow, 408 if the upload was."""
        limit = f"{self.config.deadline:g} s"
        if is_body_complete:
            message = (
                f"the scores were not ready within {limit}; send fewer images, or retry later."
            )
            return error_response(504, message)
        return error_response(
            408, f"the body did not arrive within {limit}; send it faster, or a smaller one."
        )

    def _too_large(self) -> str:
        """Return the error message of a body that is too large."""
        limit = self.config.max_body
        return f"the body has more than {limit:,} bytes; send fewer or smaller images."


class _BodyReader:
    """Receives the body of a request, and counts its bytes.

    Args:
        receive: ASGI's function to receive the body.
        max_bytes: The most bytes that are read.
        too_large: The error message if there are more.

    Attributes:
        is_complete: Whether all of the body has arrived.
    """

    def __init__(self, receive: Receive, max_bytes: int, too_large: str) -> None:
        """Begin with no bytes read."""
        self.receive = receive
        self.max_bytes = max_bytes
        self.too_large = too_large
        self.bytes_read = 0
        self.is_complete = False

    async def __call__(self) -> Message:
        """Receive a piece of the body.

        Raises:
            HTTPException: 413 if the body is too large.
        """
        message = await self.receive()
        self.bytes_read += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.is_complete = True
        if self.bytes_read > self.max_bytes:
            raise HTTPException(413, self.too_large)
        return message


class _ResponseSender:
    """Sends a response, and remembers its status once it has begun.

    Args:
        send: ASGI's function to send the response.

    Attributes:
        status: The HTTP status of the response; None until it has begun.
    """

    def __init__(self, send: Send) -> None:
        """Begin without a response."""
        self.send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        """Send a message of ASGI: the start of the response, or a piece of its body."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.send(message)


def _check_hosts(headers: list[tuple[bytes, bytes]]) -> JSONResponse | None:
    """Refuse a request to another name than this machine's own: return 403, or None to accept it.

    This stops DNS rebinding: a web page whose name was made to point to this machine, so that its
    browser lets it read the service's answers.

    Args:
        headers: The request's headers, with names in lower case.
    """
    hosts = {value.partition(b":")[0] for name, value in headers if name == b"host"}
    if hosts <= LOCAL_HOSTS:
        return None
    message = (
        "only requests to 127.0.0.1 and localhost are answered; use one of them, or start the "
        "service with QUALMS_TOKEN set."
    )
    return error_response(403, message)


def _check_token(
    path: str,
    headers: dict[bytes, bytes],
    token: str,
) -> JSONResponse | None:
    """Refuse a request without the token, except to public paths: return 401, or None to accept.

    Args:
        path: The request's path.
        headers: The request's headers, with names in lower case.
        token: The service's token.
    """
    if path in PUBLIC_PATHS:
        return None
    scheme, _, sent = headers.get(b"authorization", b"").partition(b" ")
    is_same = hmac.compare_digest(sent.strip(), token.encode())  # in constant time
    if is_same and scheme.lower() == b"bearer":
        return None
    message = "the token is missing or wrong; send it as `Authorization: Bearer …`."
    return error_response(401, message, {"WWW-Authenticate": "Bearer"})


def request_state(scope: Scope) -> RequestState:
    """Return the state that the middleware has stored in the ASGI scope of a request."""
    state: RequestState = scope[STATE_KEY]
    return state


def error_response(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """Build the response of a failed request.

    Args:
        status: 4xx or 5xx.
        message: One sentence: what is wrong, and what to do.
        headers: Additional headers.
    """
    return JSONResponse({"error": message}, status, headers)
