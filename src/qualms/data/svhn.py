"""SVHN, the cropped digits: one MATLAB file for each split.

The file has the images as `X`, bytes [height, width, channel, n], and the labels as `y`, integers
from 1 to 10; label 10 is the digit 0.
"""

import zlib
from pathlib import Path

import numpy as np

from qualms.data.class_names import DIGITS
from qualms.data.images import Images, build_images
from qualms.data.mat import read_mat
from qualms.data.places import find_first, read_file_bytes
from qualms.errors import QualmsError, reason


def read_svhn(root: Path, split: str) -> Images:
    """Read SVHN: house numbers, one digit in the middle of each image.

    Args:
        root: the folder of datasets; the file is in it, in `svhn` or in `SVHN`.
        split: "train" or "test".

    Returns:
        Color images [n, 3, 32, 32] with ten classes.
    """
    file = f"{split}_32x32.mat"
    path = find_first([root / folder / file for folder in (".", "svhn", "SVHN")], file)
    variables = _read_variables(path)
    pixels, labels = variables["X"], variables["y"].ravel()
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != "uint8":
        raise QualmsError(
            f"X in {path} is {pixels.dtype} of shape {pixels.shape}, but SVHN's is uint8 of shape "
            "(32, 32, 3, n); download it again."
        )
    if not _are_svhn_labels(labels):
        raise QualmsError(
            f"the labels in {path} are not all from 1 to 10, the classes of SVHN; download it "
            "again."
        )
    # Label 10 stands for the digit 0.
    digits = labels.astype("int64") % 10
    # From [height, width, channel, n] to [n, channel, height, width].
    return build_images("svhn", path, pixels.transpose(3, 2, 0, 1), digits, DIGITS)


def _are_svhn_labels(labels: np.ndarray) -> bool:
    """Whether all labels are integers from 1 to 10."""
    if labels.size == 0:
        # `build_images` raises the error for a file without images.
        return True
    in_range = labels.min() >= 1 and labels.max() <= 10
    return bool(in_range and (labels == labels.astype("int64")).all())


def _read_variables(path: Path) -> dict[str, np.ndarray]:
    """Read the arrays of a MATLAB file by name, or raise an error if `X` or `y` is missing."""
    content = read_file_bytes(path)
    try:
        variables = read_mat(content)
    except (ValueError, zlib.error) as error:
        raise QualmsError(
            f"{path} is truncated or not a MATLAB 5 file ({reason(error)}); download it again."
        ) from None
    arrays = {}
    for name, variable in variables.items():
        if variable.array is not None:
            arrays[name] = variable.array
    if "X" not in arrays or "y" not in arrays:
        kinds = [f"{name} ({variable.kind})" for name, variable in variables.items()]
        raise QualmsError(
            f"{path} is truncated or not an SVHN file: it contains {', '.join(kinds) or 'nothing'} "
            "instead of the numbers X and y; download it again."
        )
    return arrays
