"""One HTML file that holds all that it shows: its template filled in, its data packed."""

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
    """An error that says how to install what a page needs."""
    for name in names:
        if find_spec(name) is None:
            raise QualmsError(
                f"the report page needs {name}; pip install '.[app]' in a clone of qualms"
            )


def write_html(path: str | Path, html: str) -> Path:
    """Write a page, whole or not at all; what was there stays until then."""
    path = Path(path)
    with explain_write_failure(path), atomic_write(path) as part:
        part.write_text(html, encoding="utf-8")
    return path


def filled(template: str, styles: Sequence[str], scripts: Sequence[str], **values: Any) -> str:
    """A template of this folder with its values, and the files that it brings along; values are
    text, never markup.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_own),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    css, js = ("".join(_own(name) for name in names) for names in (styles, scripts))
    return environment.get_template(template).render(css=css, js=js, version=__version__, **values)


def _own(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def coded(names: list[str]) -> dict[str, Any]:
    """Words that come again and again, each once, and which stands where."""
    words = list(dict.fromkeys(names))
    number = {word: i for i, word in enumerate(words)}
    return {
        "words": words,
        "codes": packed(np.array([number[name] for name in names], dtype=np.int32)),
    }


def packed(values: np.ndarray) -> dict[str, str]:
    """An array without a digit lost: half as long where single precision holds every value exactly."""
    if values.dtype in (np.uint8, np.int32):
        kind = values.dtype.str[1:]
    else:
        values = values.astype(np.float64)
        with np.errstate(
            over="ignore"
        ):  # what single precision cannot hold is not equal, and kept in double
            kind = (
                "f4" if np.array_equal(values.astype(np.float32), values, equal_nan=True) else "f8"
            )
    return {"kind": kind, "bytes": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode()}
