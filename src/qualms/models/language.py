"""Language models of Hugging Face, with their tokenizers."""

from dataclasses import dataclass
from typing import Any

import torch

from qualms.errors import QualmsError, reason
from qualms.models.hubs import check_all_loaded, require_held, transformers_for, without_bars

PREFIX = "hf:"
GET = (
    "get its files, config.json, model.safetensors and tokenizer.json, into a folder, and name that"
)


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model that says of every token what comes next, and the tokenizer that cuts texts for it.

    Args:
        name: what errors call it.
        model: a causal language model of transformers, on one device.
        tokenizer: a fast one, which says where in the text its tokens stand.
    """

    name: str
    model: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        places = sorted(
            {str(place) for place in (getattr(self.model, "hf_device_map", None) or {}).values()}
        )
        if len(places) > 1:
            raise QualmsError(
                f"{self.name} is spread over the devices {', '.join(places)}; load it onto one, without device_map."
            )
        if not getattr(self.tokenizer, "is_fast", False):
            raise QualmsError(
                f"the tokenizer of {self.name} ({type(self.tokenizer).__name__}) does not say where in a text its "
                "tokens stand; use a fast one, which has a tokenizer.json."
            )

    @property
    def context(self) -> int | None:
        """How many tokens the model can read at once; None if it does not say."""
        said = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return said if isinstance(said, int) and said > 0 else None


def load_language_model(source: str) -> LanguageModel:
    """A causal language model in evaluation mode and float32, on the CPU; no code that comes with
    it is run.

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
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        _require_architecture(source, config)
        # In float32 whatever it was stored in: in half precision, scores would be noise.
        with without_bars(transformers):
            require_held(name, transformers.AutoModelForCausalLM, config)
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                name,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
                # torch pushes no tangents through the fused products of experts
                experts_implementation="eager",
                output_loading_info=True,
            )
        check_all_loaded(name, found, "get them whole")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        loaded = LanguageModel(source, model.eval(), tokenizer)
        _require_causal(loaded)
        tokenizer("a", return_offsets_mapping=True)  # one that cannot cut a text says so here
    except QualmsError:
        raise
    except Exception as error:
        raise QualmsError(f"{source} could not be loaded: {reason(error)}; {GET}.") from error
    return loaded


def _require_architecture(source: str, config: Any) -> None:
    """Others would load too, with a last layer of random numbers, or as what they are not."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architectures = config.architectures or []
    if config.is_encoder_decoder or not set(architectures) & set(
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    ):
        raise _no_causal(source, f"its architecture: {', '.join(architectures) or 'none'}")


@torch.no_grad()
def _require_causal(loaded: LanguageModel) -> None:
    """Some architectures are causal only if their configuration says so, and no field says it for
    all of them.
    """
    ids = torch.tensor([[0, 1, 0], [0, 1, 1]])
    before, after = loaded.model(input_ids=ids).logits[:, :2]
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-4):
        raise _no_causal(loaded.name, "what it says of a token depends on those that follow")


def _no_causal(source: str, why: str) -> QualmsError:
    return QualmsError(
        f"{source} is no causal language model ({why}); use qualms.Scorer with class_dim=-1 for it."
    )
