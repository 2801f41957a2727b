"""Networks of timm and of Hugging Face, with their published weights or with a checkpoint's."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qualms.errors import QualmsError, reason
from qualms.models.checkpoint import fit_state, read_state

LEAST_OF_A_LAYER = 32  # bytes in a file: the name of one tensor, and where it is
NUMBERS_IN_A_BYTE = 8  # in the most compressed of weights
KINDS = ("ForImageClassification", "ForSequenceClassification")


def from_timm(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """A network of timm's; its published weights are fetched unless `weights` are given."""
    try:
        import timm
    except (
        Exception
    ) as error:  # beside another build of torch, torchvision raises more than ImportError
        raise QualmsError(
            f"timm:{name} needs timm, which does not import here ({reason(error)}); pip install timm torchvision."
        ) from error
    if ":" not in name and not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "timm.list_models() has the names."
        raise QualmsError(f"timm has no network {name!r}; {hint}")
    chosen = {} if classes is None else {"num_classes": classes}
    try:
        published = timm.get_pretrained_cfg(name)
        if weights is None and published is not None:
            check_classes(f"timm:{name}", classes, published.num_classes)
        model: nn.Module = timm.create_model(name, pretrained=weights is None, **chosen)
    except QualmsError:
        raise
    except Exception as error:
        raise _not_made(f"timm:{name}", weights, error) from error
    if model.num_classes == 0:
        raise QualmsError(
            f"timm:{name} gives features, not classes; pass classes= and weights= that were trained for them."
        )
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=f"timm:{name}")
    return model


@contextmanager
def without_bars(transformers: Any) -> Iterator[None]:
    """Without the bars of transformers, which would stand among the lines of whoever loads a
    network.

    Also without torch's warning of layers of no size; a network that has one does not fit its
    weights.
    """
    shown = transformers.utils.logging
    before = shown.is_progress_bar_enabled()
    shown.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            yield
    finally:
        if before:
            shown.enable_progress_bar()


def from_hugging_face(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """A classifier of images or texts, from a folder or the hub, in float32; no code from the hub
    is run.
    """
    transformers = transformers_for(name)
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        auto = getattr(transformers, f"AutoModel{_kind(name, config)}")
        if weights is None:
            check_classes(f"hf:{name}", classes, config.num_labels)
            # In float32 whatever it was stored in: in half precision, scores would be noise.
            with without_bars(transformers):
                require_held(name, auto, config)
                model, found = auto.from_pretrained(
                    name,
                    config=config,
                    dtype=torch.float32,
                    trust_remote_code=False,
                    output_loading_info=True,
                )
            check_all_loaded(name, found, "pass weights=, a checkpoint that has them")
        else:
            config.num_labels = config.num_labels if classes is None else classes
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except QualmsError:
        raise
    except Exception as error:
        raise _not_made(f"hf:{name}", weights, error) from error
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=f"hf:{name}")
    return model


def require_held(name: str, auto: Any, config: Any) -> None:
    """An error if a folder's configuration claims far more weights than its files hold: room would
    be made for all.
    """
    if not Path(name).is_dir():
        return
    held = sum(file.stat().st_size for file in Path(name).rglob("*") if file.is_file())
    deepest = max(
        (n for key, n in config.to_dict().items() if "layers" in key and type(n) is int), default=0
    )
    if deepest * LEAST_OF_A_LAYER <= held:
        with torch.device("meta"):  # shapes without numbers
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if sum(p.numel() for p in model.parameters()) <= held * NUMBERS_IN_A_BYTE:
            return
    raise QualmsError(
        f"the configuration of hf:{name} claims more weights than its files hold; get both anew."
    )


def transformers_for(name: str) -> Any:
    """The package, which reads what `name` stands for; an error if either is not there."""
    try:
        import transformers
    except ImportError as error:
        raise QualmsError(
            f"hf:{name} needs the package transformers; pip install transformers."
        ) from error
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise QualmsError(f"there is no folder {name} for hf:; check the path.")
    return transformers


def _kind(name: str, config: Any) -> str:
    architectures = config.architectures or []
    for kind in KINDS:
        if any(a.endswith(kind) for a in architectures):
            return kind
    said = ", ".join(architectures) or "none"
    raise QualmsError(
        f"hf:{name} is no classifier of images or texts (its architecture: {said}); name one."
    )


def check_classes(source: str, asked: int | None, published: int) -> None:
    """An error if published weights are asked for another number of classes than they have."""
    if asked not in (None, published):
        raise QualmsError(
            f"the published weights of {source} know {published} classes, so a last layer for {asked} would be random; "
            "leave out classes=, or pass weights=, a checkpoint that was trained for them."
        )


def _not_made(source: str, weights: str | Path | None, error: Exception) -> QualmsError:
    if weights is not None:
        return QualmsError(f"{source} could not be made: {reason(error)}; check the name.")
    return QualmsError(
        f"{source} could not be made with its published weights: {reason(error)}; "
        "if they cannot be fetched from here, pass weights=, a checkpoint on disk."
    )


def check_all_loaded(name: str, found: dict[str, Any], advice: str) -> None:
    """transformers fills what the weights lack with random numbers, and only logs it."""
    missing = sorted(found["missing_keys"])
    if missing:
        raise QualmsError(
            f"the weights of hf:{name} lack {len(missing)} tensors (first '{missing[0]}'), which would be random; "
            f"{advice}."
        )
