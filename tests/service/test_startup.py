"""While the network is loaded, the service listens, reports its progress, and stops at once."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from qualms import Scorer
from qualms.errors import QualmsError
from qualms.service.lifecycle import Failure, RemoteTraceback, Startup
from qualms.service.scoring import ScoringService
from tests.helpers.servers import HERE, PATIENCE, Running, image, not_ended, port_is_free
from tests.helpers.services import (
    BUSY,
    NAME,
    client,
    network,
    pixels,
    refused,
    starting,
    upload,
    usual,
)

pytestmark = pytest.mark.serve
AT_ONCE = 3.0  # seconds; a third of one on an idle machine
TENSOR = {"name": "images", "shape": [1, 8, 8], "datatype": "UINT8", "data": pixels(0).tolist()}


def test_probes_say_how_far_the_start_is() -> None:
    start = starting()
    ask = client(startup=start)
    first = ask.get("/readyz")
    assert first.status_code == 503
    assert first.headers["retry-after"] == "5"
    assert first.json() == {
        "status": "warming up",
        "step": "starting the worker process",
        "step_number": 1,
        "steps": 3,
        "seconds": pytest.approx(0, abs=30),
    }
    start.begin("loading digits")
    second = ask.get("/readyz").json()
    assert (second["step"], second["step_number"], second["steps"]) == ("loading digits", 2, 3)
    assert ask.get("/healthz").status_code == ask.get("/v2/health/live").status_code == 200
    start.finish(usual().model_info, usual().network.transform)
    assert ask.get("/readyz").json() == {"status": "ready"}
    assert ask.post("/v1/score", files=upload(0)).status_code == 200


def test_until_the_network_is_ready_requests_are_refused_at_once() -> None:
    start = starting()
    start.begin("loading digits")
    ask = client(startup=start)
    words = "the network is warming up (loading digits, step 2 of 3, "
    for path in ("/v2/health/ready", f"/v2/models/{NAME}/ready", f"/v2/models/{NAME}", "/v1/model"):
        refused(ask.get(path), 503, words)
    for answer in (
        ask.post("/v1/score", files=upload(0)),
        ask.post("/v1/score", json={"images": [pixels(0).tolist()]}),
        ask.post(f"/v2/models/{NAME}/infer", json={"inputs": [TENSOR]}),
    ):
        refused(answer, 503, words)
        assert answer.headers["retry-after"] == "5"
    assert "is warming up" in ask.get("/").text


def test_a_failed_start_is_reported_without_its_details() -> None:
    start = starting()
    start.begin("loading digits")
    start.fail(QualmsError("there is no file /secret/folder/digits.pt."))
    ask = client(startup=start)
    found = ask.get("/readyz")
    assert (found.status_code, found.json()["status"], found.json()["step"]) == (
        503,
        "failed",
        "loading digits",
    )
    assert "secret" not in found.text
    refused(
        ask.post("/v1/score", files=upload(0)),
        503,
        "could not be loaded; see the service's log",
    )


def test_a_network_that_hangs_is_not_ready() -> None:
    ask = client(hangs=lambda: True)
    assert ask.get("/readyz").json()["status"] == "hangs"
    refused(ask.post("/v1/score", files=upload(0)), 503, "the network is not responding")


def test_what_is_served_says_its_tolerance() -> None:
    net = network()
    own = ScoringService(NAME, net, Scorer(net.model, "regrad+layers", tolerance=0.1))
    assert client(own).get("/v1/model").json()["tolerance"] == 0.1


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (QualmsError("there is no such network."), QualmsError, "there is no such network."),
        (ZeroDivisionError("no classes"), RuntimeError, "ZeroDivisionError: no classes"),
    ],
)
def test_a_failure_in_the_other_process_is_raised_in_this_one(
    error: Exception, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as raised:
        Failure.from_error(error).throw()
    assert isinstance(raised.value.__cause__, RemoteTraceback)  # which --debug shows


def test_the_log_says_each_step_with_its_seconds() -> None:
    lines: list[str] = []
    start = Startup(usual().model_info, 3, lines.append)
    start.begin("loading digits")
    start.begin("scoring a warm-up image")
    assert [re.sub(r"^\d+\.\d s", "T", line) for line in lines] == [
        "T: loading digits …",
        "T: scoring a warm-up image …",
    ]
    assert start.progress().number == 3


def wait_for(service: Running, condition: str) -> None:
    """Wait until the log contains a text."""
    until = time.monotonic() + PATIENCE
    while condition not in service.log.read_text():
        assert time.monotonic() < until, service.log.read_text()
        assert service.process.poll() is None, service.log.read_text()
        time.sleep(0.02)


def test_it_listens_while_the_network_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUALMS_TEST_GO", str(tmp_path / "go"))
    service = Running("--model", f"{HERE}:slow", "--methods", "regrad+layers", log=tmp_path / "log")
    try:
        wait_for(service, "listening on http://127.0.0.1:")
        assert service.ask("/healthz")[0] == 200
        assert service.ask("/readyz")[0] == 503
        wait_for(service, "loading")
        until = time.monotonic() + PATIENCE
        while (answer := service.ask("/readyz"))[1].get(
            "step"
        ) != "loading digits" and time.monotonic() < until:
            time.sleep(0.02)
        status, found = answer
        assert (status, found["status"], found["step"]) == (503, "warming up", "loading digits")
        assert (found["step_number"], found["steps"]) == (2, 3)
        status, said = service.ask("/v1/score", image(0))
        assert (status, "warming up (loading digits, step 2 of 3" in said["error"]) == (503, True)
        (tmp_path / "go").touch()
        service.wait_until_ready()
        assert service.ask("/v1/score", image(0))[0] == 200
        assert service.ask("/v1/model")[1]["model_hash"] != ""
        wait_for(service, "is served at")
        lines = [
            re.sub(r"\d+(\.\d)? m?s\b", "T", line) for line in service.log.read_text().splitlines()
        ]
        where = f"http://127.0.0.1:{service.port}"
        assert lines == [
            "T: starting the worker process …",
            f"T: listening on {where}",
            "T: loading digits …",
            "T: scoring a warm-up image, about T per image (18 forward passes) …",
            f"ready after T: digits is served at {where}; its page is {where}/, its routes are at {where}/docs.",
        ]
    finally:
        service.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("factory", ["endless", "long_pass"])
def test_a_stop_ends_a_start_at_once(tmp_path: Path, factory: str, number: signal.Signals) -> None:
    service = Running("--model", f"{HERE}:{factory}", "--methods", "entropy", log=tmp_path / "log")
    try:
        wait_for(service, BUSY)
        began = time.monotonic()
        if number == signal.SIGINT:
            os.killpg(service.process.pid, number)  # as Ctrl-C does
        else:
            service.process.send_signal(number)
        assert (
            service.process.wait(PATIENCE) == 130
        )  # stopped in order, and not ended by the signal
        took = time.monotonic() - began
        assert not_ended(service) == []
        assert took < AT_ONCE
        assert port_is_free(service.port)
        assert service.complaints() == [BUSY, "qualms: stopped."]
    finally:
        service.stop()


def test_a_stop_works_while_the_process_with_the_network_is_importing(
    tmp_path: Path,
) -> None:
    service = Running("--methods", "entropy", log=tmp_path / "log")
    try:
        wait_for(service, "listening on")
        began = time.monotonic()
        os.killpg(service.process.pid, signal.SIGINT)
        assert service.process.wait(PATIENCE) == 130
        assert time.monotonic() - began < AT_ONCE
        assert not_ended(service) == []
        assert service.complaints() == ["qualms: stopped."]
    finally:
        service.stop()


def test_a_network_that_cannot_be_loaded_ends_the_service_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUALMS_TEST_GO", str(tmp_path))
    service = Running("--model", f"{HERE}:broken", "--methods", "entropy", log=tmp_path / "log")
    try:
        assert service.process.wait(PATIENCE) == 1
        assert not_ended(service) == []
        (sentence,) = service.complaints()
        assert "no classes are left" in sentence
    finally:
        service.stop()
