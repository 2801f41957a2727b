"""Language models of Hugging Face, with their tokenizers."""

from dataclasses import dataclass
from typing import Any

import torch

from qualms.errors import QualmsError, explain_failure, reason
from qualms.models.hubs import import_transformers, load_own_weights

PREFIX = "hf:"
ADVICE = (
    "download config.json, model.safetensors and tokenizer.json to a folder, and pass that folder"
)


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model, which predicts each next token, and its tokenizer.

    Args:
        name: what errors call the model.
        model: a causal language model of transformers, on one device.
        tokenizer: a fast tokenizer of transformers, which reports the character offsets of tokens.
    """

    name: str
    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        """Raise an error if the model is on several devices, or if the tokenizer is not fast."""
        # transformers sets this if it has spread the model over devices.
        device_map = getattr(self.model, "hf_device_map", None) or {}
        devices = sorted({str(device) for device in device_map.values()})
        if len(devices) > 1:
            raise QualmsError(
                f"{self.name} is spread over the devices {', '.join(devices)}; load it onto one, "
                "without device_map."
            )
        if not getattr(self.tokenizer, "is_fast", False):
            raise QualmsError(
                f"the tokenizer of {self.name} ({type(self.tokenizer).__name__}) does not "
                "report the character offsets of its tokens; use a fast tokenizer, "
                "which has a tokenizer.json."
            )

    @property
    def context(self) -> int | None:
        """The largest number of tokens in one input, by the configuration; None if not known."""
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        if isinstance(length, int) and length > 0:
            return length
        return None


def load_language_model(source: str) -> LanguageModel:
    """Load a causal language model in evaluation mode and float32, on the CPU.

    Code that comes with the model is not run.

    Args:
        source: `hf:FOLDER` for a folder on disk, or `hf:NAME` for a name on the hub; the weights
            must be in safetensors.
    """
    if not source.startswith(PREFIX):
        raise QualmsError(
            f"{source} does not name a language model; pass {PREFIX}FOLDER or {PREFIX}NAME."
        )
    name = source.removeprefix(PREFIX)
    transformers = import_transformers(name)

    def explain(error: Exception) -> QualmsError:
        """Create the error that names the source, with the reason and advice."""
        return QualmsError(f"{source} could not be loaded: {reason(error)}; {ADVICE}.")

    with explain_failure(explain):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        _require_architecture(source, config)
        model = load_own_weights(
            transformers,
            transformers.AutoModelForCausalLM,
            name,
            config,
            advice="download all of them",
            use_safetensors=True,
            # Experts one by one: torch has no forward-mode derivative of their fused product.
            experts_implementation="eager",
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        loaded = LanguageModel(source, model.eval(), tokenizer)
        _require_causal(loaded)
        # Raises here, instead of at the first text, if the tokenizer is damaged.
        tokenizer("a", return_offsets_mapping=True)
    return loaded


def _require_architecture(source: str, config: Any) -> None:
    """Raise unless a configuration is that of a causal language model.

    Other models would load too, but with a random last layer, or as the wrong architecture.

    Args:
        source: what the error calls the model.
        config: the configuration of the model.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = config.architectures or []
    causal_architectures = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    is_causal = any(architecture in causal_architectures for architecture in architectures)
    if config.is_encoder_decoder or not is_causal:
        raise _not_causal_error(source, f"its architecture: {', '.join(architectures) or 'none'}")


@torch.no_grad()
def _require_causal(loaded: LanguageModel) -> None:
    """Raise if the model's prediction at a token depends on later tokens.

    This is tested with a forward pass, since some architectures are causal only if their
    configuration says so, in a field that is not the same for all of them.
    """
    # Two texts that differ only in the third token: the logits at the first two tokens must agree.
    token_ids = torch.tensor([[0, 1, 0], [0, 1, 1]])
    first_logits, second_logits = loaded.model(input_ids=token_ids).logits[:, :2]
    if not torch.allclose(first_logits, second_logits, rtol=1e-3, atol=1e-4):
        raise _not_causal_error(loaded.name, "its prediction for a token depends on later tokens")


def _not_causal_error(source: str, why: str) -> QualmsError:
    """Create the error that a model is not a causal language model, with the reason."""
    return QualmsError(
        f"{source} is not a causal language model ({why}); use qualms.Scorer with class_dim=-1."
    )
