"""Classifiers of transformers with random weights, made small by one table of sizes, and inputs for
them.

A configuration is shrunk by the names of its fields, with those of the configurations inside it;
what that does not suit is put right by name in `EXCEPTIONS`. Inputs differ from each other, and
texts have lengths of their own.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CLASSES, CHOICES, INPUTS, LENGTH, WORDS, PIXELS = 3, 3, 4, 12, 64, 32
LENGTHS = (12, 7, 10, 4)

# Field of a configuration -> its size in the small one.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "d_latents"), 32),
    **dict.fromkeys(("projection_dim", "projection_size", "pooler_hidden_size", "pooler_output_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "output_hidden_size", "xvector_output_dim", "decoder_hidden_size"), 32),
    **dict.fromkeys(("out_hidden_size", "cross_attention_hidden_size", "audio_hidden_size", "pred_hidden_size"), 32),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "entity_emb_size"), 16),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "visual_embedding_dim", "rotary_dim"), 8),
    **dict.fromkeys(("intermediate_size", "d_ff", "dff", "d_inner", "ffn_dim", "hidden_dim", "feed_forward_size"), 40),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "decoder_intermediate_size"), 40),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "prediction_head_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "decoder_num_hidden_layers", "num_self_attends_per_block"), 1),
    **dict.fromkeys(("num_pooler_layers", "pred_num_hidden_layers", "num_feedforward_networks", "depth"), 1),
    **dict.fromkeys(("num_spatial_layers", "num_temporal_layers", "num_auxiliary_layers", "num_adapter_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_self_attention_heads", "num_cross_attention_heads"), 4),
    **dict.fromkeys(("decoder_num_attention_heads", "pred_num_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads", "num_query_groups"), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("head_dim", "d_head", "d_kv", "attention_head_size", "v_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "linear_key_head_dim", "linear_value_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "kv_lora_rank", "q_lora_rank", "index_head_dim", "gated_norm_rank"), 8),
    **dict.fromkeys(("vocab_size", "entity_vocab_size", "pronunciation_vocab_size", "shape_vocab_size"), WORDS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_2d_position_embeddings"), 64),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "index_topk", "keep_window_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "n_group"), 2),
    **dict.fromkeys(("topk_group", "n_shared_experts", "expert_layer_offset"), 1),
    **dict.fromkeys(("sliding_window", "local_attention"), 10),
    **dict.fromkeys(("window_size", "attention_window"), 4),
    **dict.fromkeys(("classifier_proj_size", "codevector_dim", "proj_codevector_dim", "intra_bottleneck_size"), 16),
    **dict.fromkeys(("true_hidden_size", "mamba_dt_rank", "mamba_d_state", "adapter_rank", "num_landmarks"), 8),
    **dict.fromkeys(("num_conv_pos_embeddings", "num_latents", "prompt_mid_dim", "segment_means_seq_len"), 8),
    **dict.fromkeys(("num_conv_pos_embedding_groups", "block_size", "num_mem_blocks"), 2),
    "image_size": PIXELS, "crop_size": PIXELS, "input_size": PIXELS, "patch_size": 8, "encoder_stride": 8,
    "num_frames": 4, "frames_per_clip": 4, "num_mel_bins": 16, "max_length": 32, "coordinate_size": 6, "shape_size": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2,
    "sep_token_id": 2, "mask_token_id": 3, "cls_token_id": 1, "aspp_out_channels": 16, "groups_width": 8,
    "num_groups": 2, "stem_out_channels": 16, "class_expand": 24, "auxiliary_channels": 16, "attn_layer_period": 2,
}  # fmt: skip

# Lists with a size for each stage: the first so many of these.
STAGES: dict[str, tuple[int, ...]] = {
    "hidden_sizes": (8, 16, 24, 32, 32), "embed_dim": (8, 16, 24, 32), "embed_dims": (8, 16, 24, 32),
    "depths": (1, 1, 2, 1), "depth": (1, 1, 2), "num_heads": (2, 2, 4, 4), "num_attention_heads": (2, 2, 4, 4),
    "conv_dim": (16,) * 20, "tdnn_dim": (16,) * 5, "stage_num_blocks": (1, 1, 1, 1), "block_sizes": (1, 1, 1),
    "stage_numb_of_layers": (2, 2, 2, 2), "neck_hidden_sizes": (8, 8, 16, 16, 24, 24, 32), "key_dim": (8, 8, 8),
    "n_attn_blocks": (1, 1, 1), "base_attn_unit_dims": (16, 16, 16), "num_block_repeats": (1,) * 7,
}  # fmt: skip

# What the tables do not suit, by class of configuration.
ALL_HEADS = {"num_key_value_heads": 4}
TURNS = {"rope_type": "default", "rope_theta": 10_000.0}
FOUR = {
    "partial_rotary_factor": 0.5,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 64,
}
ROPE = {"rope_parameters": TURNS}
WINDOWS = {"patch_size": 2, "window_size": 2}
FEW_TOKENS = {"mm_tokens_per_image": 4}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("AXK1Config", "AXK2Config", "DeepseekV3Config", "MiniCPM3Config"), ALL_HEADS),
    **dict.fromkeys(("EsmcConfig", "NemotronConfig"), ALL_HEADS),
    **dict.fromkeys(("HunYuanDenseV1Config", "HunYuanMoEV1Config", "MinistralConfig"), ROPE | {"head_dim": 8}),
    **dict.fromkeys(("SwinConfig", "DonutSwinConfig"), WINDOWS),
    **dict.fromkeys(("Gemma3Config", "T5Gemma2EncoderConfig"), FEW_TOKENS),
    **dict.fromkeys(("Qwen3NextConfig",), HYBRID),
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": TURNS, "full_attention": TURNS},
    },
    "CvtConfig": {"depth": [1, 2, 3]},
    "EfficientNetConfig": {"width_coefficient": 0.25, "depth_coefficient": 1.0, "hidden_dim": 320},
    "EsmConfig": {"vocab_size": WORDS},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "HGNetV2Config": {
        "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 24, 32], "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 24, 32, 32], "hidden_sizes": [16, 24, 32, 32],
    },
    "HieraConfig": {"image_size": [32, 32], "embed_dim": 8, "num_heads": [1, 2, 4, 8]},
    "JambaConfig": {"attn_layer_offset": 1},
    "LevitConfig": {"image_size": 64, "patch_size": 16, "hidden_sizes": [16, 24, 32]},
    "LiltConfig": {"hidden_size": 24, "num_attention_heads": 2},
    "MobileBertConfig": {"true_hidden_size": 16},
    "MobileViTConfig": {"image_size": 64, "patch_size": 2},
    "MobileViTV2Config": {"image_size": 64, "patch_size": 2},
    "ReformerConfig": {
        "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "hash_seed": 0, "num_buckets": 2,
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "attn_layers": ["local", "lsh"], "is_decoder": False,
    },
    "SqueezeBertConfig": {"embedding_size": 32},
    "T5Config": {"decoder_start_token_id": 1},
    "TextNetConfig": {"hidden_sizes": [16, 16, 24, 32, 32]},
    "ViltConfig": {"num_images": 2, "modality_type_vocab_size": 3},
    "DeepseekV2Config": ALL_HEADS | {"num_experts_per_tok": 2},
    "Mistral4Config": ALL_HEADS | {"rope_parameters": TURNS | FOUR},
    "PatchTSTConfig": {"num_targets": CLASSES},
    "ShieldGemma2Config": FEW_TOKENS | {"yes_token_index": 10, "no_token_index": 11},
    "Qwen3_5TextConfig": HYBRID | {"pad_token_id": 0},
    "CanineConfig": {"num_hash_buckets": 64, "local_transformer_stride": 8},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "Zamba2Config": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "mamba_headdim": 8,
        "n_mamba_heads": 8, "chunk_size": 4,
    },
}  # fmt: skip

# Without a padding token a language model reads one text at a time.
LABELS = {"num_labels": CLASSES, "pad_token_id": 0}


def transformers_names() -> list[str]:
    """Every classifier of whole inputs that the installed transformers has."""
    import transformers

    kind = re.compile(
        r"For(Sequence|Image|Audio|Video|TimeSeries|Entity|EntityPair|ImagesAndText|)Classification$|ForMultipleChoice$"
    )
    names = [name for name in dir(transformers) if kind.search(name)]
    return [name for name in names if not name.startswith(("Auto", "DataCollator"))]


def small_config(kind: Any, **more: Any) -> Any:
    """A configuration of this class with the sizes of the tables."""
    fields: dict[str, Any] = {}
    for name, value in vars(kind()).items():
        if hasattr(value, "to_dict") and not name.startswith("_"):
            fields[name] = small_config(type(value))
        elif isinstance(value, int) and not isinstance(value, bool) and name in SIZES:
            fields[name] = min(value, SIZES[name]) if name.endswith("_size") else SIZES[name]
        elif isinstance(value, (list, tuple)) and name in STAGES:
            fields[name] = list(STAGES[name][: len(value)])
    return kind(**fields | EXCEPTIONS.get(kind.__name__, {}) | more)


def transformers_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small classifier of transformers, and inputs for it."""
    import transformers

    kind = getattr(transformers, name)
    config = small_config(kind.config_class, **LABELS)
    torch.manual_seed(0)
    config._experts_implementation = "eager"  # the others have no double precision
    model = kind(config)
    inputs = inputs_for(model, config, name)
    return OnlyLogits(model) if kind.__name__ in WITHOUT_LOGITS else model, inputs


