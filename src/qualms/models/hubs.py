"""Networks of timm and of Hugging Face, with their published weights or with a checkpoint's."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qualms.data.normalisation import Normalisation
from qualms.errors import QualmsError
from qualms.models.checkpoint import fit_state, read_state

KINDS = ("ForImageClassification", "ForSequenceClassification")


def from_timm(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """A network of timm's; its published weights are fetched unless `weights` are given."""
    try:
        import timm
    except Exception as error:  # beside another build of torch, torchvision raises more than ImportError
        raise QualmsError(
            f"timm:{name} needs timm, which does not import here ({_reason(error)}); pip install timm torchvision."
        ) from error
    if ":" not in name and not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has the names."
        raise QualmsError(f"timm has no network {name!r}; {hint}")
    chosen = {} if classes is None else {"num_classes": classes}
    try:
        model: nn.Module = timm.create_model(name, pretrained=weights is None, **chosen)
    except Exception as error:
        raise QualmsError(
            f"timm:{name} could not be made{_with_weights(weights)}: {_reason(error)}{_advice(weights)}."
        ) from error
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=f"timm:{name}")
    return model


def from_hugging_face(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """A classifier of images or texts, from a folder or the hub, in float32; no code from the hub is run."""
    try:
        import transformers
    except ImportError as error:
        raise QualmsError(f"hf:{name} needs the package transformers; pip install transformers.") from error
    chosen = {} if classes is None else {"num_labels": classes}
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **chosen)
        kind = _kind(name, config)
        auto = getattr(transformers, f"AutoModel{kind}")
        if weights is not None:
            model: nn.Module = auto.from_config(config, trust_remote_code=False)
        else:
            # Stored in half precision, scores would be too.
            model, found = auto.from_pretrained(
                name, config=config, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
            _check_all_loaded(name, found)
    except QualmsError:
        raise
    except Exception as error:
        raise QualmsError(
            f"hf:{name} could not be made{_with_weights(weights)}: {_reason(error)}{_advice(weights)}."
        ) from error
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=f"hf:{name}")
    return model


def _kind(name: str, config: Any) -> str:
    architectures = config.architectures or []
    for kind in KINDS:
        if any(a.endswith(kind) for a in architectures):
            return kind
    said = ", ".join(architectures) or "none"
    raise QualmsError(f"hf:{name} is no classifier of images or texts (its architecture: {said}); name one.")


def _check_all_loaded(name: str, found: dict[str, Any]) -> None:
    """transformers fills what the weights lack with random numbers, and only logs it."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise QualmsError(
            f"the weights of hf:{name} lack {len(missing)} tensors (first '{missing[0]}'), which would be random; "
            "pass weights=, a checkpoint that has them."
        )


def timm_normalisation(model: nn.Module) -> Normalisation | None:
    """What timm says its weights were trained with."""
    settings = getattr(model, "pretrained_cfg", None) or {}
    mean, std = settings.get("mean"), settings.get("std")
    return Normalisation(tuple(mean), tuple(std)) if mean and std else None


def hugging_face_normalisation(name: str) -> Normalisation | None:
    """What the image processor saved in a local folder does to pixels in [0, 1]."""
    path = Path(name) / "preprocessor_config.json"
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text())
        mean, std = settings.get("image_mean"), settings.get("image_std")
        if not (mean and std and settings.get("do_normalize", True) and settings.get("do_rescale", True)):
            return None
        return Normalisation(tuple(map(float, mean)), tuple(map(float, std)))
    except (AttributeError, TypeError, ValueError) as error:
        raise QualmsError(f"{path} is damaged ({_reason(error)}); save the image processor anew.") from error


def _with_weights(weights: str | Path | None) -> str:
    return " with its published weights" if weights is None else ""


def _advice(weights: str | Path | None) -> str:
    return "; without a network, pass weights=, a checkpoint on disk" if weights is None else ""


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0].rstrip(".")
