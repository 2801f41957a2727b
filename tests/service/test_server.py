"""The command itself, on the loopback address: batches, the token, and a stop that answers all
accepted requests.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from qualms import Scorer
from tests.helpers.commands import run
from tests.helpers.servers import HERE, PATIENCE, ROOT, Running, image
from tests.helpers.services import REGRAD, TOKEN, digits, network, pixels

pytestmark = pytest.mark.serve
Start = Callable[..., "Running"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    started: list[Running] = []

    def begin(*words: str, token: str | None = None) -> Running:
        log = tmp_path_factory.mktemp("service") / "log"
        started.append(Running(*words, token=token, log=log))
        started[-1].wait_until_ready()
        return started[-1]

    yield begin
    for one in started:
        one.stop()


@pytest.fixture(scope="module")
def service(start: Start) -> Running:
    return start("--methods", f"{REGRAD},entropy")


def batches(service: Running) -> tuple[int, int]:
    """Return how many requests were scored, and how many of them in a batch of one image."""
    lines = dict(
        line.rsplit(" ", 1) for line in service.ask("/metrics")[1].splitlines() if line[0] != "#"
    )
    return int(float(lines["qualms_batch_images_count"])), int(
        float(lines['qualms_batch_images_bucket{le="1.0"}'])
    )


def test_requests_that_come_together_are_scored_together_and_alike(service: Running) -> None:
    before, alone_before = batches(service)
    numbers = [i % 8 for i in range(48)]
    with ThreadPoolExecutor(48) as pool:
        answers = list(pool.map(lambda i: service.ask("/v1/score", image(i)), numbers))
    assert [status for status, _ in answers] == [200] * 48
    after, alone_after = batches(service)
    assert after - before == 48
    assert alone_after - alone_before < 24, "most requests were scored by themselves"
    net = network()
    x, own = net.numbered_inputs(digits().take(slice(0, 8)))
    alone = Scorer(net.model, REGRAD, pixel_std=0.5)(x, numbers=own).scores[REGRAD].tolist()
    for i, (_, answer) in zip(numbers, answers, strict=True):
        assert answer["results"][0]["scores"][REGRAD] == pytest.approx(alone[i], rel=1e-5)


def test_it_listens_to_this_machine_alone(service: Running) -> None:
    heard = {
        c.laddr.ip
        for p in service.family()
        for c in p.net_connections()
        if c.status == psutil.CONN_LISTEN
    }
    assert heard == {"127.0.0.1"}


def test_it_is_idle_without_requests(service: Running) -> None:
    def used() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in service.family())

    service.ask("/healthz")
    before = used()
    time.sleep(3)
    assert used() - before < 0.6  # a process that polls takes as much in a second


def test_a_client_that_leaves_does_not_affect_others(service: Running) -> None:
    body = json.dumps(image(0)).encode()
    kind = "Content-Type: application/json"
    head = f"POST /v1/score HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    log = service.log.read_text()
    taken = [
        len(body),
        len(body) // 2,
    ] * 5  # some leave as they wait for the answer, some in the middle of the upload
    for part in taken:
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as gone:
            gone.sendall(head.encode() + body[:part])
    assert service.ask("/v1/score", image(0))[0] == 200
    until = time.monotonic() + PATIENCE
    while "qualms_waiting 0.0" not in service.ask("/metrics")[1]:
        assert time.monotonic() < until
    assert 'route="none"' not in service.ask("/metrics")[1]  # all of them were let in
    assert service.log.read_text() == log


Answers = list[tuple[int, Any]]


def busy(service: Running, token: str | None = None) -> tuple[list[threading.Thread], Answers]:
    """Send twelve requests, each in a thread, and wait until the service has accepted them; return
    the threads and the list that collects the answers.
    """
    many, answers = {"images": [pixels(i).tolist() for i in range(32)]}, Answers()

    def ask() -> None:
        with suppress(OSError):  # the service is gone
            answers.append(service.ask("/v1/score", many, token))

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + PATIENCE
    while "qualms_waiting 12.0" not in service.ask("/metrics", token=token)[1] and not answers:
        assert time.monotonic() < until
    return threads, answers


@pytest.mark.parametrize(
    "how", ["SIGTERM to the command", "Ctrl-C", "Ctrl-C that the web side hears last"]
)
def test_a_stop_answers_what_was_taken(start: Start, how: str) -> None:
    token = TOKEN if how == "Ctrl-C" else None
    service = start("--methods", REGRAD, "--batch", "2", token=token)
    assert service.ask("/v1/model")[0] == (401 if token else 200)
    assert service.ask("/v1/score", image(0), token)[0] == 200
    threads, answers = busy(service, token)
    family = service.family()
    if how == "SIGTERM to the command":
        service.process.send_signal(signal.SIGTERM)
    else:
        if how != "Ctrl-C":  # the web side is the process that was started last
            max(family[1:], key=lambda p: (p.create_time(), p.pid)).send_signal(signal.SIGTERM)
            time.sleep(0.05)
        os.killpg(service.process.pid, signal.SIGINT)
    for thread in threads:
        thread.join(PATIENCE)
    assert [status for status, _ in answers] == [200] * 12
    assert all(len(answer["results"]) == 32 for _, answer in answers)
    assert service.process.wait(PATIENCE) == 0
    assert psutil.wait_procs(family, timeout=30)[1] == []
    assert service.complaints() == []


def test_a_second_ctrl_c_waits_for_nothing(start: Start) -> None:
    service = start("--methods", REGRAD, "--batch", "1")
    threads, answers = busy(service)
    family = service.family()
    os.killpg(service.process.pid, signal.SIGINT)
    time.sleep(0.3)
    answered = len(answers)
    os.killpg(service.process.pid, signal.SIGINT)
    assert service.process.wait(PATIENCE) == 130
    assert psutil.wait_procs(family, timeout=30)[1] == []
    for thread in threads:
        thread.join(PATIENCE)
    assert answered <= len(answers) < 12
    assert service.complaints() == ["qualms: stopped."]


def test_a_dead_process_ends_the_service_with_a_sentence(start: Start) -> None:
    service = start("--methods", "entropy")
    (scoring,) = (p for p in service.family() if any("spawn_main" in word for word in p.cmdline()))
    scoring.kill()
    assert service.process.wait(PATIENCE) == 1
    assert "qualms: the worker process exited" in service.log.read_text()


DEAD = """
import os, sys
from qualms.service.server import serve
from qualms.service.config import ServiceConfig
from tests.helpers.services import usual

