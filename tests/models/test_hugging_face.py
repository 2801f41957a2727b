"""Classifiers of Hugging Face, from folders that these tests write: nothing is fetched."""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import qualms
from qualms.data import Normalization
from qualms.errors import QualmsError
from qualms.models import load_model, normalization_of
from tests.helpers.errors import refusal

transformers = pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 5,
}


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    config = transformers.ViTConfig(image_size=8, patch_size=4, **SMALL)
    return written(transformers.ViTForImageClassification(config), tmp_path / "vit")


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, **SMALL)
    return written(transformers.BertForSequenceClassification(config), tmp_path / "bert")


def written(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


refused = partial(refusal, load_model)


def agrees_with_the_reference(model: nn.Module, x: Any) -> None:
    model = model.double()
    specs = ["regrad+layers", "exgrad"]
    expected = qualms.compare(model, x, specs, engine="reference")
    torch.testing.assert_close(qualms.compare(model, x, specs), expected, rtol=1e-9, atol=1e-12)


def test_a_classifier_of_images_from_a_folder(vit: Path) -> None:
    model = load_model(f"hf:{vit}")
    assert not model.training
    expected = transformers.ViTForImageClassification.from_pretrained(vit)
    x = torch.rand(3, 3, 8, 8)
    assert torch.equal(model(x).logits, expected(x).logits)
    agrees_with_the_reference(model, x.double())


def test_a_classifier_of_texts_from_a_folder(bert: Path) -> None:
    x = {
        "input_ids": torch.randint(0, 30, (3, 6)),
        "attention_mask": torch.ones(3, 6, dtype=torch.long),
    }
    agrees_with_the_reference(load_model(f"hf:{bert}"), x)


def test_weights_from_a_checkpoint_go_into_the_configured_network(
    vit: Path, tmp_path: Path
) -> None:
    config = transformers.ViTConfig.from_pretrained(vit)
    config.num_labels = 3
    other = transformers.ViTForImageClassification(config)
    torch.save({"model": other.state_dict()}, tmp_path / "w.pt")
    model = load_model(f"hf:{vit}", tmp_path / "w.pt", classes=3)
    assert all(torch.equal(v, other.state_dict()[k]) for k, v in model.state_dict().items())
    assert not model.training
    assert "2 keys with a different shape" in refused(f"hf:{vit}", tmp_path / "w.pt")


def test_half_precision_on_disk_is_float32_in_memory(vit: Path) -> None:
    transformers.ViTForImageClassification.from_pretrained(vit).half().save_pretrained(vit)
    assert load_file(vit / "model.safetensors")["classifier.bias"].dtype == torch.half
    assert {p.dtype for p in load_model(f"hf:{vit}").parameters()} == {torch.float32}


def test_no_part_of_the_network_is_random_in_silence(vit: Path) -> None:
    assert "have 5 classes, so a last layer for 3 would be initialized randomly" in refused(
        f"hf:{vit}", classes=3
    )
    assert load_model(f"hf:{vit}", classes=5).config.num_labels == 5
    state = load_file(vit / "model.safetensors")
    save_file(
        {k: v for k, v in state.items() if "classifier" not in k},
        vit / "model.safetensors",
        {"format": "pt"},
    )
    assert (
        "lack 2 tensors (first 'classifier.bias'), which would be initialized randomly"
        in refused(f"hf:{vit}")
    )


class RunsCode:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def test_a_folder_runs_no_code(vit: Path, tmp_path: Path) -> None:
    (vit / "model.safetensors").unlink()
    torch.save({"classifier.bias": RunsCode(tmp_path / "ran")}, vit / "pytorch_model.bin")
    refused(f"hf:{vit}")
    config = json.loads((vit / "config.json").read_text())
    own_code = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (vit / "config.json").write_text(json.dumps(config | own_code))
    (vit / "mine.py").write_text(f"import os\nos.system('touch {tmp_path / 'ran'}')\n")
    refused(f"hf:{vit}")
    assert not (tmp_path / "ran").exists()


def test_what_is_no_classifier_is_refused(tmp_path: Path) -> None:
    config = transformers.ViTConfig(image_size=8, patch_size=4, **SMALL)
    folder = written(transformers.ViTModel(config), tmp_path / "features")
    assert "not an image or text classifier (its architecture: ViTModel)" in refused(f"hf:{folder}")
    transformers.ViTConfig().save_pretrained(tmp_path / "bare")
    assert "(its architecture: none)" in refused(f"hf:{tmp_path / 'bare'}")


def test_what_cannot_be_had_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "names a folder that does not exist" in refused(f"hf:{tmp_path / 'none'}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "pass weights=, a checkpoint file" in refused("hf:nobody/has-this")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs the package transformers" in refused("hf:nobody/has-this")


def test_normalization_is_the_image_processors(vit: Path) -> None:
    model = load_model(f"hf:{vit}")
    assert normalization_of(f"hf:{vit}", model) is None
    path = vit / "preprocessor_config.json"
    path.write_text(
        json.dumps(
            {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "do_normalize": True}
        )
    )
    assert normalization_of(f"hf:{vit}", model) == Normalization((0.5, 0.4, 0.3), (0.2, 0.2, 0.1))
    path.write_text(
        json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": False})
    )
    assert normalization_of(f"hf:{vit}", model) is None
    path.write_text("{")
    with pytest.raises(QualmsError, match="is damaged"):
        normalization_of(f"hf:{vit}", model)
