"""What a network expects of its inputs, and what it calls its classes: asked of whoever made it."""

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
from qualms.errors import QualmsError, reason, warn_renamed
from qualms.models.imagenet import imagenet_classes
from qualms.models.zoo import ZOO

RESAMPLES: dict[int, Interpolation] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
}  # Pillow's numbers
# Image processors of Hugging Face for which one number is the shorter side, as it is for all that
# crop afterwards.
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


@dataclass(frozen=True)
class Preprocessing:
    """How images become a network's inputs, and the names of its classes; None or empty where
    nobody says.

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

    @property
    def fit(self) -> ImageTransform | None:
        """The deprecated name of `transform`."""
        warn_renamed("Preprocessing.fit", "Preprocessing.transform")
        return self.transform


def preprocessing_of(source: str | Path, model: nn.Module) -> Preprocessing:
    """What whoever made `load_model(source)` says of its inputs and classes.

    The zoo says it of its networks and of the published weights it names; timm in `pretrained_cfg`;
    Hugging Face in `preprocessor_config.json` and `config.json`; a `.pt2` file knows the shape of
    the input it was exported with. Of the network behind an import path nobody says anything, but
    that torchvision's of 1000 classes know ImageNet's.

    Example:
        ```python
        from qualms.models import load_model, preprocessing_of

        said = preprocessing_of("cifar10-resnet20", load_model("cifar10-resnet20"))
        assert said.transform.size == (32, 32)
        assert said.class_names[0] == "airplane"
        print(said.normalization)
        ```
    """
    name = str(source)
    if name in ZOO:
        return _of_the_zoo(name, model)
    if name.startswith("timm:"):
        return _of_timm(
            getattr(model, "pretrained_cfg", None) or {}, getattr(model, "num_classes", 0)
        )
    if name.startswith("hf:"):
        return _of_hugging_face(name.removeprefix("hf:"), getattr(model, "config", None))
    if name.endswith(".pt2"):
        return Preprocessing(transform=_exported_with(model))
    if name.startswith("torchvision.models") and _outputs(model) == len(imagenet_classes()):
        return Preprocessing(class_names=imagenet_classes())
    return Preprocessing()


def normalization_of(source: str | Path, model: nn.Module) -> Normalization | None:
    """What the weights of `load_model(source)` expect pixels in [0, 1] to be normalized with; None
    if it is not known.

    Example:
        ```python
        from qualms.models import load_model, normalization_of

        model = load_model("cifar10-resnet20")
        print(normalization_of("cifar10-resnet20", model))
        ```
    """
    return preprocessing_of(source, model).normalization


def _of_the_zoo(name: str, model: nn.Module) -> Preprocessing:
    entry = ZOO[name]
    fit = ImageTransform(
        (entry.size, entry.size),
        entry.resize,
        entry.interpolation,
        entry.channels,
        by=f"as {name} takes them",
    )
    named = _outputs(model) == len(entry.class_names)
    return Preprocessing(entry.normalization, fit, entry.class_names if named else ())


def _outputs(model: nn.Module) -> int:
    """How many numbers the last layer with weights gives: the classes, in networks of the usual
    build.
    """
    last = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            last = module.out_features
        elif isinstance(module, nn.Conv2d):
            last = module.out_channels
    return last


def _of_timm(settings: Any, classes: int) -> Preprocessing:
    mean, std, shape = settings.get("mean"), settings.get("std"), settings.get("input_size")
    normalization = Normalization(tuple(mean), tuple(std)) if mean and std else None
    names = _timm_names(settings, classes)
    mode, asked = settings.get("crop_mode") or "center", settings.get("interpolation") or "bicubic"
    way = next((known for known in RESAMPLES.values() if known == asked), None)
    if not shape or mode not in ("center", "squash") or way is None:
        return Preprocessing(normalization, None, names)
    channels, height, width = shape
    share = settings.get("crop_pct") or 0.875
    before = (math.floor(height / share), math.floor(width / share))
    fit = ImageTransform(
        (height, width), before if mode == "squash" else min(before), way, _known(channels)
    )
    return Preprocessing(normalization, fit, names)


def _timm_names(settings: Any, classes: int) -> tuple[str, ...]:
    """The names in a network's settings; else ImageNet's, or those of a larger part of it, if its
    tag says so.
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
    path = _settings_file(name)
    normalization, fit = None, None
    if path is not None:
        try:
            settings = json.loads(path.read_text())
            normalization, fit = _processor_normalization(settings), _processor_fit(settings)
        except (
            AttributeError,
            KeyError,
            TypeError,
            ValueError,
            ArithmeticError,
            RecursionError,
            OSError,
        ) as error:
            raise QualmsError(
                f"{path} is damaged ({reason(error)}); save the image processor anew."
            ) from error
    if fit is None:
        fit = _configured(config)
    if fit is not None:
        channels = (
            len(normalization.mean) if normalization else getattr(config, "num_channels", None)
        )
        fit = replace(fit, channels=_known(channels))
    return Preprocessing(normalization, fit, _labels(config))


