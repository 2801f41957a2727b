"""The service's page in a browser: an image in, the very answer of the service on it, and nothing
asked elsewhere.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed; run `make test-serve`")
pytest.importorskip("fastapi", reason="fastapi is not installed; run `make test-serve`")
services = pytest.importorskip("tests.helpers.services")

pytestmark = [pytest.mark.browser, pytest.mark.serve]
Open = Callable[..., Any]
WIDTHS = (1200, 400)
NASTY = "<img src=x onerror=alert(1)>.png"


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[..., str]]:
    """Serve an app of this process on the loopback address; its address."""
    running: list[tuple[Any, threading.Thread]] = []

    def serve(*kind: Any, **settings: Any) -> str:
        app = services.client(*kind, **settings).app
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        until = time.monotonic() + 30
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def usual(serving: Callable[..., str]) -> str:
    return serving()


@pytest.fixture
def opened(browser: Any) -> Iterator[Open]:
    """Look at a page; whatever goes wrong on it fails the test in the end."""
    troubles: list[str] = []
    contexts = []

    def look(address: str, width: int = 1200, scheme: str = "light") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        own = (address, "data:", f"blob:{address}")
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: troubles.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda asked: None if asked.url.startswith(own) else troubles.append(asked.url),
        )
        page.goto(address)
        return page

    yield look
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten digits."""
    folder = tmp_path_factory.mktemp("digits")
    for i in range(10):
        (folder / f"{i}.png").write_bytes(services.png(services.pixels(i)))
    return [folder / f"{i}.png" for i in range(10)]


def scored(page: Any, file: Path) -> None:
    page.set_input_files("#file", file)
    page.locator("#found").wait_for(state="visible")


def percent(share: float) -> str:
    return (
        "over 99.9\N{NO-BREAK SPACE}%"
        if 0.9995 < share < 1
        else f"{round(100 * share + 1e-9, 1):g}\N{NO-BREAK SPACE}%"
    )


@pytest.mark.parametrize("decision", ["accepted", "abstain"])
def test_the_page_shows_what_the_service_answers(
    opened: Open, usual: str, files: list[Path], decision: str
) -> None:
    ask = services.client()
    answers = [
        ask.post("/v1/score?layers=true", files=[("images", (f.name, f.read_bytes()))]).json()[
            "results"
        ][0]
        for f in files
    ]
    number = next(i for i, answer in enumerate(answers) if answer["decision"] == decision)
    want, page = answers[number], opened(usual)
    scored(page, files[number])
    assert page.locator("#prediction").text_content() == want["class_name"]
    assert page.locator("#confidence").text_content() == percent(want["confidence"])
    assert page.locator("#decision").text_content() == decision
    assert page.locator("#percentile").text_content() == percent(want["percentile"] / 100)
    assert (
        page.locator("#answer")
        .text_content()
        .startswith("Accepted: " if decision == "accepted" else "Abstain. ")
    )
    assert want["class_name"] in page.locator("#answer").text_content()
    here, limit = (page.locator(f"#{mark}").bounding_box()["x"] for mark in ("here", "limit"))
    assert (here <= limit) == (decision == "accepted")
    rows = page.locator("#scores tbody tr")
    assert [row.split("\t")[0] for row in rows.all_inner_texts()] == list(want["scores"])
    bars = page.locator("#bars .share").all_inner_texts()
    assert [bar.split("\n")[-1] for bar in bars] == [
        percent(layer["share"]) for layer in want["layers"]
    ]
    assert page.locator("#histogram path").count() > 0


def test_an_image_can_be_dropped(opened: Open, usual: str) -> None:
    page = opened(usual)
    page.evaluate(
        """bytes => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" }));
        document.getElementById("drop").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
        }""",
        list(services.png(services.pixels(0))),
    )
    page.locator("#found").wait_for(state="visible")
    assert page.locator("#preview").get_attribute("alt") == "dropped.png"
    assert page.locator("#preview").evaluate("image => image.naturalWidth") == 8


