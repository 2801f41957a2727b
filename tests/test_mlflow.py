"""A scorer that MLflow has saved and loaded gives the scores that it gave before."""

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qualms import QualmsError, Scorer, Threshold
from qualms.mlflow import ScorerModel, save_model
from qualms.result import Scored

pytestmark = [
    pytest.mark.serve,
    # MLflow warns of its own code as it is imported.
    *map(
        pytest.mark.filterwarnings, ("ignore::UserWarning:mlflow", "ignore::FutureWarning:mlflow")
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
mlflow = pytest.importorskip(
    "mlflow", reason="mlflow-skinny is not installed; run `make test-serve`"
)
pytest.importorskip("pandas", reason="pandas is not installed; run `make test-serve`")
METHODS = ["regrad+layers+smooth", "energy", "laplace"]


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    torch.manual_seed(0)
    model, train = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(30, 4)
    plain = Scorer(model, METHODS, train=[train], class_names=["a", "b", "c"])
    known = plain(train).scores[METHODS[0]]
    limit = Threshold.from_scores(known, 0.5, provenance=plain.provenance)
    return Scorer(model, METHODS, train=[train], class_names=["a", "b", "c"], threshold=limit)


@pytest.fixture(scope="module")
def saved(scorer: Scorer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mlflow") / "model"
    save_model(scorer, place)
    return place


def inputs() -> np.ndarray:
    return np.random.default_rng(1).normal(size=(7, 4)).astype(np.float32)


def expected(scorer: Scorer) -> Scored:
    """Draws follow an input's bytes, in the network's own 32 bits."""
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in inputs()]
    found = scorer(inputs(), numbers=[int.from_bytes(digest) >> 1 for digest in digests])
    return replace(found, ids=range(len(digests)))


def test_an_input_has_the_same_score_in_whatever_row(saved: Path) -> None:
    loaded, x = mlflow.pyfunc.load_model(str(saved)), inputs()
    among = loaded.predict(x)
    for i in range(len(x)):
        alone = loaded.predict(x[i : i + 1])
        for name in METHODS:
            assert among[f"score_{name}"].iloc[i] == pytest.approx(
                alone[f"score_{name}"].iloc[0], rel=1e-5
            )


def test_a_loaded_scorer_says_the_same(scorer: Scorer, saved: Path) -> None:
    import pandas

    loaded = mlflow.pyfunc.load_model(str(saved))
    want = expected(scorer).to_pandas()
    pandas.testing.assert_frame_equal(loaded.predict(inputs()), want, check_exact=True)
    for kind in (np.float32, np.float64, ">f4"):
        table = pandas.DataFrame(inputs().astype(kind))
        pandas.testing.assert_frame_equal(loaded.predict(table), want, check_exact=True)
    assert set(want["accepted"]) == {True, False}
    assert [f"score_{name}" in want for name in METHODS] == [True] * 3


def test_another_process_says_the_same(scorer: Scorer, saved: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", inputs())
    script = (
        "import sys, numpy, mlflow; m = mlflow.pyfunc.load_model(sys.argv[1]); "
        "m.predict(numpy.load(sys.argv[2])).to_csv(sys.argv[3])"
    )
    out = tmp_path / "scores.csv"
    subprocess.run(
        [sys.executable, "-c", script, str(saved), str(tmp_path / "x.npy"), str(out)],
        check=True,
        timeout=240,
    )
    import pandas

    found = pandas.read_csv(out, index_col="id")
    for name, values in expected(scorer).scores.items():
        np.testing.assert_allclose(found[f"score_{name}"], values, rtol=1e-6)


def test_nothing_is_overwritten(scorer: Scorer, saved: Path) -> None:
    with pytest.raises(QualmsError, match="already exists"):
        save_model(scorer, saved)


def test_a_network_of_16_bits_is_asked_like_any_other() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()
    found = ScorerModel(Scorer(model, "entropy")).predict(inputs().astype(np.float64))
    want = Scorer(model, "entropy")(torch.from_numpy(inputs()).bfloat16()).scores["entropy"]
    assert found["score_entropy"].tolist() == want.tolist()
