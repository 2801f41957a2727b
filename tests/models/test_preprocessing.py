"""What a network expects of its inputs comes from whoever made it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from qualms.data import ImageTransform, Normalization
from qualms.errors import QualmsError
from qualms.models import ZOO, Preprocessing, load_model, preprocessing_of

HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.mark.parametrize("name", ZOO)
def test_a_network_of_the_zoo_takes_the_size_it_says(name: str) -> None:
    model = ZOO[name].build(ZOO[name].classes).eval()
    fit = preprocessing_of(name, model).transform
    assert fit is not None
    with torch.no_grad():
        assert model(torch.rand(1, fit.channels or 0, *fit.size)).shape == (1, ZOO[name].classes)


def test_the_zoo_names_classes_only_if_there_are_as_many() -> None:
    assert preprocessing_of("digits-cnn", load_model("digits-cnn")).class_names == tuple(
        "0123456789"
    )
    assert preprocessing_of("digits-cnn", load_model("digits-cnn", classes=7)).class_names == ()
    assert (
        preprocessing_of("cifar10-resnet20", load_model("cifar10-resnet20")).class_names[-1]
        == "truck"
    )
    assert preprocessing_of("resnet18", load_model("resnet18")).class_names == ()


class Timm(nn.Linear):
    """What timm leaves on its networks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(2, 2)
        self.num_classes = 2
        self.pretrained_cfg = {
            "input_size": (3, 224, 224),
            "mean": (0.4,) * 3,
            "std": (0.2,) * 3,
            **settings,
        }


@pytest.mark.parametrize(
    ("settings", "fit"),
    [
        (
            {"crop_pct": 0.875, "interpolation": "bilinear"},
            ImageTransform((224, 224), 256, "bilinear", 3),
        ),
        (
            {"crop_pct": 0.95, "interpolation": "bicubic", "crop_mode": "center"},
            ImageTransform((224, 224), 235, "bicubic", 3),
        ),
        (
            {"crop_pct": 1.0, "interpolation": "bicubic", "crop_mode": "squash"},
            ImageTransform((224, 224), (224, 224), "bicubic", 3),
        ),
        (
            {"input_size": (1, 28, 32), "crop_pct": 1.0, "interpolation": "nearest"},
            ImageTransform((28, 32), 28, "nearest", 1),
        ),
        ({"crop_mode": "border"}, None),
        ({"input_size": None}, None),
    ],
)
def test_timms_settings(settings: dict[str, Any], fit: ImageTransform | None) -> None:
    said = preprocessing_of("timm:some", Timm(**settings))
    assert said.transform == fit
    assert said.normalization == Normalization((0.4,) * 3, (0.2,) * 3)


def test_timms_label_names() -> None:
    assert preprocessing_of("timm:some", Timm(label_names=["cat", "dog"])).class_names == (
        "cat",
        "dog",
    )
    assert preprocessing_of("timm:some", Timm(label_names=["cat", "dog", "cow"])).class_names == ()


