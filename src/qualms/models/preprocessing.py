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

# Interpolations by Pillow's numbers for them, which image processors of Hugging Face use.
INTERPOLATIONS: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
# Prefixes of the names of Hugging Face's image processors for which a `size` of one number is the
# length of the shorter side. For other processors it is both height and width.
SHORTER_SIDE_PREFIXES = (
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
DAMAGE_ERRORS = (
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
    """The preprocessing of images for a network, and the names of the network's classes.

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
    """Find the preprocessing and the class names of a network.

    They are read from the network's entry in `ZOO`; from timm's `pretrained_cfg`; or from Hugging
    Face's `preprocessor_config.json` and `config.json`. For a `.pt2` file, only the size of the
    images is known, from the input that the network was exported with. Nothing is known of a
    network from an import path, except that a network of torchvision with 1000 outputs has
    ImageNet's classes.

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
        return _get_zoo_preprocessing(name, model)
    if name.startswith("timm:"):
        settings = getattr(model, "pretrained_cfg", None) or {}
        return _read_timm_preprocessing(settings, getattr(model, "num_classes", 0))
    if name.startswith("hf:"):
        config = getattr(model, "config", None)
        return _read_hugging_face_preprocessing(name.removeprefix("hf:"), config)
    if name.endswith(".pt2"):
        return Preprocessing(transform=_read_export_transform(model))
    if name.startswith("torchvision.models") and _count_outputs(model) == len(imagenet_classes()):
        return Preprocessing(class_names=imagenet_classes())
    return Preprocessing()


def normalization_of(source: str | Path, model: nn.Module) -> Normalization | None:
    """Find the normalization, of pixels from 0 to 1, that a network's weights were trained with.

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


def _get_zoo_preprocessing(name: str, model: nn.Module) -> Preprocessing:
    """Return the preprocessing of the network `ZOO[name]`.

    The class names are left out if the model was created with another number of classes.
    """
    entry = ZOO[name]
    transform = ImageTransform(
        size=(entry.size, entry.size),
        resize=entry.resize,
        interpolation=entry.interpolation,
        channels=entry.channels,
        by=f"as {name} expects",
    )
    names = entry.class_names if _count_outputs(model) == len(entry.class_names) else ()
    return Preprocessing(entry.normalization, transform, names)


def _count_outputs(model: nn.Module) -> int:
    """Return the number of outputs of the last linear layer or convolution; 0 if there is none.

    In most networks, this is the number of classes.
    """
    outputs = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            outputs = module.out_features
        elif isinstance(module, nn.Conv2d):
            outputs = module.out_channels
    return outputs


def _read_timm_preprocessing(settings: Any, classes: int) -> Preprocessing:
    """Read the preprocessing from timm's settings of a network.

    Args:
        settings: a dictionary, the `pretrained_cfg` of the network.
        classes: the number of classes of the network.
    """
    mean, std = settings.get("mean"), settings.get("std")
    normalization = Normalization(tuple(mean), tuple(std)) if mean and std else None
    class_names = _find_timm_class_names(settings, classes)
    return Preprocessing(normalization, _read_timm_transform(settings), class_names)


def _read_timm_transform(settings: Any) -> ImageTransform | None:
    """Read how images are resized and cropped from timm's settings; None if that is not known.

    The size before the crop is the network's input size divided by `crop_pct`.

    Args:
        settings: a dictionary, the `pretrained_cfg` of a network.
    """
    shape = settings.get("input_size")
    mode = settings.get("crop_mode") or "center"
    interpolation = _known_interpolation(settings.get("interpolation") or "bicubic")
    if not shape or mode not in ("center", "squash") or interpolation is None:
        return None
    channels, height, width = shape
    crop_fraction = settings.get("crop_pct") or 0.875  # timm's default
    before = (math.floor(height / crop_fraction), math.floor(width / crop_fraction))
    # "squash" resizes to this height and width; "center" keeps the image's aspect ratio.
    resize = before if mode == "squash" else min(before)
    return ImageTransform((height, width), resize, interpolation, _known_channels(channels))


def _known_interpolation(name: Any) -> Interpolation | None:
    """Return a name unchanged if it is an interpolation of `ImageTransform`, otherwise None."""
    for known in INTERPOLATIONS.values():
        if known == name:
            # Of type `Interpolation`, which `name` is not for a type checker.
            return known
    return None


def _find_timm_class_names(settings: Any, classes: int) -> tuple[str, ...]:
    """Find the class names of a network of timm; empty if they are not known.

    They are in the network's settings; or they are those of ImageNet, or of a larger version of
    ImageNet, if the tag of the weights names it.

    Args:
        settings: a dictionary, the `pretrained_cfg` of the network.
        classes: the number of classes of the network.
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
    # Each description is a list of synonyms, of which the first is used.
    descriptions = ImageNetInfo(subset).label_descriptions()
    return tuple(str(synonyms).split(",")[0] for synonyms in descriptions)


def _read_hugging_face_preprocessing(name: str, config: Any) -> Preprocessing:
    """Read the preprocessing from Hugging Face's settings of an image processor and of a network.

    Args:
        name: the network: a folder, or a name on the hub.
        config: the configuration of the network; None if it has none.
    """
    path = _find_processor_settings(name)
    normalization, transform = None, None
    if path is not None:
        try:
            settings = json.loads(path.read_text())
            normalization = _read_processor_normalization(settings)
            transform = _read_processor_transform(settings)
        except DAMAGE_ERRORS as error:
            raise QualmsError(
                f"{path} is damaged ({reason(error)}); save the image processor again."
            ) from error
    transform = transform or _read_config_transform(config)
    if transform is not None:
        # Gray or color, as the normalization or else the network's configuration says.
        channels = getattr(config, "num_channels", None)
        if normalization is not None:
            channels = len(normalization.mean)
        transform = replace(transform, channels=_known_channels(channels))
    return Preprocessing(normalization, transform, _read_config_class_names(config))


def _find_processor_settings(name: str) -> Path | None:
    """Find the settings of a network's image processor, `preprocessor_config.json`.

    Args:
        name: the network: a folder, or a name on the hub, from which the file is downloaded.

    Returns:
        The path of the file; None if there is none, or if it cannot be downloaded.
    """
    file = "preprocessor_config.json"
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        from transformers.utils.hub import cached_file

        cached = cached_file(name, file)
    # The network has no such file, or the hub cannot be reached.
    except (ImportError, OSError, ValueError):
        return None
    return None if cached is None else Path(cached)


def _read_processor_normalization(settings: dict[str, Any]) -> Normalization | None:
    """Read the normalization of an image processor; None if it has none for pixels from 0 to 1.

    Args:
        settings: the content of `preprocessor_config.json`.
    """
    mean, std = settings.get("image_mean"), settings.get("image_std")
    # "do_rescale" divides by 255; without it, mean and std are for pixels from 0 to 255.
    is_used = settings.get("do_normalize", True) and settings.get("do_rescale", True)
    if not (mean and std and is_used):
        return None
    # With `include_top`, EfficientNet's processor divides by std twice.
    exponent = 2 if settings.get("include_top") else 1
    stds = tuple(float(channel_std) ** exponent for channel_std in std)
    return Normalization(tuple(map(float, mean)), stds)


def _read_processor_transform(settings: dict[str, Any]) -> ImageTransform | None:
    """Read how an image processor resizes and crops images.

    Args:
        settings: the content of `preprocessor_config.json`.

    Returns:
        The transform; None if the processor does not resize, or does so in a way that is not known.
    """
    size = settings.get("size")
    interpolation = INTERPOLATIONS.get(settings.get("resample", 2))
    if size is None or interpolation is None or not settings.get("do_resize", True):
        return None
    kind = settings.get("image_processor_type")
    # Old settings call the processor a feature extractor.
    kind = str(kind or settings.get("feature_extractor_type") or "")
    if isinstance(size, int):
        # Old settings have one number, whose meaning depends on the class of the processor.
        is_shorter_side = kind.startswith(SHORTER_SIDE_PREFIXES)
        size = {"shortest_edge": size} if is_shorter_side else {"height": size, "width": size}
    crop = None
    if settings.get("do_center_crop", False):
        crop = settings.get("crop_size", 224)  # the default of most processors
    if "shortest_edge" in size:
        shorter_side = int(size["shortest_edge"])
        crop_fraction = settings.get("crop_pct")
        final_size, resize = _compute_shorter_side_sizes(kind, shorter_side, crop, crop_fraction)
        return ImageTransform(final_size, resize, interpolation)
    if "height" not in size or "width" not in size:
        return None
    resized = _as_pair(size)
    if crop is None:
        return ImageTransform(resized, resize=None, interpolation=interpolation)
    return ImageTransform(_as_pair(crop), resized, interpolation)


def _compute_shorter_side_sizes(
    kind: str,
    shorter_side: int,
    crop: Any,
    crop_fraction: Any,
) -> tuple[tuple[int, int], int | None]:
    """Compute the sizes after and before the crop from the length of the shorter side.

    Args:
        kind: the name of the image processor's class; some classes compute sizes differently.
        shorter_side: `shortest_edge` in the processor's settings.
        crop: `crop_size` in the settings; None if images are not cropped.
        crop_fraction: `crop_pct` in the settings; None if they have none.

    Returns:
        The height and width after the crop; and the length of the shorter side before the crop,
        None if images are resized straight to the height and width.
    """
    # All rules and default fractions are those of the classes in transformers.
    # ConvNext crops by `crop_pct` below 384 pixels, and only resizes from 384 pixels on.
    if kind.startswith("ConvNext"):
        resize = None
        if shorter_side < 384:
            resize = int(shorter_side / (crop_fraction or 224 / 256))
        return (shorter_side, shorter_side), resize
    if kind.startswith(("Levit", "LeViT")):
        shorter_side = int(256 / 224 * shorter_side)
    elif kind.startswith("PoolFormer"):
        shorter_side = int(shorter_side / (crop_fraction or 0.9))
    # Without a crop, images would differ in the longer side, so they are cropped to a square.
    if crop is None:
        crop = shorter_side
    return _as_pair(crop), shorter_side


def _as_pair(size: Any) -> tuple[int, int]:
    """Convert a size, one number or a dict with height and width, to (height, width)."""
    if isinstance(size, int):
        return size, size
    return int(size["height"]), int(size["width"])


def _read_config_transform(config: Any) -> ImageTransform | None:
    """Create the transform to the image size in a configuration; None if that has no size."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return ImageTransform((size, size))
    if isinstance(size, (list, tuple)) and len(size) == 2:
        return ImageTransform((int(size[0]), int(size[1])))
    return None


def _read_config_class_names(config: Any) -> tuple[str, ...]:
    """Read the class names from a network's configuration.

    Args:
        config: the configuration, whose `id2label` is a dict from class indices to names.

    Returns:
        The names in the order of the classes; empty if one is missing, or if they are the defaults
        of transformers, LABEL_0 and so on.
    """
    labels = getattr(config, "id2label", None) or {}
    names = []
    for i in range(len(labels)):
        if i not in labels:
            return ()
        names.append(str(labels[i]))
    if all(name == f"LABEL_{i}" for i, name in enumerate(names)):
        return ()
    return tuple(names)


def _read_export_transform(model: nn.Module) -> ImageTransform | None:
    """Read the size of images from the input that a network was exported with.

    Returns:
        The transform to that size; None if the network does not take one batch of images, or takes
        images of any size.
    """
    graph = getattr(model, "graph", None)
    nodes = graph.nodes if graph is not None else ()
    input_shapes = []
    for node in nodes:
        # Placeholders are the inputs of the graph; "val" is an example of the input.
        example = node.meta.get("val") if node.op == "placeholder" else None
        if isinstance(example, torch.Tensor):
            input_shapes.append(tuple(example.shape))
    if len(input_shapes) != 1 or len(input_shapes[0]) != 4:
        return None
    _, channels, height, width = input_shapes[0]
    # Sizes that were exported as dynamic are symbols instead of integers.
    if not all(isinstance(length, int) for length in (channels, height, width)):
        return None
    by = "as in the exported network"
    return ImageTransform((height, width), channels=_known_channels(channels), by=by)


def _known_channels(channels: Any) -> int | None:
    """Return a number of channels if `ImageTransform` can produce it (1 or 3), otherwise None."""
    return channels if channels in (1, 3) else None