def test_it_works_by_keyboard_alone(opened: Open, usual: str, files: list[Path]) -> None:
    page = opened(usual)
    page.on("filechooser", lambda dialog: dialog.set_files(files[0]))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    page.keyboard.press("Enter")
    page.locator("#found").wait_for(state="visible")


def test_the_token_is_asked_for_where_there_is_one(
    opened: Open, serving: Callable[..., str], files: list[Path]
) -> None:
    page = opened(serving(token=services.TOKEN))
    page.set_input_files("#file", files[0])
    page.get_by_role("alert").wait_for(state="visible")
    assert "token is missing or wrong" in page.get_by_role("alert").text_content()
    assert page.locator("#found").is_hidden()
    page.get_by_label("Token").fill(services.TOKEN)
    scored(page, files[1])
    assert page.get_by_role("alert").is_hidden()


def test_what_is_refused_is_told(
    opened: Open, usual: str, files: list[Path], tmp_path: Path
) -> None:
    page = opened(usual)
    scored(page, files[0])
    (tmp_path / "text.png").write_text("not an image")
    page.set_input_files("#file", tmp_path / "text.png")
    page.get_by_role("alert").wait_for(state="visible")
    assert (
        "text.png is truncated or not an image" in page.get_by_role("alert").text_content().lower()
    )
    assert page.locator("#found").is_hidden()
    scored(page, files[1])
    assert page.get_by_role("alert").is_hidden()


def test_the_page_says_how_far_the_start_is_and_can_be_used_once_it_is_over(
    opened: Open, serving: Callable[..., str], files: list[Path]
) -> None:
    start = services.starting()
    start.begin("loading digits")
    page = opened(serving(startup=start))
    page.get_by_text("Warming up: loading digits (2 of 3, ").wait_for(state="visible")
    assert "digits is warming up" in page.locator("#answer").text_content()
    assert page.locator("#file").is_disabled()
    start.begin("scoring a warm-up image")
    page.get_by_text("Warming up: scoring a warm-up image (3 of 3, ").wait_for(state="visible")
    start.finish(services.usual().model_info, services.usual().network.transform)
    page.get_by_text("Choose an image to see what digits predicts").wait_for(state="visible")
    assert page.locator("#warming").count() == 0
    scored(page, files[0])
    assert services.usual().model_info.model_hash in page.locator("footer").text_content()


def test_a_name_is_only_text(opened: Open, usual: str) -> None:
    page = opened(usual)
    page.set_input_files(
        "#file", {"name": NASTY, "mimeType": "image/png", "buffer": b"not an image"}
    )
    page.get_by_role("alert").wait_for(state="visible")
    assert NASTY in page.locator("#answer").text_content()
    assert page.locator("img[src='x']").count() == 0


def test_what_there_is_nothing_to_say_of_is_left_out(
    opened: Open, serving: Callable[..., str], files: list[Path]
) -> None:
    page = opened(serving(services.served(("entropy",), decided=False)))
    scored(page, files[0])
    for part in ("#layers", "#decision", "#percentile", "#drawing"):
        assert page.locator(part).is_hidden(), part
    assert page.locator("#scores").is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_axe_finds_no_barrier(
    opened: Open,
    serving: Callable[..., str],
    files: list[Path],
    axe: str,
    path: str,
    width: int,
    scheme: str,
) -> None:
    address = serving(token=services.TOKEN)
    page = opened(address, width, scheme)
    if path == "/":
        page.get_by_label("Token").fill(services.TOKEN)
        scored(page, files[0])
    else:
        page.goto(address + path)
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert [(v["id"], [n["html"] for n in v["nodes"]]) for v in found["violations"]] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_page(
    opened: Open, usual: str, tmp_path: Path, width: int
) -> None:
    page = opened(usual, width)
    wide = tmp_path / f"{'a-long-name-' * 12}.png"
    Image.fromarray(np.zeros((40, 900), np.uint8)).save(wide)
    scored(page, wide)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.goto(f"{usual}/docs")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
