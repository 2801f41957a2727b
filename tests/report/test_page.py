"""The report is one well-formed file: sections where there is something to say, names as text,
nothing fetched.
"""

import base64
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import qualms
from qualms import metrics
from qualms.data import Images
from qualms.report.content import Content, Group
from qualms.report.gallery import image_url
from qualms.report.offline import pack_array
from qualms.report.page import write_page
from tests.helpers.pages import Page, check_offline, check_well_formed
from tests.helpers.report_contents import NASTY, bare, full, group

Write = Callable[[Content], "Page"]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda content: Page(
        write_page(content, tmp_path / "report.html", resamples=10).read_text("utf-8")
    )


@pytest.mark.parametrize("content", [full(), bare()], ids=["full", "bare"])
def test_the_page_is_well_formed(write: Write, content: Content) -> None:
    page = write(content)
    check_well_formed(page)


def test_nothing_comes_from_elsewhere(write: Write) -> None:
    page = write(full())
    check_offline(page)


def test_names_are_text_and_never_markup(write: Write) -> None:
    content = full(known=NASTY, title=NASTY)
    nasty_method = {NASTY: content.known.scores["exact"]}
    others = [
        replace(g, name=f"{g.name}{NASTY}", scores={NASTY: g.scores["exact"]})
        for g in content.unknown
    ]
    rows = [{**row, "method": NASTY, "data": NASTY} for row in content.cycles]
    known = replace(content.known, scores=nasty_method)
    page = write(Content(NASTY, known, others, {NASTY: NASTY}, {NASTY: NASTY}, cycles=rows))
    assert "<script>alert" not in page.source
    assert [attrs.get("id") for tag, attrs in page.elements if tag == "script"] == ["data", None]
    assert "b" not in {tag for tag, _ in page.elements}
    assert page.words.count(NASTY) >= 5
    assert page.data["groups"][0]["name"] == NASTY


def test_what_is_missing_is_left_out_or_explained(write: Write) -> None:
    everything = {
        "glance",
        "curves",
        "gallery",
        "layers",
        "learning",
        "roc",
        "lift",
        "accuracy",
        "let-through-2",
    }
    assert everything <= set(write(full()).ids)
    page = write(bare())
    assert everything & set(page.ids) == {"glance", "curves", "gallery"}
    assert not {"#layers", "#learning"} & {attrs.get("href") for _, attrs in page.elements}
    words = " ".join(page.words)
    for why in (
        "There are no ROC curves, because there are no unknown images",
        "There is no lift curve, because the images of",
        "The images of digits have no labels, so no prediction can be called wrong.",
        "Methods cannot be compared on these images",
        "was not among the requested methods. The page opens on",
    ):
        assert why in words


def test_the_page_opens_on_the_default_method_and_marks_it(write: Write) -> None:
    page = write(full())
    chosen = [
        attrs["value"] for tag, attrs in page.elements if tag == "option" and "selected" in attrs
    ]
    assert [page.data["methods"][int(str(number))]["name"] for number in chosen] == ["exact"]
    assert page.words.count("default") == 1
    assert "why-not-default" not in page.ids


def test_methods_that_are_not_for_use_are_folded_away(write: Write) -> None:
    page = write(full())
    assert [
        attrs.get("id") for tag, attrs in page.elements if tag == "tbody" and "hidden" in attrs
    ] == ["folded"]
    assert "flat: only for comparison with the paper." in " ".join(page.words)


def test_layers_are_told_in_words_only_for_methods_that_have_them(write: Write) -> None:
    found = {m["name"]: m["layers"] for m in write(full()).data["methods"]}
    assert [bar["name"] for bar in found["exact"]["bars"]] == [
        "Conv 5×5 · conv1",
        "Conv 3×3 · conv2",
        "Linear · fc",
    ]
    assert "in digits from Linear · fc" in found["exact"]["summary"]
    assert found["wide"]["bars"] == []
    assert found["wide"]["summary"] == (
        "wide does not use gradients, so its scores cannot be split by layer. Those of exact and tied can."
    )