def _settings_file(name: str) -> Path | None:
    """The image processor's settings, from the folder, or from where the network came from."""
    if Path(name).is_dir():
        path = Path(name) / "preprocessor_config.json"
        return path if path.is_file() else None
    try:
        from transformers.utils.hub import cached_file

        found = cached_file(name, "preprocessor_config.json")
        return None if found is None else Path(found)
    except Exception:  # a network without them, or one that cannot be reached
        return None


def _processor_normalization(settings: dict[str, Any]) -> Normalization | None:
    mean, std = settings.get("image_mean"), settings.get("image_std")
    if not (
        mean and std and settings.get("do_normalize", True) and settings.get("do_rescale", True)
    ):
        return None
    again = 2 if settings.get("include_top") else 1  # EfficientNet's divides a second time
    return Normalization(tuple(map(float, mean)), tuple(float(s) ** again for s in std))


def _processor_fit(settings: dict[str, Any]) -> ImageTransform | None:
    size, way = settings.get("size"), RESAMPLES.get(settings.get("resample", 2))
    if size is None or way is None or not settings.get("do_resize", True):
        return None
    kind = str(settings.get("image_processor_type") or settings.get("feature_extractor_type") or "")
    crop = settings.get("crop_size", 224) if settings.get("do_center_crop", False) else None
    if isinstance(size, int):
        size = (
            {"shortest_edge": size}
            if kind.startswith(BY_SHORTER_SIDE)
            else {"height": size, "width": size}
        )
    if "shortest_edge" in size:
        shorter = int(size["shortest_edge"])
        if kind.startswith(
            "ConvNext"
        ):  # which crops by a share of its own, and squeezes what is large
            share = settings.get("crop_pct") or 224 / 256
            return ImageTransform(
                (shorter, shorter), int(shorter / share) if shorter < 384 else None, way
            )
        if kind.startswith(("Levit", "LeViT")):
            shorter = int(256 / 224 * shorter)
        elif kind.startswith("PoolFormer"):
            shorter = int(shorter / (settings.get("crop_pct") or 0.9))
        return ImageTransform(_pair(shorter if crop is None else crop), shorter, way)
    if "height" not in size or "width" not in size:
        return None
    before = (int(size["height"]), int(size["width"]))
    return (
        ImageTransform(before, None, way)
        if crop is None
        else ImageTransform(_pair(crop), before, way)
    )


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size["height"]), int(size["width"]))


def _configured(config: Any) -> ImageTransform | None:
    """The size alone, where a network's configuration has it."""
    size = getattr(config, "image_size", None)
    if isinstance(size, int):
        return ImageTransform((size, size))
    return (
        ImageTransform((int(size[0]), int(size[1])))
        if isinstance(size, (list, tuple)) and len(size) == 2
        else None
    )


def _labels(config: Any) -> tuple[str, ...]:
    names = getattr(config, "id2label", None) or {}
    found = tuple(str(names[i]) for i in range(len(names)) if i in names)
    meaningless = all(name == f"LABEL_{i}" for i, name in enumerate(found))
    return () if meaningless or len(found) != len(names) else found


def _exported_with(model: nn.Module) -> ImageTransform | None:
    """The shape of the input that a network was exported with, where its height and width were not
    left open.
    """
    graph = getattr(model, "graph", None)
    values = (
        [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
        if graph is not None
        else []
    )
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    if (
        len(shapes) != 1
        or len(shapes[0]) != 4
        or not all(isinstance(side, int) for side in shapes[0][1:])
    ):
        return None
    _, channels, height, width = shapes[0]
    return ImageTransform(
        (height, width), channels=_known(channels), by="as the network was exported"
    )


def _known(channels: Any) -> int | None:
    return channels if channels in (1, 3) else None
