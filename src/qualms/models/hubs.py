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

# The fewest bytes that a layer takes in a file, for the name and the position of a tensor.
MIN_LAYER_BYTES = 32
# A byte of weights of one bit contains eight of them.
MAX_NUMBERS_PER_BYTE = 8
CLASSIFIER_ENDINGS = ("ForImageClassification", "ForSequenceClassification")


def from_timm(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """Create a network of timm, with its published weights or with those of a checkpoint.

    Args:
        name: the name that `timm.create_model` takes.
        weights: the path of a checkpoint; None downloads the published weights.
        classes: the number of classes; None for the number of the published network.
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
    with explain_failure(_explain_creation_failure(source, weights)):
        published_config = timm.get_pretrained_cfg(name)
        if weights is None and published_config is not None:
            require_classes(source, classes, published_config.num_classes)
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

    # timm imports torchvision, which raises more than ImportError if built for another torch.
    with explain_failure(explain):
        import timm

        return timm


@contextmanager
def hide_progress_bars(transformers: Any) -> Iterator[None]:
    """Hide the progress bars of transformers inside a `with` block, to keep the output readable.

    torch's warning about layers of size zero is hidden too: a network with such a layer does not
    fit its weights, which raises an error anyway.

    Args:
        transformers: the imported package.
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
    """Create a classifier of images or texts from Hugging Face, in float32.

    Code that comes with the network is not run.

    Args:
        name: a folder, or a name on the hub.
        weights: the path of a checkpoint; None loads the network's own weights.
        classes: the number of classes; None for the number in the network's configuration.
    """
    source = f"hf:{name}"
    transformers = import_transformers(name)
    with explain_failure(_explain_creation_failure(source, weights)):
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        ending = _find_classifier_ending(source, config)
        auto_class = getattr(transformers, f"AutoModel{ending}")
        if weights is None:
            require_classes(source, classes, config.num_labels)
            model = load_own_weights(transformers, auto_class, name, config)
        else:
            if classes is not None:
                config.num_labels = classes
            model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=source)
    return model


def load_own_weights(
    transformers: Any,
    auto_class: Any,
    name: str,
    config: Any,
    advice: str = "pass weights=, a checkpoint that contains them",
    **options: Any,
) -> Any:
    """Load a model of transformers, and check that its files contain all of its weights.

    Args:
        transformers: the imported package.
        auto_class: the class whose `from_pretrained` loads the model, such as AutoModelForCausalLM.
        name: a folder, or a name on the hub.
        config: the configuration of the model.
        advice: what to do if the files lack weights; the end of the error.
        options: further keyword arguments of `from_pretrained`.

    Returns:
        The model in float32.
    """
    with hide_progress_bars(transformers):
        _require_plausible_size(name, auto_class, config)
        model, report = auto_class.from_pretrained(
            name,
            config=config,
            # Even if the weights are stored in half precision, in which scores would be noise.
            dtype=torch.float32,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
    # transformers initializes missing tensors randomly, and reports that only in its log.
    missing = sorted(report["missing_keys"])
    if missing:
        raise QualmsError(
            f"the weights of hf:{name} lack {len(missing)} tensors (first '{missing[0]}'), which "
            f"would be initialized randomly; {advice}."
        )
    return model


def _require_plausible_size(name: str, auto_class: Any, config: Any) -> None:
    """Raise if a folder's configuration claims more weights than its files can contain.

    Memory would be allocated for all weights that the configuration claims. A name on the hub is
    not checked.

    Args:
        name: a folder, or a name on the hub.
        auto_class: the class whose `from_config` creates the model.
        config: the configuration of the model.
    """
    if not Path(name).is_dir():
        return
    folder_bytes = sum(file.stat().st_size for file in Path(name).rglob("*") if file.is_file())
    layer_counts = [0]
    for key, value in config.to_dict().items():
        if "layers" in key and type(value) is int:
            layer_counts.append(value)
    # Check the number of layers first: creating a model takes time and memory for each layer, even
    # without weights.
    if max(layer_counts) * MIN_LAYER_BYTES <= folder_bytes:
        # The device "meta" allocates no memory for the weights.
        with torch.device("meta"):
            model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=False)
        n_weights = sum(parameter.numel() for parameter in model.parameters())
        if n_weights <= folder_bytes * MAX_NUMBERS_PER_BYTE:
            return
    raise QualmsError(
        f"the configuration of hf:{name} claims more weights than its files contain; download "
        "both again."
    )


def import_transformers(name: str) -> Any:
    """Import the package transformers, and check that a network's folder exists.

    Args:
        name: the network that will be loaded: a folder, or a name on the hub.

    Raises:
        QualmsError: if the package is not installed, or if the folder does not exist.
    """
    try:
        import transformers
    except ImportError as error:
        raise QualmsError(
            f"hf:{name} needs the package transformers; run pip install transformers."
        ) from error
    # transformers would take a folder that does not exist for a name on the hub.
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise QualmsError(f"hf:{name} names a folder that does not exist; check the path.")
    return transformers


def _find_classifier_ending(source: str, config: Any) -> str:
    """Find how the name of a classifier's architecture ends, such as "ForImageClassification".

    With "AutoModel" before it, the ending is the name of the class that loads the network.

    Args:
        source: what the error calls the network.
        config: the configuration of the network.
    """
    architectures = config.architectures or []
    for ending in CLASSIFIER_ENDINGS:
        if any(name.endswith(ending) for name in architectures):
            return ending
    names = ", ".join(architectures) or "none"
    raise QualmsError(
        f"{source} is not an image or text classifier (its architecture: {names}); name one."
    )


def require_classes(source: str, classes: int | None, published: int) -> None:
    """Raise if the requested number of classes is not that of the published weights.

    Args:
        source: what the error calls the network.
        classes: the requested number of classes; None if none was requested.
        published: the number of classes of the published weights.
    """
    if classes not in (None, published):
        raise QualmsError(
            f"the published weights of {source} have {published} classes, so a last layer for "
            f"{classes} would be initialized randomly; leave out classes=, or pass weights=, a "
            f"checkpoint that was trained for {classes} classes."
        )


def _explain_creation_failure(
    source: str, weights: str | Path | None
) -> Callable[[Exception], QualmsError]:
    """Return a function that converts an exception of timm or transformers to an error with advice.

    Args:
        source: what the error calls the network.
        weights: the path of a checkpoint; if None, the error advises to pass one.
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
