"""Start the service, and stop it once what it took is answered."""

import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing import active_children, parent_process
from typing import Any

from fastapi import FastAPI

from qualms.data import Fit
from qualms.errors import QualmsError
from qualms.service.answers import About
from qualms.service.app import add_service
from qualms.service.batching import server_of
from qualms.service.connection import connections
from qualms.service.orphans import end_children_with_this
from qualms.service.scoring import Served
from qualms.service.settings import Settings

WEB_SIDE = "LitServer"  # how LitServe's name of its process begins


def serve(
    make: Callable[[], Served], about: About, fit: Fit | None, settings: Settings, say: Callable[[str], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM; what was taken by then is answered first, unless Ctrl-C comes once more.

    Args:
        make: builds what is served, in a process of its own; it must be something that can be sent there.
        about: what is served.
        fit: how images become the network's inputs.
        settings: where to listen, and the limits.
        say: tells a line to whoever started it.
    """
    _require_free(settings)
    server, desk = server_of(make, settings)
    add_service(server.app, about, fit, settings, desk.ask, lambda: server.loaded and not desk.hangs)
    where = f"http://{f'[{settings.host}]' if ':' in settings.host else settings.host}:{settings.port}"

    @asynccontextmanager
    async def told(app: FastAPI) -> AsyncIterator[None]:
        # Ctrl-C reaches every process, and LitServe then stops this one by SIGTERM. If that is heard first, uvicorn
        # takes the other for a second Ctrl-C, and drops what it is answering.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        async with server.lifespan(app):
            say(f"{about.model} is served at {where}; its page is {where}/, its routes are at {where}/docs.")
            yield

    server.app.router.lifespan_context = told
    end_children_with_this()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    quiet: dict[str, Any] = {"access_log": False, "server_header": False, "http": connections(settings.deadline)}
    try:
        server.run(settings.host, settings.port, 1, "warning", generate_client_file=False, **quiet)
    except KeyboardInterrupt:  # before LitServe heeds it, or a second one: Python would wait for what has been started
        for process in active_children():
            # The web side takes any other end for a stop in order, and answers first.
            (process.kill if process.name.startswith(WEB_SIDE) else process.terminate)()
        raise
    except (EOFError, ConnectionError):  # LitServe's queues go when the process with the model does
        raise QualmsError("the process with the network ended; the lines above say why, or memory ran out.") from None


def _stop(*_: object) -> None:
    """LitServe stops in order at Ctrl-C alone; its children end without a word once they are done."""
    if parent_process() is None:
        # The thread that watches LitServe's processes may ask a queue that has gone by then, and log a trace of it.
        logging.getLogger("litserve.server").addFilter(lambda record: "Monitoring" not in record.getMessage())
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