WITHOUT_LOGITS = (
    "PPLCNetForImageClassification",
    "PatchTSMixerForTimeSeriesClassification",
    "PatchTSTForClassification",
)


class OnlyLogits(nn.Module):
    """A model that calls its logits something else, or gives more with them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        """The first tensor of the output that has a number for each class."""
        found = self.model(**batch)
        return next(
            t for t in found.values() if isinstance(t, Tensor) and t.shape == (len(t), CLASSES)
        )


def inputs_for(model: nn.Module, config: Any, name: str) -> dict[str, Tensor]:
    """What the model's main argument calls for, and what else it needs."""
    taken = inspect.signature(model.forward).parameters
    main = str(getattr(model, "main_input_name", "input_ids"))
    batch = (videos if "Video" in name and main == "pixel_values" else MAKERS[main])(config)
    for start, make in FURTHER.items():
        batch |= make(config) if name.startswith(start) else {}
    batch = {field: value for field, value in batch.items() if field in taken}
    if "MultipleChoice" in name:
        return {
            field: torch.stack([value.roll(i, 1) for i in range(CHOICES)], 1)
            for field, value in batch.items()
        }
    return batch


def normal(*shape: int) -> Tensor:
    """A tensor of normal numbers for each input."""
    return torch.randn(INPUTS, *shape, dtype=torch.double)


