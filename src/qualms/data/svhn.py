"""SVHN, the cropped digits: one .mat file a split."""

from io import BytesIO
from pathlib import Path
from typing import Any

from qualms.data.images import Images, images_of
from qualms.data.places import content_of, extra, first_of
from qualms.errors import QualmsError

DIGITS = tuple("0123456789")
NUMBERS = {"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "single", "double"}


def read_svhn(root: Path, split: str) -> Images:
    """House numbers, one digit in the middle of each image. The files count the digit 0 as class 10."""
    file = f"{split}_32x32.mat"
    path = first_of((root / folder / file for folder in (".", "svhn", "SVHN")), file)
    found = _variables(path)
    pixels, labels = found["X"], found["y"].ravel()
    if pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3) or pixels.dtype != "uint8":
        raise QualmsError(
            f"X in {path} is {pixels.dtype} of shape {pixels.shape}, and SVHN's is uint8 of (32, 32, 3, n); "
            "get it again."
        )
    if labels.size and not (labels.min() >= 1 and labels.max() <= 10 and (labels == labels.astype("int64")).all()):
        raise QualmsError(f"the labels in {path} are not all classes from 1 to 10, as SVHN counts them; get it again.")
    # [height, width, channel, n] in the file.
    return images_of("svhn", path, pixels.transpose(3, 2, 0, 1), labels.astype("int64") % 10, DIGITS)


def _variables(path: Path) -> dict[str, Any]:
    scipy = extra("scipy.io", "scipy", "SVHN's .mat files")
    content = content_of(path)
    try:
        kinds = {name: kind for name, _, kind in scipy.whosmat(BytesIO(content))}
        # Only plain numbers are read: their length is that of the bytes in the file, not a number in a header.
        if not all(kinds.get(name) in NUMBERS for name in ("X", "y")):
            there = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "nothing"
            raise QualmsError(f"{path} is cut or not SVHN's: it holds {there} and not numbers X and y; get it again.")
        return scipy.loadmat(BytesIO(content), variable_names=["X", "y"])
    except QualmsError:
        raise
    except Exception as error:  # scipy raises whatever comes up
        raise QualmsError(f"{path} is cut or not a MATLAB 5 file ({type(error).__name__}); get it again.") from None
