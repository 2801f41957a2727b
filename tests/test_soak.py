"""The soak (`benchmarks/soak.py`) in short: what it says of a process that is in order, and of one
that is not.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import soak as found

    return found


@pytest.mark.slow
def test_mixed_scoring_leaves_nothing_behind_and_gives_the_same_each_time() -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "soak.py"),
        "--minutes",
        "0",
    ]  # a few rounds all the same
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    assert re.search(r"4 rounds of \d+ tasks, 0 of \d+ results differ", done.stdout)


class Measured:
    """A process of which memory, files and threads are what a test says: what another test left
    does not matter.
    """

    def __init__(self) -> None:
        self.rss, self.files = 300 * 2**20, 6

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=self.rss)

    def num_fds(self) -> int:
        return self.files

    def num_threads(self) -> int:
        return 1

    def leak(self) -> None:
        self.rss += 3 * 2**20

    def open(self) -> None:
        self.files += 1


@pytest.mark.slow
def test_what_is_not_in_order_is_told(soak: ModuleType) -> None:
    numbers, process = iter(range(100)), Measured()
    todo: dict[str, Callable[[], Any]] = {
        "leaks": process.leak,
        "opens": process.open,
        "changes": lambda: next(numbers) // 6,
    }
    running = soak.Soak(todo, process=process)
    for _ in range(8):
        running.round()
    by_slope, by_medians, *more = running.faults[1:]
    assert running.faults[0] == "changes gave another result"
    assert by_slope.startswith("memory rises by ")
    assert by_medians.startswith("memory rises by ")
    assert len(more) == 1
    assert more[0].startswith("the open files rise from ")


@pytest.mark.slow
def test_what_is_in_order_is_not_told(soak: ModuleType) -> None:
    running = soak.Soak({"adds": lambda: 1 + 1}, process=Measured())
    for _ in range(8):
        running.round()
    assert running.faults == []
    assert "0 of 7 results differ" in soak.line(running, 0.1)
