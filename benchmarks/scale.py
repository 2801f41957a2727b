"""What scoring many images costs: memory, how far reading overlaps with computing, and time with
workers of Ray.

    python benchmarks/scale.py memory      (10,000 and 100,000 images, each in a process of its own)
    python benchmarks/scale.py overlap     (photographs of 500 x 375 pixels, by both ways in which
    OpenMP can wait) python benchmarks/scale.py workers     (a ResNet-20, images of 32 x 32 pixels;
    needs the extra `ray`) python benchmarks/scale.py page        (fills docs/scale.md from the
    rows)

Rows go to `results/scale.jsonl`; a part that is run again replaces its rows.
"""

import argparse
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet

from qualms.data import DATASETS, ImageTransform, load
from qualms.methods import parse
from qualms.models import load_model
from qualms.scale.batch import BatchScorer
from qualms.scale.cluster import cluster, score_on_ray
from qualms.scale.shards import SIZE, score_shards
from qualms.scorer import Scorer
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network
from qualms.stream.sizes import BATCH
from qualms.stream.source import open_source

RESULTS = Path(__file__).parent / "results" / "scale.jsonl"
LOAD = RESULTS.with_name("serve_load.jsonl")
PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
PHOTOS = 768
# Images by method, so that each takes some seconds; a run of twice as many tells what an image
# costs beside the start.
WORK = {"entropy": 6144, "coherence": 1024, "regrad": 192, "regrad+layers+smooth": 128}
GROUPS = (
    8  # of rows that are stored together, in the smaller run; one is the least that a worker takes
)
MANY, CORES, DAY, PRICE = (
    10**9,
    64,
    24,
    0.04,
)  # images, cores of a node, hours, dollars for an hour of a core
Row = dict[str, Any]


def memory() -> Iterator[Row]:
    """The most memory that `qualms score` held, by the number of images."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        torch.manual_seed(0)
        torch.save(load_model("digits-cnn").state_dict(), folder / "weights.pt")
        for kind in ("parquet", "npz"):
            for count in (1_000, 10_000, 100_000):
                data = _parquet(folder, count) if kind == "parquet" else _npz(folder, count)
                normal = DATASETS["digits"].normalization
                words = [
                    "score",
                    data,
                    "--model",
                    "digits-cnn",
                    "--weights",
                    "weights.pt",
                    "--methods",
                    "entropy",
                ]
                words += [
                    "--mean",
                    str(normal.mean[0]),
                    "--std",
                    str(normal.std[0]),
                    "--out",
                    f"{kind}-{count}/",
                ]
                began = time.monotonic()
                pid = os.posix_spawn(
                    sys.executable,
                    [
                        sys.executable,
                        "-c",
                        f"import os, qualms.cli; os.chdir({place!r}); qualms.cli.main()",
                        *words,
                    ],
                    {**os.environ, "OMP_NUM_THREADS": "1"},
                )
                _, status, usage = os.wait4(pid, 0)
                assert status == 0
                seconds = time.monotonic() - began
                row = {
                    "format": kind,
                    "images": count,
                    "mib": usage.ru_maxrss / 1024,
                    "seconds": round(seconds, 1),
                }
                yield {"part": "memory", **row}


def overlap() -> Iterator[Row]:
    """As below, where threads without work keep their core for a while, as is usual, and where they
    give it up.
    """
    for policy in ("active", "passive"):
        own = {**os.environ, "OMP_WAIT_POLICY": policy}
        done = subprocess.run(
            [sys.executable, __file__, "overlap once"], env=own, capture_output=True, check=True
        )
        yield {"part": "overlap", "policy": policy, **json.loads(done.stdout)}


def overlap_once() -> dict[str, float]:
    """Milliseconds for an image: to read it, to score it, and for both as `qualms score` does it;
    the best of three.
    """
    torch.manual_seed(0)
    network = Network(
        "svhn-cnn", load_model("svhn-cnn"), DATASETS["svhn"].normalization, ImageTransform((32, 32))
    )
    scorer = Scorer(network.model, "entropy")

    score = ImageScorer(network, scorer).score

    with tempfile.TemporaryDirectory() as folder:
        source = open_source(_photos(Path(folder)), None, network.transform)
        parts = [task() for task in source.readers(0, repeat(BATCH))]
        score(parts[0].images, 0)  # what is found out about a network once

        def read() -> None:
            for task in source.readers(0, repeat(BATCH)):
                task()

        def compute() -> None:
            for part in parts:
                score(part.images, 0)

        def both() -> None:
            score_shards(score, source, Path(folder) / str(time.monotonic()), {})

        found = {
            work.__name__: min(_seconds(work) for _ in range(3)) for work in (read, compute, both)
        }
        return {name: 1000 * seconds / PHOTOS for name, seconds in found.items()}


def workers() -> Iterator[Row]:
    """Images a second by one process without Ray and by workers of Ray, one thread each; bytes of a
    row of scores.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = Network("resnet20", load_model("cifar10-resnet20"), DATASETS["cifar10"].normalization)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for count in (0, 1, 2):
            with cluster(None, count) if count else nullcontext():
                for spec, n in WORK.items():
                    method = network.scale_noise(parse(spec))
                    batches = BatchScorer(network, Scorer(network.model, {spec: method}), "images")
                    _scored(folder, batches, 64, count)  # what is found out about a network once
                    once, twice = (_scored(folder, batches, m, count) for m in (n, 2 * n))
                    bytes_ = sum(p.stat().st_size for p in twice[1].glob("shard*.parquet")) / (
                        2 * n
                    )
                    row = {
                        "workers": count,
                        "method": spec,
                        "images": n,
                        "per_second": n / (twice[0] - once[0]),
                    }
                    yield {
                        "part": "workers",
                        **row,
                        "start": 2 * once[0] - twice[0],
                        "bytes": bytes_,
                    }


