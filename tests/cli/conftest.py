"""Folders to run commands in, and commands that may not load a model."""

from pathlib import Path

import pytest
from PIL import Image

from qualms.data import load

STORY = "Once upon a time, there was a little girl."


@pytest.fixture
def here(weights_here: Path) -> Path:
    """The weights of a network for digits, and two folders of pictures of digits."""
    for folder, first in (("pictures", 0), ("known", 6)):
        (weights_here / folder).mkdir()
        for i, image in enumerate(load("digits").pixels[first : first + 6]):
            Image.fromarray(image[0].numpy()).save(weights_here / folder / f"{i:02d}.png")
    return weights_here


@pytest.fixture
def data_here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is the folder of datasets as well."""
    monkeypatch.setenv("QUALMS_DATA", str(workdir))
    monkeypatch.setenv("COLUMNS", "200")
    return workdir


@pytest.fixture(scope="session")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny language model."""
    from tests.helpers.tiny_llama import write_language_model

    return write_language_model(tmp_path_factory.mktemp("model") / "lm")


@pytest.fixture
def story_here(workdir: Path, language_model: Path) -> Path:
    """A language model and a text."""
    (workdir / "lm").symlink_to(language_model)
    (workdir / "story.txt").write_text(STORY)
    return workdir


@pytest.fixture
def no_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading a model an error, to test that invalid options are refused before."""
    from qualms.cli import input_texts, scoring_run

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded first")

    monkeypatch.setattr(scoring_run, "load_network", fail)
    monkeypatch.setattr(input_texts, "load_language_model", fail)
