"""Middleware that checks the token and the limits of each request, and sets its deadline.

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
# Values of the header `Host` for this machine. Programs may omit the header, browsers do not.
LOCAL_HOSTS = frozenset({b"", b"127.0.0.1", b"localhost"})
# In seconds, and short: it is unknown how long requests will wait, and a retry is cheap.
RETRY_AFTER = {"Retry-After": "1"}
# The key of the `RequestState` in a request's ASGI scope.
STATE_KEY = "qualms.state"
log = logging.getLogger(__name__)


@dataclass
class RequestState:
    """The state of a request with a body, which the middleware and the routes share.

    Args:
        received_at: When the headers arrived, by `time.monotonic`.
        work: The decoding or scoring of the request, set by the route that starts it. It continues
            after the request was answered 504.
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
        num_active: The number of requests with a body that have no answer yet.
        unfinished: The decoding or scoring of requests that were answered 504. Until it is done, it
            takes memory and time, so these requests count as waiting.
    """

    def __init__(
        self,
        app: App,
        config: ServiceConfig,
        metrics: Metrics,
    ) -> None:
        """Begin without requests; let the gauge `waiting` call `count_waiting` when it is read."""
        self.app = app
        self.config = config
        self.metrics = metrics
        self.num_active = 0
        self.unfinished: list[Future[Any] | asyncio.Future[Any]] = []
        metrics.waiting.set_function(self.count_waiting)

    def count_waiting(self) -> int:
        """Count the requests that are received, queued or scored, or still scored after their 504.

        504 answers a client at the deadline, but does not stop the scoring.
        """
        # Forget the work that is done by now.
        self.unfinished = [work for work in self.unfinished if not work.done()]
        return self.num_active + len(self.unfinished)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, or refuse it; count it, and answer 500 if a route has a bug.

        The arguments are those of any ASGI application. Events other than HTTP requests, such as
        the start of the server ("lifespan"), are passed on unchanged.
        """
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        response = _ResponseSender(send)
        started_at = time.perf_counter()
        try:
            await self._handle(scope, receive, response)
        except ClientDisconnect:
            pass  # the client left during its upload, so nobody waits for an answer
        # A bug in a route: its traceback goes to the log, not to the client.
        except Exception:
            # A response that has begun cannot be replaced by another.
            if response.status is not None:
                raise
            log.exception("a request failed because of an unexpected error")
            message = "an unexpected error occurred; see the service's log."
            await error_response(500, message)(scope, receive, response)
        finally:
            seconds = time.perf_counter() - started_at
            self.metrics.count_request(scope, response.status, seconds)

    async def _handle(
        self,
        scope: Scope,
        receive: Receive,
        response: "_ResponseSender",
    ) -> None:
        """Refuse a request, or run its route; a POST, which has a body, has a deadline.

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
        """Check the headers of a request: its token or host, its length, and whether it must wait.

        Returns:
            The response with status 401, 403, 413 or 429; None if the request is accepted.
        """
        # A list, since a header may be repeated; `dict(headers)` has the last value of each.
        headers = [(name.lower(), value) for name, value in scope["headers"]]
        if self.config.token is None:
            refusal = _check_hosts(headers)
        else:
            refusal = _check_token(scope["path"], dict(headers), self.config.token)
        if refusal is not None:
            return refusal
        length = dict(headers).get(b"content-length", b"0")
        # The first 20 digits decide: such a number is above any limit, and int() of thousands of
        # digits would take long.
        if length.isdigit() and int(length[:20]) > self.config.max_body:
            return error_response(413, self._describe_size_limit())
        num_waiting = self.count_waiting()
        if scope["method"] == "POST" and num_waiting >= self.config.waiting:
            message = f"too many requests are waiting ({num_waiting}); retry later."
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
        body = _BodyReader(receive, self.config.max_body, self._describe_size_limit())
        state = RequestState(received_at=time.monotonic())
        scope[STATE_KEY] = state
        self.num_active += 1
        try:
            async with asyncio.timeout(self.config.deadline) as timeout:
                await self.app(scope, body, response)
        except TimeoutError:
            # Raise a timeout of the route's own, and any after the response has begun.
            if response.status is not None or not timeout.expired():
                raise
            refusal = self._describe_timeout(body.is_complete)
            await refusal(scope, receive, response)
        finally:
            self.num_active -= 1
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

    def _describe_size_limit(self) -> str:
        """Return the error message for a body that is too large."""
        limit = self.config.max_body
        return f"the body has more than {limit:,} bytes; send fewer or smaller images."


class _BodyReader:
    """An ASGI `receive` function that limits the bytes of a body.

    Args:
        receive: ASGI's function to receive the body.
        max_bytes: The most bytes that are read.
        too_large_message: The error message if there are more.

    Attributes:
        is_complete: Whether all of the body has arrived.
    """

    def __init__(self, receive: Receive, max_bytes: int, too_large_message: str) -> None:
        """Begin with no bytes read."""
        self.receive = receive
        self.max_bytes = max_bytes
        self.too_large_message = too_large_message
        self.bytes_read = 0
        self.is_complete = False

    async def __call__(self) -> Message:
        """Receive a piece of the body, as a message of ASGI.

        Raises:
            HTTPException: 413 if the body is too large.
        """
        message = await self.receive()
        self.bytes_read += len(message.get("body", b""))
        if not message.get("more_body", False):
            self.is_complete = True
        if self.bytes_read > self.max_bytes:
            raise HTTPException(413, self.too_large_message)
        return message


class _ResponseSender:
    """An ASGI `send` function that stores the status of the response.

    Args:
        send: ASGI's function to send the response.

    Attributes:
        status: The HTTP status of the response; None until it has begun.
    """

    def __init__(self, send: Send) -> None:
        """Store ASGI's function; no response has begun."""
        self.send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        """Send a message of ASGI: the start of the response, or a piece of its body."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.send(message)


def _check_hosts(headers: list[tuple[bytes, bytes]]) -> JSONResponse | None:
    """Refuse a request whose `Host` is not a name of this machine.

    This prevents DNS rebinding, in which the owner of a web page lets the page's name point to this
    machine, so that the browser allows the page to read the service's answers.

    Args:
        headers: The request's headers, with names in lower case.

    Returns:
        The response with status 403; None if the request is accepted.
    """
    hosts = {value.partition(b":")[0] for name, value in headers if name == b"host"}
    # Also true without the header, which no browser omits.
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
    """Refuse a request without the token, except to `PUBLIC_PATHS`.

    Args:
        path: The request's path.
        headers: The request's headers, with names in lower case.
        token: The service's token.

    Returns:
        The response with status 401; None if the request is accepted.
    """
    if path in PUBLIC_PATHS:
        return None
    scheme, _, sent_token = headers.get(b"authorization", b"").partition(b" ")
    # In constant time: the duration of == would tell how many characters are right.
    is_same = hmac.compare_digest(sent_token.strip(), token.encode())
    if is_same and scheme.lower() == b"bearer":
        return None
    message = "the token is missing or wrong; send it as `Authorization: Bearer …`."
    return error_response(401, message, {"WWW-Authenticate": "Bearer"})


def request_state(scope: Scope) -> RequestState:
    """Return the state that `LimitsMiddleware` has stored in the ASGI scope of a request."""
    state: RequestState = scope[STATE_KEY]
    return state


def error_response(
    status: int,
    message: str,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    """Build the response to a request that failed.

    Args:
        status: The HTTP status, 4xx or 5xx.
        message: One sentence: what is wrong, and what to do.
        headers: Additional headers.
    """
    return JSONResponse({"error": message}, status, headers)
