"""Commands that are ended at random moments, started again, and compared with one that was let
alone.

    python -m tests.helpers.moments '{"words": ["train", …], "count": 50, …}'

A process that has loaded all modules forks one for each run, so that a run takes its own time and
not that of imports. With "fresh", each is a process from the start, and moments fall into the
imports too.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

RESULTS = "results"  # the folder, below that of a run, in which commands write
TEMPORARY = "temporary"


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code, less than 0 for a signal, and what it said."""

    code: int
    said: str
    seconds: float


class Run:
    """A run of a command, in a session of its own."""

    def __init__(self, words: list[str], folder: Path, fresh: bool) -> None:
        (folder / TEMPORARY).mkdir(parents=True, exist_ok=True)
        self.log, self.began = folder / "log", time.monotonic()
        self.log.write_bytes(b"")  # here, as the run may be killed before its first line
        if fresh:
            env = {**os.environ, "TMPDIR": str(folder / TEMPORARY)}
            command = [sys.executable, "-m", "qualms", *words]
            with self.log.open("wb") as out:
                started = subprocess.Popen(
                    command, cwd=folder, env=env, stdout=out, stderr=out, start_new_session=True
                )
            self.pid = started.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            self._command(words, folder)

    def _command(self, words: list[str], folder: Path) -> None:
        from qualms.cli import main

        os.setsid()
        os.chdir(folder)
        tempfile.tempdir = str(folder / TEMPORARY)
        log = os.open(self.log, os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.argv = ["qualms", *words]
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def end(self) -> Ended:
        _, status = os.waitpid(self.pid, 0)
        took = time.monotonic() - self.began
        return Ended(os.waitstatus_to_exitcode(status), self.log.read_text(), took)

    def family_lives(self) -> bool:
        """Whether a process of its session is left, after some patience."""
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.02)
        return True


def content(folder: Path) -> dict[str, Any]:
    """All that a command has written: bytes, but for rows, without what they say of time, and for
    weights.
    """
    found: dict[str, Any] = {}
    for path in sorted((folder / RESULTS).rglob("*")):
        if path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            found[str(path.relative_to(folder))] = [
                {key: value for key, value in row.items() if key not in ("seconds", "ratio")}
                for row in rows
            ]
        elif path.suffix == ".pt":
            found[str(path.relative_to(folder))] = plain(torch.load(path, weights_only=True))
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
    return found


def plain(value: Any) -> Any:
    """What can be compared: a file of weights has other bytes if its words were read, and not made
    up, by a run.
    """
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def left_behind(folder: Path) -> list[str]:
    """Files that are in the making, and temporary ones."""
    parts = [*(folder / RESULTS).rglob("*.part"), *(folder / TEMPORARY).rglob("*")]
    return [str(path.relative_to(folder)) for path in parts]


def faults(
    words: list[str], place: Path, number: signal.Signals, after: float, want: Any, job: Any
) -> list[str]:
    """What is wrong after one signal and one more run; "finished" if the command was quicker than
    the signal.
    """
    found: list[str] = []
    run = Run(words, place, job["fresh"])
    time.sleep(after)
    os.kill(run.pid, number)
    ended = run.end()
    if run.family_lives():
        found.append("a process lives on")
    if ended.code == job["code"]:
        found.append("finished")
    elif number == signal.SIGTERM:
        # A process that has not reached the first line of qualms is ended by the signal itself.
        if ended.code != 143 and not (ended.code == -number and after < job["deaf"]):
            found.append(f"exit code {ended.code}: {ended.said}")
        if left := left_behind(place):
            found.append(f"left behind: {left}")
    if "Traceback" in ended.said or "Exception ignored" in ended.said:
        found.append(f"a trace: {ended.said}")
    again = Run(words, place, fresh=False).end()
    if again.code != job["code"]:
        found.append(f"the next run ended with {again.code}: {again.said}")
    elif content(place) != want:
        found.append("the next run ended with other results")
    if left := left_behind(place):
        found.append(f"left behind by two runs: {left}")
    return found


def main(job: dict[str, Any]) -> dict[str, Any]:
    """For each signal: how many moments, how many found the command at work, and what was wrong."""
    torch.set_num_threads(1)
    words, home = job["words"], Path(job["home"])
    for module in job["modules"]:
        import_module(module)
    for _ in range(
        1 if job["fresh"] else 2
    ):  # the second is not slowed down by what the first one finds cold
        shutil.rmtree(home / "whole", ignore_errors=True)
        whole = Run(words, home / "whole", job["fresh"]).end()
        assert whole.code == job["code"], whole.said
    want, told = content(home / "whole"), {}
    assert want
    for name in job["signals"]:
        number, draw = signal.Signals[name], random.Random(job["seed"])
        hits, wrong = 0, []
        for i in range(job["count"]):
            after, place = whole.seconds * (i + draw.random()) / job["count"], home / f"{name}-{i}"
            found = faults(words, place, number, after, want, job)
            hits += "finished" not in found
            wrong += [
                f"{after:.3f} s of {whole.seconds:.3f} s: {one}"
                for one in found
                if one != "finished"
            ]
            shutil.rmtree(place)
        told[name] = {
            "moments": job["count"],
            "hit": hits,
            "wrong": wrong,
            "seconds": round(whole.seconds, 2),
        }
    return told


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
