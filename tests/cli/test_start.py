"""How the command starts and stops: quick where it has nothing to compute, and told in one line
when it is stopped.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

import qualms
from qualms.cli.bench_command import Tasks
from qualms.cli.commands import Commands
from tests.helpers.commands import run

WITHOUT_TORCH = """
import sys
from qualms.cli import main
try:
    main()
finally:
    assert "torch" not in sys.modules, "torch was imported"
    assert "numpy" not in sys.modules, "numpy was imported"
"""
QUICK = (
    1 / 4
)  # of the time that a processor takes to import torch, which follows how busy the machine is
PATIENCE = 120  # seconds


def processor_time(script: str, *words: str, code: int = 0) -> float:
    """Measure the processor time of a Python script in seconds, the best of three runs."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=PATIENCE
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == code, done.stderr
    return min(taken)


@pytest.fixture(scope="module")
def importing_torch() -> float:
    return processor_time("import torch")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--help",), 0),
        (("--version",), 0),
        (("scroe",), 2),
        (("bench", "--help"), 0),
        (("bench", "odo"), 2),
    ],
)
def test_what_needs_no_torch_does_not_wait_for_it(
    words: tuple[str, ...], code: int, importing_torch: float
) -> None:
    assert processor_time(WITHOUT_TORCH, *words, code=code) < QUICK * importing_torch


def test_the_package_by_itself_is_quick_and_has_every_name() -> None:
    script = (
        "import sys, qualms; assert 'torch' not in sys.modules; assert set(qualms.__all__) <= set(dir(qualms)); "
        "from qualms import *; import qualms.metrics; assert callable(score) and callable(qualms.data.load); "
        "import qualms.methods.registry; assert qualms.methods is methods"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=PATIENCE)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = qualms.nothing  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "words",
    [(name,) for name in Commands.table] + [("bench", name) for name in Tasks.table],
    ids=" ".join,
)
def test_every_command_in_the_list_has_help_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *words, "--help") == 0
    assert f" {' '.join(words)} " in capsys.readouterr().out


def test_a_command_that_is_stopped_says_so_in_one_line(tmp_path: Path) -> None:
    checkpoint = tmp_path / "digits.pt"
    command = [
        sys.executable,
        "-m",
        "qualms",
        "train",
        "digits",
        "--epochs",
        "100000",
        "--out",
        str(checkpoint),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        until = time.monotonic() + PATIENCE
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert err == "qualms: stopped; run the same command again to resume.\n"
    assert out == ""
    assert process.returncode == 130


def test_a_question_that_is_not_answered_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from qualms.cli import methods_command as methods

    def aborted() -> None:
        raise typer.Abort

    monkeypatch.setattr(methods, "list_methods", aborted)
    assert run(monkeypatch, "methods") == 1


@pytest.mark.slow
def test_debug_shows_the_traceback_of_a_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "qualms", "reproduce", "table9"]
    plain, shown = (
        subprocess.run(
            [*command, *more], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE
        )
        for more in ((), ("--debug",))
    )
    assert (plain.returncode, shown.returncode) == (1, 1)
    assert plain.stderr.count("\n") == 1
    assert "Traceback" in shown.stderr
    assert "reproduce_command.py" in shown.stderr
