"""A service that is ended by a signal at any moment leaves no process and no port behind, and
starts again as it was.

With QUALMS_FUZZ=1 there are fifty moments for each signal, else a few.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.servers import PATIENCE, Running, image, not_ended, port_is_free
from tests.helpers.services import REGRAD

pytestmark = [pytest.mark.serve, pytest.mark.slow]
FUZZ = os.environ.get("QUALMS_FUZZ") == "1"
MOMENTS = 50 if FUZZ else 2
SERVED = 1.0  # seconds that a service is up before its last moment comes
ORDERLY = (
    0,
    130,
    143,
    -signal.SIGTERM,
)  # served; stopped as it loaded; as it was imported; before its first line


def start_service(folder: Path, name: str) -> Running:
    return Running("--methods", REGRAD, log=folder / name)


def answer(service: Running) -> object:
    status, found = service.ask("/v1/score", image(0))
    assert status == 200
    return found["results"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, object]:
    """Measure how long an undisturbed service takes to start, and what it answers."""
    began = time.monotonic()
    service = start_service(tmp_path_factory.mktemp("service"), "whole")
    try:
        service.wait_until_ready()
        ready, found = time.monotonic() - began, answer(service)
        service.process.terminate()
        assert service.process.wait(PATIENCE) == 0
        assert not_ended(service) == []
    finally:
        service.stop()
    return ready, found


@pytest.mark.timeout(4 * 3600 if FUZZ else 900)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_service_that_is_ended_takes_all_its_processes_along(
    tmp_path: Path, number: signal.Signals, whole: tuple[float, object]
) -> None:
    ready, want = whole
    draw, wrong, served = random.Random(0), [], 0
    for i in range(MOMENTS):
        service, began = start_service(tmp_path, f"log{i}"), time.monotonic()
        try:
            if i % 2:  # every second one is let come up
                service.wait_until_ready()
                after = time.monotonic() - began + SERVED * draw.random()
            else:
                after = ready * (i + 2 * draw.random()) / MOMENTS
            time.sleep(max(0.0, began + after - time.monotonic()))
            up = service.process.poll() is None and "is served at" in service.log.read_text()
            found = [f"another answer than {want}"] if up and answer(service) != want else []
            service.process.send_signal(number)
            found += faults(service, number)
        finally:
            service.stop()
        served += up
        for one in found:
            print(
                f"after {after:.2f} s of {ready:.2f}, {'up' if up else 'not up'}: {one}", flush=True
            )
        wrong += found
    print(
        f"serve, {number.name}: {MOMENTS} moments, {MOMENTS - served} over the {ready:.1f} s of its start, {served} "
        f"while it served; failures: {len(wrong)}"
    )
    assert wrong == []


def faults(service: Running, number: signal.Signals) -> list[str]:
    """List what is wrong after a service was sent a signal."""
    found, code = [], service.process.wait(PATIENCE)
    left = not_ended(service)
    log = service.log.read_text()
    if left:
        found.append(f"{left} live on; {log}")
    if not port_is_free(service.port):
        found.append("the port is taken")
    if number == signal.SIGTERM and (
        code not in ORDERLY or "Traceback" in log or "Exception ignored" in log
    ):
        found.append(f"exit code {code}; {log}")
    return found
