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
# The most connections that wait to be accepted; uvicorn has the same default.
BACKLOG = 2048
# How long uvicorn may take to answer accepted requests at a stop, in addition to the deadline.
SHUTDOWN_SECONDS = 5
# multiprocessing's name of the process with the queues starts so.
MANAGER_PREFIX = "SyncManager"


class ScoringServer(LitServer):
    """LitServe's server, which listens while the network is still loaded.

    LitServe would load the network first, and then listen. Here, another process loads it at the
    same time. So the process that receives the signal to stop is never in a call to torch, which
    would delay the stop.

    Args:
        worker: The process with the model.
        kwargs: Arguments of LitServe's class.

    Attributes:
        sockets: The bound sockets that the service listens on.
        url: The service's URL, for the log.
        on_ready: Called without arguments once the network is ready.
    """

    def __init__(self, worker: ScoringWorker, **kwargs: Any) -> None:
        """Set up the server; no process is started yet."""
        super().__init__(worker, **kwargs)
        self.startup = worker.startup
        self.sockets: list[socket.socket] = []
        # `serve` sets these two before the start.
        self.url = ""
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
        """Start the process with the model, with SIGINT and SIGTERM blocked.

        The process inherits the blocked signals, and unblocks them once it can handle them:
        otherwise Ctrl-C during its imports would print a traceback.

        Args:
            lit_api: The worker.
        """
        # Start multiprocessing's resource tracker now: starting it later would unblock the signals.
        ensure_running()
        self.startup.log(f"{self.startup.last_progress.step} …")
        old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().launch_inference_worker(lit_api)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)

    def verify_worker_status(self) -> None:
        """Do nothing: LitServe's method would wait for the network before the service listens."""

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
            num_uvicorn_servers: The number of processes that answer HTTP, which is one.
            log_level: The log level of uvicorn.
            sockets: The bound sockets.
            args: Further arguments of LitServe.
            kwargs: Further arguments of LitServe and uvicorn.
        """
        self.sockets = sockets
        for bound_socket in sockets:
            # From now on, connections are queued until the process that answers HTTP runs.
            bound_socket.listen(BACKLOG)
        self.startup.log(f"listening on {self.url}")
        return super()._start_server(port, num_uvicorn_servers, log_level, sockets, *args, **kwargs)

    def _start_worker_monitoring(self, manager: Any, uvicorn_workers: dict[Any, Any]) -> None:
        """Wait until the network is ready, call `on_ready`, and let LitServe watch the processes.

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
            processes: The processes that must not end before that.

        Raises:
            KeyboardInterrupt: If SIGINT or SIGTERM has arrived.
            QualmsError: If the network cannot be loaded, or if a process ended.
            RuntimeError: If the network raised another error.
        """
        while True:
            if self.startup.is_stopped:
                raise KeyboardInterrupt
            # Before the progress is read: a process may report a failure just before it ends.
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
        """Let LitServe stop if the network is ready, else kill all processes.

        Args:
            manager: The manager that LitServe has created, which is shut down.
            uvicorn_workers: The processes that answer HTTP.
            shutdown_reason: Why the server stops, for LitServe.
        """
        if self.startup.is_ready:
            super()._perform_graceful_shutdown(manager, uvicorn_workers, shutdown_reason)
            return
        # No request was accepted yet. A process in a call to torch only reacts to SIGKILL.
        processes = [*uvicorn_workers.values(), *self.inference_workers]
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        for bound_socket in self.sockets:
            bound_socket.close()
        manager.shutdown()


def build_server(
    load: LoadFn,
    config: ServiceConfig,
    startup: Startup,
) -> tuple[ScoringServer, BatchClient]:
    """Build the LitServe server of a network, without the routes that LitServe adds.

    Args:
        load: Loads the network, and chooses its device.
        config: The limits.
        startup: Reports the progress of the process with the model.

    Returns:
        The server, and the client that sends requests to the process with the model.
    """
    worker = ScoringWorker(load, config, startup)
    # One process with the model, to which LitServe gives no GPU: `load` chooses the device.
    server = ScoringServer(
        worker,
        accelerator="cpu",
        devices=1,
        timeout=config.deadline,
    )
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
    port is open from the start; until the network is ready, requests get status 503.

    Args:
        load: Loads the network in a process of its own, and scores a first image. It is called with
            a function that reports a step. Must be picklable.
        model_info: The model's description before it is loaded.
        config: The address, the token and the limits.
        echo: Writes a line to the log. Must be picklable.
        steps: The number of steps of the start: one that starts the process with the network, and
            those that `load` reports.

    Raises:
        QualmsError: If the port is in use, if the network cannot be loaded, or if its process ends.
        KeyboardInterrupt: If the service was stopped before it was ready, or by a second Ctrl-C.
    """
    _require_free_port(config)
    startup = Startup(model_info, steps, echo)
    server, client = build_server(load, config, startup)
    add_service(server.app, startup, config, client.score, lambda: client.is_hung)
    server.url = _service_url(config)
    server.on_ready = lambda: _report_ready(server)
    # The process that answers HTTP is stopped by SIGTERM alone.
    server.app.router.lifespan_context = _lifespan_without_ctrl_c(server)
    # Hide all objects so far, such as modules, from the garbage collector: forks then share their
    # memory, and do not search them for garbage as they exit.
    gc.freeze()
    kill_forks_with_this_process()
    _handle_stop_signals(_make_startup_handler(startup))
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
        # LitServe handles Ctrl-C, and returns; before the network is ready, that is an error.
        if not startup.is_ready:
            raise KeyboardInterrupt
    # Also raised by Ctrl-C before LitServe handles it, and by a second one.
    except KeyboardInterrupt:
        _kill_children()
        raise
    except (EOFError, ConnectionError):
        # LitServe's queues have failed, because the process with the model ended.
        raise QualmsError(
            "the worker process exited; see the lines above, or check whether it ran out of memory."
        ) from None


