"""Find the preprocessing and the class names of a network from its source."""

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qualms.data import ImageTransform, Normalization
from qualms.data.image_transform import Interpolation
from qualms.deprecated import RenamedAttribute, renamed_arguments
from qualms.errors import QualmsError, reason
from qualms.models.imagenet import imagenet_classes
from qualms.models.zoo import ZOO

# Interpolations by Pillow's numbers, which image processors of Hugging Face use.
RESAMPLES: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Starts of the names of Hugging Face's image processors for which a `size` of one number is the
# shorter side. For the others it is height and width.
BY_SHORTER_SIDE = (
    "CLIP",
    "ConvNext",
    "Bit",
    "Levit",
    "LeViT",
    "MobileNet",
    "MobileViT",
    "PoolFormer",
)
# The exceptions that reading a damaged file of settings can raise.
DAMAGE = (
    AttributeError,
    KeyError,
    TypeError,
    ValueError,
    ArithmeticError,
    RecursionError,
    OSError,
)


@renamed_arguments(fit="transform", normalisation="normalization")
@dataclass(frozen=True)
class Preprocessing:
    """How images become a network's inputs, and what its classes are called.

    Args:
        normalization: the normalization of pixels from 0 to 1; None if not known.
        transform: how images are resized and cropped to the network's input size; None if not
            known.
        class_names: the names of the classes; empty if not known.

    Example:
        ```python
        from torch import nn
        from qualms.models import Preprocessing, preprocessing_of

        assert preprocessing_of("my.module:network", nn.Linear(4, 3)) == Preprocessing()
        ```
    """

    normalization: Normalization | None = None
    transform: ImageTransform | None = None
    class_names: tuple[str, ...] = ()

    fit = RenamedAttribute("transform")
    normalisation = RenamedAttribute("normalization")


def preprocessing_of(source: str | Path, model: nn.Module) -> Preprocessing:
    """Find the preprocessing and the class names that belong to a network.

    The zoo has them for its networks and for published weights; timm in `pretrained_cfg`; Hugging
    Face in `preprocessor_config.json` and `config.json`; a `.pt2` file has the shape of the input
    it was exported with. Nothing is known of the network behind an import path, except that those
    of torchvision with 1000 classes have ImageNet's.

    Args:
        source: the source that was passed to `load_model`.
        model: the network that `load_model` returned.

    Example:
        ```python
        from qualms.models import load_model, preprocessing_of

        found = preprocessing_of("cifar10-resnet20", load_model("cifar10-resnet20"))
        assert found.transform.size == (32, 32)
        assert found.class_names[0] == "airplane"
        print(found.normalization)
        ```
    """
    name = str(source)
    if name in ZOO:
        return _of_zoo(name, model)
    if name.startswith("timm:"):
        settings = getattr(model, "pretrained_cfg", None) or {}
        return _of_timm(settings, getattr(model, "num_classes", 0))
    if name.startswith("hf:"):
        return _of_hugging_face(name.removeprefix("hf:"), getattr(model, "config", None))
    if name.endswith(".pt2"):
        return Preprocessing(transform=_export_transform(model))
    if name.startswith("torchvision.models") and _count_outputs(model) == len(imagenet_classes()):
        return Preprocessing(class_names=imagenet_classes())
    return Preprocessing()


def normalization_of(source: str | Path, model: nn.Module) -> Normalization | None:
    """Find the normalization that a network's weights expect of pixels from 0 to 1.

    Args:
        source: the source that was passed to `load_model`.
        model: the network that `load_model` returned.

    Returns:
        The normalization; None if it is not known.

    Example:
        ```python
        from qualms.models import load_model, normalization_of

        model = load_model("cifar10-resnet20")
        print(normalization_of("cifar10-resnet20", model))
        ```
    """
    return preprocessing_of(source, model).normalization


def _of_zoo(name: str, model: nn.Module) -> Preprocessing:
    """Return the preprocessing of a network of the zoo."""
    entry = ZOO[name]
    transform = ImageTransform(
        (entry.size, entry.size),
        entry.resize,
        entry.interpolation,
        entry.channels,
        by=f"as {name} expects",
    )
    names = entry.class_names if _count_outputs(model) == len(entry.class_names) else ()
    return Preprocessing(entry.normalization, transform, names)


