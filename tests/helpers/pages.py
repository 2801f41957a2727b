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
