"""What scoring many images costs: memory, and how far reading overlaps with computing.

    python benchmarks/scale.py memory      (10,000 and 100,000 images, each in a process of its own)
    python benchmarks/scale.py overlap     (photographs of 500 x 375 pixels)
    python benchmarks/scale.py page        (fills docs/scale.md from the rows)

Rows go to `results/scale.jsonl`; a part that is run again replaces its rows.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import pages
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet

from qualms.data import DATASETS, Fit, Images, load
from qualms.models import load_model
from qualms.scale.shards import score_shards
from qualms.scale.source import PART, open_source
from qualms.scored import Scored
from qualms.scorer import Scorer
from qualms.tasks.network import Network
from qualms.tasks.scoring import scored_images

RESULTS = Path(__file__).parent / "results" / "scale.jsonl"
PAGE = Path(__file__).parent.parent / "docs" / "scale.md"
PHOTOS = 256
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
                normal = DATASETS["digits"].normalisation
                words = ["score", data, "--model", "digits-cnn", "--weights", "weights.pt", "--methods", "entropy"]
                words += ["--mean", str(normal.mean[0]), "--std", str(normal.std[0]), "--out", f"{kind}-{count}/"]
                began = time.monotonic()
                pid = os.posix_spawn(
                    sys.executable,
                    [sys.executable, "-c", f"import os, qualms.cli; os.chdir({place!r}); qualms.cli.main()", *words],
                    {**os.environ, "OMP_NUM_THREADS": "1"},
                )
                _, status, usage = os.wait4(pid, 0)
                assert status == 0
                seconds = time.monotonic() - began
                row = {"format": kind, "images": count, "mib": usage.ru_maxrss / 1024, "seconds": round(seconds, 1)}
                yield {"part": "memory", **row}


def overlap() -> Iterator[Row]:
    """Milliseconds for an image: to read it, to score it, and for both as `qualms score` does it; the best of three."""
    torch.manual_seed(0)
    network = Network("svhn-cnn", load_model("svhn-cnn"), DATASETS["svhn"].normalisation, Fit((32, 32)))
    scorer = Scorer(network.model, "entropy")

    def score(images: Images, place: int) -> Scored:
        return scored_images(network, scorer, images, place)

    with tempfile.TemporaryDirectory() as folder:
        source = open_source(_photos(Path(folder)), None, network.fit)
        parts = [task() for task in source.tasks(0, repeat(PART))]
        score(parts[0].images, 0)  # what is found out about a network once

        def read() -> None:
            for task in source.tasks(0, repeat(PART)):
                task()

        def compute() -> None:
            for part in parts:
                score(part.images, 0)

        def both() -> None:
            score_shards(score, source, Path(folder) / str(time.monotonic()), {})

        found = {work.__name__: min(_seconds(work) for _ in range(3)) for work in (read, compute, both)}
        yield {"part": "overlap", **{name: 1000 * seconds / PHOTOS for name, seconds in found.items()}}


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
        parquet.write_table(pyarrow.table({"image": rows}), folder / str(count) / f"{start:06d}.parquet")
    return f"{count}/*.parquet"


def _photos(folder: Path) -> str:
    (folder / "photos").mkdir()
    photo = np.asarray(Image.fromarray(load("photos").pixels[0].permute(1, 2, 0).numpy()).resize((500, 375)))
    for i in range(PHOTOS):
        (folder / "photos" / f"{i}.jpg").write_bytes(_encoded(np.roll(photo, i, axis=1), "JPEG"))
    return str(folder / "photos")


def _encoded(image: np.ndarray, kind: str) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, kind)
    return content.getvalue()


PARTS = {"memory": memory, "overlap": overlap}


def page(rows: list[Row]) -> None:
    """Fill the tables."""
    peaks = [[r["format"], f"{r['images']:,}", f"{r['mib']:.0f}", f"{r['seconds']:.0f}"] for r in rows if "mib" in r]
    times = [[f"{r[k]:.1f}" for k in ("read", "compute", "both")] for r in rows if "both" in r]
    parts = {
        "memory": pages.table(["format", "images", "most memory, MiB", "seconds"], peaks),
        "overlap": pages.table(["reading, ms an image", "scoring", "both together"], times),
    }
    pages.fill(PAGE, parts)


def main() -> None:
    """Run a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*PARTS, "page"])
    part = parser.parse_args().part
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
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
