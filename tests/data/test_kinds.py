"""Image files of every kind: read as Pillow reads them, and told what was done; what cannot be read
is told too.
"""

import struct
import sys
import types
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, TiffImagePlugin

import qualms
from qualms.data import ImageTransform, Rejected, load
from qualms.data import folder as folder_module
from qualms.data.decode import decode_image


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    return tmp_path / "mine"


def gradient(high: int = 6, wide: int = 8) -> np.ndarray:
    """No two pixels alike."""
    return np.arange(high * wide, dtype=np.uint8).reshape(high, wide) * 5


def saved(path: Path, array: np.ndarray, **options: Any) -> np.ndarray:
    Image.fromarray(array).save(path, **options)
    return array


def gray(pixels: Any) -> np.ndarray:
    return np.asarray(pixels[0])


@pytest.mark.parametrize("ending", ["tif", "gif", "ppm", "pgm", "tga", "ico", "jp2", "pcx"])
def test_what_pillow_reads_is_read(folder: Path, ending: str) -> None:
    image = np.full((16, 16), 100, np.uint8)
    saved(folder / f"a.{ending}", image)
    assert int((load("mine").pixels.int() - 100).abs().max()) <= 2


def test_sixteen_bits_are_scaled_and_not_cut_off(folder: Path) -> None:
    values = np.array([[0, 257, 32896], [65535, 300, 128]], np.uint16)
    for name in ("a.png", "b.tif"):
        saved(folder / name, values)
    (folder / "c.pgm").write_bytes(b"P5 3 2 65535\n" + values.astype(">u2").tobytes())
    found = load("mine")
    for pixels in found.pixels:
        assert gray(pixels).tolist() == [[0, 1, 128], [255, 1, 0]]
    assert "3 images were scaled from more than 8 bits to 8" in found.notes


def test_sixteen_bits_of_color_are_told(folder: Path) -> None:
    row = b"\0" + struct.pack(">6H", 65535, 0, 0, 0, 65535, 257)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(row)),
        (b"IEND", b""),
    ]
    (folder / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))
    found = load("mine")
    assert found.pixels[0, :, 0].T.tolist() == [[255, 0, 0], [0, 255, 1]]
    assert found.notes == ("1 image was scaled from more than 8 bits to 8",)


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def test_numbers_without_a_scale_are_refused_and_those_from_0_to_1_scaled(folder: Path) -> None:
    saved(folder / "a.tif", np.array([[0.0, 0.5, 1.0]], np.float32))
    saved(folder / "b.tif", np.array([[0.0, 0.5, 90.0]], np.float32))
    saved(folder / "c.tif", np.array([[0, 5, 1_000_000]], np.int32))
    found = load("mine", strict=False)
    assert gray(found.pixels[0]).tolist() == [[0, 128, 255]]
    assert [one.id for one in found.rejected] == ["b.tif", "c.tif"]
    assert "values from 0 to 90; only 0 to 1 can be scaled" in found.rejected[0].reason
    assert "values from 0 to 1e+06; only 0 to 65535 can be scaled" in found.rejected[1].reason