class Configured(nn.Linear):
    """What Hugging Face leaves on its networks."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(2, 2)
        self.config = type("Config", (), settings)


@pytest.mark.parametrize(
    ("settings", "fit"),
    [
        (
            {"size": 224, "resample": 2, "feature_extractor_type": "ViTFeatureExtractor"},
            ImageTransform((224, 224), channels=3),
        ),
        (
            {"size": {"height": 30, "width": 40}, "resample": 3},
            ImageTransform((30, 40), None, "bicubic", 3),
        ),
        (
            {
                "size": {"shortest_edge": 256},
                "crop_size": {"height": 224, "width": 224},
                "do_center_crop": True,
            },
            ImageTransform((224, 224), 256, channels=3),
        ),
        (
            {
                "size": 224,
                "crop_size": 224,
                "do_center_crop": True,
                "image_processor_type": "CLIPImageProcessor",
            },
            ImageTransform((224, 224), 224, channels=3),
        ),
        (
            {
                "size": {"height": 256, "width": 256},
                "crop_size": 224,
                "do_center_crop": True,
                "resample": 1,
            },
            ImageTransform((224, 224), (256, 256), "lanczos", 3),
        ),
        (
            {
                "size": {"shortest_edge": 224},
                "crop_pct": 0.875,
                "image_processor_type": "ConvNextImageProcessor",
            },
            ImageTransform((224, 224), 256, channels=3),
        ),
        (
            {
                "size": {"shortest_edge": 384},
                "crop_pct": 0.875,
                "image_processor_type": "ConvNextFeatureExtractor",
            },
            ImageTransform((384, 384), channels=3),
        ),
        ({"size": 224, "do_resize": False}, None),
    ],
)
def test_hugging_faces_image_processor(
    settings: dict[str, Any], fit: ImageTransform | None, tmp_path: Path
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(HALVES | settings))
    said = preprocessing_of(f"hf:{tmp_path}", Configured())
    assert said.transform == fit
    assert said.normalization == Normalization((0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    "kind",
    [
        "ViT",
        "CLIP",
        "ConvNext",
        "Beit",
        "DeiT",
        "Bit",
        "MobileNetV2",
        "Levit",
        "PoolFormer",
        "EfficientNet",
    ],
)
def test_images_are_fitted_as_hugging_face_does(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    processor = getattr(transformers, f"{kind}ImageProcessorPil")(do_normalize=True)
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    photo = Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC)
    said = preprocessing_of(f"hf:{tmp_path}", Configured())
    assert said.transform is not None
    assert said.normalization is not None
    fitted = torch.from_numpy(np.array(said.transform.apply_to_image(photo))).permute(2, 0, 1)[None]
    expected = np.asarray(processor(photo, return_tensors="np")["pixel_values"][0])
    np.testing.assert_allclose(said.normalization.apply(fitted)[0], expected, atol=1e-5)


def test_hugging_faces_configuration(tmp_path: Path) -> None:
    assert preprocessing_of(f"hf:{tmp_path}", Configured()) == Preprocessing()
    plain = Configured(image_size=8, num_channels=1, id2label={0: "cat", 1: "dog"})
    assert preprocessing_of(f"hf:{tmp_path}", plain) == Preprocessing(
        None, ImageTransform((8, 8), channels=1), ("cat", "dog")
    )
    nameless = Configured(id2label={0: "LABEL_0", 1: "LABEL_1"})
    assert preprocessing_of(f"hf:{tmp_path}", nameless).class_names == ()
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"size": {"height": "tall", "width": 3}})
    )
    with pytest.raises(QualmsError, match=r"preprocessor_config\.json is damaged"):
        preprocessing_of(f"hf:{tmp_path}", plain)


@pytest.mark.parametrize("open_batch", [True, False])
def test_an_exported_network_knows_the_shape_it_was_exported_with(
    open_batch: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    shapes = ({0: torch.export.Dim("batch")},) if open_batch else None
    program = torch.export.export(model, (torch.rand(2, 3, 16, 24),), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    assert preprocessing_of(
        tmp_path / "m.pt2", load_model(tmp_path / "m.pt2")
    ).transform == ImageTransform((16, 24), channels=3)


def test_an_exported_network_of_open_size_says_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    sides = {
        0: torch.export.Dim("batch"),
        2: torch.export.Dim("h", min=4, max=64),
        3: torch.export.Dim("w", min=4),
    }
    program = torch.export.export(model, (torch.rand(2, 3, 16, 24),), dynamic_shapes=(sides,))
    torch.export.save(program, tmp_path / "m.pt2")
    assert preprocessing_of(tmp_path / "m.pt2", load_model(tmp_path / "m.pt2")) == Preprocessing()


def test_of_an_import_path_nobody_says_anything() -> None:
    assert preprocessing_of("some.module:factory", nn.Linear(2, 2)) == Preprocessing()
