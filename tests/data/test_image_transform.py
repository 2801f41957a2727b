"""Images of any size to the size of a network's input."""

import numpy as np
import pytest
import torch
from PIL import Image

import qualms
from qualms.data import Images, ImageTransform


def images(high: int, wide: int, channels: int = 3, count: int = 2) -> Images:
    numbers = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, channels, high, wide), generator=numbers).to(torch.uint8)
    return Images("some", pixels, None)


@pytest.mark.parametrize("way", ["nearest", "bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize("resize", [None, 24, (30, 20)])
def test_memory_and_files_are_fitted_alike(way: str, resize: int | tuple[int, int] | None) -> None:
    some, fit = images(32, 48), ImageTransform((20, 16), resize, way)  # type: ignore[arg-type]
    in_memory = fit.apply(some).pixels.int()
    for pixels, fitted in zip(some.pixels, in_memory, strict=True):
        one = np.asarray(
            fit.apply_to_image(Image.fromarray(pixels.permute(1, 2, 0).numpy()))
        ).astype(int)
        assert np.abs(one.transpose(2, 0, 1) - fitted.numpy()).max() <= 1


@pytest.mark.parametrize("shape", [(32, 48), (48, 32), (5, 200)])
def test_a_crop_is_the_middle_in_the_images_own_shape(shape: tuple[int, int]) -> None:
    high, wide = shape
    pixels = torch.zeros(1, 1, high, wide, dtype=torch.uint8)
    pixels[..., high // 2, :] = 255
    found = (
        ImageTransform((16, 16), resize=16).apply(Images("line", pixels, None)).pixels[0, 0].float()
    )
    assert found.shape == (16, 16)
    assert int(found.mean(1).argmax()) in (7, 8)
    assert float(found.std(1).max()) < 1, "a line stays a line"


def test_a_size_that_is_right_already_is_left_alone() -> None:
    some = images(16, 16)
    assert ImageTransform((16, 16), resize=20, interpolation="bicubic").apply(some) is some
    gray = ImageTransform((16, 16), resize=20, channels=1).apply(some)
    assert torch.equal(gray.pixels, some.convert(1, 16).pixels)
    assert ImageTransform((16, 16)).describe([(16, 16)]) == ""


def test_sizes_that_are_not_square() -> None:
    assert ImageTransform((12, 20)).apply(images(32, 32)).pixels.shape == (2, 3, 12, 20)
    assert ImageTransform((12, 20), resize=14).apply(images(50, 20)).pixels.shape == (2, 3, 12, 20)
    assert images(8, 8).convert(1, (4, 6)).pixels.shape == (2, 1, 4, 6)


def test_it_is_told_in_one_sentence() -> None:
    fit = ImageTransform((224, 224), 256, "bicubic")
    assert fit.describe([(480, 640)] * 3 + [(224, 224)]) == (
        "3 images of 640 x 480 pixels were resized to 256 on the shorter side and cropped to 224 x 224 (bicubic), "
        "as in the network's settings"
    )
    assert ImageTransform((8, 8), by="as set by --size").describe([(2, 3), (9, 9)]) == (
        "2 images of 3 x 2 to 9 x 9 pixels were resized to 8 x 8 (bilinear), as set by --size"
    )


@pytest.mark.parametrize("shape", [(1, 2_700), (2_700, 1), (3, 100_000), (1, 178_000)], ids=str)
def test_an_image_that_is_long_and_thin_is_not_made_large(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda one, size, *more: made.append(size[0] * size[1]) or real(one, size, *more),
    )
    ramp = np.linspace(0, 255, max(shape), dtype=np.uint8).reshape(-1, 1)
    pixels = np.broadcast_to(ramp if shape[0] > shape[1] else ramp.T, shape)
    found = np.asarray(
        ImageTransform((224, 224), resize=256).apply_to_image(
            Image.fromarray(np.ascontiguousarray(pixels))
        )
    )
    assert found.shape == (224, 224)
    assert np.abs(found.astype(int) - 127).max() <= 1, "the middle"
    assert made
    assert max(made) <= 100 * 256**2


@pytest.mark.parametrize("shape", [(10, 1_000), (1_000, 10)])
def test_a_crop_is_the_same_whether_or_not_the_ends_are_cut_first(shape: tuple[int, int]) -> None:
    some, fit = images(*shape, count=1), ImageTransform((16, 16), 20, "bicubic")
    longer = torch.nn.functional.pad(
        some.pixels, (100, 100, 0, 0) if shape[0] < shape[1] else (0, 0, 100, 100)
    )
    assert torch.equal(fit.apply(Images("longer", longer, None)).pixels, fit.apply(some).pixels)


def test_a_long_network_gets_a_long_middle() -> None:
    ramp = np.arange(8_000, dtype=np.uint32)[None].repeat(2, 0)
    pixels = (ramp * 255 // 7_999).astype(np.uint8)
    found = np.asarray(ImageTransform((2, 400), resize=2).apply_to_image(Image.fromarray(pixels)))
    assert np.array_equal(found, pixels[:, 3_800:4_200])


def test_errors() -> None:
    with pytest.raises(qualms.QualmsError, match="each side must be 1 to"):
        ImageTransform((0, 4))
    with pytest.raises(qualms.QualmsError, match="cannot crop 8 x 8 from 6 x 6 pixels"):
        ImageTransform((8, 8), (6, 6))
    with pytest.raises(qualms.QualmsError, match="cannot have 4 channels"):
        ImageTransform((8, 8), channels=4)
