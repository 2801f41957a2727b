"""Language models of Hugging Face, with their tokenizers."""

from dataclasses import dataclass
from typing import Any

import torch

from qualms.errors import QualmsError, explain_failure, reason
from qualms.models.hubs import load_own_weights, transformers_for

PREFIX = "hf:"
ADVICE = (
    "download config.json, model.safetensors and tokenizer.json to a folder, and pass that folder"
)


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model that predicts every next token, and the tokenizer that cuts texts for it.

    Args:
        name: what errors call the model.
        model: a causal language model of transformers, on one device.
        tokenizer: a fast tokenizer, which reports the character offsets of its tokens.
    """

    name: str
    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        """Raise an error if the model is on several devices, or if the tokenizer is not fast."""
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
        """How many tokens the model can read at once, by its configuration; None if not known."""
        config = self.model.config.get_text_config()
        length = getattr(config, "max_position_embeddings", None)
        if isinstance(length, int) and length > 0:
            return length
        return None


def load_language_model(source: str) -> LanguageModel:
    """Load a causal language model in evaluation mode and float32, on the CPU.

    No code that comes with the model is run.

    Args:
        source: `hf:FOLDER` or `hf:NAME`, a folder on disk or a name on the hub, with weights in
            safetensors.
    """
    if not source.startswith(PREFIX):
        raise QualmsError(
            f"{source} does not name a language model; pass {PREFIX}FOLDER or {PREFIX}NAME."
        )
    name = source.removeprefix(PREFIX)
    transformers = transformers_for(name)

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
            "download all of them",
            use_safetensors=True,
            # torch has no forward-mode derivative of the fused products of experts
            experts_implementation="eager",
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        loaded = LanguageModel(source, model.eval(), tokenizer)
        _require_causal(loaded)
        # Raises if the tokenizer cannot cut a text.
        tokenizer("a", return_offsets_mapping=True)
    return loaded


def _require_architecture(source: str, config: Any) -> None:
    """Raise unless a configuration is a causal language model's.

    Other models would load too, but with a random last layer, or as an architecture that they are
    not.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = config.architectures or []
    is_causal = not set(architectures).isdisjoint(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if config.is_encoder_decoder or not is_causal:
        raise _not_causal(source, f"its architecture: {', '.join(architectures) or 'none'}")


@torch.no_grad()
def _require_causal(loaded: LanguageModel) -> None:
    """Raise if what a model predicts depends on later tokens.

    Some architectures are causal only by their configuration, and no field is common to all
    of them.
    """
    # Two texts that differ in the third token only: the logits at the first two must agree.
    ids = torch.tensor([[0, 1, 0], [0, 1, 1]])
    first, second = loaded.model(input_ids=ids).logits[:, :2]
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise _not_causal(loaded.name, "its prediction for a token depends on later tokens")


def _not_causal(source: str, why: str) -> QualmsError:
    """Create the error that a model does not predict next tokens."""
    return QualmsError(
        f"{source} is not a causal language model ({why}); use qualms.Scorer with class_dim=-1."
    )
