"""A headless Chromium and axe-core; where one of them is missing the tests skip, and say so.

`make test-all` sets QUALMS_NEEDS_AXE: there, an axe-core that is not installed is an error.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
AXE = Path(__file__).parents[2] / ".axe" / "node_modules" / "axe-core" / "axe.min.js"


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("there is no chromium on the path")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=[*SWITCHES, "--disable-sync", "--no-first-run"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The script that looks for barriers in a page."""
    if not AXE.exists() and "QUALMS_NEEDS_AXE" not in os.environ:
        pytest.skip("axe-core is not installed; run `make .axe/.installed`")
    return AXE.read_text("utf-8")
