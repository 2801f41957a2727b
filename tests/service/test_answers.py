"""The answers are the scorer's, however the images are sent."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qualms import QualmsError, Scorer, Sketch
from qualms.data import Images, ImageTransform
from qualms.models.fingerprint import fingerprint
from qualms.report.layer_chart import layer_sums
from qualms.result import Scored
from qualms.service.scoring import ScoreRequest, ScoreResponse, ScoringService, score_requests
from tests.helpers.services import (
    NAMES,
    REGRAD,
    client,
    digits,
    network,
    pixels,
    png,
    refused,
    served,
    upload,
    usual,
)

pytestmark = pytest.mark.serve


def expected(*numbers: int) -> dict[str, torch.Tensor]:
    """Score these digits by the library, as tables and shards do."""
    net = network()
    x, own = net.numbered_inputs(digits().take(torch.tensor(numbers)))
    return Scorer(net.model, [REGRAD, "entropy"], pixel_std=0.5)(x, numbers=own).scores


def test_files_are_scored_as_the_scorer_does() -> None:
    answer = client().post("/v1/score", files=upload(3, 5, 8))
    assert answer.status_code == 200
    found, want = answer.json(), expected(3, 5, 8)
    for name, values in want.items():
        assert [r["scores"][name] for r in found["results"]] == pytest.approx(
            values.tolist(), rel=1e-6
        )
    probs = network().model(network().inputs(digits().take(torch.tensor([3, 5, 8])))).softmax(1)
    assert [r["prediction"] for r in found["results"]] == probs.argmax(1).tolist()
    assert [r["confidence"] for r in found["results"]] == pytest.approx(
        probs.amax(1).tolist(), rel=1e-6
    )
    assert [r["class_name"] for r in found["results"]] == [NAMES[i] for i in probs.argmax(1)]
    assert [r["id"] for r in found["results"]] == ["3.png", "5.png", "8.png"]
    assert found["model_hash"] == fingerprint(network().model)
    assert found["method"] == REGRAD
    assert 0 < found["seconds"] < 60


def test_percentile_and_decision_are_the_thresholds() -> None:
    found = client().post("/v1/score", files=upload(*range(30))).json()
    threshold = usual().scorer.threshold
    assert threshold is not None
    scores = [r["scores"][REGRAD] for r in found["results"]]
    assert [r["percentile"] for r in found["results"]] == threshold.percentile(
        torch.tensor(scores)
    ).tolist()
    decisions = [
        "accepted" if taken else "abstain" for taken in threshold.accept(torch.tensor(scores))
    ]
    assert [r["decision"] for r in found["results"]] == decisions
    assert set(decisions) == {"accepted", "abstain"}
    assert found["threshold"] == threshold.value


def test_without_a_threshold_nothing_is_decided() -> None:
    (found,) = (
        client(served(("entropy",), decided=False))
        .post("/v1/score", files=upload(0))
        .json()["results"]
    )
    assert found["decision"] is None
    assert found["percentile"] is None
    assert found["scores"].keys() == {"entropy"}


@pytest.mark.parametrize(
    "body",
    [
        {"images": [pixels(4).tolist()]},
        {"images": [pixels(4)[..., None].tolist()]},
        {"images": [np.repeat(pixels(4)[..., None], 3, 2).tolist()], "white": 255},
        {"images": [(pixels(4) / 255).tolist()], "white": 1},
    ],
    ids=["gray", "one channel", "color", "from 0 to 1"],
)
def test_numbers_are_scored_as_the_file_of_the_same_image(body: dict[str, object]) -> None:
    ask = client()
    (file,) = ask.post("/v1/score", files=upload(4)).json()["results"]
    (array,) = ask.post("/v1/score", json=body).json()["results"]
    assert array["scores"] == pytest.approx(file["scores"], rel=1e-6)
    assert array["id"] == "0"


@pytest.mark.parametrize(
    "fit",
    [ImageTransform((8, 8), channels=1), ImageTransform((8, 8), 10, "bicubic", 1), None],
    ids=str,
)
def test_numbers_of_another_size_are_fitted_as_the_file_of_the_same_image(
    fit: ImageTransform | None,
) -> None:
    big = np.random.default_rng(0).integers(
        0, 256, (50, 30, 3) if fit else (8, 8, 3), dtype=np.uint8
    )
    own = served()
    ask = client(replace(own, network=replace(own.network, transform=fit)))
    (file,) = ask.post("/v1/score", files=[("images", ("big.png", png(big)))]).json()["results"]
    (array,) = ask.post("/v1/score", json={"images": [big.tolist()]}).json()["results"]
    assert array["scores"] == file["scores"]


def test_a_photograph_is_fitted_as_the_command_fits_it(tmp_path: Path) -> None:
    from qualms.data import load

    big = np.random.default_rng(0).integers(0, 256, (50, 30, 3), dtype=np.uint8)
    Image.fromarray(big).save(tmp_path / "big.png")
    net = network()
    x, own = net.numbered_inputs(load(str(tmp_path), transform=net.transform))
    want = Scorer(net.model, REGRAD, pixel_std=0.5)(x, numbers=own).scores[REGRAD]
    (found,) = (
        client().post("/v1/score", files=[("images", ("big.png", png(big)))]).json()["results"]
    )
    assert found["scores"][REGRAD] == pytest.approx(float(want), rel=1e-6)


def test_layers_are_returned_on_request() -> None:
    ask = client()
    (plain,) = ask.post("/v1/score", files=upload(2)).json()["results"]
    (layered,) = ask.post("/v1/score?layers=true", files=upload(2)).json()["results"]
    assert plain["layers"] is None
    net = network()
    names, sums = layer_sums(
        net.model, net.inputs(digits().take(torch.tensor([2]))), usual().scorer.methods
    )
    assert (
        [layer["name"] for layer in layered["layers"]]
        == names
        == ["Conv 3×3 · 0", "Conv 3×3 · 2", "Linear · 5"]
    )
    shares = sums[REGRAD][0] / sums[REGRAD][0].sum()
    assert [layer["share"] for layer in layered["layers"]] == pytest.approx(
        shares.tolist(), rel=1e-5
    )
    (none,) = (
        client(served(("entropy",)))
        .post("/v1/score?layers=true", files=upload(2))
        .json()["results"]
    )
    assert none["layers"] is None


def test_layers_come_from_the_scorers_own_engine() -> None:
    own = served((REGRAD,), decided=False)
    sketched = replace(
        own, scorer=Scorer(own.network.model, REGRAD, engine=Sketch(4), pixel_std=0.5)
    )
    (found,) = client(sketched).post("/v1/score?layers=true", files=upload(2)).json()["results"]
    x = own.network.inputs(digits().take(torch.tensor([2])))
    shares = {}
    for engine, scorer in (("exact", own.scorer), ("sketch", sketched.scorer)):
        sums = layer_sums(own.network.model, x, scorer.methods, scorer.settings)[1][REGRAD][0]
        shares[engine] = (sums / sums.sum()).tolist()
    assert [layer["share"] for layer in found["layers"]] == pytest.approx(
        shares["sketch"], rel=1e-5
    )
    assert shares["sketch"] != pytest.approx(shares["exact"], rel=1e-2)


def score_request(*numbers: int, layers: bool = False) -> ScoreRequest:
    return ScoreRequest([digits().pixels[i].numpy() for i in numbers], layers)


def test_an_image_has_the_same_score_in_any_batch() -> None:
    requests = [
        score_request(0),
        score_request(1, 2, 3),
        score_request(0, layers=True),
        score_request(3),
    ]
    together = score_requests(usual(), requests)
    for request, response in zip(requests, together, strict=True):
        (alone,) = score_requests(usual(), [request])
        assert alone.results is not None
        assert response.results is not None
        assert response.batch_images == 6
        for one, other in zip(alone.results, response.results, strict=True):
            assert one["scores"] == pytest.approx(other["scores"], rel=1e-5)
            assert (one["layers"] is None) == (other["layers"] is None)
    for one, other in (((0, 0), (2, 0)), ((1, 2), (3, 0))):
        first, second = (together[q].results[i]["scores"][REGRAD] for q, i in (one, other))  # type: ignore[index]
        assert first == pytest.approx(second, rel=1e-5)


def not_a_number_for_black(_: object, x: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    black = x[0].amax((1, 2, 3)) < 0  # normalized
    return torch.where(black[:, None, None, None], torch.nan, out)


def test_an_image_that_cannot_be_scored_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    own = served(("entropy",))
    own.network.model[0].register_forward_hook(not_a_number_for_black)
    black = ScoreRequest([np.zeros((1, 8, 8), dtype=np.uint8)])
    good, bad, other = score_requests(own, [score_request(0), black, score_request(1)])
    assert good.results is not None
    assert other.results is not None
    assert bad.results is None
    assert "cannot be scored" in caplog.text
    answer = client(own).post("/v1/score", json={"images": [[[0] * 8] * 8]})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("the network cannot score images of 8 x 8 pixels")


def test_a_request_that_meets_a_defect_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = ScoringService.score

    def defective(own: ScoringService, some: torch.Tensor) -> Scored:
        if not some.any(dim=(1, 2, 3)).all():
            raise ZeroDivisionError("a defect with black images")
        return real(own, some)

    monkeypatch.setattr(ScoringService, "score", defective)
    good, bad, other = score_requests(
        usual(),
        [score_request(0), ScoreRequest([np.zeros((1, 8, 8), dtype=np.uint8)]), score_request(1)],
    )
    assert (good.failed, bad.failed, other.failed) == (False, True, False)
    assert good.results is not None
    assert other.results is not None
    assert "a defect with black images" in caplog.text
    refused(
        client().post("/v1/score", json={"images": [[[0] * 8] * 8]}), 500, "could not be scored"
    )


def test_only_the_part_with_an_image_that_cannot_be_scored_is_scored_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored: list[int] = []
    real = ScoringService.score

    def counted(own: ScoringService, some: torch.Tensor) -> Scored:
        scored.append(len(some))
        if not some.any(dim=(1, 2, 3)).all():
            raise QualmsError("a black image.")
        return real(own, some)

    monkeypatch.setattr(ScoringService, "score", counted)
    black = ScoreRequest([np.zeros((1, 8, 8), dtype=np.uint8)] * 20)
    found = score_requests(usual(), [*(score_request(i, i + 1) for i in range(12)), black])
    assert [reply.results is None for reply in found] == [False] * 12 + [True]
    assert scored == [16, 16, *[2] * 4, 8]  # and nothing of the rest of the black ones
    assert all(len(result["scores"]) == 2 for reply in found[:12] for result in reply.results or [])


def test_a_request_is_given_up_once_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[int] = []
    real = ScoringService.score

    def slow(own: ScoringService, some: torch.Tensor) -> Scored:
        scored.append(len(some))
        time.sleep(0.6)
        return real(own, some)

    monkeypatch.setattr(ScoringService, "score", slow)
    now = time.monotonic()
    old, new = (
        replace(score_request(*range(30)), received_at=now - 59.5),
        replace(score_request(40, 41), received_at=now),
    )
    given_up, good = score_requests(usual(), [old, new], deadline=60.0)
    assert given_up == ScoreResponse(None, timed_out=True)
    assert good.results is not None
    assert len(good.results) == 2
    assert scored == [16, 2]


def test_images_of_several_sizes_share_a_request() -> None:
    small, large = np.full((1, 8, 8), 200, dtype=np.uint8), np.full((1, 9, 9), 200, dtype=np.uint8)
    (response,) = score_requests(usual(), [ScoreRequest([small, large, small])])
    assert response.results is not None
    scores = [r["scores"]["entropy"] for r in response.results]
    assert scores[0] == pytest.approx(scores[2], rel=1e-6)


def test_pixels_reach_the_network_unchanged() -> None:
    seen: list[torch.Tensor] = []
    own = served(("entropy",), decided=False)
    own.network.model.register_forward_pre_hook(lambda _m, x: seen.append(x[0].clone()))
    client(own).post("/v1/score", files=upload(7))
    want = own.network.inputs(Images("one", digits().pixels[7:8], None))
    assert any(torch.equal(x, want) for x in seen)
