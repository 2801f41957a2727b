"""Every public name is in the reference, with an example that runs."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe
import pytest

import qualms
from qualms import data, methods, metrics, models, training

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
SOURCE: Any = griffe.load("qualms", search_paths=[ROOT / "src"], docstring_parser="google")


def where(path: str) -> str:
    """Where the object that a path names is defined."""
    found = SOURCE[path.removeprefix("qualms.")]
    return str(found.final_target.path if found.is_alias else found.path)


def public() -> list[str]:
    names = []
    for module in (qualms, data, methods, metrics, models, training):
        for name in module.__all__:
            value = getattr(module, name)
            if hasattr(value, "__qualname__"):
                names.append(f"{value.__module__}.{value.__qualname__}")
            elif not isinstance(value, (ModuleType, tuple)):
                names.append(where(f"{module.__name__}.{name}"))
    return sorted(names)


def documented() -> set[str]:
    """What the pages ask for by `::: path`: a name, some members of a module, or all of them."""
    found = set()
    for page in PAGES:
        for path, members in re.findall(
            r"^::: (\S+)(?:\n    options:.*?members: \[(.*?)\])?", page.read_text(), re.M
        ):
            names = [member.strip() for member in members.split(",") if member]
            source = SOURCE[path.removeprefix("qualms.")]
            if not names and source.is_module:
                names = [n for n, member in source.members.items() if not member.is_alias]
            found |= {where(f"{path}.{name}") for name in names} or {where(path)}
    return found


def examples(path: str) -> list[str]:
    docstring = SOURCE[path.removeprefix("qualms.")].docstring
    sections = docstring.parsed if docstring else []
    boxes = [
        s.value.contents
        for s in sections
        if s.kind.value == "admonition" and s.value.kind == "example"
    ]
    return [
        block for box in boxes for block in re.findall(r"```python\n(.*?)```", box, flags=re.DOTALL)
    ]


@pytest.mark.parametrize("path", public())
def test_every_public_name_has_an_example_that_runs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examples(path)
    assert found, "its docstring has no Example: with a block of Python"
    monkeypatch.chdir(tmp_path)
    for example in found:
        exec(compile(example, path, "exec"), {})


def test_every_public_name_is_in_the_reference() -> None:
    assert set(public()) <= documented()


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f"reference/{page.name}" in menu