def texts(config: Any) -> dict[str, Tensor]:
    """Ids from 4 on, an end of sequence at the end of each text, zeros behind it."""
    mask = (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).long()
    ids = torch.randint(4, WORDS, (INPUTS, LENGTH)) * mask
    ids[torch.arange(INPUTS), torch.tensor(LENGTHS) - 1] = 2
    return {"input_ids": ids, "attention_mask": mask}


def pixels(config: Any) -> dict[str, Tensor]:
    """Images of the size that the configuration names."""
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", PIXELS)
    size = size if isinstance(size, int) else size[0]
    return {"pixel_values": normal(getattr(config, "num_channels", 3), size, size)}


def patches(config: Any) -> dict[str, Tensor]:
    """Images cut up beforehand, of several shapes."""
    shapes = torch.tensor([[4, 4], [2, 8], [8, 2], [4, 3]])
    mask = (torch.arange(16) < shapes.prod(1)[:, None]).long()
    return {
        "pixel_values": normal(16, 192) * mask[:, :, None],
        "pixel_attention_mask": mask,
        "spatial_shapes": shapes,
    }


def entities(config: Any) -> dict[str, Tensor]:
    """Two entities in each text."""
    places = torch.stack([torch.randperm(4)[:2] for _ in range(INPUTS)])[:, :, None]
    ones = torch.ones(INPUTS, 2, dtype=torch.long)
    ids = torch.randint(1, WORDS, (INPUTS, 2))
    return {"entity_ids": ids, "entity_attention_mask": ones, "entity_position_ids": places}


def videos(config: Any) -> dict[str, Tensor]:
    """Videos of four images."""
    return {"pixel_values": normal(4, 3, PIXELS, PIXELS)}


Maker = Callable[[Any], dict[str, Tensor]]
MAKERS: dict[str, Maker] = {
    "input_ids": texts,
    "inputs": lambda config: {
        "inputs": texts(config)["input_ids"],
        "attention_mask": texts(config)["attention_mask"],
    },
    "pixel_values": pixels,
    "pixel_values_videos": lambda config: {"pixel_values_videos": videos(config)["pixel_values"]},
    "input_values": lambda config: {"input_values": normal(1600)},
    "input_features": lambda config: {"input_features": normal(20, 160)},
    "past_values": lambda config: {"past_values": normal(32, 1)},
}
# By the start of a model's name.
FURTHER: dict[str, Maker] = {
    "AST": lambda config: {"input_values": normal(32, 16)},
    "Whisper": lambda config: {"input_features": normal(16, 128)},
    "LayoutLM": lambda config: {"bbox": boxes()},
    "LayoutLMv3": pixels,
    "Lilt": lambda config: {"bbox": boxes()},
    "Longformer": lambda config: {
        "global_attention_mask": (torch.arange(LENGTH) == 0).long().repeat(INPUTS, 1)
    },
    "Luke": entities,
    "Siglip2": patches,
    "Vilt": lambda config: {"pixel_values": normal(2, 3, PIXELS, PIXELS)},
    "VisualBert": lambda config: {"visual_embeds": normal(5, 8)},
}


def boxes() -> Tensor:
    """Where the words stand on a page: left, top, right, bottom."""
    return torch.randint(0, 30, (INPUTS, LENGTH, 2)).repeat(1, 1, 2) + torch.tensor([0, 0, 20, 20])


def lively(model: nn.Module) -> nn.Module:
    """In double precision, with weights as after training: scales that start at zero or one would
    hide a layer.
    """
    model = model.double().eval()
    for m in model.modules():
        if (
            isinstance(m, nn.modules.batchnorm._NormBase)
            and m.running_mean is not None
            and m.running_var is not None
        ):
            m.running_mean.normal_(std=0.5)
            m.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model
