"""The token and the limits: each holds, and each refusal is one sentence of JSON."""

import asyncio
import hmac
import json
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from qualms import QualmsError
from qualms.data import ImageTransform
from qualms.service.config import ServiceConfig
from qualms.service.scoring import ScoreRequest, ScoreResponse
from qualms.service.uploads import ImageReader
from tests.helpers.servers import OPEN, bomb
from tests.helpers.services import TOKEN, client, pixels, png, refused, run_async, upload, usual

pytestmark = pytest.mark.serve
CLOSED = (
    "/v1/model",
    "/metrics",
    "/v2",
    "/v2/models/digits",
    "/v2/models/digits/ready",
    "/anything/else",
)


# The token.


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer é",
    ],
)
def test_paths_that_are_not_public_need_the_token(path: str, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode()}
    answer = client(token=TOKEN).get(path, headers=headers)
    refused(answer, 401, "the token is missing or wrong")
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/v1/score", "/v2/models/digits/infer"])
def test_without_the_token_not_even_the_body_is_read(path: str) -> None:
    answer = raw(client(token=TOKEN).app, b"{", b"}", path=path)
    assert answer.status == 401
    assert "the token is missing or wrong" in answer.error
    assert answer.read == 0


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_with_the_token_everything_is_answered(scheme: str) -> None:
    ask = client(token=TOKEN)
    ask.headers["Authorization"] = f"{scheme} {TOKEN}"
    assert [ask.get(path).status_code for path in CLOSED] == [200] * 5 + [404]
    assert ask.post("/v1/score", files=upload(0)).status_code == 200


@pytest.mark.parametrize("path", OPEN)
def test_probes_and_pages_need_no_token_and_hold_no_scores(path: str) -> None:
    answer = client(token=TOKEN).get(path)
    assert answer.status_code == 200
    assert TOKEN not in answer.text
    about = client().get("/v1/model").json()
    assert not any(str(score) in answer.text for score in [about["threshold"], *about["reference"]])
    assert "seven" not in answer.text
    shown = {about[name] for name in ("model_hash", "rule") if about[name] in answer.text}
    assert shown == (
        {about["model_hash"], about["rule"]} if path == "/" else set()
    )  # as the docs say


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    client(token=TOKEN).get("/v1/model", headers={"Authorization": "Bearer wrong"})
    assert compared == [(b"wrong", TOKEN.encode())]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_addresses_than_the_loopback_need_a_token(host: str) -> None:
    with pytest.raises(QualmsError, match="could use the service"):
        ServiceConfig(host=host)
    assert ServiceConfig(host=host, token=TOKEN).host == host
    assert ServiceConfig().host == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/v1/model", "/v1/score"])
def test_a_page_elsewhere_cannot_take_the_services_place_in_a_browser(path: str) -> None:
    """DNS rebinding: a page whose name points to this machine. With a token, it lacks that."""
    other = {"Host": "evil.example:8000"}
    open_, guarded = client(), client(token=TOKEN)
    ask = open_.post if path == "/v1/score" else open_.get
    refused(ask(path, headers=other), 403, "127.0.0.1 and localhost are answered")
    assert ask(path, headers={"Host": "localhost:8000"}).status_code in (200, 415)
    assert (
        guarded.get("/v1/model", headers={**other, "Authorization": f"Bearer {TOKEN}"}).status_code
        == 200
    )


@pytest.mark.parametrize(
    "token", ["", "short", "sixteen spaces  and more", "ключ-ключ-ключ-ключ", "x" * 20 + "\n"]
)
def test_a_token_that_protects_nothing_is_refused(token: str) -> None:
    with pytest.raises(QualmsError, match="the token in QUALMS_TOKEN is invalid"):
        ServiceConfig(token=token)


def test_a_token_is_not_shown_with_the_settings() -> None:
    assert TOKEN not in repr(ServiceConfig(token=TOKEN))


