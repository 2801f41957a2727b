"""One rule for random draws at every door: an image's score follows from its pixels and the seed,
never from its place among other images.
"""

import io
import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image
from pyarrow import parquet

import qualms
from qualms.data import DATASETS, load
from qualms.models import load_model
from qualms.stream.network import Network
from tests.helpers.commands import NORMAL, own, rows, run

SMOOTH, PERTURB = "regrad+layers(0.2)+smooth(0.02,4)", "perturb-x(0.05,6)"
METHODS = ("--methods", f"{SMOOTH};{PERTURB}".replace(";", ","))
COUNT = 6
SEED = 3
Scores = dict[str, tuple[float, ...]]  # by the id of an image, one for each method


@pytest.fixture
def pictures_here(weights_here: Path) -> Path:
    """Write six digits into two folders, in two orders; the second begins with other digits."""
    digits = load("digits").pixels
    for folder, numbers in (("pictures", range(COUNT)), ("shuffled", [9, 8, 5, 3, 1, 0, 2, 4])):
        (weights_here / folder).mkdir()
        for place, number in enumerate(numbers):
            name = f"{place}-{number}.png"
            Image.fromarray(digits[number, 0].numpy()).save(weights_here / folder / name)
    return weights_here


def network_and_scorer() -> tuple[Network, qualms.Scorer]:
    model = load_model("digits-cnn", "weights.pt")
    network = Network("digits-cnn", model, DATASETS["digits"].normalization)
    scorer = qualms.Scorer(model, [SMOOTH, PERTURB], pixel_std=NORMAL.std[0], seed=SEED)
    return network, scorer


def expected() -> Scores:
    """Score the six digits by a scorer of the library, one image at a time."""
    network, scorer = network_and_scorer()
    found = {}
    for place in range(COUNT):
        x, numbers = network.numbered_inputs(load("digits").take(slice(place, place + 1)))
        scores = scorer(x, numbers=numbers).scores.values()
        found[f"{place}"] = tuple(float(values[0]) for values in scores)
    return found


def assert_same(found: Scores) -> None:
    """Check the scores of the six digits, whatever else was scored."""
    by_digit = {Path(name).stem.rpartition("-")[2]: scores for name, scores in found.items()}
    for digit, scores in expected().items():
        assert by_digit[digit] == pytest.approx(scores, rel=1e-4), digit


def of_shards(folder: Path) -> Scores:
    """Read the scores by id from all shards of a folder."""
    found = {}
    for shard in sorted(folder.glob("shard*.parquet")):
        for row in parquet.read_table(shard).to_pylist():
            found[row["id"]] = (row[f"score_{SMOOTH}"], row[f"score_{PERTURB}"])
    return found


def of_journal(path: Path, images: str) -> Scores:
    """Read the scores by id from a task's rows, which are in the order of `subset`."""
    order = load(images).subset(500).ids
    found = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["row"] == "scores" and row["data"] == images:
            each = zip(*row["scores"].values(), strict=True)
            for place, scores in enumerate(each, row["first"]):
                found[order[place]] = scores
    return found


def test_scorer_with_numbers(pictures_here: Path) -> None:
    """In one batch, in reverse; by place both scores are others, so that the tests here can fail."""
    network, scorer = network_and_scorer()
    order = torch.arange(COUNT - 1, -1, -1)
    x, numbers = network.numbered_inputs(load("digits").take(order))
    found = scorer(x, numbers=numbers).scores.values()
    columns = [values.tolist() for values in found]
    digits = [f"-{number}" for number in order.tolist()]
    assert_same(dict(zip(digits, zip(*columns, strict=True), strict=True)))
    for by_pixels, by_place in zip(found, scorer(x).scores.values(), strict=True):
        assert (by_pixels / by_place - 1).abs().max() > 1e-3


@pytest.mark.parametrize("folder", ["pictures", "shuffled"])
def test_score_into_a_table(
    folder: str, pictures_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = own(*METHODS, "--seed", str(SEED), "--out", "scores.csv")
    assert run(monkeypatch, "score", f"{folder}/", *words) == 0
    assert_same(
        {
            row["id"]: (float(row[f"score_{SMOOTH}"]), float(row[f"score_{PERTURB}"]))
            for row in rows(pictures_here / "scores.csv")
        }
    )


def test_score_into_shards(pictures_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = own(*METHODS, "--seed", str(SEED), "--out", "shards/", "--shard-size", "3")
    assert run(monkeypatch, "score", "shuffled/", *words) == 0
    assert_same(of_shards(pictures_here / "shards"))


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\..*")
def test_score_on_ray(pictures_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="ray is not installed; run `make test-all`")
    words = own(*METHODS, "--seed", str(SEED), "--out", "shards/", "--runner", "ray")
    assert run(monkeypatch, "score", "shuffled/", *words, "--workers", "1") == 0
    assert_same(of_shards(pictures_here / "shards"))


def test_threshold(pictures_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = own("--method", SMOOTH, "--seed", str(SEED), "--out", "limit.json")
    assert run(monkeypatch, "threshold", "pictures/", *words) == 0
    want = sorted(smooth for smooth, _ in expected().values())
    assert qualms.Threshold.load("limit.json").reference == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("task", ["report", "bench"])
def test_report_and_bench(task: str, pictures_here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = own("--id", "pictures", "--ood", "shuffled", *METHODS, "--seed", str(SEED))
    if task == "report":
        assert run(monkeypatch, "report", *words, "--rows", "rows.jsonl") == 0
    else:
        assert run(monkeypatch, "bench", "ood", *words, "--out", "rows.jsonl") == 0
    for folder in ("pictures", "shuffled"):
        assert_same(of_journal(pictures_here / "rows.jsonl", folder))


@pytest.mark.serve
def test_service(pictures_here: Path) -> None:
    if find_spec("litserve") is None and "QUALMS_NEEDS_SERVE" not in os.environ:
        pytest.skip("litserve is not installed; run `make test-serve`")
    from qualms.service.scoring import ScoringService
    from tests.helpers.services import client

    network, scorer = network_and_scorer()
    files = []
    for path in sorted((pictures_here / "shuffled").iterdir()):
        files.append(("images", (path.name, io.BytesIO(path.read_bytes()), "image/png")))
    answer = client(ScoringService("digits", network, scorer)).post("/v1/score", files=files)
    assert answer.status_code == 200, answer.text
    assert_same({r["id"]: tuple(r["scores"].values()) for r in answer.json()["results"]})
