"""Slow, numerous, vanished and malicious clients, and networks that raise or hang: other clients are
answered all the same.
"""

import json
import re
import resource
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qualms.service.batching import BatchClient
from qualms.service.connection import MAX_HEAD_BYTES
from tests.helpers.servers import HERE, OPEN, PATIENCE, Running, bomb, image
from tests.helpers.services import TOKEN, client, pixels, png, run_async

pytestmark = pytest.mark.serve
DEADLINE = 3.0
WAITING = 16
CONNECTIONS = 1000
MEGABYTE = 2**20
HOST = b"Host: 127.0.0.1\r\n"
JSON = b"Content-Type: application/json\r\n"
FORM = b"Content-Type: multipart/form-data; boundary=b\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
PART = b'--b\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
GOOD = json.dumps(image(0)).encode()
BLACK, WHITE = ({"images": [[[level] * 8] * 8]} for level in (0, 255))
# What tells how the service is made: traces, files, Python's names of errors, addresses of objects.
TOLD = re.compile(
    r"Traceback|\.py\b|site-packages|/home|/usr|/work|\b[A-Z]\w*(Error|Exception)\b|0x[0-9a-f]{6}|a secret"
)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service that may open enough files for all clients of these tests."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4 * CONNECTIONS), most))
    log = tmp_path_factory.mktemp("service") / "log"
    words = ["--model", f"{HERE}:touchy", "--deadline", str(DEADLINE), "--waiting", str(WAITING)]
    one = Running("--methods", "entropy", *words, log=log)
    try:
        one.wait_until_ready()
        yield one
        assert "Traceback" not in log.read_text()  # nothing of this is a defect of the service
    finally:
        one.stop()
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, most))


def connected(service: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=30)


def post(
    body: bytes, *, head: bytes = JSON, path: bytes = b"/v1/score", length: int | None = None
) -> bytes:
    size = (
        b""
        if CHUNKED in head
        else b"Content-Length: %d\r\n" % (len(body) if length is None else length)
    )
    return b"POST %b HTTP/1.1\r\n%b%b%b\r\n%b" % (path, HOST, head, size, body)


def answer(of: socket.socket) -> tuple[int, str]:
    """Receive one answer as status and body; check that nothing in it names the implementation."""
    found = b""
    while b"\r\n\r\n" not in found:
        more = of.recv(65_536)
        assert more, f"the connection was closed after {found!r}"
        found += more
    head, _, body = found.partition(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head.lower())[1])  # type: ignore[index]
    while len(body) < length:
        body += of.recv(65_536)
    assert not TOLD.search(found.decode())
    return int(head.split()[1]), body.decode()


def asked(service: Running, request: bytes) -> tuple[int, str]:
    with connected(service) as one:
        one.sendall(request)
        return answer(one)


def sentence(found: tuple[int, str], *statuses: int) -> str:
    """Check that an answer is a refusal, and return its one sentence."""
    status, body = found
    assert status in statuses, body
    assert list(json.loads(body)) == ["error"]
    return str(json.loads(body)["error"])


def settled(service: Running) -> None:
    """Wait until no request is being handled."""
    until = time.monotonic() + PATIENCE
    while "qualms_waiting 0.0" not in service.ask("/metrics")[1]:
        assert time.monotonic() < until
        time.sleep(0.05)


def web_side(service: Running) -> psutil.Process:
    """Find the process that answers HTTP, which starts last."""
    return max(service.family(), key=lambda process: process.create_time())


def handles(service: Running) -> int:
    """Count the open files of the process that answers HTTP, without those of its threads: each
    opens the queue of the network once.
    """
    web = web_side(service)
    return web.num_fds() - web.num_threads()


# What is no request.


