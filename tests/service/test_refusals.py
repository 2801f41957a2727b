"""Invalid requests: refused in one sentence, and nothing of them is opened or loaded."""

import json
import pickle
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile
from pydantic import ValidationError

from qualms.service.schemas import ImageArrays, InferRequest, describe_validation_error
from qualms.service.scoring import ScoreRequest, ScoreResponse
from qualms.service.uploads import ImageReader
from tests.helpers.services import client, pixels, png, refused, upload

pytestmark = pytest.mark.serve


def test_what_is_not_an_image_is_refused_by_name() -> None:
    whole = png(pixels(0))
    cases = {
        "cut.png": whole[: len(whole) // 2],
        "empty.png": b"",
        "text.png": b"not an image",
        "zip.png": b"PK\3\4",
    }
    cases["object.pkl"] = pickle.dumps({"a": 1})
    for name, content in cases.items():
        answer = client().post(
            "/v1/score", files=[("images", ("good.png", whole)), ("images", (name, content))]
        )
        refused(answer, 422, f"{name} is truncated or not an image")


def test_formats_that_start_other_programs_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *words: started.append(words))
    file = BytesIO()
    Image.fromarray(pixels(0)).save(file, "EPS")
    refused(
        client().post("/v1/score", files=[("images", ("a.eps", file.getvalue()))]), 422, "a.eps is"
    )
    assert started == []


def test_a_pickle_is_never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("a pickle was loaded"))
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("a file was loaded"))
    content = pickle.dumps(pixels(0))
    ask = client()
    for kind in ("application/octet-stream", "application/x-pickle", "application/x-npy"):
        refused(
            ask.post("/v1/score", content=content, headers={"content-type": kind}),
            415,
            "multipart/form-data",
        )
    refused(ask.post("/v1/score", files=[("images", ("a.npy", content))]), 422, "not an image")


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1/x"]
)
def test_a_name_in_a_request_is_never_opened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = client()
    opened: list[Any] = []
    real = open
    monkeypatch.setattr(
        "builtins.open",
        lambda path, *more, **rest: opened.append(path) or real(path, *more, **rest),
    )
    answer = ask.post("/v1/score", files=[("images", (name, png(pixels(0))))])
    assert answer.status_code == 200
    assert answer.json()["results"][0]["id"] == name
    for body in (
        {"path": name},
        {"images": name},
        {"images": [name]},
        {"images": [[[0]]], "model": name},
    ):
        assert ask.post("/v1/score", json=body).status_code == 422
    for path in (f"/v1/score?model={name}", f"/v1/score?weights={name}"):
        assert ask.post(path, files=upload(0)).json()["model"] == "digits"
    assert ask.post(f"/v2/models/{name.replace('/', '%2F')}/infer", json={}).status_code in (
        404,
        405,
    )
    assert not any("passwd" in str(path) for path in opened)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "the body is not valid JSON"),
        (b"[" * 100_000, 400, "the body is not valid JSON"),
        (b"[]", 422, "the body is invalid"),
        (b"{}", 422, "images is invalid"),
        (b'{"images": []}', 422, "images is invalid"),
        (b'{"images": [[[0, "1"]]]}', 422, "images.0.0.1 is invalid"),
        (b'{"images": [[[true]]]}', 422, "images.0.0.0 is invalid"),
        (b'{"images": [[[NaN]]]}', 422, "images.0.0.0 is invalid"),
        (b'{"images": [[[1e999]]]}', 422, "images.0.0.0 is invalid"),
        (b'{"images": [[[256]]]}', 422, "images.0.0.0 is invalid"),
        (b'{"images": [[[0.5]]]}', 422, "image 0 has fractional numbers, but `white` is 255"),
        (b'{"images": [[[2]]], "white": 1}', 422, "image 0 has numbers outside 0 to 1"),
        (b'{"images": [[[0, 1], [0]]]}', 422, "image 0 is not an array of numbers"),
        (b'{"images": [[[[0, 1]]]]}', 422, "image 0 has 2 channels"),
        (b'{"images": [[[0]]], "white": 100}', 422, "white is invalid"),
        (b'{"images": [[[0]]], "extra": 1}', 422, "extra is invalid"),
    ],
)
def test_numbers_that_are_no_image_are_refused(body: bytes, status: int, words: str) -> None:
    refused(
        client().post("/v1/score", content=body, headers={"content-type": "application/json"}),
        status,
        words,
    )


