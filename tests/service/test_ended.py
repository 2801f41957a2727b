"""A service that is ended by a signal at any moment leaves no process and no port behind, and starts again as it was.

With QUALMS_FUZZ=1 there are fifty moments for each signal, else a few.
"""

import os
import random
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.service.services import REGRAD
from tests.service.test_server import PATIENCE, Running, image

pytestmark = [pytest.mark.serve, pytest.mark.slow]
FUZZ = os.environ.get("QUALMS_FUZZ") == "1"
MOMENTS = 50 if FUZZ else 3
SERVED = 1.0  # seconds that a service is up before its last moment comes
ORDERLY = (0, 130, 143, -signal.SIGTERM)  # served; stopped as it loaded; as it was imported; before its first line


def begun(folder: Path, name: str) -> Running:
    return Running("--methods", REGRAD, log=folder / name)


def session(service: Running) -> list[psutil.Process]:
    """All processes of the service, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == service.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def all_ended(service: Running) -> bool:
    until = time.monotonic() + 10
    while left := session(service):
        if time.monotonic() > until:
            for process in left:
                process.kill()
            return False
        time.sleep(0.05)
    return True


def port_is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return trial.connect_ex(("127.0.0.1", port)) != 0


def answer(service: Running) -> object:
    status, found = service.ask("/v1/score", image(0))
    assert status == 200
    return found["results"]


@pytest.mark.timeout(4 * 3600 if FUZZ else 900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_is_ended_takes_all_its_processes_along(tmp_path: Path, number: signal.Signals) -> None:
    began = time.monotonic()
    whole = begun(tmp_path, "whole")
    try:
        whole.wait_until_ready()
        ready, want = time.monotonic() - began, answer(whole)
        whole.process.terminate()
        assert whole.process.wait(PATIENCE) == 0
        assert all_ended(whole)
    finally:
        whole.stop()
    draw, wrong, served = random.Random(0), [], 0
    for i in range(MOMENTS):
        after = (ready + SERVED) * (i + draw.random()) / MOMENTS
        service, began = begun(tmp_path, f"log{i}"), time.monotonic()
        try:
            while time.monotonic() < began + after:
                time.sleep(0.01)
            up = service.process.poll() is None and "is served at" in service.log.read_text()
            if up and answer(service) != want:
                wrong.append(f"after {after:.2f} s: another answer")
            served += up
            service.process.send_signal(number)
            code = service.process.wait(PATIENCE)
            log = service.log.read_text()
            if not all_ended(service):
                wrong.append(f"after {after:.2f} s: a process lives on; {log}")
            if not port_is_free(service.port):
                wrong.append(f"after {after:.2f} s: the port is taken")
            if number == signal.SIGTERM and (code not in ORDERLY or "Traceback" in log or "Exception ignored" in log):
                wrong.append(f"after {after:.2f} s: exit code {code}; {log}")
        finally:
            service.stop()
    print(
        f"serve, {number.name}: {MOMENTS} moments over {ready + SERVED:.1f} s, {served} while it served; "
        f"failures: {len(wrong)}"
    )
    assert wrong == []
