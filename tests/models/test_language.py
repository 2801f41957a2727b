"""Language models of Hugging Face, from folders that these tests write: nothing is fetched."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import qualms
from qualms.errors import QualmsError
from qualms.models.language import LanguageModel, load_language_model
from tests.helpers.errors import refusal
from tests.helpers.tiny_llama import llama, tokenizer, write_language_model

transformers = pytest.importorskip("transformers")
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 300,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_language_model(tmp_path / "lm")


def refused(source: object) -> str:
    return refusal(load_language_model, f"hf:{source}")


def test_a_model_comes_with_its_tokenizer(folder: Path) -> None:
    found = load_language_model(f"hf:{folder}")
    assert found.name == f"hf:{folder}"
    assert found.context == 32
    assert not found.model.training
    encoded = found.tokenizer("Once upon", return_offsets_mapping=True)
    assert encoded["offset_mapping"][0] == (0, 0)
    assert encoded["offset_mapping"][-1][1] == 9
    ids = torch.tensor([encoded["input_ids"]])
    assert torch.equal(found.model(ids).logits, llama()(ids).logits)


def test_half_precision_on_disk_is_float32_in_memory(folder: Path) -> None:
    llama().half().save_pretrained(folder)
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {
        torch.half
    }
    assert {p.dtype for p in load_language_model(f"hf:{folder}").model.parameters()} == {
        torch.float32
    }


def test_no_part_of_the_model_is_random_in_silence(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert (
        "lack 1 tensors (first 'model.norm.weight'), which would be initialized randomly; download all of them."
        in refused(folder)
    )


def test_weights_that_could_run_code_are_not_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(llama().state_dict(), folder / "pytorch_model.bin")
    assert "model.safetensors" in refused(folder)
    config = json.loads((folder / "config.json").read_text())
    own_code = {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config | own_code))
    (folder / "mine.py").write_text(f"import os\nos.system('touch {tmp_path / 'ran'}')\n")
    refused(folder)
    assert not (tmp_path / "ran").exists()


def test_models_that_do_not_read_from_left_to_right_are_sent_to_the_scorer(tmp_path: Path) -> None:
    t5 = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=300
    )
    told = {
        "BertForMaskedLM": transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
        "T5ForConditionalGeneration": transformers.T5ForConditionalGeneration(t5),
        "LlamaForSequenceClassification": transformers.LlamaForSequenceClassification(
            transformers.LlamaConfig(**SMALL)
        ),
    }
    for architecture, model in told.items():
        folder = write_language_model(tmp_path / architecture, model)
        assert refused(folder) == (
            f"hf:{folder} is not a causal language model (its architecture: {architecture}); "
            "use qualms.Scorer with class_dim=-1."
        )


def test_an_architecture_that_may_be_causal_is_tried(tmp_path: Path) -> None:
    config = transformers.BertConfig(is_decoder=True, initializer_range=0.3, **SMALL)
    torch.manual_seed(0)
    folder = write_language_model(tmp_path / "bert", transformers.BertLMHeadModel(config))
    assert load_language_model(f"hf:{folder}").context == 512
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"is_decoder": False}))
    assert (
        "not a causal language model (its prediction for a token depends on later tokens)"
        in refused(folder)
    )


def test_a_mixture_of_experts_can_be_sketched(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "num_experts": 4}
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(num_key_value_heads=1, **SMALL, **sizes)
    )
    found = load_language_model(f"hf:{write_language_model(tmp_path / 'experts', model)}")
    ids = torch.arange(3, 11)[None]
    torch.testing.assert_close(found.model(ids).logits, model.eval()(ids).logits)
    scores = qualms.Scorer(found.model, "regrad", class_dim=-1)(ids).scores["regrad"]
    assert (scores > 0).all()


def test_a_model_on_several_devices_is_refused() -> None:
    model = llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(
        QualmsError, match="mine is spread over the devices 0, cpu; load it onto one"
    ):
        LanguageModel("mine", model, tokenizer())
    model.hf_device_map = {"": "cpu"}
    LanguageModel("mine", model, tokenizer())


def test_a_tokenizer_without_places_in_the_text_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(
        QualmsError, match=r"the tokenizer of mine \(Slow\) does not report the character offsets"
    ):
        LanguageModel("mine", llama(), Slow())


def test_what_cannot_be_had_is_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        QualmsError,
        match=r"timm:resnet18 does not name a language model; pass hf:FOLDER or hf:NAME.",
    ):
        load_language_model("timm:resnet18")
    assert "names a folder that does not exist" in refused(tmp_path / "none")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "config.json, model.safetensors and tokenizer.json" in refused(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "download config.json" in refused("nobody/has-this")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "needs the package transformers" in refused("nobody/has-this")


def test_a_model_that_states_no_limit_has_none() -> None:
    config: Any = transformers.MambaConfig(
        hidden_size=8, num_hidden_layers=1, state_size=4, vocab_size=300
    )
    assert (
        LanguageModel("mamba", transformers.MambaForCausalLM(config), tokenizer()).context is None
    )