def test_forms_that_hold_something_else_are_refused() -> None:
    ask = client()
    refused(
        ask.post("/v1/score", data={"images": "x"}, files=upload(0)),
        422,
        "parts that are not files named",
    )
    refused(
        ask.post("/v1/score", files=[("other", ("a.png", png(pixels(0))))]),
        422,
        "parts that are not files named",
    )
    refused(
        ask.post("/v1/score", content=b"x", headers={"content-type": "multipart/form-data"}),
        400,
        "form cannot be parsed",
    )
    form = {"content-type": "multipart/form-data; boundary=b"}
    refused(ask.post("/v1/score", content=b"--b--\r\n", headers=form), 422, "has no images")
    refused(ask.post("/v1/score", content=b""), 415, "multipart/form-data")


def test_an_unexpected_error_is_counted_and_answered_without_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(_: ScoreRequest) -> ScoreResponse:
        raise RuntimeError("a secret at /home/somebody/model.py")

    ask = client(ask=broken)
    refused(ask.post("/v1/score", files=upload(0)), 500, "unexpected error")
    assert "a secret" in caplog.text
    assert 'qualms_requests_total{route="/v1/score",status="500"} 1.0' in ask.get("/metrics").text


@pytest.mark.parametrize("path", ["/v1/score", "/v2/models/digits/infer"])
def test_memory_that_runs_out_is_answered_without_a_traceback(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_much(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageReader, "read_arrays", too_much)
    tensor = {"name": "images", "shape": [1, 1, 1], "datatype": "UINT8", "data": [0]}
    body = {"inputs": [tensor]} if "infer" in path else {"images": [[[0]]]}
    refused(client().post(path, json=body), 413, "more memory than is available")
    assert caplog.text == ""


def test_memory_that_runs_out_as_a_file_is_decoded_is_not_the_files_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_much(_: ImageFile.ImageFile) -> None:
        raise MemoryError

    monkeypatch.setattr(ImageFile.ImageFile, "load", too_much)
    refused(client().post("/v1/score", files=upload(0)), 413, "more memory than is available")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ImageArrays, {"images": [[["x"] * 50_000]]}),
        (ImageArrays, {"images": [[["x"]] * 50_000]}),
        (ImageArrays, {"images": [[["x"]]] * 50_000}),
        (InferRequest, {"inputs": [{"shape": ["x"] * 50_000}]}),
        (InferRequest, {"inputs": [{}] * 50_000}),
        (InferRequest, {"outputs": [{}] * 50_000}),
    ],
)
def test_only_the_first_of_many_mistakes_is_looked_for(kind: Any, body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as found:
        kind.model_validate_json(json.dumps(body))
    assert found.value.error_count() <= 102  # as many outputs can be wrong as may be named
    assert describe_validation_error(found.value)[0] == 422


def test_many_unknown_fields_are_one_sentence() -> None:
    body = {"images": [[[0]]]} | {f"unknown {i}": 0 for i in range(50_000)}
    refused(client().post("/v1/score", json=body), 422, "the body has 50,000 errors")


@pytest.mark.parametrize("length", [80, 3_000])
def test_an_error_repeats_no_more_than_a_few_words(length: int) -> None:
    ask, name = client(), "x" * length
    tensor = {"name": "images", "shape": [1, 8, 8], "datatype": "UINT8", "data": pixels(0).tolist()}
    wrong = {"inputs": [tensor], "outputs": [{"name": name}]}
    for answer, words in (
        (ask.post("/v1/score", json={"images": [[[0]]], name: 0}), " is invalid"),
        (
            ask.post("/v1/score", files=[("images", (name, b"not an image"))]),
            " is truncated or not an image",
        ),
        (ask.post("/v2/models/digits/infer", json=wrong), "'; choose from"),
    ):
        refused(answer, 422, "x" * 80 + words)
        assert "x" * 81 not in answer.text


def test_more_outputs_than_there_can_be_are_refused() -> None:
    tensor = {"name": "images", "shape": [1, 8, 8], "datatype": "UINT8", "data": pixels(0).tolist()}
    body = {"inputs": [tensor], "outputs": [{"name": "prediction"}] * 101}
    refused(client().post("/v2/models/digits/infer", json=body), 422, "outputs is invalid")


def test_unknown_paths_are_answered_in_json() -> None:
    refused(client().get("/nothing"), 404, "nothing at this path")
    answer = client().get("/v1/score")
    refused(answer, 405, "does not support the HTTP method")
    assert answer.headers["allow"] == "POST"
    assert json.loads(answer.text)
