"""Old public names work for one version, and say what to use."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import qualms
from qualms.threshold import Provenance


def test_made_by_is_provenance(tmp_path: Path) -> None:
    torch.manual_seed(0)
    scorer = qualms.Scorer(nn.Linear(4, 3), "entropy")
    with pytest.warns(DeprecationWarning, match=r"use Scorer\.provenance"):
        provenance = scorer.made_by
    assert provenance == scorer.provenance
    scores, correct = torch.rand(5), torch.ones(5)
    for make in (qualms.Threshold.from_scores, qualms.Threshold.from_labels):
        arguments = (scores,) if make == qualms.Threshold.from_scores else (scores, correct)
        with pytest.warns(DeprecationWarning, match="use provenance="):
            threshold = make(*arguments, made_by=provenance)
        with pytest.warns(DeprecationWarning, match=r"use Threshold\.provenance"):
            assert threshold.made_by == threshold.provenance == provenance


def test_files_with_made_by_are_read(tmp_path: Path) -> None:
    threshold = qualms.Threshold.from_scores(
        torch.rand(5), provenance=Provenance("Entropy()", "0123")
    )
    values = json.loads(threshold.to_json())
    values["made_by"] = values.pop("provenance")
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert qualms.Threshold.load(tmp_path / "old.json") == threshold


def test_concatenated_is_concatenate() -> None:
    scored = qualms.Scorer(nn.Linear(4, 3), "entropy")(torch.rand(2, 4))
    with pytest.warns(DeprecationWarning, match=r"use Scored\.concatenate"):
        assert len(qualms.Scored.concatenated([scored, scored])) == 4


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("qualms.data", "Fit", "ImageTransform"),
        ("qualms.data", "Normalisation", "Normalization"),
        ("qualms.models", "normalisation_of", "normalization_of"),
        ("qualms.threshold", "MadeBy", "Provenance"),
    ],
)
def test_an_old_name_is_the_new_one(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated; use .*{new}"):
        assert getattr(home, old) is getattr(home, new)
    with pytest.raises(AttributeError, match="nothing"):
        home.nothing  # noqa: B018