def test_conversions_are_counted_and_told(folder: Path) -> None:
    saved(folder / "a.png", gradient())
    Image.fromarray(gradient()).convert("CMYK").save(folder / "b.jpg")
    Image.fromarray(gradient()).convert("P").save(folder / "c.gif")
    alpha = np.dstack([gradient()] * 3 + [np.full((6, 8), 200, np.uint8)])
    saved(folder / "d.png", alpha)
    alpha[..., 3] = 255
    saved(folder / "e.png", alpha)  # transparent nowhere
    frames = [Image.fromarray(gradient() + i) for i in (0, 40)]
    frames[0].save(folder / "f.webp", save_all=True, append_images=frames[1:], lossless=True)
    (folder / "notes.txt").write_text("not an image")
    (folder / "list.csv").write_text("a")
    found = load("mine")
    assert found.ids == ("a.png", "b.jpg", "c.gif", "d.png", "e.png", "f.webp")
    assert set(found.notes) == {
        "1 image has several frames; only the first was read",
        "1 grayscale image was converted to color",
        "1 image with a palette was converted to color",
        "1 image has transparency, which was dropped",
        "1 CMYK image was converted to RGB",
        "2 files that are not images were skipped (list.csv, notes.txt)",
    }
    for i in (0, 3, 4):
        assert np.array_equal(gray(found.pixels[i]), gradient()), found.ids[i]
    assert np.abs(gray(found.pixels[5]).astype(int) - gradient()).max() <= 1, "not the first frame"
    assert np.abs(found.pixels[1].numpy().astype(int) - gradient()).max() <= 8, "CMYK"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(folder: Path, orientation: int) -> None:
    from PIL import ImageOps

    image = Image.fromarray(gradient())
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(folder / "a.png", exif=exif)
    with Image.open(folder / "a.png") as file:
        upright = np.asarray(ImageOps.exif_transpose(file))
    found = load("mine")
    assert np.array_equal(gray(found.pixels[0]), upright)
    assert ("1 image was rotated by EXIF orientation" in found.notes) == (orientation > 1)


def test_unreadable_files_are_left_out_with_the_reason(folder: Path) -> None:
    saved(folder / "good.png", gradient())
    whole = (folder / "good.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[:40])
    (folder / "text.jpg").write_text("hello")
    (folder / "phone.heic").write_bytes(b"....ftypheic")
    (folder / "gone.png").symlink_to("nowhere.png")
    with pytest.raises(
        qualms.QualmsError,
        match=r"mine/cut\.png is truncated or not an image .*; replace or remove it",
    ):
        load("mine")
    found = load("mine", strict=False)
    assert found.ids == ("good.png",)
    reasons = {one.id: one.reason for one in found.rejected}
    assert reasons["phone.heic"] == "a .heic file, which needs the package pillow-heif"
    assert "No such file" in reasons["gone.png"]
    assert "truncated or not an image" in reasons["cut.png"]
    assert "truncated or not an image" in reasons["text.jpg"]
    (folder / "good.png").unlink()
    with pytest.raises(
        qualms.QualmsError, match=r"none of the 4 images in mine can be read: cut\.png is truncated"
    ):
        load("mine", strict=False)


def test_labels_stay_with_their_images_when_others_are_left_out(folder: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir()
        (folder / name / "0.png").write_bytes(b"broken")
        saved(folder / name / "1.png", np.full((4, 4), 100 * label, np.uint8))
    found = load("mine", strict=False)
    assert found.ids == ("cat/1.png", "dog/1.png")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1]
    assert found.pixels[:, 0, 0, 0].tolist() == [0, 100]


def test_a_plugin_for_heic_is_used_where_it_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    plugin = types.ModuleType("pillow_heif")
    plugin.register_heif_opener = lambda: called.append(True)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pillow_heif", plugin)
    folder_module.readable_endings.cache_clear()
    saved(folder / "a.png", gradient())
    load("mine")
    folder_module.readable_endings.cache_clear()
    assert called


def header(wide: int, high: int) -> bytes:
    """A PNG that claims a size, and has no pixels."""
    size = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(b"\0" * 100))
        + chunk(b"IEND", b"")
    )


def test_a_header_that_claims_too_much_is_told_as_too_large(folder: Path) -> None:
    saved(folder / "a.png", gradient())
    (folder / "bomb.png").write_bytes(header(60_000, 60_000))
    found = load("mine", strict=False)
    (rejected,) = found.rejected
    assert rejected == Rejected(
        "bomb.png",
        "too large: its header claims 3,600,000,000 pixels; the limit is 178,956,970",
    )


def test_an_image_that_pillow_only_warns_about_is_read_or_rejected_as_any_other(
    folder: Path,
) -> None:
    saved(folder / "a.png", gradient())
    (folder / "large.png").write_bytes(
        header(10_000, 9_000)
    )  # above the size that Pillow warns about
    found = load("mine", strict=False)
    (reason,) = (one.reason for one in found.rejected)
    assert reason.startswith("too large for its file size: its header claims 90,000,000 pixels in ")


