"""Scores of images, chunk by chunk: the same as in one go, and never computed twice."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.data import Images, Normalization
from qualms.errors import QualmsError
from qualms.methods.context import BatchContext
from qualms.methods.gradients import REGrad
from qualms.methods.method import Method
from qualms.methods.perturb_inputs import MCAA, PerturbX
from qualms.methods.registry import parse
from qualms.models import load_model
from qualms.models.imagenet import imagenet_classes
from qualms.scorer import Scorer
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import Network
from qualms.tasks.calibration import calibration
from qualms.tasks.image_scores import score_images, select_usable
from qualms.tasks.journal import Journal
from qualms.tasks.ood import ood

METHODS: dict[str, Method] = {
    "REGrad*": parse("regrad+layers+smooth"),
    "x": PerturbX(draws=10),
    "entropy": parse("entropy"),
}


class Killed(BaseException):
    pass


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, tuple[str, ...]]]:
    """Record the first position and the methods of every batch that is scored."""
    seen: list[tuple[int, tuple[str, ...]]] = []
    real = ImageScorer.score

    def counted(self: ImageScorer, images: Images, first: int = 0) -> qualms.Scored:
        part = real(self, images, first)
        seen.append((first, tuple(self.scorer.methods)))
        return part

    monkeypatch.setattr(ImageScorer, "score", counted)
    return seen


def test_chunks_give_what_one_call_gives(network: Network, known: Images) -> None:
    own = {name: network.scale_noise(method) for name, method in METHODS.items()}
    x, numbers = network.numbered_inputs(known)
    want = Scorer(network.model, own, seed=3)(x, numbers=numbers).scores
    have = score_images(network, known, METHODS, Journal(None, {}), seed=3)
    for name, scores in want.items():
        np.testing.assert_allclose(have.scores[name], scores.numpy(), rtol=1e-4)
    assert have.correct.mean() == network.accuracy(known)


def test_a_run_that_was_killed_goes_on_with_the_next_chunk(
    network: Network, known: Images, tmp_path: Path, calls: list[tuple[int, tuple[str, ...]]]
) -> None:
    whole = score_images(network, known, METHODS, Journal(None, {}))
    del calls[:]

    def kill(what: str, done: int, total: int) -> None:
        if done == 64:
            raise Killed

    with Journal(tmp_path / "rows", {}) as journal, pytest.raises(Killed):
        score_images(network, known, METHODS, journal, progress=kill)
    with Journal(tmp_path / "rows", {}) as journal:
        again = score_images(network, known, METHODS, journal)
    assert [first for first, _ in calls] == [0, 1, 4, 16, 32, 64, 96]
    for name in METHODS:
        np.testing.assert_array_equal(again.scores[name], whole.scores[name])


def test_only_what_is_new_is_computed(
    network: Network, known: Images, calls: list[tuple[int, tuple[str, ...]]]
) -> None:
    journal = Journal(None, {})
    score_images(network, known.take(slice(0, 64)), {"entropy": METHODS["entropy"]}, journal)
    score_images(network, known, {"entropy": METHODS["entropy"]}, journal)  # more images
    score_images(network, known.take(slice(0, 32)), METHODS, journal)  # more methods
    score_images(network, known.take(slice(0, 32)), METHODS, journal)
    assert calls == [
        *((first, ("entropy",)) for first in (0, 1, 4, 16, 32)),
        *((first, ("entropy",)) for first in (64, 96)),
        *((first, ("REGrad*", "x")) for first in (0, 1, 4, 16)),
    ]


def test_rows_of_draws_by_place_are_not_taken(
    network: Network, known: Images, calls: list[tuple[int, tuple[str, ...]]]
) -> None:
    journal, few = Journal(None, {}), known.take(slice(0, 4))
    score_images(network, few, METHODS, journal)
    older = Journal(None, {})
    for row in journal.where(row="scores"):
        assert row.pop("draws") == "by pixels"
        older.add(row)
    del calls[:]
    score_images(network, few, METHODS, older)
    assert [first for first, _ in calls] == [0, 1]


@pytest.mark.parametrize("change", ["seed", "engine", "parameter", "pixel", "train"])
def test_what_would_give_other_scores_is_computed_anew(
    network: Network, known: Images, calls: list[tuple[int, tuple[str, ...]]], change: str
) -> None:
    journal, few = Journal(None, {}), known.take(slice(0, 32))
    score_images(
        network,
        few,
        {"m": parse("laplace" if change == "train" else "regrad+smooth")},
        journal,
        train=known,
    )
    pixels = few.pixels.clone()
    pixels[0, 0, 0, 0] ^= 1
    with_change = {
        "seed": lambda: score_images(
            network, few, {"m": parse("regrad+smooth")}, journal, train=known, seed=1
        ),
        "engine": lambda: score_images(
            network, few, {"m": parse("regrad+smooth")}, journal, train=known, engine="sketch"
        ),
        "parameter": lambda: score_images(
            network, few, {"m": parse("regrad+smooth(0.03)")}, journal, train=known
        ),
        "pixel": lambda: score_images(
            network,
            replace(few, pixels=pixels),
            {"m": parse("regrad+smooth")},
            journal,
            train=known,
        ),
        "train": lambda: score_images(network, few, {"m": parse("laplace")}, journal, train=few),
    }
    before = len(calls)
    with_change[change]()
    assert len(calls) == before + (
        1 if change == "pixel" else before
    )  # the chunk of that pixel, or all


def test_noise_in_pixels_becomes_noise_in_the_networks_units() -> None:
    network = Network("n", nn.Linear(1, 2), Normalization((0.5, 0.5, 0.5), (0.5, 0.25, 0.2)))
    starred = network.scale_noise(parse("regrad+layers(0.2)+smooth(0.02)"))
    assert isinstance(starred, REGrad)
    assert starred.smooth is not None
    assert starred.smooth.sigma == pytest.approx((0.04, 0.08, 0.1))
    assert starred.layers == 0.2
    x, aa = network.scale_noise(PerturbX(0.008)), network.scale_noise(MCAA(0.0001))
    assert isinstance(x, PerturbX)
    assert x.sigma == pytest.approx((0.016, 0.032, 0.04))
    assert isinstance(aa, MCAA)
    assert aa.a == pytest.approx((0.0002, 0.0004, 0.0005))
    assert network.scale_noise(parse("perturb-theta")) == parse("perturb-theta")


def test_methods_that_cannot_be_used_are_left_out_with_the_reason(
    network: Network, known: Images
) -> None:
    wanted = {name: parse(name) for name in ("entropy", "mc-dropout", "laplace", "regrad")}
    good, rows = select_usable(network, known, wanted, None)
    assert list(good) == ["entropy", "regrad"]
    assert {row["method"]: row["why"] for row in rows}.keys() == {"mc-dropout", "laplace"}
    assert "needs a dropout layer" in rows[0]["why"]
    assert list(select_usable(network, known, wanted, known)[0]) == ["entropy", "laplace", "regrad"]
    with pytest.raises(QualmsError, match="no method can be used: mc-dropout"):
        select_usable(network, known, {"mc-dropout": parse("mc-dropout")}, None)


def test_other_trainings_of_the_network_make_an_ensemble(network: Network, known: Images) -> None:
    few, wanted = known.take(slice(0, 32)), {"ensemble": parse("ensemble")}
    with pytest.raises(QualmsError, match="ensemble needs several models"):
        select_usable(network, few, wanted, None)
    torch.manual_seed(1)
    several = replace(network, members=(load_model("digits-cnn"),))
    assert list(select_usable(several, few, wanted, None)[0]) == ["ensemble"]
    want = qualms.score(network.model, network.inputs(few), "ensemble", models=several.members)
    have = score_images(several, few, wanted, Journal(None, {})).scores["ensemble"]
    np.testing.assert_allclose(have, want.numpy(), rtol=1e-4)
    assert several.about != network.about


def test_a_score_that_is_not_finite_is_told_and_not_written(
    known: Images, network: Network
) -> None:
    class Broken(Method):
        name, paper, needs, cost = "broken", "", ("logits",), "1"

        def score(self, seen: object) -> Tensor:
            return torch.full((32,), float("nan"))

    journal = Journal(None, {})
    with pytest.raises(QualmsError, match=r"broken has no finite score for image 0 of digits"):
        score_images(network, known.take(slice(0, 32)), {"broken": Broken()}, journal)
    assert list(journal) == []


def test_an_image_without_a_finite_score_is_told_by_its_name(
    known: Images, network: Network
) -> None:
    class Broken(Method):
        name, paper, needs, cost = "broken", "", ("logits",), "1"

        def score(self, seen: BatchContext) -> Tensor:
            return torch.where(torch.arange(len(seen.logits)) == 2, torch.inf, 1.0)

    named = replace(known.take(slice(0, 4)), ids=("a", "b", "c", "d"))
    for images, called in ((named, "c"), (known.take(slice(0, 4)), "image 9")):
        with pytest.raises(QualmsError, match=f"broken has no finite score for {called} of digits"):
            ImageScorer(network, Scorer(network.model, {"broken": Broken()})).score(images, first=7)


def test_the_network_leaves_as_it_came(known: Images, network: Network) -> None:
    network.model.train()
    before = {k: v.clone() for k, v in network.model.state_dict().items()}
    score_images(network, known.take(slice(0, 32)), METHODS, Journal(None, {}))
    assert network.model.training
    assert all(torch.equal(v, network.model.state_dict()[k]) for k, v in before.items())
    network.model.eval()


@pytest.mark.parametrize("task", ["ood", "calibration"])
def test_rows_say_how_scores_were_computed_and_not_that_it_was_left_open(
    task: str, network: Network, known: Images, strange: Images
) -> None:
    journal, methods = Journal(None, {}), {"r": parse("gradnorm+layers")}
    if task == "ood":
        list(ood(network, known, [strange], methods, journal, engine="auto"))
    else:
        list(calibration(network, known, methods, journal, engine="auto"))
    (measured,) = journal.where(row=task)
    assert measured["engine"] == "exact"
    chunks = journal.where(row="scores", engine="exact")
    assert {chunk["data"] for chunk in chunks} == (
        {"digits", "strange"} if task == "ood" else {"digits"}
    )
    assert not journal.where(engine="auto")


def test_labels_are_counted_as_the_network_counts_its_classes(
    network: Network, known: Images
) -> None:
    named = replace(network, class_names=tuple("9876543210"))
    assert known.labels is not None
    some = known.take((known.labels < 3).nonzero().flatten())
    folder = replace(some, name="mine", classes=("0", "1", "2"), source="mine/")
    assert torch.equal(named.relabel(folder).labels, 9 - some.labels)
    assert named.relabel(folder).classes == named.class_names
    with pytest.raises(
        QualmsError, match="mine/ has the class 'two', which digits-cnn does not have"
    ):
        named.relabel(replace(folder, classes=("0", "1", "two")))
    with pytest.raises(QualmsError, match="outputs 10 classes, but mine/ has 3"):
        network.relabel(folder)
    assert network.relabel(known) is known
    unlabeled = replace(folder, labels=None)
    assert named.relabel(unlabeled) is unlabeled


def test_labels_of_two_classes_with_one_name_are_matched_in_order_or_refused(
    network: Network, known: Images
) -> None:
    named = replace(network, class_names=("crane", "drum", "crane", *"3456789"))
    assert known.labels is not None
    some = known.take((known.labels < 3).nonzero().flatten())
    folder = replace(some, name="mine", classes=("crane", "crane", "drum"), source="mine/")
    assert torch.equal(named.relabel(folder).labels, torch.tensor([0, 2, 1])[some.labels])
    with pytest.raises(
        QualmsError, match=r"mine/ has the class 'crane', but classes 0 and 2 of .* share"
    ):
        named.relabel(replace(folder, classes=("crane", "drum", "3")))


def test_folders_of_imagenets_classes_may_be_called_by_wordnet_ids(
    network: Network, known: Images
) -> None:
    named = replace(network, class_names=imagenet_classes())
    assert known.labels is not None
    some = known.take((known.labels < 2).nonzero().flatten())
    cranes = replace(some, name="mine", classes=("n03126707", "n02012849"), source="mine/")
    assert torch.equal(named.relabel(cranes).labels, torch.tensor([517, 134])[some.labels])