def _count_outputs(model: nn.Module) -> int:
    """Count the outputs of the last linear layer or convolution; 0 if there is none.

    In most networks, these are the classes.
    """
    last = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            last = module.out_features
        elif isinstance(module, nn.Conv2d):
            last = module.out_channels
    return last


def _of_timm(settings: Any, classes: int) -> Preprocessing:
    """Read the preprocessing from timm's settings of a network.

    Args:
        settings: a network's `pretrained_cfg`.
        classes: the number of classes of the network.
    """
    mean, std = settings.get("mean"), settings.get("std")
    normalization = Normalization(tuple(mean), tuple(std)) if mean and std else None
    return Preprocessing(normalization, _timm_transform(settings), _timm_names(settings, classes))


def _timm_transform(settings: Any) -> ImageTransform | None:
    """Read how images are resized from timm's settings; None if that is not known.

    The size before the crop is the network's input size divided by `crop_pct`.
    """
    shape = settings.get("input_size")
    mode = settings.get("crop_mode") or "center"
    interpolation = _known_interpolation(settings.get("interpolation") or "bicubic")
    if not shape or mode not in ("center", "squash") or interpolation is None:
        return None
    channels, height, width = shape
    share = settings.get("crop_pct") or 0.875
    before = (math.floor(height / share), math.floor(width / share))
    resize = before if mode == "squash" else min(before)
    return ImageTransform((height, width), resize, interpolation, _known_channels(channels))


def _known_interpolation(name: Any) -> Interpolation | None:
    """Return the name if it is an interpolation of `ImageTransform`; None if it is not."""
    for known in RESAMPLES.values():
        if known == name:
            return known
    return None


def _timm_names(settings: Any, classes: int) -> tuple[str, ...]:
    """Find the class names of a network of timm.

    They are those in its settings; else those of ImageNet or one of its larger versions, if the tag
    of the weights names one; else none.
    """
    names = tuple(map(str, settings.get("label_names") or ()))
    if len(names) == classes:
        return names
    is_imagenet = re.search(r"in(1k|12k|21k|22k)", str(settings.get("tag") or "")) is not None
    if not is_imagenet or settings.get("num_classes") != classes:
        return ()
    if classes == len(imagenet_classes()):
        return imagenet_classes()
    try:
        from timm.data import ImageNetInfo, infer_imagenet_subset
    except ImportError:  # an older timm
        return ()
    subset = infer_imagenet_subset(settings)
    if subset is None:
        return ()
    synonyms = ImageNetInfo(subset).label_descriptions()
    return tuple(str(words).split(",")[0] for words in synonyms)


def _of_hugging_face(name: str, config: Any) -> Preprocessing:
    """Read the preprocessing from the settings of Hugging Face.

    Args:
        name: a folder, or a name on the hub.
        config: the configuration of the network.
    """
    path = _find_processor_settings(name)
    normalization, transform = None, None
    if path is not None:
        try:
            settings = json.loads(path.read_text())
            normalization = _processor_normalization(settings)
            transform = _processor_transform(settings)
        except DAMAGE as error:
            raise QualmsError(
                f"{path} is damaged ({reason(error)}); save the image processor again."
            ) from error
    transform = transform or _config_transform(config)
    if transform is not None:
        channels = getattr(config, "num_channels", None)
        if normalization is not None:
            channels = len(normalization.mean)
        transform = replace(transform, channels=_known_channels(channels))
    return Preprocessing(normalization, transform, _config_names(config))


def _find_processor_settings(name: str) -> Path | None:
    """Find the file of the image processor's settings; None if there is none.

    Args:
        name: a folder, or a name on the hub, from which the file is downloaded.
    """
    file = "preprocessor_config.json"
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        from transformers.utils.hub import cached_file

        cached = cached_file(name, file)
    # A network without them, or out of reach.
    except (ImportError, OSError, ValueError):
        return None
    return None if cached is None else Path(cached)


