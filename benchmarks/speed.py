"""One table from one run: what class-gradient norms cost, in forward passes and in memory, and against other ways.

    python benchmarks/speed.py            (2 threads, float32, random weights: the cost does not depend on them)

Every way runs in a process of its own, which first reports the peak of its memory above what it had before, and then
times the way, the exact engine and a plain forward pass in turn; all numbers are ratios of medians within that process.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from peers import NETWORKS, vmap_jacrev
from torch import Tensor, nn

import qualms

MODELS = {name: NETWORKS[name] for name in ("MNIST CNN", "ResNet-18")}


def exact(model: nn.Module, x: Tensor) -> Tensor:
    """qualms, the default engine."""
    return qualms.class_gradient_norms(model, x).norms.square().sum(-1).sqrt()


def reference(model: nn.Module, x: Tensor) -> Tensor:
    """The paper's way: one input, one class, one backward pass."""
    return qualms.class_gradient_norms(model, x, engine="reference").norms.square().sum(-1).sqrt()


# The ways, with the number of inputs each is timed on: cost is linear in it, and the slow ones need not run long.
WAYS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], dict[str, int]]] = {
    "exact": (exact, {"MNIST CNN": 256, "ResNet-18": 64}),
    "reference": (reference, {"MNIST CNN": 32, "ResNet-18": 4}),
    "vmap(jacrev)": (vmap_jacrev, {"MNIST CNN": 64, "ResNet-18": 8}),
}


def timed(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(model_name: str, way: str, repeats: int) -> dict[str, float]:
    """Time for each input, in forward passes and in units of the exact engine, and peak memory in MiB."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    build, shape = MODELS[model_name]
    run, inputs = WAYS[way]
    most = WAYS["exact"][1][model_name]
    model, batch = build().eval(), torch.randn(most, *shape)
    x = batch[: inputs[model_name]]

    def forward() -> None:
        with torch.no_grad():
            model(batch[:32])

    forward()
    run(model, x[:2])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(model, x)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    rounds = [
        (
            median(timed(forward) / 32 for _ in range(5)),
            timed(lambda: exact(model, batch)) / most,
            timed(lambda: run(model, x)) / len(x),
        )
        for _ in range(repeats)
    ]
    of_forward, of_exact, of_way = (median(column) for column in zip(*rounds, strict=True))
    return {
        "inputs": len(x),
        "passes": of_way / of_forward,
        "ratio": of_way / of_exact,
        "peak_mib": peak / 1024,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "WAY"), help="measure one way in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        model_name, way = arguments.one
        print(json.dumps(measure(model_name, way, arguments.repeats)))
        return
    print("| network | way | inputs | forward passes | slower than exact | peak memory, MiB | MiB an input |")
    print("|---|---|---|---|---|---|---|")
    for name in MODELS:
        for way in WAYS:
            command = [sys.executable, __file__, "--one", name, way, "--repeats", str(arguments.repeats)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            r = json.loads(done.stdout)
            print(
                f"| {name} | {way} | {r['inputs']} | {r['passes']:.1f} | {r['ratio']:.1f} | {r['peak_mib']:.0f} "
                f"| {r['peak_mib'] / r['inputs']:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
