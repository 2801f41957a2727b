"""A headless Chromium; without one, or without playwright, the tests skip and say so."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


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