def test_of_an_image_that_is_long_and_thin_the_middle_is_read(folder: Path) -> None:
    thin = np.zeros((1, 20_001), np.uint8)
    thin[:, 10_000] = 255
    saved(folder / "thin.png", thin)
    found = load("mine", transform=ImageTransform((16, 16), resize=256))
    assert (found.pixels > 240).all()


def pages(*sizes: int, broken: bool = False) -> bytes:
    """A TIFF with square pages of these sides, the first black and the others white; perhaps the
    last is damaged.
    """
    file = BytesIO()
    first, *others = [
        Image.new("L", (side, side), 0 if i == 0 else 255) for i, side in enumerate(sizes)
    ]
    first.save(file, "TIFF", save_all=True, append_images=others)
    content = bytearray(file.getvalue())
    at, offsets = 4, []
    while (place := struct.unpack_from("<I", content, at)[0]) != 0:
        offsets.append(at)
        at = place + 2 + 12 * struct.unpack_from("<H", content, place)[0]
    if broken:
        struct.pack_into("<I", content, offsets[-1], len(content) - 1)
    return bytes(content)


def test_a_damaged_page_does_not_lead_to_another_one() -> None:
    image, done = decode_image(pages(8, 600, 8, broken=True), "some.tif", max_pixels=100)
    assert image.size == (8, 8)
    assert image.getextrema() == ((0, 0),) * 3, "the first page is black"
    assert done == ["frames", "grayscale"]


def test_pages_that_are_not_read_are_not_visited(monkeypatch: pytest.MonkeyPatch) -> None:
    content, visited = pages(*[8] * 40), list[int]()
    real = TiffImagePlugin.TiffImageFile._seek
    monkeypatch.setattr(
        TiffImagePlugin.TiffImageFile,
        "_seek",
        lambda image, page: visited.append(page) or real(image, page),
    )
    assert decode_image(content, "some.tif")[1] == ["frames", "grayscale"]
    assert set(visited) == {0}


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "PNG", "WEBP"])
def test_several_frames_are_told_in_every_format(kind: str) -> None:
    for count in (1, 2, 3):
        file = BytesIO()
        first, *others = [Image.new("L", (8, 8), 80 * i) for i in range(count)]
        first.save(file, kind, **({"save_all": True, "append_images": others} if others else {}))
        assert ("frames" in decode_image(file.getvalue(), "some")[1]) == (count > 1)


def test_a_single_image_is_a_valid_input(folder: Path) -> None:
    image = saved(folder / "a.png", gradient())
    found = load("mine/a.png")
    assert (found.name, found.ids, len(found)) == ("a", ("a.png",), 1)
    assert found.source == "mine/a.png (image file)"
    assert np.array_equal(gray(found.pixels[0]), image)
    (folder / "b.heic").write_bytes(b"")
    with pytest.raises(
        qualms.QualmsError,
        match=r"mine/b\.heic is a \.heic file, which needs the package pillow-heif",
    ):
        load("mine/b.heic", strict=False)


def test_images_are_fitted_as_they_are_read(folder: Path) -> None:
    big = np.zeros((40, 80), np.uint8)
    big[:, 20:60] = 200
    saved(folder / "a.png", big)
    saved(folder / "b.png", np.full((16, 16), 7, np.uint8))
    found = load("mine", transform=ImageTransform((16, 16), resize=20, channels=1))
    assert found.pixels.shape == (2, 1, 16, 16)
    assert found.pixels[0].unique().tolist() == [200], "the middle of the image, in its shape"
    assert found.pixels[1].unique().tolist() == [7]
    assert found.notes == (
        "1 image of 80 x 40 pixels was resized to 20 on the shorter side and cropped to 16 x 16 (bilinear), "
        "as in the network's settings",
    )
