"""HTML files that contain all they need: template, styles, scripts and data."""

import base64
from collections.abc import Mapping, Sequence
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
                f"the report page needs {name}; run pip install '.[app]' in a clone of qualms"
            )


def write_html(path: str | Path, html: str) -> Path:
    """Write a page atomically: an existing file is replaced only when the page is complete.

    Args:
        path: The file.
        html: The text of the page.

    Returns:
        The path of the file.
    """
    path = Path(path)
    with explain_write_failure(path), atomic_write(path) as temp_path:
        temp_path.write_text(html, encoding="utf-8")
    return path


def render_template(
    template: str, styles: Sequence[str], scripts: Sequence[str], **values: Any
) -> str:
    """Render a template of the folder `qualms/report`.

    Args:
        template: The file name of the template.
        styles: The CSS files that the page includes.
        scripts: The JavaScript files that the page includes.
        values: The variables of the template. They are escaped, so that text from users cannot
            become markup.

    Returns:
        The text of the page.
    """
    # Imported here, since it may not be installed (see `require_packages`).
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_read_own),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    # How `tojson` writes data: without spaces, and without NaN, which JSON lacks.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    css = "".join(map(_read_own, styles))
    js = "".join(map(_read_own, scripts))
    page = environment.get_template(template)
    return page.render(
        css=css,
        js=js,
        version=__version__,
        **values,
    )


def _read_own(name: str) -> str:
    """Return the text of a file in the folder `qualms/report`, such as `page.css`."""
    return (files(__package__) / name).read_text("utf-8")


def format_facts(about: Mapping[str, str]) -> list[str]:
    """Format facts, by name, as lines below the title of a page, such as `Seed: 0`."""
    return [f"{name}: {value}" for name, value in about.items()]


def pack_words(words: list[str]) -> dict[str, Any]:
    """Encode a list of recurring words for the page's JSON.

    Args:
        words: The words.

    Returns:
        `words`, the distinct words in the order of their first occurrence, and `codes`, for each
        item the index of its word (see `pack_array`).
    """
    index_by_word: dict[str, int] = {}
    word_indices = []
    for word in words:
        word_indices.append(index_by_word.setdefault(word, len(index_by_word)))
    return {
        "words": list(index_by_word),
        "codes": pack_array(np.array(word_indices, dtype=np.int32)),
    }


def pack_array(values: np.ndarray) -> dict[str, str]:
    """Encode an array in base64, without loss.

    Bytes and 32-bit integers keep their dtype. Other numbers are stored in single precision if that
    represents all of them exactly, otherwise in double precision.

    Args:
        values: An array of numbers, of shape [n].

    Returns:
        `kind`, the dtype of the numbers, such as `f4`; and `bytes`, the numbers in little-endian
        order and base64.
    """
    if values.dtype in (np.uint8, np.int32):
        # `|u1` and `<i4` without their byte order.
        kind = values.dtype.str[1:]
        return {"kind": kind, "bytes": _encode(values, kind)}
    values = values.astype(np.float64)
    # A number too large for single precision becomes infinite, and the arrays are not equal then.
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    kind = "f8"
    if np.array_equal(single, values, equal_nan=True):
        kind = "f4"
    return {"kind": kind, "bytes": _encode(values, kind)}


def _encode(values: np.ndarray, kind: str) -> str:
    """Return an array in base64, as little-endian numbers of the dtype `kind`, such as `f4`."""
    little_endian = values.astype(f"<{kind}")
    return base64.b64encode(little_endian.tobytes()).decode()