def _scored(folder: Path, batches: BatchScorer, count: int, workers: int) -> tuple[float, Path]:
    """The seconds that some images take, and where their scores are."""
    data = folder / f"{count}.parquet"
    if not data.exists():
        pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        rows = [{"bytes": _encoded(image, "PNG")} for image in pixels]
        parquet.write_table(
            pyarrow.table({"image": rows}), data, row_group_size=max(32, count // GROUPS)
        )
    source, out = open_source(str(data), None, None), folder / str(time.monotonic())
    began = time.monotonic()
    if workers:
        score_on_ray(batches, source, out, {}, SIZE, workers)
    else:
        score_shards(batches.score, source, out, {})
    return time.monotonic() - began, out


def _seconds(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _digits(count: int) -> np.ndarray:
    return np.resize(load("digits").pixels[:, 0].numpy(), (count, 8, 8))


def _npz(folder: Path, count: int) -> str:
    np.savez(folder / f"{count}.npz", x=_digits(count))
    return f"{count}.npz"


def _parquet(folder: Path, count: int) -> str:
    """Files of 10,000 images each, as PNG."""
    encoded = [_encoded(image, "PNG") for image in _digits(1000)]
    (folder / str(count)).mkdir()
    for start in range(0, count, 10_000):
        rows = [{"bytes": encoded[i % 1000]} for i in range(start, min(count, start + 10_000))]
        parquet.write_table(
            pyarrow.table({"image": rows}), folder / str(count) / f"{start:06d}.parquet"
        )
    return f"{count}/*.parquet"


def _photos(folder: Path) -> str:
    (folder / "photos").mkdir()
    photo = np.asarray(
        Image.fromarray(load("photos").pixels[0].permute(1, 2, 0).numpy()).resize((500, 375))
    )
    for i in range(PHOTOS):
        (folder / "photos" / f"{i}.jpg").write_bytes(_encoded(np.roll(photo, i, axis=1), "JPEG"))
    return str(folder / "photos")


def _encoded(image: np.ndarray, kind: str) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, kind)
    return content.getvalue()


def _rounded(rate: float) -> str:
    return f"{rate:.{0 if rate > 9 else 1}f}"


def served(rows: list[Row]) -> str:
    """What the service answered, and the memory that it held during the last part."""
    cells = []
    for row in rows:
        answers = ", ".join(
            f"{count:,} x {status}" for status, count in sorted(row["statuses"].items())
        )
        times = [f"{row[key]:.0f}" for key in ("per_second", "median_ms", "p99_ms")]
        cells.append([row["part"], f"{row['requests']:,}", answers, *times])
    held = [mb for n, mb in rows[-1]["memory_mb"] if n]
    note = (
        f"Memory of the whole service during the last part: {min(held):.0f} to {max(held):.0f} MiB."
    )
    header = ["requests", "in all", "answers", "a second", "median, ms", "99th percentile, ms"]
    return pages.table(header, cells) + f"\n\n{note}"


def plan(rates: dict[str, float], row: float) -> str:
    """What a billion images cost, by images a second of one core."""
    cells = []
    for method, rate in rates.items():
        hours = MANY / rate / 3600  # of a core
        nodes = max(1, math.ceil(hours / CORES / DAY))
        took = hours / CORES / nodes
        cells.append(
            [f"`{method}`", f"{hours:,.0f}", f"{nodes}", f"{took:.1f}", f"{hours * PRICE:,.0f} $"]
        )
    note = f"Scores: {MANY * row / 2**30:,.0f} GiB, {row:.0f} bytes a row."
    return (
        pages.table(["method", "core hours", f"nodes of {CORES} cores", "hours", "price"], cells)
        + f"\n\n{note}"
    )


PARTS = {"memory": memory, "overlap": overlap, "workers": workers}


def page(rows: list[Row]) -> None:
    """Fill the tables."""
    peaks = [
        [r["format"], f"{r['images']:,}", f"{r['mib']:.0f}", f"{r['seconds']:.0f}"]
        for r in rows
        if "mib" in r
    ]
    times = [
        [r["policy"], *(f"{r[k]:.1f}" for k in ("read", "compute", "both"))]
        for r in rows
        if "both" in r
    ]
    rates = {(r["method"], r["workers"]): r["per_second"] for r in rows if "workers" in r}
    speeds = [[f"`{m}`", *(_rounded(rates[m, count]) for count in (0, 1, 2))] for m in WORK]
    loads = [json.loads(line) for line in LOAD.read_text().splitlines()]
    parts = {
        "memory": pages.table(["format", "images", "most memory, MiB", "seconds"], peaks),
        "overlap": pages.table(
            ["OMP_WAIT_POLICY", "reading, ms an image", "scoring", "both together"], times
        ),
        "workers": pages.table(
            ["method", "one process, images a second", "1 worker of Ray", "2 workers"], speeds
        ),
        "load": served(loads),
        "plan": plan(
            {m: rates[m, 2] / 2 for m in WORK}, max(r["bytes"] for r in rows if "bytes" in r)
        ),
    }
    pages.fill(PAGE, parts)


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*PARTS, "overlap once", "page"])
    part = parser.parse_args().part
    if part == "overlap once":
        print(json.dumps(overlap_once()))
        return
    rows = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    if part == "page":
        page(rows)
        return
    rows = [row for row in rows if row["part"] != part]
    for row in PARTS[part]():
        print(json.dumps(row), flush=True)
        rows.append(row)
        RESULTS.write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main()
