"""Small models that answer at many positions, built from configurations with random weights, in
float64.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WORDS, TOKENS = 23, 7
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG = {"max_position_embeddings": 32, "intermediate_size": 20}


def _made(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    made: nn.Module = (
        getattr(transformers, model)(getattr(transformers, config)(**options)).double().eval()
    )
    for p in made.parameters():
        if p.ndim == 1:  # norms and biases as after training, not the neutral values of new ones
            p.data += 0.1 * torch.randn_like(p)
    return made


def gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return _made(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, bos_token_id=1, eos_token_id=2, **sizes
    )


def gemma() -> nn.Module:
    return _made(
        "GemmaForCausalLM", "GemmaConfig", **SIZES, **LONG, head_dim=8, num_key_value_heads=1
    )


def opt() -> nn.Module:
    sizes = {"ffn_dim": 20, "word_embed_proj_dim": 16, "max_position_embeddings": 32}
    return _made("OPTForCausalLM", "OPTConfig", **SIZES, **sizes)


def bloom() -> nn.Module:
    return _made(
        "BloomForCausalLM", "BloomConfig", vocab_size=WORDS, hidden_size=16, n_layer=2, n_head=2
    )


def t5() -> nn.Module:
    sizes = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 20,
        "num_layers": 2,
        "num_heads": 2,
        "decoder_start_token_id": 0,
    }
    return _made("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, **sizes)


def like_llama(name: str) -> Callable[[], nn.Module]:
    """Of the families that differ from Llama in a few layers only."""
    return lambda: _made(
        f"{name}ForCausalLM", f"{name}Config", **SIZES, **LONG, num_key_value_heads=1
    )


def bert(head: str = "BertForMaskedLM") -> Callable[[], nn.Module]:
    return lambda: _made(head, "BertConfig", **SIZES, **LONG, num_labels=4)


def ids(texts: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(3, WORDS, (texts, tokens), generator=torch.Generator().manual_seed(1))


def text() -> dict[str, Tensor]:
    return {"input_ids": ids()}


def text_pair() -> dict[str, Tensor]:
    return {"input_ids": ids(), "decoder_input_ids": ids(2, 5) - 1}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "GPT-2": (gpt2, text),
    "Llama": (like_llama("Llama"), text),
    "Mistral": (like_llama("Mistral"), text),
    "Gemma": (gemma, text),
    "Qwen": (like_llama("Qwen2"), text),
    "OPT": (opt, text),
    "Bloom": (bloom, text),
    "T5": (t5, text_pair),
    "BERT": (bert(), text),
    "BERT by token": (bert("BertForTokenClassification"), text),
}