def _service_url(config: ServiceConfig) -> str:
    """Return the service's URL, in which an IPv6 address stands in brackets."""
    is_ipv6 = ":" in config.host
    host = f"[{config.host}]" if is_ipv6 else config.host
    return f"http://{host}:{config.port}"


def _report_ready(server: ScoringServer) -> None:
    """Write to the log that the network is ready; from now on, signals stop the running server.

    Raises:
        KeyboardInterrupt: If SIGINT or SIGTERM has already arrived.
    """
    startup = server.startup
    _handle_stop_signals(_stop_server)
    # The handler during startup only stored that the signal arrived.
    if startup.is_stopped:
        raise KeyboardInterrupt
    url = server.url
    model = f"{startup.model_info.model} is served at {url}"
    pages = f"its page is {url}/, its routes are at {url}/docs"
    startup.echo(f"ready after {startup.last_progress.seconds:.1f} s: {model}; {pages}.")


def _lifespan_without_ctrl_c(server: ScoringServer) -> Callable[[FastAPI], Any]:
    """Return a lifespan for the app, in which the process that answers HTTP ignores Ctrl-C.

    Ctrl-C sends SIGINT to every process, and LitServe then stops this one by SIGTERM. uvicorn would
    take the two signals for a Ctrl-C that was pressed twice, and drop the requests it is answering.

    Args:
        server: LitServe's server, whose lifespan is entered as well.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        """Ignore SIGINT in the process that runs the app, then enter LitServe's own lifespan."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        async with server.lifespan(app):
            yield

    return lifespan


def _handle_stop_signals(handler: Callable[..., None]) -> None:
    """Let SIGINT and SIGTERM call `handler` from now on, in this process and in its forks."""
    for signal_number in STOP_SIGNALS:
        signal.signal(signal_number, handler)


def _make_startup_handler(startup: Startup) -> Callable[..., None]:
    """Return the signal handler for SIGINT and SIGTERM during startup.

    It only sets `startup.is_stopped`, for which `wait_until_ready` raises KeyboardInterrupt. The
    handler does not raise it: Python would print and drop an exception during a fork.
    """

    def handle(*_: object) -> None:
        """Store that a signal arrived; a forked process, which inherits this handler, exits."""
        startup.is_stopped = True
        if parent_process() is not None:
            raise SystemExit(0)

    return handle


def _stop_server(*_: object) -> None:
    """Handle SIGINT or SIGTERM once the network is ready: raise the error that stops LitServe.

    A forked process, which inherits this handler, exits silently instead.
    """
    if parent_process() is not None:
        raise SystemExit(0)
    logging.getLogger("litserve.server").addFilter(_is_no_monitoring_record)
    raise KeyboardInterrupt


def _is_no_monitoring_record(record: logging.LogRecord) -> bool:
    """Filter LitServe's log: return False for records of its monitoring thread, to drop them.

    While the service stops, that thread may read a queue that has just ended, and log an error.
    """
    return "Monitoring" not in record.getMessage()


def _kill_children() -> None:
    """End all processes that this one started, since Python would wait for them at its exit."""
    for process in active_children():
        if process.name.startswith(MANAGER_PREFIX):
            # The process with the queues, which at a SIGTERM removes the folder of its socket.
            process.terminate()
        else:
            # SIGKILL: at a SIGTERM, uvicorn would first answer its requests, and a process that
            # loads the network would go on loading.
            process.kill()


def _require_free_port(config: ServiceConfig) -> None:
    """Raise an error unless the service can listen on its host and port.

    Raises:
        QualmsError: If another program uses the port.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as trial_socket:
        # A port whose last connections are only waiting to expire is free.
        trial_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial_socket.bind((config.host, config.port))
        except OSError as error:
            raise QualmsError(
                f"the service cannot listen on {config.host}, port {config.port} "
                f"({error.strerror}); choose another --port."
            ) from None
