"""Measure the cost of gradient scores, ours and those of other libraries, and how it grows.

    python benchmarks/speed.py            (2 threads, float32, random weights: the cost does not
    depend on them)

Each job is a process of its own, which times its ways in turn. Every time is the median over
rounds, divided by that of a plain forward pass over 32 inputs in the same rounds, so numbers are
ratios within one process. The first round measures peak memory, which is what a call adds to the
process, and its time counts only if there is no other round. "Second call" is a `Scorer` that has
seen an input of the kind before. Rows are appended to `results/speed.jsonl` as they are measured.

Not pytest-benchmark or asv: they time one function after the other, which gives no ratios within a
round, and measure no memory.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median

import torch
from peers import PEERS, loop_in_batches
from torch import Tensor, nn

import qualms
from qualms.gradients.settings import Engine
from qualms.methods.gradients import REGrad
from qualms.models.cifar_resnet import resnet56
from qualms.models.cnn import mnist_cnn
from qualms.models.resnet import resnet18, resnet50
from qualms.models.vit import vit_small

RESULTS = Path(__file__).parent / "results" / "speed.jsonl"
BATCHES = (1, 4, 16, 64, 256)
DRAWS = (2, 8, 32)
TOLERANCE = 0.025  # with many classes: some of them stand for all
Way = Callable[[nn.Module, Tensor], Tensor]


class Words(nn.Module):
    """The shape of a small language model: words in, a guess at the next of 30,000 words out."""

    def __init__(self, words: int = 30_000, width: int = 64, length: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.mix = nn.Linear(length * width, width)
        self.hidden = nn.Linear(width, width)
        self.head = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next word."""
        seen = torch.relu(self.mix(self.embedding(ids).flatten(1)))
        return self.head(seen + torch.relu(self.hidden(seen)))


