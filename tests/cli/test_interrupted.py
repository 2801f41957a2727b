"""A command that is ended by a signal at any moment loses nothing, doubles nothing, and leaves
nothing half written.

With QUALMS_FUZZ=1 there are fifty moments for each signal, else a few.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qualms.data import load

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FUZZ = os.environ.get("QUALMS_FUZZ") == "1"
MOMENTS = 50 if FUZZ else 2
PATIENCE = 3600 if FUZZ else 600  # seconds
NETWORK = (
    "--model",
    "digits-cnn",
    "--weights",
    "../weights.pt",
    "--mean",
    "0.3",
    "--std",
    "0.4",
    "--size",
    "8",
)
METHODS = ("--methods", "regrad,entropy")
FEW = ("--count", "100", "--weights", "../weights.pt")
LATE = ("pyarrow.parquet", "sklearn.datasets", "torch._dynamo")  # what commands import as they run
COMMANDS = {
    "score to a file": (
        "score",
        "../pictures",
        *NETWORK,
        *METHODS,
        "--out",
        "results/scores.csv",
        "--overwrite",
    ),
    "score to shards": (
        "score",
        "../many.npz",
        *NETWORK,
        *METHODS,
        "--out",
        "results/",
        "--shard-size",
        "100",
    ),
    "bench": (
        "bench",
        "calibration",
        "--id",
        "digits",
        *FEW,
        *METHODS,
        "--out",
        "results/rows.jsonl",
    ),
    "train": ("train", "digits", "--epochs", "8", "--count", "600", "--out", "results/weights.pt"),
}


@pytest.fixture
def home(weights_here: Path) -> Path:
    pixels = load("digits").pixels[:, 0].numpy()
    np.savez(weights_here / "many.npz", x=np.resize(pixels, (1200, 8, 8)))
    (weights_here / "pictures").mkdir()
    for i, image in enumerate(pixels[:300]):
        Image.fromarray(image).save(weights_here / "pictures" / f"{i:03d}.png")
    (weights_here / "pictures" / "bad.png").write_bytes(b"cut")
    return weights_here


def told(
    home: Path, name: str, count: int, signals: tuple[str, ...], fresh: bool = False
) -> dict[str, Any]:
    """Interrupt runs of the command in a process of their own; return what it reports of them."""
    words = COMMANDS[name]
    own = "qualms.cli.bench_images" if name == "bench" else f"qualms.cli.{words[0]}_command"
    code = 4 if name == "score to a file" else 0  # for the picture that cannot be read
    # How long a process may be deaf: the interpreter starts. In a fork of one that has started, it
    # is a moment.
    job = {
        "words": words,
        "home": str(home),
        "modules": ["qualms.cli.commands", own, *LATE],
        "code": code,
        "fresh": fresh,
        "deaf": 2.0 if fresh else 0.1,
    }
    job |= {"count": count, "signals": signals, "seed": 0}
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(home),
    }  # which torch would make
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    env.pop("QUALMS_DATA", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.moments", json.dumps(job)],
        cwd=home,
        env=env,
        text=True,
        timeout=PATIENCE,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for number, figures in found.items():
        wrong = len(figures["wrong"])
        print(
            f"{name}, {number}{', with imports' if fresh else ''}: {figures['moments']} moments over "
            f"{figures['seconds']} s, {figures['hit']} before its end; failures: {wrong}"
        )
    return found


@pytest.mark.timeout(PATIENCE)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_ended_and_started_again_ends_as_one_that_was_not(
    home: Path, name: str
) -> None:
    found = told(home, name, MOMENTS, ("SIGKILL", "SIGTERM"))
    assert [figures["wrong"] for figures in found.values()] == [[], []]
    assert sum(figures["hit"] for figures in found.values()) >= MOMENTS, (
        "most signals came too late"
    )


@pytest.mark.timeout(PATIENCE)
def test_a_stop_is_in_order_from_the_first_import_on(home: Path) -> None:
    found = told(home, "score to a file", MOMENTS, ("SIGTERM",), fresh=True)
    assert found["SIGTERM"]["wrong"] == []
