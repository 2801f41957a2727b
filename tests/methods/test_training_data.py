"""The rivals that learn from training data, each against a computation from its paper's formula."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.data import load
from qualms.methods import FDBD, KNN, QUAM, Mahalanobis, ReAct, ViM
from qualms.methods.training_react_vim import default_dimensions
from qualms.metrics import auroc
from qualms.models import load_model
from qualms.models.zoo import ZOO
from tests.helpers.settings import Setting

ALL = (KNN(), ViM(), Mahalanobis(), ReAct(), FDBD(), QUAM(steps=4))
TRAIN = torch.randn(90, 1, 8, 8, generator=torch.Generator().manual_seed(5)).double()
LABELS = torch.arange(90) % 5


def features(setting: Setting, x: Tensor) -> np.ndarray:
    return setting.model[:8](x).detach().numpy()


def head(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    last = setting.model[8]
    return last.weight.detach().numpy(), last.bias.detach().numpy()


def score(setting: Setting, method: Any, train: Any = (TRAIN,)) -> np.ndarray:
    return qualms.score(setting.model, setting.x, method, train=list(train)).numpy()


@pytest.mark.parametrize("k", [1, 7, 50, 200])
def test_knn(setting: Setting, k: int) -> None:
    z, known = (
        f / np.linalg.norm(f, axis=1, keepdims=True)
        for f in (features(setting, setting.x), features(setting, TRAIN))
    )
    want = [sorted(np.linalg.norm(one - known, axis=1))[min(k, 90) - 1] for one in z]
    np.testing.assert_allclose(score(setting, KNN(k), TRAIN.split(32)), want)


def test_vim(setting: Setting) -> None:
    (w, b), h, known = head(setting), features(setting, setting.x), features(setting, TRAIN)
    origin = -np.linalg.pinv(w) @ b
    values, vectors = np.linalg.eig((known - origin).T @ (known - origin) / 90)
    rest = vectors[:, np.argsort(-values)[6:]]  # 12 features, half of them principal
    alpha = (known @ w.T + b).max(1).mean() / np.linalg.norm((known - origin) @ rest, axis=1).mean()
    virtual = alpha * np.linalg.norm((h - origin) @ rest, axis=1)
    have = score(setting, "vim")
    np.testing.assert_allclose(have, virtual - np.log(np.exp(h @ w.T + b).sum(1)))
    logits = np.concatenate([h @ w.T + b, virtual[:, None]], axis=1)
    probability = (np.exp(logits) / np.exp(logits).sum(1, keepdims=True))[:, -1]
    np.testing.assert_allclose(np.log(probability / (1 - probability)), have)
    np.testing.assert_allclose(score(setting, ViM(6)), have)
    assert not np.allclose(score(setting, ViM(3)), have)


def test_the_papers_rule_for_vim() -> None:
    assert {f: default_dimensions(f) for f in (2560, 2048, 1024, 768, 512, 50)} == {
        2560: 1000, 2048: 1000, 1024: 512, 768: 512, 512: 256, 50: 25,
    }  # fmt: skip


def test_vim_needs_something_to_be_left_over(setting: Setting) -> None:
    with pytest.raises(qualms.QualmsError, match="vary in more than 6 dimensions"):
        score(setting, ViM(), [TRAIN[:5]])
    with pytest.raises(qualms.QualmsError, match=r"dimensions=12, but .* 12 features"):
        score(setting, ViM(12))


def test_vim_needs_logits_that_are_positive_on_average(setting: Setting) -> None:
    model = copy.deepcopy(setting.model)
    with torch.no_grad():
        model[8].bias -= 100
    with pytest.raises(
        qualms.QualmsError, match=r"largest logits is -9.* vim needs a positive one .*; use knn"
    ):
        qualms.score(model, setting.x, "vim", train=[TRAIN])


@pytest.mark.parametrize("copies", [1, 3])
def test_mahalanobis_needs_classes_that_vary(copies: int) -> None:
    model, train = nn.Linear(4, 3), torch.randn(3, 4).repeat(copies, 1)
    with pytest.raises(
        qualms.QualmsError, match=r"do not vary within their classes, so mahalanobis .*; pass more"
    ):
        qualms.score(
            model, torch.randn(5, 4), "mahalanobis", train=[(train, torch.arange(3).repeat(copies))]
        )


@pytest.mark.parametrize("labeled", [True, False])
def test_mahalanobis(setting: Setting, labeled: bool) -> None:
    h, known = features(setting, setting.x), features(setting, TRAIN)
    alive = known.std(0) > 0  # ReLUs that never fire say nothing
    h, known = h[:, alive], known[:, alive]
    y = LABELS.numpy() if labeled else setting.model(TRAIN).argmax(1).numpy()
    means = {c: known[y == c].mean(0) for c in np.unique(y)}
    covariance = (
        sum(np.outer(f - means[c], f - means[c]) for f, c in zip(known, y, strict=True)) / 90
    )
    assert np.linalg.matrix_rank(covariance) == alive.sum() > 8
    want = [
        min((one - m) @ np.linalg.inv(covariance) @ (one - m) for m in means.values()) for one in h
    ]
    train = [(TRAIN[:50], LABELS[:50]), [TRAIN[50:], LABELS[50:]]] if labeled else [TRAIN]
    np.testing.assert_allclose(score(setting, "mahalanobis", train), want)


def test_mahalanobis_ignores_features_that_never_vary(setting: Setting) -> None:
    class WithConstants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last = copy.deepcopy(setting.model[:8]), nn.Linear(14, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            return self.last(torch.cat([h, torch.zeros_like(h[:, :1]), h[:, :1]], dim=1))

    model = WithConstants().eval()
    train = [(TRAIN, LABELS)]
    have = qualms.score(model, setting.x, "mahalanobis", train=train)
    torch.testing.assert_close(
        have, qualms.score(setting.model, setting.x, "mahalanobis", train=train)
    )
    single = qualms.score(
        model.float(), setting.x.float(), "mahalanobis", train=[(TRAIN.float(), LABELS)]
    )
    torch.testing.assert_close(single, have.float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("quantile", [0.9, 0.5])
def test_react(setting: Setting, quantile: float) -> None:
    (w, b), h = head(setting), features(setting, setting.x)
    ordered = np.sort(features(setting, TRAIN).ravel())
    place = quantile * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[int(place) + 1]
    clipped = np.minimum(h, low + (place - int(place)) * (high - low))
    assert (clipped < h).any()
    np.testing.assert_allclose(
        score(setting, ReAct(quantile)), -np.log(np.exp(clipped @ w.T + b).sum(1))
    )


def test_fdbd(setting: Setting) -> None:
    (w, b), h, mean = head(setting), features(setting, setting.x), features(setting, TRAIN).mean(0)
    want = []
    for one in h:
        z = w @ one + b
        top, away = z.argmax(), []
        for c in set(range(5)) - {top}:
            normal = w[top] - w[c]
            on_boundary = one - (normal @ one + b[top] - b[c]) / (normal @ normal) * normal
            np.testing.assert_allclose(w[top] @ on_boundary + b[top], w[c] @ on_boundary + b[c])
            away.append(np.linalg.norm(one - on_boundary))
        want.append(-np.mean(away) / np.linalg.norm(one - mean))
    np.testing.assert_allclose(score(setting, "fdbd"), want)


def test_fdbd_of_classes_without_a_boundary_and_of_the_mean_itself_is_finite() -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight[1] = model.weight[0]
    x = torch.randn(6, 4)
    assert torch.isfinite(qualms.score(model, x, "fdbd", train=[x])).all()
    assert torch.isfinite(qualms.score(model, x[:1], "fdbd", train=[x[:1]])).all()


@pytest.mark.parametrize("bias", [True, False])
def test_quam(setting: Setting, bias: bool) -> None:
    model = copy.deepcopy(setting.model)
    model[8] = nn.Linear(12, 5, bias=bias).double()
    method = QUAM(
        steps=6, penalty=3.0, growth=1.5, every=2, rate=0.02, weight_decay=0.01, temperature=0.05
    )
    h, known = model[:8](setting.x).detach(), model[:8](TRAIN).detach()
    cross_entropy = nn.functional.cross_entropy
    p, given_loss = model[8](h).softmax(1).detach(), cross_entropy(model[8](known), LABELS).detach()
    want = []
    for i in range(len(h)):
        weights, divergences = [], []
        for k in range(5):
            last = copy.deepcopy(model[8])
            adam = torch.optim.Adam(last.parameters(), 0.02, weight_decay=0.01)
            for step in range(6):
                c = 1.5 ** (step // 2)
                adam.param_groups[0]["lr"] = 0.02 / c
                adam.zero_grad()
                loss, q = cross_entropy(last(known), LABELS), last(h[i]).softmax(0)
                (3 * c * (loss - given_loss) - q[k].log()).backward()
                weights.append((-(loss.detach() - given_loss) / 0.05).exp())
                divergences.append((p[i] * (p[i] / q.detach()).log()).sum())
                adam.step()
        w = torch.stack(weights)
        want.append((w / w.sum() * torch.stack(divergences)).sum())
    have = qualms.score(model, setting.x, method, train=[(TRAIN, LABELS)])
    torch.testing.assert_close(have, torch.stack(want))
    assert (have > 1e-3).all()


def test_quam_takes_each_step_on_other_training_inputs_and_the_seed_says_which() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3).double(), torch.randn(3, 4).double()
    train = [(torch.randn(1100, 4).double(), torch.arange(1100) % 3)]
    of_seed = [qualms.score(model, x, "quam(4)", train=train, seed=s) for s in (0, 0, 1)]
    assert torch.equal(of_seed[0], of_seed[1])
    assert not torch.equal(of_seed[0], of_seed[2])
    few = [(train[0][0][:512], train[0][1][:512])]
    assert torch.equal(*(qualms.score(model, x, "quam(4)", train=few, seed=s) for s in (0, 1)))


@pytest.mark.parametrize(
    ("inputs", "steps", "sizes"), [(3, 9, [3]), (4, 9, [4]), (11, 9, [4, 4]), (40, 3, [4, 4, 4])]
)
def test_quam_takes_whole_batches_and_no_more_than_it_has_steps(
    inputs: int, steps: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qualms.methods.training_laplace_quam.BATCH", 4)
    taken, plain = list[list[int]](), QUAM._search

    def searched(
        self: QUAM, x: Tensor, wanted: Tensor, start: Tensor, training: Any
    ) -> tuple[Tensor, Tensor]:
        taken.append([len(known.labels) for known in training])
        return plain(self, x, wanted, start, training)

    monkeypatch.setattr(QUAM, "_search", searched)
    torch.manual_seed(0)
    train = [(torch.randn(inputs, 2), torch.arange(inputs) % 3)]
    qualms.score(nn.Linear(2, 3), torch.randn(1, 2), QUAM(steps=steps), train=train)
    assert taken == [sizes]


def test_quam_keeps_to_the_budget(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 100 classes on 512 features, with its gradient and the two means of Adam, has 100 ·
    513 · 4 numbers.
    """
    torch.manual_seed(0)
    model, x = nn.Linear(512, 100), torch.randn(2, 512)
    train, at_once, plain = [(torch.randn(10, 512), torch.arange(10))], list[int](), QUAM._search

    def searched(self: QUAM, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        at_once.append(len(x))
        return plain(self, x, *rest)

    monkeypatch.setattr(QUAM, "_search", searched)
    within = qualms.score(model, x, QUAM(steps=2), train=train, budget=2**24)
    assert 1 < max(at_once) <= 2**24 // (100 * 513 * 4 * 4)
    assert sum(at_once) == 200
    torch.testing.assert_close(
        within, qualms.score(model, x, QUAM(steps=2), train=train, budget=2**29)
    )
    with pytest.raises(
        qualms.QualmsError, match=r"adapting one head takes about .* budget of 0.5 MiB"
    ):
        qualms.score(model, x, "quam", train=train, budget=2**19)


def test_quam_in_parts_is_quam(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(setting, "quam")
    monkeypatch.setattr("qualms.methods.training_laplace_quam.LOGITS_AT_ONCE", 1)
    np.testing.assert_allclose(score(setting, "quam"), whole, rtol=1e-8)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_knn_of_training_features_that_are_zero(k: int) -> None:
    """A vector of zeros stays one: it is 1 away from every other."""
    train, x = (
        torch.tensor([[0.0, 0.0], [1.0, 3.0], [3.0, 1.0], [-1.0, 0.2]]),
        torch.tensor([[1.0, -0.8], [0.0, 0.0]]),
    )
    z, known = nn.functional.normalize(x), nn.functional.normalize(train)
    want = torch.stack([(one - known).norm(dim=1).sort().values[k - 1] for one in z])
    torch.testing.assert_close(qualms.score(nn.Linear(2, 2), x, KNN(k), train=[train]), want)


def test_knn_of_nothing_but_zeros_is_the_length_of_a_unit_vector() -> None:
    have = qualms.score(
        nn.Linear(2, 2), torch.tensor([[3.0, 4.0], [0.0, 0.0]]), KNN(2), train=[torch.zeros(3, 2)]
    )
    torch.testing.assert_close(have, torch.tensor([1.0, 0.0]))


def test_knn_in_parts_is_knn(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = score(setting, "knn")
    monkeypatch.setattr("qualms.methods.training_distances.PRODUCTS_AT_ONCE", 1)
    np.testing.assert_allclose(score(setting, "knn"), whole)


class Pairs(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return len(TRAIN)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return TRAIN[index], int(LABELS[index])


@pytest.mark.parametrize("name", ["mahalanobis", "quam"])
def test_labels_are_used_where_they_are(setting: Setting, name: str) -> None:
    want = score(setting, name, [(TRAIN, LABELS)])
    for same in (
        [(TRAIN.numpy(), LABELS.numpy())],
        [(TRAIN, LABELS.to(torch.uint8))],
        [(TRAIN, LABELS.tolist())],
        [(TRAIN, tuple(LABELS.numpy()))],
        [(TRAIN, LABELS[:, None])],
        [(TRAIN.numpy(), LABELS[:, None].numpy())],
        torch.utils.data.DataLoader(Pairs(), batch_size=32),
        Pairs(),
    ):
        torch.testing.assert_close(
            qualms.score(setting.model, setting.x, name, train=same), torch.from_numpy(want)
        )
    predicted = score(setting, name)
    assert not np.allclose(predicted, want)
    none = (
        [(TRAIN, nn.functional.one_hot(LABELS).double())],
        [(TRAIN, LABELS.double())],
        [(TRAIN, ["a"] * 90)],
        TRAIN,
    )
    for without in none:
        torch.testing.assert_close(
            qualms.score(setting.model, setting.x, name, train=without), torch.from_numpy(predicted)
        )


def test_labels_in_a_dict_are_used() -> None:
    from tests.helpers.settings import bert, training_text

    model, x = bert()
    train = training_text()
    labels = torch.arange(len(train["input_ids"])) % 3
    named = [
        qualms.score(model, x, "mahalanobis", train=[{**train, key: labels}])
        for key in ("label", "labels")
    ]
    assert torch.equal(*named)
    assert not torch.allclose(named[0], qualms.score(model, x, "mahalanobis", train=[train]))


@pytest.mark.parametrize("bad", [-1, 5])
def test_labels_that_are_no_classes_are_refused(setting: Setting, bad: int) -> None:
    labels = LABELS.clone()
    labels[7] = bad
    with pytest.raises(
        qualms.QualmsError,
        match=r"the labels in train= range from .* 5 classes, numbered from 0; correct",
    ):
        score(setting, "mahalanobis", [(TRAIN, labels)])


def test_the_training_data_is_read_once_for_all_of_them_and_again_for_other_weights(
    setting: Setting,
) -> None:
    class Loader:
        read = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.read += 1
            yield TRAIN[:45], LABELS[:45]
            yield TRAIN[45:], LABELS[45:]

    model, loader = copy.deepcopy(setting.model), Loader()
    scorer = qualms.Scorer(model, ALL, train=loader)
    before = scorer(setting.x).scores
    scorer(setting.x)
    assert loader.read == 1
    with torch.no_grad():
        model[5].weight += 0.1
    after, fresh = (
        scorer(setting.x).scores,
        qualms.compare(model, setting.x, ALL, train=[(TRAIN, LABELS)]),
    )
    assert loader.read == 2
    for method in ALL:
        torch.testing.assert_close(after[method.name], fresh[method.name])
        assert not torch.allclose(after[method.name], before[method.name]), method.name


@pytest.mark.parametrize("name", ["mahalanobis", "laplace", "mc-batchnorm"])
def test_errors_in_the_training_data_are_said_to_be_there(setting: Setting, name: str) -> None:
    for train, match in (
        (
            (TRAIN, LABELS),
            r"^train=\(\.\.\.\) is read as one batch .*pass a list of batches: train=\[\(inputs, labels\)\]",
        ),
        ([torch.full_like(TRAIN, torch.nan)], "^input 0 of train contains NaN"),
        ([TRAIN[:0]], "^train is an empty batch"),
        (3, "^train is a int"),
    ):
        with pytest.raises(qualms.QualmsError, match=match):
            qualms.score(setting.model, setting.x, name, train=train)


def test_a_tuple_is_training_data_of_a_model_that_takes_two_inputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, by: Tensor) -> Tensor:
            return self.fc(x * by[:, None])

    x, by = torch.randn(20, 4), torch.arange(20)
    assert torch.isfinite(qualms.score(Both(), (x, by), "knn", train=(x, by))).all()


@pytest.mark.parametrize("method", ALL)
def test_what_they_need_is_said(setting: Setting, method: qualms.methods.Method) -> None:
    with pytest.raises(
        qualms.QualmsError, match=f"^{method.name} needs training data; pass train="
    ):
        qualms.score(setting.model, setting.x, method)
    with pytest.raises(qualms.QualmsError, match="needs logits from a final linear layer"):
        qualms.score(nn.Sequential(setting.model, nn.Tanh()), setting.x, method, train=[TRAIN])


def test_quam_is_positive_however_confident_the_model_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
    model[2].weight.data *= 200
    x = torch.randn(200, 6)
    assert (qualms.score(model, x, QUAM(), train=[torch.randn(60, 6)]) >= 0).all()


def test_labels_that_are_not_one_for_each_input_are_an_error(setting: Setting) -> None:
    with pytest.raises(
        qualms.QualmsError, match=f"has {len(TRAIN)} inputs and 5 labels; pass one label per input"
    ):
        qualms.score(
            setting.model,
            setting.x,
            "mahalanobis",
            train=[(TRAIN, torch.zeros(5, dtype=torch.long))],
        )


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.skipif(
    "QUALMS_DATA" not in os.environ, reason="QUALMS_DATA is not set: no real data here"
)
def test_a_real_mnist_network_against_fashion_mnist() -> None:
    root, entry = Path(os.environ["QUALMS_DATA"]), ZOO["mnist-cnn-5x5"]
    assert entry.normalization is not None
    model = load_model("mnist-cnn-5x5", root / "weights" / str(entry.file))
    known, unknown = (
        entry.normalization.apply(load(n, root).pixels[:64]) for n in ("mnist", "fashion-mnist")
    )
    images = load("mnist", root, "train").take(slice(0, 5120))
    assert images.labels is not None
    train = list(
        zip(
            entry.normalization.apply(images.pixels).split(512),
            images.labels.split(512),
            strict=True,
        )
    )
    found = qualms.compare(model, torch.cat([known, unknown]), (*ALL[:-1], QUAM()), train=train)
    detected = {name: auroc(values[:64], values[64:]) for name, values in found.items()}
    assert detected["quam"] > 0.9
    assert all(value > 0.75 for value in detected.values()), detected