def make(begin):
    os._exit(9)

if __name__ == "__main__":
    serve(make, usual().model_info, ServiceConfig(port=int(sys.argv[1])), print)
"""


def test_a_process_that_dies_as_it_loads_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    (tmp_path / "dead.py").write_text(DEAD)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])}
    command = [sys.executable, str(tmp_path / "dead.py"), port]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1
    assert "QualmsError: the worker process exited while loading the network" in done.stderr


def test_an_invalid_setup_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("QUALMS_TOKEN", raising=False)
    net = ["--model", f"{HERE}:plain", "--mean", "0.5", "--std", "0.5", "--methods", "entropy"]
    (tmp_path / "t.json").write_text(
        '{"value": 1, "samples": 3, "rule": "coverage 0.9", "provenance": {"method": "MSP()", "network": "x"}}'
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for words, message in (
            (["--host", "0.0.0.0"], "can reach 0.0.0.0 could use the service"),
            (["--host", "10.0.0.1"], "cannot listen on '10.0.0.1'"),
            (["--port", "80"], "choose one from 1024"),
            (["--waiting", "0"], "limit 'waiting' is 0"),
            (["--deadline", "nan"], "limit 'deadline' is nan"),
            (["--max-body", "inf"], "--max-body is inf"),
            (
                ["--threshold", str(tmp_path / "t.json")],
                "the threshold was calibrated with other settings",
            ),
            (["--threshold", str(tmp_path / "no.json")], "there is no threshold file"),
            (["--size", "8", "--port", str(taken.getsockname()[1])], "Address already in use"),
            (["--size", "5"], "the model does not accept"),
            (
                ["--size", "8", "--model", f"{HERE}:stubborn", "--classes", "3"],
                "3 classes",
            ),
            (
                ["--size", "8", "--model", f"{HERE}:stubborn", "--classes", "a,b"],
                "2 classes",
            ),
        ):
            assert run(monkeypatch, "serve", *net, *words) == 1
            assert message in capsys.readouterr().err
