"""Scores by workers of Ray: those of one process, row for row, also if a worker is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from torch import nn

import qualms
from qualms.cli.status import SOME_REJECTED
from qualms.data import Images
from qualms.scale import cluster as module
from qualms.scale.batch import BatchScorer
from qualms.scale.cluster import cluster, score_on_ray
from qualms.scale.shard_folder import Done
from qualms.scale.shards import score_shards
from qualms.stream.network import Network
from qualms.stream.source import Source, open_source
from tests.helpers.commands import own, run
from tests.helpers.stores import COUNT, FORMATS, METHODS, as_folder, as_npz, as_parquet

# Ray warns of settings that it makes itself.
pytestmark = [
    pytest.mark.ray,
    pytest.mark.xdist_group("ray"),  # one cluster for all
    pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*"),
]
WORKERS = 2


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """A cluster on this machine. Its start is slow, and can fail if the machine is busy: it is
    tried twice.
    """
    pytest.importorskip("ray", reason="ray is not installed; run `make test-all`")
    for attempt in range(2):
        try:
            started = cluster(None, WORKERS)
            yield started.__enter__()
            break
        except qualms.QualmsError:
            if attempt:
                raise
    started.__exit__(None, None, None)


@pytest.fixture(scope="module")
def batches(network: Network) -> BatchScorer:
    """Build a scorer whose tables have every kind of column."""
    methods = {name: network.scale_noise(qualms.methods.parse(name)) for name in METHODS}
    limit = qualms.Threshold.from_scores(np.linspace(0, 60, 50), coverage=0.5)
    scorer = qualms.Scorer(network.model, methods, threshold=limit)
    named = replace(network, class_names=tuple("abcdefghij"))
    return BatchScorer(named, scorer, "digits", size=(8, 8))


def by_id(folder: Path) -> pyarrow.Table:
    table = pyarrow.concat_tables(
        [parquet.read_table(path) for path in sorted(folder.glob("shard*.parquet"))]
    )
    assert len(set(table["id"].to_pylist())) == len(table), "some rows are there twice"
    return table.sort_by("id")


def assert_same(found: pyarrow.Table, want: pyarrow.Table) -> None:
    assert found.schema.remove_metadata() == want.schema.remove_metadata()
    for name in want.column_names:
        if name.startswith("score_") or name == "confidence":
            np.testing.assert_allclose(found[name].to_numpy(), want[name].to_numpy(), rtol=1e-4)
        else:
            assert found[name].to_pylist() == want[name].to_pylist()


@pytest.mark.parametrize("kind", ["folder", "parquet", "tar"])
def test_ray_gives_the_scores_of_one_process(
    ray: Any, kind: str, digits: Images, batches: BatchScorer, tmp_path: Path
) -> None:
    data = FORMATS[kind](digits, tmp_path / "data")
    if kind == "folder":
        (tmp_path / "data" / "005.png").write_bytes(b"no image")
    source = open_source(data, None, None)
    want = score_shards(batches.score, source, tmp_path / "local", {"seed": 0}, 30)
    found = score_on_ray(batches, source, tmp_path / "out", {"seed": 0}, 30, WORKERS)
    assert found == want
    assert_same(by_id(tmp_path / "out"), by_id(tmp_path / "local"))
    rejected = [
        parquet.read_table(tmp_path / runner / "rejected.parquet") for runner in ("out", "local")
    ]
    assert rejected[0] == rejected[1]
    assert len(rejected[0]) == (kind == "folder")
    assert {p.name for p in (tmp_path / "out").iterdir() if not p.name.startswith("shard")} == {
        "rejected.parquet",
        "manifest.json",
        ".lock",
    }
    assert (
        json.loads((tmp_path / "out" / "manifest.json").read_text())["done"]["scored"]
        == found.scored
    )


SEEN: dict[
    Path, set[float]
] = {}  # batches, in this process; a model's own attributes are put back after each pass


class Fragile(nn.Module):
    """A network that calls `act` once a worker has scored `after` batches."""

    def __init__(
        self, inner: nn.Module, out: Path, act: Callable[[Path], None], after: int
    ) -> None:
        super().__init__()
        self.inner, self.out, self.act, self.after, self.home = inner, out, act, after, os.getpid()

    def forward(self, x: Any) -> Any:
        if os.getpid() != self.home:
            SEEN.setdefault(self.out, set()).add(float(x.sum()))
            if len(SEEN[self.out]) > self.after:
                self.act(self.out)
        return self.inner(x)


def kill_once(out: Path) -> None:
    """Kill the first worker that calls this function."""
    try:
        (out / ".killed").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def give_up(out: Path) -> None:
    """Raise an error once a shard is written, unless the file `.go on` exists."""
    if (out / ".go on").exists():
        return
    for _ in range(600):
        if list((out / ".noted").glob("shard*.parquet")):
            raise qualms.QualmsError("the network gives up; ask again.")
        time.sleep(0.05)


def by_one_process(source: Source, network: Network, out: Path) -> pyarrow.Table:
    scorer = qualms.Scorer(network.model, "entropy")
    score_shards(BatchScorer(network, scorer, "digits").score, source, out, {}, 10)
    return by_id(out)


def batches_of(model: nn.Module, network: Network) -> BatchScorer:
    return BatchScorer(
        Network("fragile", model, network.normalization), qualms.Scorer(model, "entropy"), "digits"
    )


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost_or_doubled(
    ray: Any, digits: Images, network: Network, tmp_path: Path
) -> None:
    source, out = open_source(as_parquet(digits, tmp_path / "data"), None, None), tmp_path / "out"
    batches = batches_of(Fragile(network.model, out, kill_once, after=1), network)
    assert score_on_ray(batches, source, out, {}, 10, WORKERS) == Done(COUNT, 0, None)
    assert (out / ".killed").exists(), "no worker was killed"
    assert_same(by_id(out), by_one_process(source, network, tmp_path / "local"))


def test_a_run_that_ended_early_is_gone_on_with(
    ray: Any, digits: Images, network: Network, tmp_path: Path
) -> None:
    source, out = open_source(as_parquet(digits, tmp_path / "data"), None, None), tmp_path / "out"
    # The first two batches are one task of Ray's: 40 rows in batches of 32.
    batches = batches_of(Fragile(network.model, out, give_up, after=2), network)
    with pytest.raises(qualms.QualmsError, match=r"^the network gives up; ask again\.$"):
        score_on_ray(batches, source, out, {}, 10, 1)
    (out / ".rejected").mkdir()
    parquet.write_table(
        pyarrow.table({"id": ["0.parquet row 3"], "reason": ["away"]}),
        out / ".rejected" / "0.parquet",
    )
    early = {path.name: path.read_bytes() for path in (out / ".writing").glob("shard*.parquet")}
    assert early
    (out / ".go on").touch()
    assert score_on_ray(batches, source, out, {}, 10, 1) == Done(COUNT, 0, None)
    assert_same(by_id(out), by_one_process(source, network, tmp_path / "local"))
    assert {name: (out / name).read_bytes() for name in early} == early


def test_a_finished_folder_is_left_alone_and_another_seed_is_refused(
    ray: Any, digits: Images, batches: BatchScorer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(as_folder(digits.take(slice(0, 8)), tmp_path / "data"), None, None)
    put: list[object] = []
    real = ray.put
    monkeypatch.setattr(ray, "put", lambda value: put.append(value) or real(value))
    done = score_on_ray(batches, source, tmp_path / "out", {"seed": 0}, 30, WORKERS)
    assert [type(value) for value in put].count(BatchScorer) == 1  # the weights are stored once
    monkeypatch.setattr(module, "_run", None)
    assert score_on_ray(batches, source, tmp_path / "out", {"seed": 0}, 30, WORKERS) == done
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    for shard in (tmp_path / "copy").glob("shard*"):
        parquet.write_table(parquet.read_table(shard).slice(0, 3), shard)
    with pytest.raises(qualms.QualmsError, match=r"missing some of its 8 rows"):
        score_on_ray(batches, source, tmp_path / "copy", {"seed": 0}, 30, WORKERS)
    with pytest.raises(qualms.QualmsError, match="seed 0, not 1"):
        score_on_ray(batches, source, tmp_path / "out", {"seed": 1}, 30, WORKERS)
    with pytest.raises(qualms.QualmsError, match="runner ray, not None"):
        score_shards(batches.score, source, tmp_path / "out", {"seed": 0}, 30)


def test_the_command_says_what_it_did(
    ray: Any,
    digits: Images,
    weights_here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_folder(digits.take(slice(0, 6)), weights_here / "pictures")
    (weights_here / "pictures" / "003.png").write_bytes(b"no image")
    words = own("--methods", "entropy", "--out", "many/", "--runner", "ray", "--workers", "2")
    assert run(monkeypatch, "score", "pictures", *words) == SOME_REJECTED
    told = capsys.readouterr()
    assert (
        told.out
        == "5 images scored by entropy: many/; 1 could not be read: many/rejected.parquet\n"
    )
    assert parquet.read_table(weights_here / "many" / "rejected.parquet")["id"].to_pylist() == [
        "003.png"
    ]


def test_the_command_asks_a_cluster_that_is_there(
    ray: Any, digits: Images, weights_here: Path
) -> None:
    """By its address, from another process."""
    as_folder(digits.take(slice(0, 6)), weights_here / "pictures")
    address = ray.get_runtime_context().gcs_address
    words = own(
        "--methods", "entropy", "--out", "many/", "--runner", "ray", "--ray-address", address
    )
    done = subprocess.run(
        [sys.executable, "-m", "qualms", "score", "pictures", *words],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "6 images scored by entropy: many/\n", done.stderr
    assert ray.is_initialized()  # it is still there


def test_a_run_that_is_killed_is_gone_on_with(ray: Any, digits: Images, weights_here: Path) -> None:
    """With all of its processes, at a moment when it has written something."""
    data = as_parquet(digits, weights_here / "data")
    words = [data, *own("--methods", "regrad,entropy", "--shard-size", "10", "--runner", "ray")]
    command = [sys.executable, "-m", "qualms", "score", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    address = ("--ray-address", ray.get_runtime_context().gcs_address)
    subprocess.run(
        [*command, *address, "--out", "whole/"],
        env=env,
        check=True,
        timeout=300,
        capture_output=True,
    )
    with subprocess.Popen(
        [*command, *address, "--out", "out/"], env=env, stderr=subprocess.DEVNULL
    ) as process:
        while not list((weights_here / "out" / ".noted").glob("shard*.parquet")):
            assert process.poll() is None, "it was quicker"
            time.sleep(0.01)
        process.kill()
    subprocess.run(
        [*command, *address, "--out", "out/"], env=env, check=True, timeout=300, capture_output=True
    )
    assert_same(by_id(weights_here / "out"), by_id(weights_here / "whole"))


def test_what_only_one_process_can_read_is_refused(
    digits: Images, batches: BatchScorer, tmp_path: Path
) -> None:
    source = open_source(as_npz(digits, tmp_path / "data"), None, None)
    with pytest.raises(qualms.QualmsError, match=r"Ray cannot read .*; name a folder"):
        score_on_ray(batches, source, tmp_path / "out", {}, 30)