def _processor_normalization(settings: dict[str, Any]) -> Normalization | None:
    """Read the normalization of an image processor; None if it does not normalize."""
    mean, std = settings.get("image_mean"), settings.get("image_std")
    is_used = settings.get("do_normalize", True) and settings.get("do_rescale", True)
    if not (mean and std and is_used):
        return None
    # EfficientNet's divides a second time.
    times = 2 if settings.get("include_top") else 1
    return Normalization(tuple(map(float, mean)), tuple(float(s) ** times for s in std))


def _processor_transform(settings: dict[str, Any]) -> ImageTransform | None:
    """Read how an image processor resizes; None if it does not, or in a way that is not known.

    Args:
        settings: the content of `preprocessor_config.json`.
    """
    size, interpolation = settings.get("size"), RESAMPLES.get(settings.get("resample", 2))
    if size is None or interpolation is None or not settings.get("do_resize", True):
        return None
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    if isinstance(size, int):
        is_shorter = kind.startswith(BY_SHORTER_SIDE)
        size = {"shortest_edge": size} if is_shorter else {"height": size, "width": size}
    crop = None
    if settings.get("do_center_crop", False):
        crop = settings.get("crop_size", 224)
    if "shortest_edge" in size:
        shorter = int(size["shortest_edge"])
        target, resize = _shorter_side(kind, shorter, crop, settings.get("crop_pct"))
        return ImageTransform(target, resize, interpolation)
    if "height" not in size or "width" not in size:
        return None
    before = (int(size["height"]), int(size["width"]))
    if crop is None:
        return ImageTransform(before, None, interpolation)
    return ImageTransform(_as_pair(crop), before, interpolation)


def _shorter_side(
    kind: str, shorter: int, crop: Any, share: Any
) -> tuple[tuple[int, int], int | None]:
    """Compute the sizes for an image processor whose `size` is the shorter side.

    Args:
        kind: the name of the processor's class; some classes compute sizes differently.
        shorter: the shorter side in the settings.
        crop: the size of the crop; None if there is none.
        share: `crop_pct` in the settings; None if it is not there.

    Returns:
        The height and width after the crop; and the shorter side before it, None for an image that
        is resized straight to them.
    """
    # Crops by `crop_pct` below 384 pixels, only resizes above.
    if kind.startswith("ConvNext"):
        resize = int(shorter / (share or 224 / 256)) if shorter < 384 else None
        return (shorter, shorter), resize
    if kind.startswith(("Levit", "LeViT")):
        shorter = int(256 / 224 * shorter)
    elif kind.startswith("PoolFormer"):
        shorter = int(shorter / (share or 0.9))
    return _as_pair(shorter if crop is None else crop), shorter


def _as_pair(size: Any) -> tuple[int, int]:
    """Convert a size in a processor's settings to height and width."""
    if isinstance(size, int):
        return size, size
    return int(size["height"]), int(size["width"])


def _config_transform(config: Any) -> ImageTransform | None:
    """Read the input size from a network's configuration; None if there is none."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return ImageTransform((size, size))
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return ImageTransform((int(size[0]), int(size[1])))
    return None


def _config_names(config: Any) -> tuple[str, ...]:
    """Read the class names from a network's configuration; empty if they are LABEL_0 and so on."""
    labels = getattr(config, "id2label", None) or {}
    names = []
    for i in range(len(labels)):
        if i not in labels:
            return ()
        names.append(str(labels[i]))
    if all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        return ()
    return tuple(names)


def _export_transform(model: nn.Module) -> ImageTransform | None:
    """Read the input size that a network was exported with; None if its height or width is open."""
    # Placeholders in it are the model's inputs.
    graph = getattr(model, "graph", None)
    shapes = []
    for node in graph.nodes if graph is not None else ():
        value = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(value, torch.Tensor):
            shapes.append(tuple(value.shape))
    if len(shapes) != 1 or len(shapes[0]) != 4:
        return None
    _, channels, height, width = shapes[0]
    if not all(isinstance(side, int) for side in (channels, height, width)):
        return None
    by = "as in the exported network"
    return ImageTransform((height, width), channels=_known_channels(channels), by=by)


def _known_channels(channels: Any) -> int | None:
    """Return a number of channels if it is 1 or 3, otherwise None."""
    return channels if channels in (1, 3) else None
