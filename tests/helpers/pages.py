"""Report pages as a browser would read them."""

import base64
import json
from html.parser import HTMLParser
from typing import Any

import numpy as np

VOID = {"meta", "link", "input", "br", "wbr", "img"}


class Page(HTMLParser):
    """The elements of a page, with the tags that were closed wrongly."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.source = text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        (self.scripts if inside == "script" else self.words).append(data)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    @property
    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.elements if "id" in attrs]


def unpacked(found: dict[str, str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(found["bytes"]), f"<{found['kind']}")


def check_well_formed(page: Page) -> None:
    """Check that tags are closed, that ids are unique, and that references to ids exist."""
    assert page.wrong == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.source.lstrip().startswith("<!DOCTYPE html>")
    for _, attrs in page.elements:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert set((attrs.get(name) or "").split()) <= set(page.ids)


def check_offline(page: Page) -> None:
    """Check that a page loads nothing, and that its content security policy forbids it."""
    own = page.source.replace("http://www.w3.org/2000/svg", "")  # a name, which nothing loads
    assert "http:" not in own
    assert "https:" not in own
    policy = ""
    addresses = []
    for _, attrs in page.elements:
        addresses += [str(attrs[key]) for key in ("src", "href") if key in attrs]
        if attrs.get("http-equiv") == "Content-Security-Policy":
            policy = str(attrs["content"])
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert policy.startswith("default-src 'none'")
