"""Files that are written whole or not at all, and what killed runs leave beside them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qualms.cli import signals
from qualms.disk import appended, locked, writing, written_whole
from qualms.errors import QualmsError


def test_what_a_killed_run_left_is_taken_away_and_what_another_writes_is_not(tmp_path: Path) -> None:
    path, other = tmp_path / "scores[1].csv", tmp_path / "scores.csv"
    left, others = (tmp_path / f".{name}.1.part" for name in (path.name, other.name))
    for file in (left, others):
        file.write_text("half")
    with written_whole(path) as part, part.open("w") as file:
        held = part.rename(part.with_name(f".{path.name}.2.part"))  # as of another process
        assert not left.exists()
        with written_whole(path) as second:
            second.write_text("whole")
        assert held.exists()
        file.write("first")
        held.rename(part)
    assert path.read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == [others.name, path.name]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_file_that_is_not_finished_takes_nobodys_place(tmp_path: Path, stop: type[BaseException]) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("before")

    def half() -> None:
        with written_whole(path) as part:
            part.write_text("half")
            raise stop

    with pytest.raises(stop):
        half()
    assert os.listdir(tmp_path) == ["scores.csv"]
    assert path.read_text() == "before"


def test_a_line_that_is_interrupted_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with locked(path) as file:
        appended(file, path, b"one\n")
        monkeypatch.setattr("qualms.disk.os.fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            appended(file, path, b"two\n")
    assert path.read_bytes() == b"one\n"


def test_only_what_a_disk_refuses_is_told_as_that() -> None:
    with pytest.raises(RuntimeError, match="of its own"), writing("scores.csv"):
        raise RuntimeError("an error of its own")
    with pytest.raises(QualmsError, match=r"^scores.csv cannot be written \(Is a directory\)"), writing("scores.csv"):
        open("/", "wb")  # noqa: SIM115 (it cannot be opened)


def test_sigterm_is_heeded_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_since", None)
    before = signal.getsignal(signal.SIGTERM)
    cleaned: list[str] = []

    def work() -> None:
        with signals.at_sigterm(signals.stop):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # an impatient second one
                cleaned.append("up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == ["up"]
    assert signals.terminated()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_that_passes_an_import_keeps_its_exit_code() -> None:
    program = """
import signal, sys
from qualms.cli.signals import at_sigterm, stop
try:
    with at_sigterm(stop):
        exec("signal.raise_signal(signal.SIGTERM)")
except KeyboardInterrupt:
    sys.exit(143)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", program], env=env).returncode == 143