# How large.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("batch", "waiting", "max_body", "max_images", "max_pixels")
            for value in (0, -1)
        ),
        *(("deadline", value) for value in (0.0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_a_limit_that_limits_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(
        QualmsError,
        match=f"limit '{name}' is {value}",
    ):
        ServiceConfig(**{name: value})


@dataclass(frozen=True)
class Raw:
    """An answer, and how many parts of the body were read for it."""

    status: int | None
    error: str
    read: int


def raw(
    app: Any, *parts: bytes, path: str = "/v1/score", gone: bool = False, **headers: str
) -> Raw:
    """Send a request whose body has these parts and no end; with `gone`, the client disconnects."""
    left, sent = list(parts), list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if left:
            return {"type": "http.request", "body": left.pop(0), "more_body": True}
        return {"type": "http.disconnect"} if gone else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    named = {
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    fields = [(name.encode(), value.encode()) for name, value in named.items()]
    run_async(
        app({**scope, "headers": fields, "http_version": "1.1", "scheme": "http"}, receive, send)
    )
    status, error = (
        (sent[0]["status"], json.loads(sent[1]["body"])["error"]) if sent else (None, "")
    )
    return Raw(status, error, len(parts) - len(left))


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    answer = raw(client(max_body=1000, deadline=5.0).app, b"{", content_length="1001")
    assert answer.status == 413
    assert "1,000 bytes" in answer.error
    assert answer.read == 0


@pytest.mark.parametrize("path", ["/v1/score", "/v2/models/digits/infer"])
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b"])
def test_a_body_of_no_stated_length_is_cut_off(path: str, kind: str) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'.ljust(
        100
    )
    answer = raw(
        client(max_body=1000, deadline=5.0).app,
        head,
        *[b"x" * 100] * 1000,
        path=path,
        content_type=kind,
    )
    if "form" in kind and "infer" in path:  # which takes JSON alone
        assert (answer.status, answer.read) == (415, 0)
        return
    assert answer.status == 413
    assert "1,000 bytes" in answer.error
    assert answer.read == 11  # of 1001


@pytest.mark.parametrize("path", ["/v1/score", "/v2/models/digits/infer"])
@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b"])
def test_a_client_that_leaves_during_the_upload_is_no_error(
    path: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ask = client()
    answer = raw(ask.app, b"--b", path=path, gone=True, content_type=kind)
    assert answer.status is None or answer.status == 415
    assert caplog.text == ""
    assert "qualms_waiting 0.0" in ask.get("/metrics").text


@pytest.mark.parametrize(
    ("width", "height"), [(6000, 6000), (50_000, 50_000), (2**31 - 1, 2**31 - 1)]
)
def test_a_decompression_bomb_is_refused_before_it_is_decoded(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    real = ImageFile.ImageFile.load
    monkeypatch.setattr(
        ImageFile.ImageFile, "load", lambda image: loaded.append("loaded") or real(image)
    )
    answer = client().post("/v1/score", files=[("images", ("bomb.png", bomb(width, height)))])
    refused(answer, 413, "more than 25,000,000 pixels")
    assert loaded == []


def test_the_limit_on_pixels_is_for_all_images_together() -> None:
    ask = client(max_pixels=3 * 64)
    assert ask.post("/v1/score", files=upload(0, 1, 2)).status_code == 200
    refused(ask.post("/v1/score", files=upload(0, 1, 2, 3)), 413, "more than 192 pixels")
    arrays = [pixels(i).tolist() for i in range(4)]
    assert ask.post("/v1/score", json={"images": arrays[:3]}).status_code == 200
    refused(ask.post("/v1/score", json={"images": arrays}), 413, "more than 192 pixels")
    tensor = {"name": "images", "shape": [2, 2**20, 2**20], "datatype": "UINT8", "data": [0]}
    refused(
        ask.post("/v2/models/digits/infer", json={"inputs": [tensor]}), 413, "more than 192 pixels"
    )


def test_an_image_that_is_long_and_thin_is_not_made_large(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = Image.Image.resize
    monkeypatch.setattr(
        Image.Image,
        "resize",
        lambda one, size, *more: made.append(size[0] * size[1]) or real(one, size, *more),
    )
    own = usual()
    ask = client(
        replace(
            own,
            network=replace(own.network, transform=ImageTransform((8, 8), resize=100, channels=1)),
        )
    )
    thin = np.zeros((1, 20_000), np.uint8)
    tensor = {
        "name": "images",
        "shape": [1, 20_000, 1],
        "datatype": "UINT8",
        "data": thin.ravel().tolist(),
    }
    assert ask.post("/v1/score", files=[("images", ("thin.png", png(thin)))]).status_code == 200
    assert ask.post("/v1/score", json={"images": [thin.tolist()]}).status_code == 200
    assert ask.post("/v2/models/digits/infer", json={"inputs": [tensor]}).status_code == 200
    assert made == [100 * 10_000] * 3


def test_the_number_of_images_is_limited() -> None:
    ask = client(max_images=2)
    for count, status in ((2, 200), (3, 413), (9, 413)):
        assert ask.post("/v1/score", files=upload(*range(count))).status_code == status
        arrays = [pixels(0).tolist()] * count
        assert ask.post("/v1/score", json={"images": arrays}).status_code == status
        tensor = {"name": "images", "shape": [count, 8, 8], "datatype": "UINT8", "data": arrays}
        assert ask.post("/v2/models/digits/infer", json={"inputs": [tensor]}).status_code == status


# How many and how long.


class Slow:
    """A scoring function that responds once `go` is set."""

    def __init__(self) -> None:
        self.requests, self.go = 0, threading.Event()

    async def __call__(self, request: ScoreRequest) -> ScoreResponse:
        self.requests += 1
        while not self.go.is_set():
            await asyncio.sleep(0.01)
        result = {
            "prediction": 0,
            "class_name": None,
            "confidence": 1.0,
            "scores": {},
            "percentile": None,
        }
        return ScoreResponse(
            [{**result, "decision": None, "layers": None}] * len(request.images), 1
        )


def test_one_request_too_many_is_answered_429() -> None:
    slow = Slow()
    with client(ask=slow, waiting=3) as ask:
        found: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: found.append(ask.post("/v1/score", files=upload(0)).status_code)
            )
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while slow.requests < 3 and time.monotonic() < until:
            time.sleep(0.01)
        answer = ask.post("/v1/score", files=upload(0))
        refused(answer, 429, "too many requests are waiting (3)")
        assert int(answer.headers["retry-after"]) >= 1
        assert ask.get("/healthz").status_code == 200  # probes are answered all the same
        assert "qualms_waiting 3.0" in ask.get("/metrics").text
        slow.go.set()
        for thread in threads:
            thread.join(30)
        assert found == [200] * 3
        assert ask.post("/v1/score", files=upload(0)).status_code == 200
        assert 'qualms_requests_total{route="none",status="429"} 1.0' in ask.get("/metrics").text


def test_scores_that_do_not_come_in_time_are_not_waited_for() -> None:
    with client(ask=Slow(), deadline=0.2) as ask:
        began = time.monotonic()
        refused(ask.post("/v1/score", files=upload(0)), 504, "were not ready within 0.2 s")
        assert time.monotonic() - began < 5


def test_a_request_keeps_its_place_until_nothing_is_scored_for_it() -> None:
    slow = Slow()
    with client(ask=slow, deadline=0.5, waiting=1) as ask:
        refused(ask.post("/v1/score", files=upload(0)), 504, "were not ready within 0.5 s")
        assert "qualms_waiting 1.0" in ask.get("/metrics").text
        refused(ask.post("/v1/score", files=upload(0)), 429, "too many requests are waiting (1)")
        assert slow.requests == 1
        slow.go.set()
        until = time.monotonic() + 30
        while "qualms_waiting 1.0" in ask.get("/metrics").text and time.monotonic() < until:
            time.sleep(0.01)
        assert ask.post("/v1/score", files=upload(0)).status_code == 200


@pytest.mark.parametrize(
    ("response", "status", "words"),
    [
        (ScoreResponse(None, timed_out=True), 504, "waited too long to be scored"),
        (ScoreResponse(None, failed=True), 500, "could not be scored"),
        (ScoreResponse(None), 422, "cannot score images of 8 x 8 pixels"),
    ],
)
def test_the_answer_tells_why_there_are_no_scores(
    response: ScoreResponse, status: int, words: str
) -> None:
    async def none(_: ScoreRequest) -> ScoreResponse:
        return response

    refused(client(ask=none).post("/v1/score", files=upload(0)), status, words)


def test_an_image_that_is_still_decoded_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    go, real = threading.Event(), ImageReader.read_files
    monkeypatch.setattr(ImageReader, "read_files", lambda *given: go.wait(30) and real(*given))
    with client(deadline=3.0, waiting=1) as ask:
        refused(ask.post("/v1/score", files=upload(0)), 504, "were not ready within 3 s")
        assert "qualms_waiting 1.0" in ask.get("/metrics").text
        refused(ask.post("/v1/score", files=upload(0)), 429, "too many requests are waiting (1)")
        go.set()
        until = time.monotonic() + 30
        while "qualms_waiting 1.0" in ask.get("/metrics").text and time.monotonic() < until:
            time.sleep(0.01)
        assert ask.post("/v1/score", files=upload(0)).status_code == 200


def test_images_are_decoded_in_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """LitServe waits for its responses in those of asyncio."""
    used: list[str] = []
    real = ImageReader.read_arrays

    def seen(*given: Any) -> Any:
        used.append(threading.current_thread().name)
        return real(*given)

    monkeypatch.setattr(ImageReader, "read_arrays", seen)
    tensor = {"name": "images", "shape": [1, 8, 8], "datatype": "UINT8", "data": pixels(0).tolist()}
    ask = client()
    assert ask.post("/v1/score", json={"images": [pixels(0).tolist()]}).status_code == 200
    assert ask.post("/v2/models/digits/infer", json={"inputs": [tensor]}).status_code == 200
    assert len(used) == 2
    assert all(name.startswith("decode") for name in used)


def test_a_body_that_does_not_arrive_is_not_waited_for() -> None:
    answer = raw(client(deadline=0.2).app, b'{"images": ')
    assert answer.status == 408
    assert answer.error == "the body did not arrive within 0.2 s; send it faster, or a smaller one."
