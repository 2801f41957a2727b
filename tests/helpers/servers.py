"""The service in a process of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.services import (
    NAMES,
    pixels,
)

ROOT = Path(__file__).parents[2]


PATIENCE = 120  # seconds


HERE = "tests.helpers.services"


STEP = re.compile(r"\d+\.\d s: |ready after \d+\.\d s: ")


class Running:
    """A service of its own process, and how to ask it."""

    def __init__(self, *words: str, token: str | None = None, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        shape = ["--size", "8", "--mean", "0.5", "--std", "0.5", "--classes", ",".join(NAMES)]
        model = ["--model", f"{HERE}:plain", "--name", "digits"]
        command = [
            sys.executable,
            "-m",
            "qualms",
            "serve",
            *model,
            *shape,
            "--port",
            str(self.port),
            *words,
        ]
        env = {k: v for k, v in os.environ.items() if k != "QUALMS_TOKEN"} | {
            "OMP_NUM_THREADS": "1"
        }
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])
        self.token, self.log = token, log
        with log.open("wb") as out:
            more = {} if token is None else {"QUALMS_TOKEN": token}
            self.process = subprocess.Popen(
                command, env=env | more, stdout=out, stderr=out, start_new_session=True
            )

    def wait_until_ready(self) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.process.poll() is None:
            try:
                # The process that answers HTTP knows it before the one that signals reach.
                if self.ask("/readyz")[0] == 200 and "is served at" in self.log.read_text():
                    return
            except OSError:
                pass
            time.sleep(0.1)
        pytest.fail(f"the service did not start: {self.log.read_text()}")

    def ask(self, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        """The status, and the answer."""
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if path != "/metrics" else text
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def complaints(self) -> list[str]:
        """The log without the steps of the start."""
        return [line for line in self.log.read_text().splitlines() if not STEP.match(line)]

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def stop(self) -> None:
        """Whatever a test left running."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE)


def image(number: int) -> dict[str, Any]:
    return {"images": [pixels(number).tolist()]}


OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz", "/v2/health/live", "/v2/health/ready")


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header claims many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        )

    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    packed = zlib.compress(bytes(100_000), 9)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size + b"\x08\x02\x00\x00\x00")
        + chunk(b"IDAT", packed)
        + chunk(b"IEND", b"")
    )


def session(service: Running) -> list[psutil.Process]:
    """All processes of the service, also those whose parent is gone."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                os.getsid(process.pid) == service.process.pid
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def not_ended(service: Running) -> list[list[str]]:
    """The commands of processes that are left. One that is at its imports as its parent is killed
    ends after them.
    """
    until = time.monotonic() + PATIENCE
    while (left := session(service)) and time.monotonic() < until:
        time.sleep(0.05)
    commands = [process.cmdline() for process in left]
    for process in left:
        process.kill()
    return commands


def port_is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return trial.connect_ex(("127.0.0.1", port)) != 0
