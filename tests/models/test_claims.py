"""Files of networks that are damaged, or claim more than they hold, are refused with one error."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from qualms.data import Images, Normalization
from qualms.errors import QualmsError
from qualms.models import load_model, preprocessing_of
from qualms.training import Recipe, fit


def test_a_zip_file_of_several_disks_is_no_exported_network(tmp_path: Path) -> None:
    locator = b"PK\x06\x07" + bytes(12) + (2).to_bytes(4, "little")
    (tmp_path / "a.pt2").write_bytes(bytes(100) + locator + b"PK\x05\x06" + bytes(18))
    with pytest.raises(QualmsError, match="is damaged or not an exported network"):
        load_model(str(tmp_path / "a.pt2"))


@pytest.mark.parametrize(
    "content",
    ["[" * 100_000, '{"size": 1' + "0" * 400 + "}", '{"image_mean": [NaN], "image_std": [1]}'],
)
def test_settings_of_an_image_processor_that_make_no_sense_are_refused(
    content: str, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(QualmsError):
        preprocessing_of(f"hf:{tmp_path}", nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("key", "value"), [("intermediate_size", 2**31), ("num_hidden_layers", 2**31)]
)
def test_a_configuration_cannot_claim_more_weights_than_the_files_hold(
    key: str, value: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **small)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    assert load_model(f"hf:{tmp_path}").config.num_labels == 3
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {key: value}))
    with pytest.raises(QualmsError, match="claims more weights than its files contain"):
        load_model(f"hf:{tmp_path}")


@pytest.mark.parametrize("part", ["state_dict", "history", "best"])
def test_a_training_does_not_go_on_from_a_file_that_lacks_a_part(part: str, tmp_path: Path) -> None:
    images = Images("squares", torch.zeros(40, 1, 4, 4, dtype=torch.uint8), torch.arange(40) % 2)
    recipe, half, path = (
        Recipe(epochs=1, rate=0.1),
        Normalization((0.5,), (0.5,)),
        tmp_path / "a.pt",
    )

    def trained() -> None:
        torch.manual_seed(0)
        fit(nn.Sequential(nn.Flatten(), nn.Linear(16, 2)), images, recipe, half, checkpoint=path)

    trained()
    content = torch.load(path, weights_only=True)
    trained()
    del content[part]
    torch.save(content, path)
    with pytest.raises(QualmsError, match="is damaged"):
        trained()
