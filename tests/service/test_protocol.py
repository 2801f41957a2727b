"""The open inference protocol gives the same answers as arrays."""

from typing import Any

import pytest

from tests.helpers.services import NAME, NAMES, REGRAD, client, pixels, served, upload, usual

pytestmark = pytest.mark.serve
PATH = f"/v2/models/{NAME}"


def tensor(data: Any, shape: list[int], datatype: str = "UINT8") -> dict[str, Any]:
    return {"inputs": [{"name": "images", "shape": shape, "datatype": datatype, "data": data}]}


def columns(answer: Any) -> dict[str, list[Any]]:
    assert answer.status_code == 200, answer.text
    return {output["name"]: output["data"] for output in answer.json()["outputs"]}


def test_the_outputs_are_what_the_other_route_answers() -> None:
    ask = client()
    want = ask.post("/v1/score", files=upload(1, 6, 9)).json()["results"]
    images = [pixels(i).tolist() for i in (1, 6, 9)]
    answer = ask.post(f"{PATH}/infer", json={"id": "mine", **tensor(images, [3, 8, 8])})
    found = columns(answer)
    assert answer.json()["id"] == "mine"
    assert answer.json()["model_name"] == NAME
    assert answer.json()["model_version"] == usual().model_info.model_hash
    for key in ("prediction", "class_name", "percentile"):
        assert found[key] == [r[key] for r in want]
    assert found["confidence"] == pytest.approx([r["confidence"] for r in want], rel=1e-6)
    for method in (REGRAD, "entropy"):
        assert found[f"score_{method}"] == pytest.approx(
            [r["scores"][method] for r in want], rel=1e-6
        )
    assert found["accepted"] == [r["decision"] == "accepted" for r in want]
    assert all(output["shape"] == [3] for output in answer.json()["outputs"])


def test_numbers_may_be_flat_with_a_channel_axis_or_from_0_to_1() -> None:
    ask, image = client(), pixels(2)
    want = columns(ask.post(f"{PATH}/infer", json=tensor([image.tolist()], [1, 8, 8])))
    flat = tensor(image.ravel().tolist(), [1, 8, 8, 1])
    shares = tensor((image / 255).ravel().tolist(), [1, 8, 8], "FP32")
    for body in (flat, shares):
        found = columns(ask.post(f"{PATH}/infer", json=body))
        assert found["prediction"] == want["prediction"]
        assert found["score_entropy"] == pytest.approx(want["score_entropy"], rel=1e-6)


def test_only_the_requested_outputs_are_returned() -> None:
    body = {
        **tensor([pixels(0).tolist()], [1, 8, 8]),
        "outputs": [{"name": "accepted"}, {"name": "prediction"}],
    }
    assert list(columns(client().post(f"{PATH}/infer", json=body))) == ["accepted", "prediction"]
    body["outputs"] = [{"name": "weights"}]
    answer = client().post(f"{PATH}/infer", json=body)
    assert answer.status_code == 422
    assert "there is no output 'weights'" in answer.json()["error"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (tensor([0] * 63, [1, 8, 8]), "data does not hold the 64 numbers"),
        (tensor([[0, 1], [2]], [1, 2, 2]), "data does not hold the 4 numbers"),
        (tensor([2**80] * 64, [1, 8, 8]), "data does not hold the 64 numbers"),
        (tensor(["a"] * 64, [1, 8, 8]), "data does not hold the 64 numbers"),
        (tensor([True] * 64, [1, 8, 8]), "data does not hold the 64 numbers"),
        (tensor([300] * 64, [1, 8, 8]), "numbers outside 0 to 255"),
        (tensor([2] * 64, [1, 8, 8], "FP32"), "numbers outside 0 to 1"),
        (tensor([0] * 64, [1, 8, 8], "BYTES"), "inputs.0.datatype"),
        (tensor([0] * 64, [64]), "inputs.0.shape"),
        (tensor([0] * 64, [1, -8, -8]), "inputs.0.shape.1"),
        ({"inputs": []}, "inputs"),
        ({**tensor([0] * 64, [1, 8, 8]), "model": "other"}, "model"),
    ],
)
def test_what_is_no_tensor_of_images_is_refused(body: dict[str, Any], words: str) -> None:
    answer = client().post(f"{PATH}/infer", json=body)
    assert answer.status_code == 422
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    "odd",
    ["x" * 1_000_000, None, {}, [0], [[[[[0]]]]]],
    ids=["text", "null", "object", "list", "deep"],
)
def test_data_of_something_else_never_reaches_numpy(
    odd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make room for the longest text at each of the places."""
    ask = client()
    monkeypatch.setattr(
        "qualms.service.protocol.np.asarray", lambda *_: pytest.fail("numpy was called")
    )
    for data in ([0] * 63 + [odd], [odd] + [0] * 63, [[[0] * 8] * 8, odd], [0] * 65, [[0] * 65]):
        answer = ask.post(f"{PATH}/infer", json=tensor(data, [1, 8, 8]))
        assert answer.status_code == 422
        assert "data does not hold the 64 numbers" in answer.json()["error"]


def test_another_type_than_json_is_refused() -> None:
    answer = client().post(
        f"{PATH}/infer", content=b"{}", headers={"content-type": "application/octet-stream"}
    )
    assert answer.status_code == 415
    assert (
        client()
        .post(f"{PATH}/infer", content=b"{", headers={"content-type": "application/json"})
        .status_code
        == 400
    )


def test_the_network_says_what_it_takes_and_gives() -> None:
    ask = client()
    found = ask.get(PATH).json()
    assert found["name"] == NAME
    assert found["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 8, 8, 1]}]
    given = columns(ask.post(f"{PATH}/infer", json=tensor([pixels(0).tolist()], [1, 8, 8])))
    assert [output["name"] for output in found["outputs"]] == list(given)
    bare = client(served(("entropy",), decided=False)).get(PATH).json()
    assert [o["name"] for o in bare["outputs"]] == [
        "prediction",
        "confidence",
        "score_entropy",
        "class_name",
    ]
    assert ask.get("/v2").json()["name"] == "qualms"
    assert ask.get("/v1/model").json()["class_names"] == list(NAMES)


@pytest.mark.parametrize(
    "path", ["/v2/models/other", "/v2/models/other/ready", "/v2/models/other/infer"]
)
def test_no_other_network_can_be_requested(path: str) -> None:
    verb = "POST" if path.endswith("infer") else "GET"
    assert client().request(verb, path, json={} if verb == "POST" else None).status_code == 404
