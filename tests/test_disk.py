"""Files that are written whole or not at all, and what killed runs leave beside them."""

import errno
import io
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

from qualms import disk
from qualms.cli import signals
from qualms.disk import (
    append_lines,
    atomic_write,
    explain_write_failure,
    lock_file,
    require_writable,
)
from qualms.errors import QualmsError


def test_what_a_killed_run_left_is_taken_away_and_what_another_writes_is_not(
    tmp_path: Path,
) -> None:
    path, other = tmp_path / "scores[1].csv", tmp_path / "scores.csv"
    left, others = (tmp_path / f".{name}.1.part" for name in (path.name, other.name))
    for file in (left, others):
        file.write_text("half")
    with atomic_write(path) as part, part.open("w") as file:
        held = part.rename(part.with_name(f".{path.name}.2.part"))  # as of another process
        assert not left.exists()
        with atomic_write(path) as second:
            second.write_text("whole")
        assert held.exists()
        file.write("first")
        held.rename(part)
    assert path.read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == [others.name, path.name]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError])
def test_a_file_that_is_not_finished_takes_nobodys_place(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    path = tmp_path / "scores.csv"
    path.write_text("before")

    def half() -> None:
        with atomic_write(path) as part:
            part.write_text("half")
            raise stop

    with pytest.raises(stop):
        half()
    assert os.listdir(tmp_path) == ["scores.csv"]
    assert path.read_text() == "before"


def test_what_a_link_leads_to_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    real, link = tmp_path / "shared" / "threshold.json", tmp_path / "threshold.json"
    link.symlink_to(real)
    for text in ("new", "newer"):  # it leads nowhere at first
        with atomic_write(link) as part:
            part.write_text(text)
        assert link.is_symlink()
        assert real.read_text() == text
    assert os.listdir(real.parent) == [real.name]


def test_a_file_keeps_its_mode_also_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "threshold.json"
    path.touch()
    for mode in (0o600, 0o664):
        path.chmod(mode)
        with atomic_write(path) as part:
            assert stat.S_IMODE(part.stat().st_mode) == mode
            part.write_text("new")
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(link)
        with atomic_write(link) as part:
            part.write_text("page")
        assert os.read(reader, 100) == b"page"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(os.listdir(tmp_path)) == 2


def test_a_page_can_be_written_to_stdout(tmp_path: Path) -> None:
    stdout = tmp_path / "stdout"  # as /dev/stdout, which no test should be able to replace
    stdout.symlink_to("/dev/fd/1")
    program = """
import sys
from qualms.disk import require_writable
from qualms.report.offline import write_html
require_writable(sys.argv[1])
write_html(sys.argv[1], "page")
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program, str(stdout)], env=env, capture_output=True
    )
    assert done.stdout == b"page"
    assert stdout.is_symlink()


def test_a_page_in_a_folder_that_takes_no_new_file_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("before")

    def read_only(path: Any, *rest: Any, **named: Any) -> Any:  # also to root
        if not Path(path).exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return io.open(path, *rest, **named)  # noqa: UP020 (the other one is replaced)

    monkeypatch.setattr("builtins.open", read_only)
    with pytest.raises(QualmsError, match=r"page.html cannot be written \(Permission denied\)"):
        require_writable(page)
    assert page.read_text() == "before"


@pytest.mark.parametrize("refused", ["folder", "protected"])
def test_a_folder_or_a_protected_file_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    path = tmp_path / "page.html"
    if refused == "folder":
        path.mkdir()
    else:
        path.touch(0o444)
        monkeypatch.setattr("os.access", lambda *_: False)  # root may write to it
    with pytest.raises(QualmsError, match=r"page.html cannot be written"):
        require_writable(path)
    with pytest.raises(QualmsError, match=r"page.html cannot be written"), atomic_write(path):
        pytest.fail("the work was begun")
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("moment", ["before it is locked", "after"])
def test_a_file_that_another_run_takes_away_as_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    path = tmp_path / "scores.csv"
    lock, others = disk._lock, list[tuple[Path, IO[bytes]]]()

    def after_another(file: IO[bytes]) -> bool:
        if not others:
            (half,) = tmp_path.iterdir()
            others.append((half, half.open("rb")))
            assert lock(others[0][1])
            if moment != "after":
                half.unlink()
                others[0][1].close()
        return lock(file)

    monkeypatch.setattr(disk, "_lock", after_another)
    with atomic_write(path) as part, part.open("w") as file:
        ((half, other),) = others
        if moment == "after":
            half.unlink(missing_ok=True)
            other.close()
        disk._remove_leftovers(path)  # by a third run
        file.write("whole")
    assert path.read_text() == "whole"
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_is_written_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scores.csv"
    monkeypatch.setattr(disk, "_lock", lambda _: False)
    with atomic_write(path) as part:
        part.write_text("by a file system without them")
    monkeypatch.undo()
    monkeypatch.setattr(disk, "fcntl", None)
    with disk.temp_sibling(path) as part:  # Windows neither moves nor removes what is open
        open_files = Path("/proc/self/fd")
        assert not open_files.exists() or str(part) not in map(
            os.path.realpath, open_files.iterdir()
        )
    assert os.listdir(tmp_path) == [path.name]


def test_a_line_that_is_interrupted_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.jsonl"

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with lock_file(path) as file:
        append_lines(file, path, b"one\n")
        monkeypatch.setattr("qualms.disk.os.fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            append_lines(file, path, b"two\n")
    assert path.read_bytes() == b"one\n"


def test_only_what_a_disk_refuses_is_told_as_that() -> None:
    with pytest.raises(RuntimeError, match="of its own"), explain_write_failure("scores.csv"):
        raise RuntimeError("an error of its own")
    with (
        pytest.raises(QualmsError, match=r"^scores.csv cannot be written \(Is a directory\)"),
        explain_write_failure("scores.csv"),
    ):
        open("/", "wb")  # noqa: SIM115 (it cannot be opened)


def test_sigterm_is_heeded_once_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "_terminated_at", None)
    before = signal.getsignal(signal.SIGTERM)
    cleaned: list[str] = []

    def work() -> None:
        with signals.at_sigterm(signals.terminate_command):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)  # an impatient second one
                cleaned.append("up")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == ["up"]
    assert signals.is_terminated()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_stop_that_passes_an_import_keeps_its_exit_code() -> None:
    program = """
import signal, sys
from qualms.cli.signals import at_sigterm, terminate_command
try:
    with at_sigterm(terminate_command):
        exec("signal.raise_signal(signal.SIGTERM)")
except KeyboardInterrupt:
    sys.exit(143)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", program], env=env).returncode == 143
