"""Networks of timm and of Hugging Face, with their published weights or with a checkpoint's."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qualms.errors import QualmsError, explain_failure, reason
from qualms.models.checkpoint import fit_state, read_state

# The least that a layer takes in a file: a tensor's name and position.
MIN_LAYER_BYTES = 32
MAX_NUMBERS_PER_BYTE = 8  # in a file of the most compressed weights
KINDS = ("ForImageClassification", "ForSequenceClassification")


def from_timm(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """Create a network of timm, with its published weights or with a checkpoint.

    Args:
        name: the name that `timm.create_model` takes.
        weights: the path of a checkpoint; None downloads the published weights.
        classes: the number of classes; None for that of the published network.
    """
    source = f"timm:{name}"
    timm = _import_timm(source)
    # timm also takes names with a colon, such as hf-hub:USER/NAME, which it does not list.
    if ":" not in name and not timm.is_model(name):
        near = get_close_matches(name, timm.list_models(), 3)
        hint = "timm.list_models() lists the names."
        if near:
            hint = f"did you mean {' or '.join(near)}?"
        raise QualmsError(f"timm has no network {name!r}; {hint}")
    options = {} if classes is None else {"num_classes": classes}
    with explain_failure(_explain_not_made(source, weights)):
        published = timm.get_pretrained_cfg(name)
        if weights is None and published is not None:
            check_classes(source, classes, published.num_classes)
        model: nn.Module = timm.create_model(name, pretrained=weights is None, **options)
    if model.num_classes == 0:
        raise QualmsError(
            f"{source} outputs features, not logits; pass classes=, and weights= that were "
            "trained for these classes."
        )
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=source)
    return model


def _import_timm(source: str) -> Any:
    """Import timm, or raise an error that explains how to install it."""

    def explain(error: Exception) -> QualmsError:
        """Create the error that timm cannot be imported, with the reason and how to install it."""
        return QualmsError(
            f"{source} needs timm, which cannot be imported ({reason(error)}); "
            "run pip install timm torchvision."
        )

    # Beside another build of torch, torchvision raises more than ImportError.
    with explain_failure(explain):
        import timm

        return timm


@contextmanager
def hide_progress_bars(transformers: Any) -> Iterator[None]:
    """Inside, transformers shows no progress bars, which would mix with the caller's output.

    Nor does torch warn of layers of size zero: a network that has one does not fit its weights, so
    an error follows.

    Args:
        transformers: the package.
    """
    logging = transformers.utils.logging
    were_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            yield
    finally:
        if were_enabled:
            logging.enable_progress_bar()


def from_hugging_face(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """Create a classifier of images or texts of Hugging Face in float32.

    No code that comes with the network is run.

    Args:
        name: a folder, or a name on the hub.
        weights: the path of a checkpoint; None reads the network's own weights.
        classes: the number of classes; None for that of the network's configuration.
    """
    source = f"hf:{name}"
    transformers = transformers_for(name)
    with explain_failure(_explain_not_made(source, weights)):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        auto = getattr(transformers, f"AutoModel{_kind(source, config)}")
        if weights is None:
            check_classes(source, classes, config.num_labels)
            model = load_own_weights(transformers, auto, name, config)
        else:
            if classes is not None:
                config.num_labels = classes
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=source)
    return model


def load_own_weights(
    transformers: Any,
    auto: Any,
    name: str,
    config: Any,
    advice: str = "pass weights=, a checkpoint that contains them",
    **options: Any,
) -> Any:
    """Load a model of transformers, and check that its files have all of its weights.

    Args:
        transformers: the package.
        auto: the class whose `from_pretrained` loads the model.
        name: a folder, or a name on the hub.
        config: the configuration of the model.
        advice: what to do about weights that lack tensors, the end of the error.
        options: further arguments of `from_pretrained`.

    Returns:
        The model in float32.
    """
    with hide_progress_bars(transformers):
        _require_plausible_size(name, auto, config)
        model, report = auto.from_pretrained(
            name,
            config=config,
            # Whatever it was stored in: in half precision, scores would be noise.
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    # transformers fills what the weights lack with random numbers, and only logs it.
    missing = sorted(report["missing_keys"])
    if missing:
        raise QualmsError(
            f"the weights of hf:{name} lack {len(missing)} tensors (first '{missing[0]}'), which "
            f"would be initialized randomly; {advice}."
        )
    return model


def _require_plausible_size(name: str, auto: Any, config: Any) -> None:
    """Raise if a folder's configuration claims far more weights than its files hold.

    Memory would be allocated for all weights that it claims. A name on the hub is not checked.

    Args:
        name: a folder, or a name on the hub.
        auto: the class whose `from_config` creates the model.
        config: the configuration of the model.
    """
    if not Path(name).is_dir():
        return
    held = sum(file.stat().st_size for file in Path(name).rglob("*") if file.is_file())
    layers = [0]
    for key, value in config.to_dict().items():
        if "layers" in key and type(value) is int:
            layers.append(value)
    # Even without numbers, creating a model takes time and memory for each layer.
    if max(layers) * MIN_LAYER_BYTES <= held:
        with torch.device("meta"):  # shapes without numbers
            model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
        if sum(p.numel() for p in model.parameters()) <= held * MAX_NUMBERS_PER_BYTE:
            return
    raise QualmsError(
        f"the configuration of hf:{name} claims more weights than its files contain; download "
        "both again."
    )


def transformers_for(name: str) -> Any:
    """Import the package transformers to read a network, or raise an error if that cannot work.

    Args:
        name: a folder, which must exist, or a name on the hub.
    """
    try:
        import transformers
    except ImportError as error:
        raise QualmsError(
            f"hf:{name} needs the package transformers; run pip install transformers."
        ) from error
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise QualmsError(f"hf:{name} names a folder that does not exist; check the path.")
    return transformers


def _kind(source: str, config: Any) -> str:
    """Return the one of `KINDS` in which the name of a network's architecture ends.

    It completes the name of the class that loads the network: AutoModel + kind.

    Args:
        source: what the error calls the network.
        config: the configuration of the network.
    """
    architectures = config.architectures or []
    for kind in KINDS:
        if any(name.endswith(kind) for name in architectures):
            return kind
    names = ", ".join(architectures) or "none"
    raise QualmsError(
        f"{source} is not an image or text classifier (its architecture: {names}); name one."
    )


def check_classes(source: str, classes: int | None, published: int) -> None:
    """Raise if published weights are wanted for another number of classes than they have.

    Args:
        source: what the error calls the network.
        classes: the requested number; None for the network's own.
        published: the number that the weights have.
    """
    if classes not in (None, published):
        raise QualmsError(
            f"the published weights of {source} have {published} classes, so a last layer for "
            f"{classes} would be initialized randomly; leave out classes=, or pass weights=, a "
            f"checkpoint that was trained for {classes} classes."
        )


def _explain_not_made(
    source: str, weights: str | Path | None
) -> Callable[[Exception], QualmsError]:
    """Create a function that turns an exception of timm or transformers into an error with advice.

    Args:
        source: what the error calls the network.
        weights: the path of a checkpoint; without one, the error advises to pass one.
    """

    def explain(error: Exception) -> QualmsError:
        """Create the error that the network could not be created, with the reason and advice."""
        if weights is not None:
            return QualmsError(f"{source} could not be created: {reason(error)}; check the name.")
        return QualmsError(
            f"{source} could not be created with its published weights: {reason(error)}; "
            "if they cannot be downloaded here, pass weights=, a checkpoint file."
        )

    return explain
