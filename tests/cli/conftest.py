"""A folder with a network for digits, and pictures of them."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from qualms.data import load
from qualms.models import load_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("QUALMS_DATA", raising=False)
    torch.manual_seed(0)
    torch.save(load_model("digits-cnn").state_dict(), tmp_path / "weights.pt")
    for folder, first in (("pictures", 0), ("known", 6)):
        (tmp_path / folder).mkdir()
        for i, image in enumerate(load("digits").pixels[first : first + 6]):
            Image.fromarray(image[0].numpy()).save(tmp_path / folder / f"{i:02d}.png")
    return tmp_path
