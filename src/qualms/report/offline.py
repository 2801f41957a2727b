"""HTML files that contain everything they show: template, styles, scripts and data."""

import base64
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from qualms.disk import atomic_write, explain_write_failure
from qualms.errors import QualmsError
from qualms.version import __version__


def require_packages(*names: str) -> None:
    """Raise an error that explains how to install the packages of a page, if one is missing."""
    for name in names:
        if find_spec(name) is None:
            raise QualmsError(
                f"the report page needs {name}; pip install '.[app]' in a clone of qualms"
            )


def write_html(path: str | Path, html: str) -> Path:
    """Write a page, all of it or nothing; a file that exists stays until then."""
    path = Path(path)
    with explain_write_failure(path), atomic_write(path) as part:
        part.write_text(html, encoding="utf-8")
    return path


def render_template(
    template: str, styles: Sequence[str], scripts: Sequence[str], **values: Any
) -> str:
    """Render a template of this folder.

    Args:
        template: Its file name.
        styles: The CSS files that it includes.
        scripts: The JavaScript files that it includes.
        values: Its variables. They are escaped, so that no text of a user becomes markup.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_own),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    css = "".join(_read_own(name) for name in styles)
    js = "".join(_read_own(name) for name in scripts)
    page = environment.get_template(template)
    return page.render(css=css, js=js, version=__version__, **values)


def _read_own(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def pack_words(names: list[str]) -> dict[str, Any]:
    """Encode a list of recurring words as the distinct words and their numbers."""
    words = list(dict.fromkeys(names))
    number = {word: i for i, word in enumerate(words)}
    codes = np.array([number[name] for name in names], dtype=np.int32)
    return {"words": words, "codes": pack_array(codes)}


def pack_array(values: np.ndarray) -> dict[str, str]:
    """Encode an array in base64, without loss.

    Bytes and 32-bit integers keep their type. Other numbers are stored in single precision if that
    represents all of them exactly, else in double precision.
    """
    if values.dtype in (np.uint8, np.int32):
        kind = values.dtype.str[1:]
        return {"kind": kind, "bytes": _encode(values, kind)}
    values = values.astype(np.float64)
    with np.errstate(over="ignore"):  # infinite in single precision, so not equal
        single = values.astype(np.float32)
    kind = "f4" if np.array_equal(single, values, equal_nan=True) else "f8"
    return {"kind": kind, "bytes": _encode(values, kind)}


def _encode(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()
