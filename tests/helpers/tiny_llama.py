"""A tiny Llama with its tokenizer, in a folder as Hugging Face keeps them."""

from pathlib import Path
from typing import Any

import torch

LEARNT = "Once upon a time, there was a little girl. She had a red ball. One day, the ball was gone, and she was sad."


def tokenizer(bos: bool = True) -> Any:
    """Bytes, and pairs of them that are frequent in `LEARNT`; every text begins with <s> if `bos`."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([LEARNT], trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def llama(context: int = 32, **more: Any) -> Any:
    """Random weights, which are large enough for its answers to differ."""
    import transformers

    small = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(
        vocab_size=300,
        max_position_embeddings=context,
        initializer_range=0.3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=0,
        **small,
        **more,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def write_language_model(folder: Path, model: Any = None, bos: bool = True) -> Path:
    """The folder, with the model and the tokenizer in it."""
    (llama() if model is None else model).save_pretrained(folder)
    tokenizer(bos).save_pretrained(folder)
    return folder
