"""Start the service, and stop it once what it took is answered."""

import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing import active_children, parent_process
from typing import Any

from fastapi import FastAPI

from qualms.errors import QualmsError
from qualms.service.answers import About
from qualms.service.app import add_service
from qualms.service.batching import Make, server_of
from qualms.service.connection import connections
from qualms.service.lifecycle import end_children_with_this
from qualms.service.settings import Settings
from qualms.service.startup import Startup

MANAGER = "SyncManager"  # how multiprocessing's name of the process with the queues begins


def serve(
    make: Make, about: About, settings: Settings, say: Callable[[str], None], steps: int = 3
) -> None:
    """Serve until Ctrl-C or SIGTERM; what was taken by then is answered first, unless Ctrl-C comes
    once more.

    The port is open at once. Until the network is ready, requests are answered 503.

    Args:
        make: builds what is served, in a process of its own, and scores a first image with it; it
            is called with a function to tell each step by. Both it and `say` must be something that
            can be sent there.
        about: what is known of what is served before that.
        settings: where to listen, and the limits.
        say: tells a line to whoever started it.
        steps: how many steps the start has: that of the process, and those that `make` tells.
    """
    _require_free(settings)
    startup = Startup(about, steps, say)
    server, desk = server_of(make, settings, startup)
    add_service(server.app, startup, settings, desk.ask, lambda: desk.hangs)
    where = (
        f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}"
    )
    server.where = where

    @asynccontextmanager
    async def deaf_to_ctrl_c(app: FastAPI) -> AsyncIterator[None]:
        # Ctrl-C reaches every process, and LitServe then stops this one by SIGTERM. If that is
        # heard first, uvicorn takes the other for a second Ctrl-C, and drops what it is answering.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        async with server.lifespan(app):
            yield

    def note_stop(*_: object) -> None:
        # `Server` looks at this twenty times a second. An exception might come up as a process is
        # forked, where Python prints and forgets it.
        startup.stopped = True
        if parent_process() is not None:
            raise SystemExit(0)

    def on_ready() -> None:
        _heed(_stop)
        if startup.stopped:
            raise KeyboardInterrupt
        served = f"{startup.about.model} is served at {where}"
        pages = f"its page is {where}/, its routes are at {where}/docs"
        say(f"ready after {startup.last.seconds:.1f} s: {served}; {pages}.")

    server.on_ready = on_ready
    server.app.router.lifespan_context = deaf_to_ctrl_c
    # what is imported stays: forks share it, and Python does not search it for a second as it ends
    gc.freeze()
    end_children_with_this()
    _heed(note_stop)
    quiet: dict[str, Any] = {
        "access_log": False,
        "server_header": False,
        "http": connections(settings.deadline),
    }
    try:
        server.run(settings.host, settings.port, 1, "warning", generate_client_file=False, **quiet)
        if not startup.is_ready:  # LitServe keeps Ctrl-C to itself
            raise KeyboardInterrupt
    except (
        KeyboardInterrupt
    ):  # before LitServe heeds it, or a second one: Python would wait for what has been started
        for process in active_children():
            # The web side takes any other end for a stop in order, and answers first; a start heeds
            # no other.
            (process.terminate if process.name.startswith(MANAGER) else process.kill)()
        raise
    except (EOFError, ConnectionError):  # LitServe's queues go when the process with the model does
        raise QualmsError(
            "the process with the network ended; the lines above say why, or memory ran out."
        ) from None


def _heed(handler: Callable[..., None]) -> None:
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


def _stop(*_: object) -> None:
    """LitServe stops in order at Ctrl-C alone; its children end without a word once they are done."""
    if parent_process() is None:
        # The thread that watches LitServe's processes may ask a queue that has gone by then, and
        # log a trace of it.
        logging.getLogger("litserve.server").addFilter(
            lambda record: "Monitoring" not in record.getMessage()
        )
        raise KeyboardInterrupt
    raise SystemExit(0)


def _require_free(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((settings.host, settings.port))
        except OSError as error:
            raise QualmsError(
                f"the service cannot listen on {settings.host}, port {settings.port} ({error.strerror}); choose "
                "another --port."
            ) from None
