"""SVHN, the cropped digits: one .mat file a split."""

import zlib
from pathlib import Path

import numpy as np

from qualms.data.images import Images, build_images
from qualms.data.mat import read_mat
from qualms.data.places import find_first, read_file_bytes
from qualms.errors import QualmsError, reason

DIGITS = tuple("0123456789")


def read_svhn(root: Path, split: str) -> Images:
    """House numbers, one digit in the middle of each image. The files count the digit 0 as class
    10.
    """
    file = f"{split}_32x32.mat"
    path = find_first((root / folder / file for folder in (".", "svhn", "SVHN")), file)
    found = _variables(path)
    pixels, labels = found["X"], found["y"].ravel()
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != "uint8":
        raise QualmsError(
            f"X in {path} is {pixels.dtype} of shape {pixels.shape}, and SVHN's is uint8 of (32, 32, 3, n); "
            "get it again."
        )
    if labels.size and not (
        labels.min() >= 1 and labels.max() <= 10 and (labels == labels.astype("int64")).all()
    ):
        raise QualmsError(
            f"the labels in {path} are not all classes from 1 to 10, as SVHN counts them; get it again."
        )
    # [height, width, channel, n] in the file.
    return build_images(
        "svhn", path, pixels.transpose(3, 2, 0, 1), labels.astype("int64") % 10, DIGITS
    )


def _variables(path: Path) -> dict[str, np.ndarray]:
    content = read_file_bytes(path)
    try:
        found = read_mat(content)
    except (ValueError, zlib.error) as error:
        raise QualmsError(
            f"{path} is cut or not a MATLAB 5 file ({reason(error)}); get it again."
        ) from None
    numbers = {name: one.numbers for name, one in found.items() if one.numbers is not None}
    if not {"X", "y"} <= numbers.keys():
        there = ", ".join(f"{name} ({one.kind})" for name, one in found.items()) or "nothing"
        raise QualmsError(
            f"{path} is cut or not SVHN's: it holds {there} and not numbers X and y; get it again."
        )
    return numbers
