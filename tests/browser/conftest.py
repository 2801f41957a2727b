"""A headless Chromium and axe-core; where one of them is missing the tests skip, and say so.

`make test-all` sets QUALMS_NEEDS_AXE: there, an axe-core that is not installed is an error.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SWITCHES = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
AXE = Path(__file__).parents[2] / ".axe" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium on the path")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=found, args=[*SWITCHES, "--disable-sync", "--no-first-run"]
        )
        yield chromium
        chromium.close()


@pytest.fixture
def look(browser: Any) -> Iterator[Callable[..., Any]]:
    """Look at a page of one file; whatever goes wrong on it, or is asked of a network, fails the
    test in the end.
    """
    troubles: list[str] = []
    contexts = []

    def opened(path: Path, width: int = 1200, scheme: str = "light", **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.on(
            "console",
            lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on(
            "request",
            lambda asked: (
                None if _own(asked.url, path) else troubles.append(f"asks for {asked.url}")
            ),
        )
        page.goto(path.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


def _own(address: str, path: Path) -> bool:
    return address == path.as_uri() or address.startswith(("data:", "blob:"))


@pytest.fixture(scope="session")
def axe() -> str:
    """The script that looks for barriers in a page."""
    if not AXE.exists() and "QUALMS_NEEDS_AXE" not in os.environ:
        pytest.skip("axe-core is not installed; run `make .axe/.installed`")
    return AXE.read_text("utf-8")
