"""Start the service, and stop it once all accepted requests are answered.

Signals are handled here, because LitServe stops in order at Ctrl-C alone, and only once the model
is loaded. The port is tried first: uvicorn would log the error and exit.
"""

import gc
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from multiprocessing import active_children, parent_process
from multiprocessing.resource_tracker import ensure_running
from typing import Any

from fastapi import FastAPI
from litserve import LitAPI, LitServer

from qualms.errors import QualmsError
from qualms.service.app import add_service
from qualms.service.batching import STOP_SIGNALS, BatchClient, LoadFn, ScoringWorker
from qualms.service.config import ServiceConfig
from qualms.service.connection import connection_factory
from qualms.service.lifecycle import Startup, kill_forks_with_this_process
from qualms.service.schemas import ModelInfo

POLL_SECONDS = 0.05  # between two looks at the progress of the start
# Connections that wait to be accepted, uvicorn's default.
BACKLOG = 2048
# Besides the deadline, for uvicorn to answer what it has accepted.
SHUTDOWN_SECONDS = 5
# Of multiprocessing's name of the process with the queues.
MANAGER_PREFIX = "SyncManager"


class ScoringServer(LitServer):
    """LitServe's server, which listens while the network is still loaded.

    LitServe would load the network first. Here, it is loaded in a process of its own meanwhile, so
    that the process that is told to stop is never in the middle of a call to torch.

    Args:
        worker: The process with the model.
        kwargs: Arguments of LitServe's class.

    Attributes:
        on_ready: Called once the network is ready.
    """

    def __init__(self, worker: ScoringWorker, **kwargs: Any) -> None:
        """Set up the server; no process is started yet."""
        super().__init__(worker, **kwargs)
        self.startup = worker.startup
        self.sockets: list[socket.socket] = []
        self.url = ""  # for the log
        self.on_ready: Callable[[], None] = lambda: None

    def _init_manager(self, num_api_servers: int) -> Any:
        """Let LitServe create its manager, and share the progress of the start through it.

        Args:
            num_api_servers: The number of processes that answer HTTP.

        Returns:
            The manager, a `multiprocessing.Manager`.
        """
        manager = super()._init_manager(num_api_servers)
        self.startup.share(manager)
        return manager

    def launch_inference_worker(self, lit_api: LitAPI) -> Any:
        """Start the process with the model.

        It starts with signals blocked until it handles them: Ctrl-C during its imports would print
        a traceback.

        Args:
            lit_api: The worker.
        """
        # multiprocessing's resource tracker, whose start would unblock signals.
        ensure_running()
        self.startup.log(f"{self.startup.last.step} …")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().launch_inference_worker(lit_api)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def verify_worker_status(self) -> None:
        """Do nothing; LitServe would wait for the network here."""

    def _start_server(
        self,
        port: int,
        num_uvicorn_servers: int,
        log_level: str,
        sockets: list[socket.socket],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Listen, and start the process that answers HTTP.

        Args:
            port: The port, for LitServe.
            num_uvicorn_servers: The number of processes that answer HTTP, one.
            log_level: The log level of uvicorn.
            sockets: The bound sockets.
            args: Further arguments of LitServe.
            kwargs: Further arguments of LitServe and uvicorn.
        """
        self.sockets = sockets
        for bound in sockets:
            # Early connections wait for the process.
            bound.listen(BACKLOG)
        self.startup.log(f"listening on {self.url}")
        return super()._start_server(port, num_uvicorn_servers, log_level, sockets, *args, **kwargs)

    def _start_worker_monitoring(self, manager: Any, uvicorn_workers: dict[Any, Any]) -> None:
        """Wait for the network, call `on_ready`, and let LitServe watch the processes.

        Args:
            manager: The manager that LitServe has created.
            uvicorn_workers: The processes that answer HTTP.
        """
        self.wait_until_ready([*self.inference_workers, *uvicorn_workers.values()])
        self.on_ready()
        super()._start_worker_monitoring(manager, uvicorn_workers)

    def wait_until_ready(self, processes: Sequence[Any]) -> None:
        """Wait until the network has scored a first image.

        Args:
            processes: The processes that must not end meanwhile.

        Raises:
            KeyboardInterrupt: If a signal has arrived.
            QualmsError: If the network cannot be loaded, or if a process ended.
            RuntimeError: If the network raised another error.
        """
        while True:
            if self.startup.is_stopped:
                raise KeyboardInterrupt
            # In this order: a process may report a failure just before it ends.
            are_alive = all(process.is_alive() for process in processes)
            progress = self.startup.progress()
            if progress.failure is not None:
                progress.failure.throw()
            if progress.status == "ready":
                return
            if not are_alive:
                raise QualmsError(
                    "the worker process exited while loading the network; it may have run out of "
                    "memory."
                )
            time.sleep(POLL_SECONDS)

    def _perform_graceful_shutdown(
        self,
        manager: Any,
        uvicorn_workers: dict[Any, Any],
        shutdown_reason: str = "normal",
    ) -> None:
        """Stop in LitServe's order if the network is ready, else kill all processes.

        Args:
            manager: The manager that LitServe has created, which is shut down.
            uvicorn_workers: The processes that answer HTTP.
            shutdown_reason: Why the server stops, for LitServe.
        """
        if self.startup.is_ready:
            super()._perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)
            return
        # No request was accepted yet. A process in a call to torch reacts to SIGKILL only.
        processes = [*uvicorn_workers.values(), *self.inference_workers]
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for bound in self.sockets:
            bound.close()
        manager.shutdown()


def build_server(
    load: LoadFn,
    config: ServiceConfig,
    startup: Startup,
) -> tuple[ScoringServer, BatchClient]:
    """Build LitServe's server, without its own pages.

    Args:
        load: Loads the network, and chooses its device.
        config: The limits.
        startup: Reports the progress of the process with the model.

    Returns:
        The server, and the client to score requests with.
    """
    worker = ScoringWorker(load, config, startup)
    server = ScoringServer(worker, accelerator="cpu", devices=1, timeout=config.deadline)
    server.app.router.routes.clear()
    server.uvicorn_graceful_timeout = config.deadline + SHUTDOWN_SECONDS
    return server, worker.spec


def serve(
    load: LoadFn,
    model_info: ModelInfo,
    config: ServiceConfig,
    echo: Callable[[str], None],
    steps: int = 3,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Accepted requests are answered before the service stops, unless Ctrl-C is pressed twice. The
    port is open at once; until the network is ready, requests get 503.

    Args:
        load: Loads the network in a process of its own, and scores a first image. It is called with
            a function that reports a step. Must be picklable.
        model_info: The model's description before it is loaded.
        config: The address, the token and the limits.
        echo: Writes a line to the log. Must be picklable.
        steps: The number of steps of the start: that of the process, and those that `load` reports.

    Raises:
        QualmsError: If the port is in use, if the network cannot be loaded, or if its process ends.
        KeyboardInterrupt: If the service was stopped before it was ready, or by a second Ctrl-C.
    """
    _require_free_port(config)
    startup = Startup(model_info, steps, echo)
    server, client = build_server(load, config, startup)
    add_service(server.app, startup, config, client.score, lambda: client.is_hung)
    server.url = _url(config)
    server.on_ready = lambda: _report_ready(server)
    server.app.router.lifespan_context = _ignore_ctrl_c_in(server)
    # Forks share the imported modules, and their exit does not search them for garbage.
    gc.freeze()
    kill_forks_with_this_process()
    _handle_stop_signals(_stop_start(startup))
    try:
        server.run(
            config.host,
            config.port,
            num_api_servers=1,
            log_level="warning",
            generate_client_file=False,
            access_log=False,
            server_header=False,
            http=connection_factory(config.deadline),
        )
        if not startup.is_ready:  # LitServe returns at Ctrl-C
            raise KeyboardInterrupt
    # Before LitServe handles it, or a second one.
    except KeyboardInterrupt:
        _kill_children()
        raise
    except (EOFError, ConnectionError):
        # LitServe's queues have failed, because the process with the model ended.
        raise QualmsError(
            "the worker process exited; see the lines above, or check whether it ran out of memory."
        ) from None


def _url(config: ServiceConfig) -> str:
    """Return the service's URL; put an IPv6 address in brackets."""
    host = config.host
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{config.port}"


def _report_ready(server: ScoringServer) -> None:
    """Write the last line of the start to the log, and let signals stop the server from now on.

    Raises:
        KeyboardInterrupt: If a signal arrived before that.
    """
    startup = server.startup
    _handle_stop_signals(_stop_server)
    if startup.is_stopped:
        raise KeyboardInterrupt
    url = server.url
    model = f"{startup.model_info.model} is served at {url}"
    pages = f"its page is {url}/, its routes are at {url}/docs"
    startup.echo(f"ready after {startup.last.seconds:.1f} s: {model}; {pages}.")


def _ignore_ctrl_c_in(server: ScoringServer) -> Callable[[FastAPI], Any]:
    """Return the app's lifespan, in which the process that answers HTTP ignores Ctrl-C.

    Ctrl-C reaches every process, and LitServe then stops this one by SIGTERM. uvicorn would take
    the two for a Ctrl-C that was pressed twice, and drop the requests it is answering.

    Args:
        server: The server, whose own lifespan runs inside.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Ignore Ctrl-C in the process that runs the app, inside LitServe's own lifespan."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        async with server.lifespan(app):
            yield

    return lifespan


def _handle_stop_signals(handler: Callable[..., None]) -> None:
    """Call `handler` at SIGINT and at SIGTERM from now on, in this process and in its forks."""
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


def _stop_start(startup: Startup) -> Callable[..., None]:
    """Return the handler of stop signals during startup, which only remembers the signal.

    `wait_until_ready` looks for it and raises. The handler itself does not: an exception during a
    fork would be printed and dropped by Python.
    """

    def handle(*_: object) -> None:
        """Remember the signal; a forked process that has inherited this handler exits instead."""
        startup.is_stopped = True
        if parent_process() is not None:
            raise SystemExit(0)

    return handle


def _stop_server(*_: object) -> None:
    """Handle SIGINT and SIGTERM alike: raise KeyboardInterrupt, at which LitServe stops in order.

    A forked process that has inherited this handler exits silently instead.
    """
    if parent_process() is not None:
        raise SystemExit(0)
    logging.getLogger("litserve.server").addFilter(_is_no_monitoring_record)
    raise KeyboardInterrupt


def _is_no_monitoring_record(record: logging.LogRecord) -> bool:
    """Whether a record of LitServe's log may pass: all but those of its monitoring.

    While the service stops, the monitoring may read a queue that has just ended, and log an error.
    """
    return "Monitoring" not in record.getMessage()


def _kill_children() -> None:
    """End all processes that were started; Python would wait for them at exit."""
    for process in active_children():
        if process.name.startswith(MANAGER_PREFIX):
            process.terminate()
        else:
            # After a SIGTERM, uvicorn would answer its requests first, and a start would go on.
            process.kill()


def _require_free_port(config: ServiceConfig) -> None:
    """Raise an error unless the service can listen on its host and port.

    Raises:
        QualmsError: If another program uses the port.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((config.host, config.port))
        except OSError as error:
            raise QualmsError(
                f"the service cannot listen on {config.host}, port {config.port} "
                f"({error.strerror}); choose another --port."
            ) from None
