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
        ("qualms.training", "Fitted", "TrainingResult"),
        ("qualms.texts.document_scores", "scored_documents", "score_documents"),
    ],
)
def test_an_old_name_is_the_new_one(module: str, old: str, new: str) -> None:
    home = importlib.import_module(module)
    with pytest.warns(DeprecationWarning, match=rf"{old} is deprecated; use .*{new}"):
        assert getattr(home, old) is getattr(home, new)
    with pytest.raises(AttributeError, match="nothing"):
        home.nothing  # noqa: B018


def test_former_names_of_attributes_are_read() -> None:
    from qualms.data import DATASETS, Images, ImageTransform, Normalization
    from qualms.models import ZOO, Preprocessing

    halves = Normalization((0.5,), (0.5,))
    with pytest.warns(DeprecationWarning, match="use (transform|normalization)="):
        found = Preprocessing(fit=ImageTransform((8, 8)), normalisation=halves)
    assert found == Preprocessing(halves, ImageTransform((8, 8)))
    images = Images("blank", torch.zeros(1, 3, 4, 4, dtype=torch.uint8), None)
    for owner, old, new in (
        (found, "fit", "transform"),
        (found, "normalisation", "normalization"),
        (DATASETS["mnist"], "normalisation", "normalization"),
        (ZOO["imagenet-efficientnet-lite0"], "normalisation", "normalization"),
    ):
        with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated; use .*\.{new}"):
            assert getattr(owner, old) == getattr(owner, new) is not None
    with pytest.warns(DeprecationWarning, match=r"use Images\.convert"):
        assert torch.equal(images.fitted(1, 2).pixels, images.convert(1, 2).pixels)


def test_former_names_of_arguments_are_taken(tmp_path: Path) -> None:
    from qualms.data import Images, ImageTransform, Normalization, load
    from qualms.training import Recipe, fit

    transform = ImageTransform((4, 4))
    with pytest.warns(DeprecationWarning, match="use transform="):
        assert torch.equal(load("digits", fit=transform).pixels, load("digits", size=4).pixels)
    pixels = torch.randint(0, 256, (40, 1, 4, 4), dtype=torch.uint8)
    images = Images("noise", pixels, torch.arange(40) % 2)
    seen: list[tuple[str, int, int]] = []
    with pytest.warns(DeprecationWarning, match="is deprecated; use") as caught:
        fit(
            nn.Sequential(nn.Flatten(), nn.Linear(16, 2)),
            images,
            Recipe(epochs=1, rate=0.1),
            normalisation=Normalization((0.5,), (0.5,)),
            tell=lambda *step: seen.append(step),
        )
    assert {str(one.message) for one in caught} == {
        "normalisation= is deprecated; use normalization=.",
        "tell= is deprecated; use progress=.",
    }
    assert seen[-1] == ("epochs", 1, 1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        load("digits", nothing=1)
