"""What a request holds is decoded in threads of their own, so that others are answered meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import HTTPException, Request

THREADS = 4
VISIT = "qualms.visit"  # where a request's scope has its `RequestState`
T = TypeVar("T")


@dataclass
class RequestState:
    """A request with a body: when its headers came, by `time.monotonic`, and what is decoded or
    scored for it.
    """

    came: float
    work: Future[Any] | asyncio.Future[Any] | None = None


class Decoding:
    """A few threads. They are not asyncio's own: LitServe waits for its replies in those, and slow
    images would be in its way.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(THREADS, "decode")

    async def __call__(self, request: Request, work: Callable[..., T], *given: Any) -> T:
        """What `work` returns. Work that has begun goes on if nobody waits any more, so the door is
        told of it.
        """
        running = self.pool.submit(work, *given)
        visit_of(request).work = running
        try:
            return await asyncio.wrap_future(running)
        except MemoryError:
            words = "the request takes more memory than there is; send fewer or smaller images."
            raise HTTPException(413, words) from None


def visit_of(request: Request) -> RequestState:
    """What the door has noted of a request."""
    visit: RequestState = request.scope[VISIT]
    return visit
