"""A command that is killed loses nothing: started again it ends with the rows and weights of one
that was not.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.slow
PATIENCE = 240  # seconds

# The paper's tables on small made-up datasets: the commands' own code, with a preset of seconds.
REPRODUCE = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from qualms.tasks.presets import CPU, Setup
from qualms.tasks.paper_tables import TABLES, Workspace
from qualms.training import RECIPES
short = RECIPES["mnist"].shortened(2)
setups = {"svhn": Setup("svhn-cnn", short, images=33, seeds=(0,))}
mnist = CPU.active["mnist"]
plan = replace(mnist.plan, cycles=2, recipe=short, pool=60, validation=30)
learning = replace(mnist, plan=plan, methods=("Random", "Entropy", "REGrad*"), seeds=(0,))
vit = {"cifar10": Setup("vit-tiny", short, images=10, seeds=(0,))}
tiny = replace(CPU, setups=setups, vit=vit, active={"mnist": learning})
for table in [name for name in TABLES if name != "runtime"]:
    for row in TABLES[table](tiny, Workspace(Path("data"), Path("out"))):
        print(row["row"], flush=True)
"""


def start(folder: Path, *command: str) -> "subprocess.Popen[str]":
    env = {**os.environ, "OMP_NUM_THREADS": "1", "QUALMS_DATA": str(folder / "data")}
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=env, text=True, stdout=subprocess.PIPE
    )


def finish(folder: Path, *command: str) -> str:
    with start(folder, *command) as process:
        out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    return out


def state(folder: Path) -> dict[str, int]:
    """Return the time of the last write to each file that a command writes."""
    found = {}
    for path in folder.rglob("*"):
        try:
            if path.is_file() and "data" not in path.relative_to(folder).parts:
                found[str(path)] = path.stat().st_mtime_ns
        except FileNotFoundError:  # it was just put in another's place
            continue
    return found


def killed(folder: Path, times: int, *command: str) -> None:
    """Start the command and end it with SIGKILL as soon as it has written something new; again and
    again.
    """
    for _ in range(times):
        before = state(folder)
        with start(folder, *command) as process:
            until = time.monotonic() + PATIENCE
            while process.poll() is None and state(folder) == before and time.monotonic() < until:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
        assert process.returncode in (0, -signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "the command ended before it could be killed"


def rows(folder: Path) -> dict[str, list[str]]:
    """Read the rows of each file, sorted, without the times that they took."""
    found = {}
    for path in sorted(folder.rglob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        kept = [{k: v for k, v in row.items() if k not in ("seconds", "ratio")} for row in lines]
        found[str(path.relative_to(folder))] = [json.dumps(row, sort_keys=True) for row in kept]
    return found


def assert_nothing_was_lost(tmp_path: Path, *command: str, times: int = 3) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(whole, *command)
    killed(cut, times, *command)
    finish(cut, *command)
    assert rows(cut) == rows(whole)
    for lines in rows(cut).values():
        assert len(set(lines)) == len(lines), "a row was computed twice"
    for path in whole.rglob("*.pt"):
        ours, theirs = (
            torch.load(p, weights_only=True) for p in (cut / path.relative_to(whole), path)
        )
        assert all(torch.equal(theirs["state_dict"][k], v) for k, v in ours["state_dict"].items())
        assert ours["history"] == theirs["history"]


@pytest.fixture
def places(tmp_path: Path) -> Path:
    for name in ("whole", "cut"):
        (tmp_path / name / "data").mkdir(parents=True)
    return tmp_path


def weights(places: Path) -> str:
    finish(
        places,
        "-m",
        "qualms",
        "train",
        "digits",
        "--epochs",
        "2",
        "--out",
        str(places / "weights.pt"),
    )
    return str(places / "weights.pt")


def test_training(places: Path) -> None:
    assert_nothing_was_lost(places, "-m", "qualms", "train", "digits", "--epochs", "12")


@pytest.mark.parametrize("task", ["ood", "calibration", "ablation", "runtime"])
def test_bench(places: Path, task: str) -> None:
    other = ("--ood", "data/noise.npz") if task in ("ood", "ablation") else ()
    pixels = np.random.default_rng(0).integers(0, 256, (70, 8, 8), dtype=np.uint8)
    for name in ("whole", "cut"):
        np.savez(places / name / "data" / "noise.npz", x=pixels)
    methods = (
        "regrad+layers+smooth,entropy,perturb-x,laplace"
        if task != "runtime"
        else "entropy,regrad,exgrad,gen,msp"
    )
    chosen = (
        () if task == "ablation" else ("--methods", methods)
    )  # whose methods are the parts of REGrad*
    few = ("--count", "100", *chosen, "--weights", weights(places))
    assert_nothing_was_lost(places, "-m", "qualms", "bench", task, "--id", "digits", *other, *few)


def test_active_learning(places: Path) -> None:
    small = ("--cycles", "2", "--epochs", "3", "--pool", "100", "--validation", "30")
    command = (
        "-m",
        "qualms",
        "bench",
        "active",
        "--id",
        "digits",
        "--methods",
        "random,entropy,regrad",
        *small,
    )
    assert_nothing_was_lost(places, *command, times=4)


@pytest.mark.timeout(900)
def test_the_papers_tables(places: Path) -> None:
    from tests.helpers.datasets import write_datasets

    for name in ("whole", "cut"):
        write_datasets(places / name / "data", train=330, test=60)
    assert_nothing_was_lost(places, "-c", REPRODUCE, times=4)