@pytest.mark.parametrize(
    "request_",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"FROB /v1/score HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: a\x00b\r\n\r\n",
        post(GOOD, head=JSON + b"Content-Length: 3\r\n"),
        post(GOOD, head=JSON + b"Content-Length: %d\r\n" % len(GOOD)),
        post(GOOD, length=-1),
        post(GOOD, length=2**64),
        post(GOOD, length=10**30),
        b"POST /v1/score HTTP/1.1\r\nContent-Length: 3, 4\r\n\r\nabc",
        b"POST /v1/score HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/score HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        post(b"zz\r\nhello\r\n0\r\n\r\n", head=JSON + CHUNKED),
        post(b"F" * 17 + b"\r\nhello\r\n0\r\n\r\n", head=JSON + CHUNKED),
    ],
    ids=lambda request: repr(request[:30] + request[-30:]),
)
def test_what_is_no_request_is_told_so_in_one_sentence(service: Running, request_: bytes) -> None:
    assert "not a valid HTTP/1.1 request" in sentence(asked(service, request_), 400)


def test_a_body_in_many_small_pieces_is_answered_as_a_whole_one_is(service: Running) -> None:
    status, whole = asked(service, post(GOOD))
    pieces = b"".join(b"1;of=many\r\n%c\r\n" % byte for byte in GOOD) + b"0\r\n\r\n"
    assert asked(service, post(pieces, head=JSON + CHUNKED))[0] == status == 200
    _, found = asked(service, post(pieces, head=JSON + CHUNKED))
    assert json.loads(found)["results"] == json.loads(whole)["results"]


@pytest.mark.parametrize(
    "endless", [b"X: " + b"y" * 1000 + b"\r\n", b"y" * 1000], ids=["many", "one long"]
)
def test_headers_without_end_are_cut_off(service: Running, endless: bytes) -> None:
    before, sent = web_side(service).memory_info().rss, 0
    with connected(service) as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: y")
        try:
            while sent < 64 * MEGABYTE:
                one.sendall(endless * 64)
                sent += 64 * len(endless)
        except OSError:  # closed
            pass
    assert sent < 32 * MEGABYTE, (
        "headers of any size were accepted"
    )  # what the machine itself holds for a connection is in it
    assert web_side(service).memory_info().rss - before < 4 * MEGABYTE
    assert service.ask("/healthz")[0] == 200


