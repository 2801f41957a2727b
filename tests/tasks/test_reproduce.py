"""The paper's tables: what is compared with what."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qualms.data import Images
from qualms.methods.entropy import Entropy
from qualms.tasks import reproduce
from qualms.tasks.presets import PAPER, Setup
from qualms.tasks.reproduce import Workspace
from qualms.training import RECIPES


def test_ood_is_measured_on_as_many_images_of_both_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(dataset: str, root: Path, split: str = "test") -> Images:
        count = 30 if dataset == "svhn" else 20
        noise = torch.Generator().manual_seed(count)
        pixels = torch.randint(0, 256, (count, 3, 32, 32), generator=noise, dtype=torch.uint8)
        return Images(dataset, pixels, torch.arange(count) % 10)

    monkeypatch.setattr(reproduce, "_load", made_up)
    monkeypatch.setattr(reproduce, "EQUAL", 20)
    setup = Setup("svhn-cnn", RECIPES["svhn"].shortened(1))
    preset, at = replace(PAPER, seeds=(0,), setups={"svhn": setup}), Workspace(tmp_path, tmp_path)
    monkeypatch.setattr(reproduce, "paper_methods", lambda *_: {"Entropy": Entropy()})
    rows = [row for row in reproduce.table1(preset, at) if row["row"] == "ood"]
    assert [(row["out"], row["n_in"], row["n_out"]) for row in rows] == [("cifar10", 20, 20), ("cifar100", 20, 20)]
    calibrated = [row for row in reproduce.table2(preset, at) if row["row"] == "calibration"]
    assert [row["n"] for row in calibrated] == [30]
