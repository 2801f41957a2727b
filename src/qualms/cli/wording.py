"""The library's errors in the words of the command line."""

import re

OPTIONS = (
    "classes",
    "size",
    "threshold",
    "train",
    "weights",
)  # of commands, and keywords of the library


def in_options(text: str) -> str:
    """The same with `--classes` for `classes=`, which is what Python calls it."""
    return re.sub(
        rf"\b({'|'.join(OPTIONS)})=(['\"]?)", lambda m: f"--{m[1]}{m[2] and ' ' + m[2]}", text
    )