class Characters(nn.Module):
    """A character model: two LSTMs of 128 over 40 steps, attention over all of them, 465 classes."""

    def __init__(self, classes: int = 465, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, 100)
        self.first = nn.LSTM(100, width, batch_first=True)
        self.second = nn.LSTM(width, width, batch_first=True)
        self.attention = nn.Linear(100 + 2 * width, 1)
        self.head = nn.Linear(100 + 2 * width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next character."""
        seen = self.embedding(ids)
        first, _ = self.first(seen)
        second, _ = self.second(first)
        steps = torch.cat([seen, first, second], dim=-1)
        return self.head((self.attention(steps).softmax(1) * steps).sum(1))


NETWORKS: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], Tensor]]] = {
    "MNIST CNN": (mnist_cnn, lambda n: torch.randn(n, 1, 28, 28)),
    "ResNet-18": (resnet18, lambda n: torch.randn(n, 3, 32, 32)),
    "ResNet-56": (resnet56, lambda n: torch.randn(n, 3, 32, 32)),
    "ResNet-50": (resnet50, lambda n: torch.randn(n, 3, 32, 32)),
    "ViT": (vit_small, lambda n: torch.randn(n, 3, 32, 32)),
    "characters": (Characters, lambda n: torch.randint(0, 465, (n, 40))),
    "30,000 words": (Words, lambda n: torch.randint(0, 30_000, (n, 16))),
}


def scored(engine: Engine, draws: int = 0, antithetic: bool = True, tolerance: float = 0.0) -> Way:
    """REGrad with layer weights, smoothed if there are draws."""
    method = REGrad(0.3, qualms.Smoothing(0.02, draws, antithetic) if draws else None)
    return lambda model, x: qualms.score(model, x, method, engine=engine, tolerance=tolerance)


@cache
def scorer(model: nn.Module, engine: Engine, spec: str) -> qualms.Scorer:
    """One for each model, which knows it from its first call."""
    return qualms.Scorer(model, spec, engine=engine)


def again(engine: Engine, spec: str = "regrad+layers(0.3)") -> Way:
    """The same by a scorer that is kept."""
    return lambda model, x: next(iter(scorer(model, engine, spec)(x).scores.values()))


@cache
def fitted(model: nn.Module, spec: str) -> qualms.Scorer:
    """One that has 512 training images."""
    return qualms.Scorer(model, spec, train=[torch.randn(512, 3, 32, 32)])


def rival(spec: str) -> Way:
    """A method that may learn from training images, which it has done by its second call."""
    return lambda model, x: next(iter(fitted(model, spec)(x).scores.values()))


RIVALS = (
    "scale",
    "ash-s",
    "lts",
    "odin",
    "rankfeat",
    "gaia",
    "clafr",
    "knn",
    "vim",
    "mahalanobis",
    "react",
    "fdbd",
    "quam",
)
WAYS: dict[str, Way] = {
    "exact": scored("exact"),
    "exact, second call": again("exact"),
    "sketch, second call": again("sketch"),
    "heat": again("exact", "heat"),
    "coherence": again("exact", "coherence"),
    **{name: rival(name) for name in RIVALS},
    f"exact, tolerance {TOLERANCE}": scored("exact", tolerance=TOLERANCE),
    "exact, tolerance 0.001": scored("exact", tolerance=1e-3),
    "exact, tolerance 0.01": scored("exact", tolerance=1e-2),
    "sketch": scored("sketch"),
    "the paper's loop": scored("reference"),
    **{name: peer.run for name, peer in PEERS.items()},
    **{f"exact, N = {n}": scored("exact", n) for n in DRAWS},
    "sketch, N = 8": scored("sketch", 8),
    "the paper's loop, N = 100": scored("reference", 100, antithetic=False),
    "the loop in batches, N = 100": partial(loop_in_batches, draws=100),
}
LOOPS = [way for way in WAYS if "loop" in way]  # which learn nothing from a first call


@dataclass(frozen=True)
class Job:
    """Ways that are timed in turn in one process, each on so many inputs."""

    part: str
    network: str
    classes: int
    ways: tuple[tuple[str, int], ...]
    rounds: int = 3


JOBS = [
    Job("peers", "MNIST CNN", 10, (("exact", 128), ("sketch", 128), ("the paper's loop", 16), ("vmap(jacrev)", 64),
                                   ("BackPACK", 128), ("laplace-torch", 128))),
    *(Job("peers", name, 10, (("exact", 32), ("sketch", 32), ("the paper's loop", 2), ("vmap(jacrev)", 4),
                              ("BackPACK", 8), ("laplace-torch", 32)), rounds=1) for name in ("ResNet-18", "ViT")),
    *(Job("batch", "MNIST CNN", 10, (("exact", n), ("sketch", n), ("BackPACK", n),
                                     *((("vmap(jacrev)", n),) if n <= 64 else ())), rounds=3) for n in BATCHES),
    *(Job("batch", "ResNet-18", 10, (("exact", n),), rounds=2) for n in BATCHES[:-1]),
    *(Job("one image", name, 10, (("exact, second call", 1), ("sketch, second call", 1)), rounds=8)
      for name in ("MNIST CNN", "ResNet-18")),
    Job("one image", "ResNet-18", 1000, (("sketch, second call", 1),), rounds=8),
    *(Job("classes", "ResNet-18", c, (("exact", n), ("sketch", 32),
                                      *(((f"exact, tolerance {TOLERANCE}", 32),) if c > 10 else ())), rounds=1)
      for c, n in ((10, 16), (100, 4), (1000, 1))),
    Job("few classes", "ResNet-56", 100, (("exact", 8), (f"exact, tolerance {TOLERANCE}", 32), ("sketch", 32)),
        rounds=1),
    *(Job("depth", name, 10, (("exact", 8), ("sketch", 8), ("the paper's loop", 1)), rounds=1)
      for name in ("ResNet-18", "ResNet-50")),
    Job("draws", "MNIST CNN", 10, (*((f"exact, N = {n}", 16) for n in DRAWS), ("sketch, N = 8", 16),
                                   ("the loop in batches, N = 100", 2), ("the paper's loop, N = 100", 1)), rounds=1),
    Job("draws", "ResNet-18", 10, (*((f"exact, N = {n}", 2) for n in DRAWS), ("sketch, N = 8", 4),
                                   ("the loop in batches, N = 100", 1), ("the paper's loop, N = 100", 1)), rounds=1),
    Job("tolerance", "ResNet-18", 10, (("exact", 48), ("exact, tolerance 0.001", 48), ("exact, tolerance 0.01", 48)),
        rounds=1),
    Job("recurrent", "characters", 465, (("exact", 32), ("sketch", 32), (f"exact, tolerance {TOLERANCE}", 32)),
        rounds=2),
    *(Job("heat", name, c, (("heat", 32), *((("coherence", 32),) if c == 10 else ())), rounds=3)
      for name, c in (("MNIST CNN", 10), ("ResNet-18", 10), ("ResNet-56", 100), ("ResNet-18", 1000))),
    Job("rivals", "ResNet-18", 10, tuple((name, 32) for name in RIVALS), rounds=3),
    Job("words", "30,000 words", 30_000, (("sketch", 64), ("exact", 8)), rounds=2),
]  # fmt: skip


def timed(function: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextmanager
def peak_mib(peaks: dict[str, float], way: str) -> Iterator[None]:
    """Notes what the work inside adds to the memory of this process at its highest (Linux counts it
    again on request).
    """

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what earlier ways have freed must not hide what this one needs
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    yield
    peaks[way] = max(peaks.get(way, 0.0), (status("VmHWM") - before) / 1024)


def run(job: Job) -> list[dict[str, object]]:
    """One row for each way."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    build, draw = NETWORKS[job.network]
    model, x = build(job.classes).eval(), draw(max(n for _, n in job.ways))
    some = draw(32)

    def forward() -> None:
        with torch.no_grad():
            model(some)

    forward()
    for way in {way for way, _ in job.ways}.difference(LOOPS):
        WAYS[way](model, x[:1])  # what happens once, such as the fit of a posterior, does not count
    peaks: dict[str, float] = {}
    units: list[float] = []
    times: dict[str, list[float]] = {way: [] for way, _ in job.ways}
    for way, n in job.ways:
        units += [timed(forward) / len(some) for _ in range(5)]
        with peak_mib(peaks, way):
            times[way].append(timed(partial(WAYS[way], model, x[:n])) / n)
    for _ in range(job.rounds - 1):
        for way, n in job.ways:
            units += [timed(forward) / len(some) for _ in range(5)]
            times[way].append(timed(partial(WAYS[way], model, x[:n])) / n)
    unit = median(units)
    fields = {"part": job.part, "network": job.network, "classes": job.classes}
    # Memory that was given back for the peak of the first round has to be allocated again in it, which
    # takes time.
    usual = {way: median(found[1:] or found) for way, found in times.items()}
    return [
        {**fields, "way": way, "inputs": n, "passes": usual[way] / unit, "peak_mib": peaks[way]}
        for way, n in job.ways
    ]


def _smaller(job: Job, most: int | None) -> Job:
    """The same job in one round on fewer inputs."""
    if most is None:
        return job
    return replace(job, ways=tuple((way, min(n, most)) for way, n in job.ways), rounds=1)


def main() -> None:
    """Run all jobs, each in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", help="only jobs of this part; the rows of others are kept")
    parser.add_argument(
        "--inputs", type=int, help="at most so many for each way, to see that all of them run"
    )
    parser.add_argument("--job", type=int, help="run one job in this process, and print its rows")
    arguments = parser.parse_args()
    if arguments.job is not None:
        print(json.dumps(run(_smaller(JOBS[arguments.job], arguments.inputs))))
        return
    RESULTS.parent.mkdir(exist_ok=True)
    known = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    rows = [row for row in known if arguments.part and row["part"] != arguments.part]
    start = time.monotonic()
    for number, job in enumerate(JOBS):
        if arguments.part not in (None, job.part):
            continue
        command = [sys.executable, __file__, "--job", str(number)]
        command += ["--inputs", str(arguments.inputs)] if arguments.inputs else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{asdict(job)} failed:\n{done.stderr}")
        for row in json.loads(done.stdout.splitlines()[-1]):
            rows.append(row)
            print(f"{time.monotonic() - start:5.0f} s  {json.dumps(row)}", flush=True)
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