def test_who_sends_headers_that_are_too_large_is_told(service: Running) -> None:
    with connected(service) as one:
        one.sendall(b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: " + b"y" * MAX_HEAD_BYTES)
        assert "more than 65,536 bytes" in sentence(answer(one), 431)


# Slow, gone, and many.


def trickled(service: Running, begin: bytes, more: bytes) -> tuple[list[tuple[int, str]], float]:
    """Send bytes slowly, one now and then, until the connection is closed.

    Returns:
        The answers, and how long the connection stays open.
    """
    with connected(service) as one:
        began, found = time.monotonic(), b""
        one.sendall(begin)
        one.settimeout(0.1)
        while time.monotonic() - began < 10 * DEADLINE:
            try:
                part = one.recv(65_536)
                if not part:
                    break
                found += part
            except TimeoutError:
                pass
            except OSError:
                break
            try:
                one.sendall(more)
            except OSError:
                break
        took = time.monotonic() - began
    if not found:
        return [], took
    head, _, body = found.partition(b"\r\n\r\n")
    assert not TOLD.search(found.decode())
    return [(int(head.split()[1]), body.decode())], took


@pytest.mark.slow
def test_a_client_that_trickles_is_let_go_and_others_are_answered(service: Running) -> None:
    head = b"GET /healthz HTTP/1.1\r\n" + HOST
    cases: dict[str, tuple[bytes, bytes, int | None, float]] = {
        "says nothing": (b"", b"", None, 1),
        "headers": (head, b"X", 408, 1),
        "headers that stop": (head, b"", 408, 1),
        "body": (post(GOOD[:9], length=5000), b" ", 408, 2),
        "body that stops": (post(GOOD[:9], length=5000), b"", 408, 2),
        "body in chunks": (post(b"", head=JSON + CHUNKED), b"1\r\n \r\n", 408, 2),
        "form": (post(PART, head=FORM, length=5000), b"x", 408, 2),
        "a body that nobody reads": (
            post(b"x", head=b"Content-Type: text/plain\r\n", length=5000),
            b" ",
            415,
            2,
        ),
    }
    with ThreadPoolExecutor(8 * len(cases)) as pool:
        slow = {
            name: [pool.submit(trickled, service, begin, more) for _ in range(2)]
            for name, (begin, more, *_) in cases.items()
        }
        for _ in range(5):
            assert service.ask("/v1/score", image(0))[0] == 200
        for name, (_, _, status, deadlines) in cases.items():
            for one in slow[name]:
                found, took = one.result(PATIENCE)
                assert [each[0] for each in found] == ([] if status is None else [status]), name
                if status is not None:
                    assert sentence(found[0], status)
                assert took < deadlines * DEADLINE + 5, name  # and not until the client is tired
    settled(service)


@pytest.mark.slow
def test_a_thousand_at_once_are_answered_or_told_to_come_back(service: Running) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * CONNECTIONS:
        pytest.skip("this machine does not allow as many open files")
    settled(service)
    before = handles(service)
    with ExitStack() as stack:
        clients: list[socket.socket] = []
        for _ in range(CONNECTIONS):
            clients.append(stack.enter_context(connected(service)))
            clients[-1].sendall(post(GOOD))  # at once: a connection that says nothing is closed
        assert service.ask("/healthz")[0] == 200
        found = [answer(one) for one in clients]
    statuses = [status for status, _ in found]
    assert set(statuses) <= {200, 429, 504}  # the last where the machine has much else to do
    assert 200 in statuses
    scores = [
        json.loads(body)["results"][0]["scores"]["entropy"]
        for status, body in found
        if status == 200
    ]
    assert scores == pytest.approx([scores[0]] * len(scores), rel=1e-5)
    assert service.ask("/v1/score", image(0))[0] == 200
    until = time.monotonic() + PATIENCE
    while handles(service) > before + 2:  # a connection or two of ours
        assert time.monotonic() < until, "connections stay open"
        time.sleep(0.1)


def answered_within(service: Running, seconds: float) -> bool:
    """Whether a client that retries when it cannot connect gets an answer by then."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return bool(service.ask("/v1/score", image(0))[0] == 200)
        except OSError:
            time.sleep(0.2)
    return False


@pytest.mark.slow
def test_silent_clients_that_take_all_connections_lose_them_at_the_deadline(
    service: Running,
) -> None:
    web = web_side(service).pid
    least, most = resource.prlimit(web, resource.RLIMIT_NOFILE)
    resource.prlimit(web, resource.RLIMIT_NOFILE, (web_side(service).num_fds() + 20, most))
    try:
        with ExitStack() as stack:
            for _ in range(100):
                stack.enter_context(connected(service))
            assert answered_within(service, DEADLINE + 10)
    finally:
        resource.prlimit(web, resource.RLIMIT_NOFILE, (least, most))


def form(*parts: bytes) -> bytes:
    return post(b"".join(PART + part + b"\r\n" for part in parts) + b"--b--\r\n", head=FORM)


NESTED = b'{"inputs":' + b"[" * 5000 + b"]" * 5000 + b"}"
ABUSE: list[
    tuple[bytes, int]
] = [  # a request, and after how many of its bytes the client leaves; -1: it waits
    (post(GOOD), -1),
    (post(GOOD), len(post(GOOD))),
    (post(GOOD), len(post(GOOD)) - 40),
    (form(b"x" * 3 * MEGABYTE), 2 * MEGABYTE),  # what starlette keeps in a file by then
    (form(b"x" * 3 * MEGABYTE), -1),
    (form(bomb(50_000, 50_000)), -1),
    (form(png(pixels(0))[:60]), -1),
    (form(*[b"x"] * 40), -1),
    (post(json.dumps(BLACK).encode()), -1),
    (post(NESTED, path=b"/v2/models/digits/infer"), -1),
    (post(b'{"images": [[["' + b"x" * MEGABYTE + b'"]]]}'), -1),
    (post(b"", length=10**9), -1),
    (b"\x00" * 1000 + b"\r\n\r\n", -1),
    (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", -1),
    (b"GET /healthz HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 4000, -1),
]


def abuse(service: Running, rounds: int) -> None:
    for _ in range(rounds):
        for request, sent in ABUSE:
            with connected(service) as one:
                if sent >= 0:
                    one.sendall(request[:sent])
                    continue
                one.sendall(request + (b"\r\n" if request.endswith(b"X: y\r\n") else b""))
                status, body = answer(one)
                if status != 200:
                    sentence((status, body), 400, 404, 413, 422, 429, 431)
    settled(service)


@pytest.mark.slow
def test_hundreds_of_abusive_requests_leave_neither_memory_nor_files_behind(
    service: Running,
) -> None:
    def held() -> tuple[float, int]:
        family = service.family()
        return sum(p.memory_info().rss for p in family) / MEGABYTE, sum(p.num_fds() for p in family)

    abuse(service, 8)
    before, files = held()
    for _ in range(3):
        abuse(service, 8)
        after, now = held()
    assert after - before < 16  # megabytes, over 360 requests
    assert now <= files + 2
    assert service.ask("/v1/score", image(0))[0] == 200


# Networks.


def test_a_network_that_raises_fails_the_request_alone_and_tells_nothing(service: Running) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(
            pool.map(
                lambda i: (i, *service.ask("/v1/score", image(i) if i % 2 else BLACK)), range(8)
            )
        )
    for i, status, said in found:
        assert status == (200 if i % 2 else 422), said
        assert not TOLD.search(json.dumps(said))
    assert "a secret" in service.log.read_text()  # the log has the details


@pytest.mark.slow
def test_a_network_that_hangs_ends_the_service_with_a_sentence(tmp_path: Path) -> None:
    words = ["--model", f"{HERE}:touchy", "--methods", "entropy", "--deadline", "2"]
    one = Running(*words, log=tmp_path / "log")
    try:
        one.wait_until_ready()
        three = {"images": [*image(0)["images"], *image(1)["images"], *WHITE["images"]]}
        began = time.monotonic()
        status, said = one.ask("/v1/score", three)
        assert (status, "were not ready within 2 s" in said["error"]) == (504, True)
        assert one.ask("/readyz")[0] == 200  # it may only be slow
        while one.ask("/readyz")[0] == 200:
            assert time.monotonic() - began < 7
            time.sleep(0.05)
        assert time.monotonic() - began > 4  # as long again
        assert one.ask("/readyz")[1]["status"] == "hangs"
        status, said = one.ask("/v1/score", image(0))
        assert (status, "the network is not responding" in said["error"]) == (503, True)
        assert one.ask("/healthz")[0] == 200
        assert one.process.poll() is None
        family = one.family()
        assert one.process.wait(PATIENCE) == 1
        assert time.monotonic() - began > 8  # the deadline for each of three, and once more
        assert psutil.wait_procs(family, timeout=30)[1] == []
        log = one.log.read_text()
        assert "qualms: the network took more than 8 s for a batch of 3" in log
        assert "services.py" in log  # where it was
        assert log.rstrip().splitlines()[-1].startswith("qualms: the worker process exited")
    finally:
        one.stop()


def test_a_request_without_a_response_for_two_deadlines_means_that_the_network_hangs() -> None:
    client_ = BatchClient(deadline=5.0)
    assert not client_.is_hung
    client_.pending["one"] = time.monotonic() - 9
    assert not client_.is_hung
    client_.pending["other"] = time.monotonic() - 11
    assert client_.is_hung


# Paths, numbers and names.


NUMBERS = [
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"1e999",
    b"-1e999",
    b"9" * 400,
    b"-" + b"9" * 400,
    b"9" * 50_000,
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:12].decode())
def test_numbers_that_no_pixel_has_are_refused(number: bytes) -> None:
    ask, head = client(), {"content-type": "application/json"}
    tensor = (
        b'{"inputs": [{"name": "images", "shape": [1, 1, 1], "datatype": "FP32", "data": [%b]}]}'
    )
    shape = (
        b'{"inputs": [{"name": "images", "shape": [1, 1, %b], "datatype": "FP32", "data": [0]}]}'
    )
    infer = "/v2/models/digits/infer"
    for path, body in (
        ("/v1/score", b'{"images": [[[%b]]]}' % number),
        ("/v1/score", b'{"images": [[[0]]], "white": %b}' % number),
        (infer, tensor % number),
        (infer, shape % number),
    ):
        found = ask.post(path, content=body, headers=head)
        sentence((found.status_code, found.text), 400, 413, 422)
        assert not TOLD.search(found.text)


@pytest.mark.parametrize("depth", [10, 150, 250, 100_000])
@pytest.mark.parametrize(
    ("start", "end"), [(b"[", b"]"), (b'{"a":', b"}")], ids=["lists", "objects"]
)
def test_json_that_is_nested_deep_is_refused(depth: int, start: bytes, end: bytes) -> None:
    ask, head = client(), {"content-type": "application/json"}
    nested = start * depth + b"0" + end * depth
    for path, body in (
        ("/v1/score", nested),
        ("/v1/score", b'{"images": %b}' % nested),
        ("/v1/score", b'{"images": [[[0]]], "x": %b}' % nested),
        ("/v2/models/digits/infer", b'{"inputs": %b}' % nested),
        (
            "/v2/models/digits/infer",
            b'{"inputs": [{"name": "images", "shape": [1, 1, 1], "datatype": "UINT8", "data": [%b]}]}'
            % nested,
        ),
    ):
        found = ask.post(path, content=body, headers=head)
        sentence((found.status_code, found.text), 400, 422)
        assert not TOLD.search(found.text)


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
PIECES = [
    "v1",
    "v2",
    "score",
    "model",
    "models",
    "digits",
    "infer",
    "healthz",
    "docs",
    "metrics",
    "..",
    ".",
    "",
    "%00",
    "é",
]
paths = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=5).map(
    lambda parts: "/" + "/".join(parts)
)


def spoken(app: Any, method: str, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str]:
    """Send an app a request with any path, even an invalid one, as uvicorn does."""
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
    }
    run_async(
        app({**scope, "headers": headers, "http_version": "1.1", "scheme": "http"}, receive, send)
    )
    return sent[0]["status"], b"".join(part.get("body", b"") for part in sent[1:]).decode()


@given(st.sampled_from(METHODS), paths)
@settings(max_examples=60)
def test_an_address_of_any_kind_is_answered_or_refused_in_one_sentence(
    method: str, path: str
) -> None:
    status, body = spoken(OPEN_APP, method, path, [(b"host", b"localhost")])
    assert not TOLD.search(body)
    if status != 200:
        assert sentence((status, body), 404, 405, 415)


@given(st.sampled_from(METHODS), paths, st.binary(max_size=40))
@settings(max_examples=150)
def test_no_spelling_of_an_address_gets_round_the_token(
    method: str, path: str, token: bytes
) -> None:
    for header in (
        b"",
        b"Bearer " + token,
        b"Bearer " + TOKEN.encode()[:-1] + token[:1].swapcase(),
        token,
    ):
        if path not in OPEN and header.partition(b" ")[2].strip() != TOKEN.encode():
            assert spoken(GUARDED_APP, method, path, [(b"authorization", header)])[0] == 401


OPEN_APP, GUARDED_APP = client().app, client(token=TOKEN).app


@pytest.mark.parametrize("hosts", [("evil.example", "localhost"), ("localhost", "evil.example")])
def test_a_second_name_does_not_hide_a_strange_one(hosts: tuple[str, str]) -> None:
    found = spoken(OPEN_APP, "GET", "/v1/model", [(b"host", host.encode()) for host in hosts])
    assert "127.0.0.1 and localhost" in sentence(found, 403)


@pytest.mark.parametrize("path", ["/v1/score/", "/v1/model/", "/v2/"])
def test_there_are_no_redirects(path: str) -> None:
    """A redirect would go to the name that the client used, over plain HTTP, with the token."""
    found = client().post(path, follow_redirects=False, headers={"Host": "localhost"})
    assert "nothing at this path" in sentence((found.status_code, found.text), 404)


@pytest.mark.parametrize("content", [b"not an image", png(pixels(0))[:60], b"\x89PNG\r\n\x1a\n"])
def test_what_pillow_calls_its_errors_is_not_told(content: bytes) -> None:
    found = client().post("/v1/score", files=[("images", ("a.png", content))])
    assert "a.png is truncated or not an image; send PNG" in sentence(
        (found.status_code, found.text), 422
    )
    assert not TOLD.search(found.text)