def test_the_page_is_light(write: Write) -> None:
    assert len(write(full()).source) < 400_000


def test_a_network_that_is_always_wrong_has_no_lift(write: Write) -> None:
    known = full().known
    page = write(Content("t", replace(known, labels=known.predicted + 1)))
    assert "lift" not in page.ids
    assert "accuracy" in page.ids


def test_a_network_that_is_always_right_has_a_lift_and_no_raulc(write: Write) -> None:
    known = full().known
    page = write(Content("t", replace(known, labels=known.predicted)))
    assert "lift" in page.ids
    assert "rAULC is undefined" in page.data["methods"][0]["curves"]["lift"]["summary"]


def test_the_table_shows_the_metrics(write: Write) -> None:
    content = full()
    words = " ".join(write(content).words)
    for method, scores in content.known.scores.items():
        for g in content.unknown:
            assert f"{100 * metrics.auroc(scores, g.scores[method]):.1f}" in words
            assert f"{100 * metrics.aupr(scores, g.scores[method]):.1f}" in words
        assert f"{metrics.raulc(scores, content.known.correct):.3f}" in words


def test_scores_arrive_without_a_digit_lost(write: Write) -> None:
    content = full()
    for method in write(content).data["methods"]:
        for g, found in zip(content.groups, method["scores"], strict=True):
            values = np.frombuffer(base64.b64decode(found["bytes"]), f"<{found['kind']}")
            assert (values == g.scores[method["name"]]).all()
    assert pack_array(np.array([0.5, 2.0]))["kind"] == "f4"
    assert pack_array(np.array([0.1]))["kind"] == "f8"
    assert pack_array(np.array([1e300]))["kind"] == "f8"


def test_large_samples_are_thinned_for_drawing(write: Write) -> None:
    content = Content("t", group("digits", 5000, 0, labeled=True), [group("letters", 5000, 1)])
    page = write(content)
    for method in page.data["methods"]:
        for each in method["curves"].values():
            assert all(len(line["x"]) <= 300 for line in each["lines"])
    assert (
        len(page.source) < 1_500_000
    )  # the scores of 10,000 images by four methods, and their names


def test_each_image_is_in_the_file_once(write: Write) -> None:
    data = write(full()).data
    shown = [
        f"{g}/{i}"
        for m in data["methods"]
        for g, both in enumerate(m["gallery"])
        for end in both
        for i in end
    ]
    assert len(shown) == 4 * 3 * 2 * 8
    shown += [f"0/{i}" for i in data["wrong"]]
    assert set(shown) == set(data["images"])
    assert len(data["images"]) < len(shown)


def test_images_are_small_png_files_of_the_right_pixels() -> None:
    from io import BytesIO

    from PIL import Image

    def decoded(images: Images, i: int) -> Image.Image:
        head, content = image_url(images, i).split(",")
        assert head == "data:image/png;base64"
        return Image.open(BytesIO(base64.b64decode(content)))

    color = full().unknown[1].images
    assert (np.asarray(decoded(color, 3)) == color.pixels[3].permute(1, 2, 0).numpy()).all()
    large = Images("large", torch.zeros(1, 1, 300, 200, dtype=torch.uint8), None)
    assert decoded(large, 0).size == (64, 96)
    with pytest.raises(qualms.QualmsError, match="odd has 4 channels"):
        image_url(Images("odd", torch.zeros(1, 4, 2, 2, dtype=torch.uint8), None), 0)


def test_a_single_image_makes_a_page(write: Write) -> None:
    images = Images("one", torch.zeros(1, 1, 4, 4, dtype=torch.uint8), None)
    page = write(
        Content("t", Group("one", images, {"m": np.array([1.0])}, np.array([0]), np.array([0])))
    )
    assert page.wrong == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(qualms.QualmsError, match=r"report\.html cannot be written"):
        write_page(bare(), tmp_path / "file" / "report.html", resamples=5)
    assert write_page(bare(), str(tmp_path / "new" / "report.html"), resamples=5).exists()
