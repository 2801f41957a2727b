"""`Scorer`: fitted once, the same numbers as `score` and `compare`, and everything that is asked of
`Scored`.
"""

import copy
import importlib.util
import io
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import qualms
from qualms.errors import SlowWarning
from qualms.gradients.isolation.snapshot import sum_bits
from qualms.gradients.plan_cache import MAX_PER_KIND, PlanCache
from qualms.gradients.sketching.tangents import TangentDistribution
from qualms.progress import pace
from tests import evasive, scattered
from tests.helpers.model_state import fingerprint, same

METHODS = ["regrad+layers+smooth(0.1,4)", "exgrad", "entropy", "perturb-x(0.1,4)"]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 5)).double().train()
    )


@pytest.fixture
def x() -> Tensor:
    return torch.randn(11, 6, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def rows_through(model: nn.Module, run: Any) -> int:
    """How many rows the model's first layer sees while something runs."""
    seen = []
    handle = model[0].register_forward_hook(lambda _m, _i, out: seen.append(len(out)))
    run()
    handle.remove()
    return sum(seen)


# The same numbers.


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
def test_a_scorer_says_what_compare_says_however_the_inputs_come(
    model: nn.Module, x: Tensor, engine: Any
) -> None:
    want = qualms.compare(model, x, METHODS, engine=engine)
    scorer = qualms.Scorer(model, METHODS, engine=engine)
    for found in (scorer(x), scorer([x[:4], x[4:]]), scorer(x[:4]) + scorer(x[4:], first=4)):
        for name, values in want.items():
            torch.testing.assert_close(found.scores[name], values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(scorer(x).probs, model.eval()(x).softmax(1))


def test_an_input_that_keeps_its_number_keeps_its_draws(model: nn.Module, x: Tensor) -> None:
    scorer = qualms.Scorer(model, ["regrad+smooth(0.5,2)", "perturb-x(0.5,4)", "mc-aa(0.5,4)"])
    want, order = scorer(x), torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    found = scorer(list(x[order].split(4)), numbers=order.tolist())
    other = scorer(x[order])
    assert list(found.ids) == order.tolist()
    for name, values in want.scores.items():
        torch.testing.assert_close(found.scores[name], values[order], rtol=1e-9, atol=1e-12)
        assert not torch.allclose(other.scores[name], values[order], rtol=1e-3, atol=0)


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
@pytest.mark.parametrize("method", ["regrad+layers+smooth", "perturb-x(0.3,4)", "mc-aa(0.3,4)"])
def test_inputs_of_several_calls_share_a_batch_and_keep_their_numbers(
    model: nn.Module, x: Tensor, engine: Any, method: str
) -> None:
    scorer = qualms.Scorer(model, method, engine=engine)
    apart = scorer(x[:3]) + scorer(x[3:4]) + scorer(x[4:6])
    together = scorer([x[:4], x[4:6]], numbers=[0, 1, 2, 0, 0, 1])
    torch.testing.assert_close(together.scores[method], apart.scores[method], rtol=1e-9, atol=1e-12)
    assert together.ids == [0, 1, 2, 0, 0, 1]
    other = scorer(x[:6]).scores[method]  # the draws do matter
    assert not torch.allclose(other[3:], apart.scores[method][3:], rtol=1e-6)


def test_scores_come_as_the_batches_do(model: nn.Module, x: Tensor) -> None:
    asked = []

    def loader() -> Iterator[Tensor]:
        for start in (0, 4, 8):
            asked.append(start)
            yield x[start : start + 4]

    parts = qualms.Scorer(model, "entropy").stream(loader())
    assert asked == []
    assert next(parts).ids == range(0, 4)
    assert asked == [0]
    assert [list(part.ids) for part in parts] == [[4, 5, 6, 7], [8, 9, 10]]


def test_between_batches_the_model_is_as_it_came(model: nn.Module, x: Tensor) -> None:
    before = fingerprint(model)
    for _ in qualms.Scorer(model, METHODS).stream([x[:4], x[4:]]):
        assert same(before, fingerprint(model))
        assert model.training


def test_arrays_and_datasets_are_inputs(model: nn.Module, x: Tensor) -> None:
    class Pairs(Dataset[Any]):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
            return x[i].numpy(), 7

    want = qualms.score(model, x)
    backwards = np.ascontiguousarray(x.numpy()[::-1])[::-1]
    backwards.flags.writeable = False
    for given in (
        x.numpy(),
        [x[:5].numpy(), x[5:].numpy()],
        (x.numpy(),),
        backwards,
        TensorDataset(x),
        Pairs(),
    ):
        torch.testing.assert_close(qualms.score(model, given), want)
    single = copy.deepcopy(model).float()
    torch.testing.assert_close(qualms.score(single, x.numpy()), qualms.score(single, x.float()))


@pytest.mark.parametrize("kind", [np.int32, np.int64, ">i8"])
def test_an_array_of_ids_stays_one_of_whole_numbers(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3))
    ids = torch.randint(0, 9, (5, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowWarning)  # ids of 32 bits are batched too
        have = qualms.score(model, ids.numpy().astype(kind), "regrad")
    torch.testing.assert_close(have, qualms.score(model, ids, "regrad"))


@pytest.mark.parametrize("given", [{"text": "a"}, (("a", "b"), 1), {}])
def test_a_batch_without_tensors_is_told_as_such(model: nn.Module, given: Any) -> None:
    with pytest.raises(
        qualms.QualmsError,
        match=r"a batch of x is a (dict|tuple) without tensors; pass tensors only",
    ):
        qualms.score(model, [given])


def test_a_dataset_whose_items_do_not_fit_together_is_told_what_to_do(model: nn.Module) -> None:
    class Ragged(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> Tensor:
            return torch.zeros(6 + i)

    with pytest.raises(qualms.QualmsError, match="collate_fn"):
        qualms.score(model, Ragged())
    with pytest.raises(qualms.QualmsError, match="pass an array of numbers"):
        qualms.score(model, np.array(["a", "b"]))


# Fitted once.


def test_training_data_is_read_once_for_all_calls(model: nn.Module, x: Tensor) -> None:
    reads = []

    class Loader:
        def __iter__(self) -> Iterator[Tensor]:
            reads.append(1)
            yield x

    scorer = qualms.Scorer(model, ["laplace(1,8)"], train=Loader())
    torch.testing.assert_close(scorer(x).scores, scorer(x).scores)
    assert len(reads) == 1


def test_the_look_at_the_model_is_taken_once(model: nn.Module, x: Tensor) -> None:
    scorer = qualms.Scorer(model, ["regrad+layers", "exgrad", "entropy"])
    first, second = (rows_through(model, lambda: scorer(x)) for _ in range(2))
    # The logits, which also tell whether inputs influence each other, the recorded pass, and two
    # rows alone.
    assert second == 2 * len(x) + 2
    assert first > second
    assert rows_through(model, lambda: qualms.Scorer(model, ["entropy", "energy"])(x)) == len(x)


def test_tangents_are_drawn_once(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    real = TangentDistribution.draw

    def counted(self: TangentDistribution, number: int, *out: Any) -> Any:
        drawn.append(number)
        return real(self, number, *out)

    monkeypatch.setattr(TangentDistribution, "draw", counted)
    scorer = qualms.Scorer(model, "regrad+layers", engine=qualms.Sketch(8))
    found = [scorer(part, first) for first, part in ((0, x[:6]), (6, x[6:]))]
    assert sorted(drawn) == list(range(8))
    monkeypatch.undo()
    whole = qualms.score(model, x, "regrad+layers", engine=qualms.Sketch(8))
    torch.testing.assert_close((found[0] + found[1]).scores["regrad+layers"], whole)


@pytest.mark.slow
def test_tangents_that_do_not_fit_the_budget_are_drawn_again(model: nn.Module, x: Tensor) -> None:
    small = qualms.Scorer(model, "regrad+layers", engine="sketch", budget=20_000)
    found = [small(x), small(x)]
    torch.testing.assert_close(found[0].scores, found[1].scores)
    torch.testing.assert_close(
        found[0].scores["regrad+layers"], qualms.score(model, x, "regrad+layers", engine="sketch")
    )


def test_other_weights_are_looked_at_anew(model: nn.Module, x: Tensor) -> None:
    scorer = qualms.Scorer(model, ["regrad+layers", "laplace(1,8)"], train=[x])
    before = scorer(x)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    after, fresh = scorer(x), qualms.Scorer(model, ["regrad+layers", "laplace(1,8)"], train=[x])(x)
    torch.testing.assert_close(after.scores, fresh.scores)
    assert not torch.allclose(before.scores["regrad+layers"], after.scores["regrad+layers"])
    scorer.model = copy.deepcopy(model)
    torch.testing.assert_close(scorer(x).scores, fresh.scores)


@pytest.mark.filterwarnings("ignore::qualms.errors.SlowWarning")
def test_what_was_learnt_on_one_batch_is_not_forced_on_another() -> None:
    """Inputs of other shapes, single inputs after batches, and models that branch on their inputs."""
    torch.manual_seed(0)
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *pooled).double()
    several = [
        torch.randn(4, 3, 8, 8),
        torch.randn(1, 3, 8, 8),
        torch.randn(3, 3, 6, 6),
        torch.randn(1, 3, 6, 6),
    ]
    _same_as_the_reference(images, [t.double() for t in several])
    routed = scattered.Routed().double()
    _same_as_the_reference(routed, [torch.randn(4, 5, 6).double() for _ in range(3)])
    innocent = evasive.BranchesOnTheBatch().double()
    _same_as_the_reference(
        innocent, [0.1 * torch.randn(4, 6).double(), 3 * torch.randn(4, 6).double()]
    )


def _same_as_the_reference(model: nn.Module, batches: list[Tensor]) -> None:
    scorer = qualms.Scorer(model.eval(), "exgrad")
    for batch in (*batches, *batches):
        want = qualms.score(model, batch, "exgrad", engine="reference")
        torch.testing.assert_close(scorer(batch).scores["exgrad"], want, rtol=1e-9, atol=1e-12)


def test_auto_settles_on_an_engine_once(model: nn.Module, x: Tensor) -> None:
    scorer = qualms.Scorer(model, "regrad")
    assert scorer.settings.engine == "auto"
    assert scorer.choose_engine(x).engine == "exact"
    assert scorer.settings.engine == "exact"
    assert (
        qualms.Scorer(model, "entropy").choose_engine(x).engine == "auto"
    )  # there is nothing to choose


def test_slowness_is_told_once_and_with_its_reason(x: Tensor) -> None:
    torch.manual_seed(0)
    scorer = qualms.Scorer(evasive.Mixing().double(), "exgrad")
    with pytest.warns(SlowWarning, match="one sample at a time.*gradient of a sample dep"):
        scorer(torch.randn(4, 5, 6).double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scorer(torch.randn(4, 5, 6).double())


# What comes back.


def test_what_is_scored_can_be_cut_and_put_together(model: nn.Module, x: Tensor) -> None:
    whole = qualms.Scorer(model, ["entropy", "msp"])(x, first=20)
    assert len(whole) == 11
    assert list(whole[2:4].ids) == [22, 23]
    sure = whole[whole.confidence > whole.confidence.median()]
    assert len(sure) == 5
    assert (sure.confidence > whole.confidence.median()).all()
    assert whole[[3, 1]].scores["msp"].tolist() == [whole.scores["msp"][3], whole.scores["msp"][1]]
    again = whole[:4] + whole[4:]
    assert list(again.ids) == list(range(20, 31))
    for name in whole.scores:
        assert torch.equal(again.scores[name], whole.scores[name])
    assert torch.equal(again.probs, whole.probs)
    assert torch.equal(whole.prediction, whole.probs.argmax(1))
    torch.testing.assert_close(1 - whole.confidence, whole.scores["msp"])


def test_a_threshold_accepts_by_the_first_method(model: nn.Module, x: Tensor) -> None:
    scores = qualms.compare(model, x, ["energy", "entropy"])
    threshold = qualms.Threshold.from_scores(scores["energy"], coverage=0.5)
    for given in (threshold, threshold.value):
        found = qualms.Scorer(model, ["energy", "entropy"], threshold=given)(x)
        assert torch.equal(found.accepted, scores["energy"] <= threshold.value)
        assert int(found.accepted.sum()) == 6
        assert torch.equal(found[3:].accepted, found.accepted[3:])


def test_a_sketch_tells_its_standard_errors_and_others_have_none(
    model: nn.Module, x: Tensor
) -> None:
    methods = ["regrad+layers", "confounding-label", "entropy"]
    found = qualms.Scorer(model, methods, engine=qualms.Sketch(32))(x)
    for name in methods[:2]:
        values, errors = qualms.score_with_error(model, x, name, engine=qualms.Sketch(32))
        torch.testing.assert_close((found.scores[name], found.errors[name]), (values, errors))
        exact = qualms.score(model, x, name, layers="module")
        assert (found.errors[name] > 0).all()
        assert (found.errors[name] < 0.5 * exact.abs()).all()
    assert not found.errors["entropy"].any()
    assert not qualms.Scorer(model, "regrad")(x).errors["regrad"].any()


def test_a_table_of_it(model: nn.Module, x: Tensor) -> None:
    names = ["ant", "bee", "cat", "dog", "eel"]
    scorer = qualms.Scorer(
        model, ["regrad", "entropy"], threshold=3.0, class_names=names, engine="sketch"
    )
    found = scorer(x[:3])
    table = found.to_arrow()
    scores = ["score_regrad", "error_regrad", "score_entropy"]
    assert table.column_names == ["id", "prediction", "confidence", *scores, "accepted"]
    assert (
        table["prediction"].to_pylist()
        == [names[c] for c in found.prediction.tolist()]
        == found.predicted_names
    )
    assert table["score_entropy"].to_pylist() == found.scores["entropy"].tolist()
    assert qualms.Scorer(model, "entropy")(x[:3]).to_arrow().column_names == [
        "id",
        "prediction",
        "confidence",
        "score_entropy",
    ]


def test_a_data_frame_where_there_is_pandas(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = qualms.Scorer(model, "entropy")(x, first=5)
    if importlib.util.find_spec("pandas") is not None:
        assert found.to_pandas().index.tolist() == list(range(5, 16))
    for module, convert in (("pandas", found.to_pandas), ("pyarrow", found.to_arrow)):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(qualms.QualmsError, match=module):
            convert()


# What is refused.


@pytest.mark.usefixtures("as_users_meet_it")
def test_mistakes_are_told(model: nn.Module, x: Tensor) -> None:
    found = qualms.Scorer(model, "entropy")(x)
    for message, mistake in {
        "pass threshold=": lambda: found.accepted,
        "pass class_names=": lambda: found.predicted_names,
        r"or \[3:4\]": lambda: found[3],
        "a mask of as many entries": lambda: found[[True, False]],
        "or a list of positions": lambda: found[[11]],
        "parts differ": lambda: found + qualms.Scorer(model, "msp")(x),
        "parts differ in": lambda: (
            found + qualms.Scorer(model, "entropy", class_names=list("abcde"))(x)
        ),
        "contains -1; pass whole numbers": lambda: qualms.Scorer(model)(x, first=-1),
        # type: ignore[list-item]
        "contains 0.5; pass whole numbers": lambda: qualms.Scorer(model)(x, numbers=[0.5]),
        "2 numbers for at least 11 inputs": lambda: qualms.Scorer(model)(x, numbers=[3, 4]),
        "there are 12 numbers for 11 inputs;": lambda: qualms.Scorer(model, "entropy")(
            x, numbers=range(12)
        ),
        "Scored to concatenate is empty": lambda: qualms.Scored.concatenate([]),
        "2 class_names but 5 logits": lambda: qualms.Scorer(model, "msp", class_names=["a", "b"])(
            x
        ),
        "threshold is a str": lambda: qualms.Scorer(model, threshold="3"),  # type: ignore[arg-type]
        "methods is empty": lambda: qualms.Scorer(model, []),
        "a method is a int": lambda: qualms.Scorer(model, [3]),  # type: ignore[list-item]
        # type: ignore[arg-type]
        "engine='fast' is invalid": lambda: qualms.Scorer(model, engine="fast"),
        # type: ignore[arg-type]
        "layers='all' is invalid": lambda: qualms.Scorer(model, layers="all"),
        "model is a str": lambda: qualms.Scorer("resnet18")(x),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(qualms.QualmsError, match=message):
            mistake()


@pytest.mark.usefixtures("as_users_meet_it")
@pytest.mark.parametrize("function", ["score", "compare", "select", "score_with_error"])
def test_a_typo_is_told_by_the_name_of_the_function_that_was_called(
    function: str, model: nn.Module, x: Tensor
) -> None:
    second: Any = {"compare": ["entropy"], "select": 2}.get(function, "entropy")
    with pytest.raises(
        TypeError, match=rf"^{function}\(\) got an unexpected keyword argument 'sead'"
    ):
        getattr(qualms, function)(model, x, second, sead=3)


# What broke once.


class Merged(nn.Module):
    """Merges inputs and positions by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x.view(-1, 6)).view(*x.shape[:2], 8).tanh().mean(1))


class Branches(nn.Module):
    """Takes another path, through another number of layers, for negative batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.a(x) if x.sum() > 0 else self.c(self.b(x))).tanh())


class TwoKinds(nn.Module):
    """Reads images or texts, of the same shape, by layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, image: Tensor | None = None, text: Tensor | None = None) -> Tensor:
        return self.head((self.a(image) if image is not None else self.b(text)).tanh())


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
def test_models_that_view_their_input_are_scored(engine: Any) -> None:
    found = qualms.compare(
        Merged(), torch.randn(5, 4, 6), ["regrad+layers", "entropy", "coherence"], engine=engine
    )
    assert all(len(scores) == 5 for scores in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["exact", qualms.Sketch(4), qualms.Sketch(4, "sum")], ids=str)
def test_another_path_in_an_earlier_batch_does_not_change_a_score(engine: Any) -> None:
    torch.manual_seed(0)
    methods, x = ["regrad+layers", "coherence"], torch.rand(4, 6).double()
    for model, batches in (
        (Branches().double(), [x, -x, x]),
        (TwoKinds().double(), [{"image": x}, {"text": x}, {"image": x}]),
    ):
        scorer = qualms.Scorer(model, methods, engine=engine)
        for batch in batches:
            torch.testing.assert_close(
                scorer(batch).scores, qualms.compare(model, batch, methods, engine=engine)
            )


def test_weights_that_change_unseen_are_noticed(x: Tensor) -> None:
    """Fused optimizers, and whoever writes to `.data`, change weights without torch counting it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 4))
    images = torch.randn(6, 3, 4, 4)
    methods = ["laplace(1,8)", "regrad"]
    scorer = qualms.Scorer(model, methods, train=[images])
    scorer(images)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(images).logsumexp(1).sum().backward()
    optimizer.step()
    torch.testing.assert_close(
        scorer(images).scores, qualms.compare(model, images, methods, train=[images])
    )
    model[0].weight.data.mul_(1.0005)
    torch.testing.assert_close(
        scorer(images).scores, qualms.compare(model, images, methods, train=[images])
    )
    with torch.no_grad():
        model[3].weight.copy_(model[3].weight.flip(1))  # the same numbers in other places
    torch.testing.assert_close(
        scorer(images).scores, qualms.compare(model, images, methods, train=[images])
    )
    model[1] = nn.ReLU()
    torch.testing.assert_close(
        scorer(images).scores, qualms.compare(model, images, methods, train=[images])
    )


@pytest.mark.slow
def test_memory_does_not_grow_with_calls_or_shapes() -> None:
    script = """
import torch, qualms
from torch import nn

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

model = nn.Sequential(nn.Linear(10, 100_000), nn.Sigmoid(), nn.Linear(100_000, 3))
scorer = qualms.Scorer(model, "exgrad")
for call in range(130):
    if call == 30:
        before = resident()
    scorer(torch.randn(2, 10))
    with torch.no_grad():
        model[0].bias.add_(0.01)  # looked at anew
assert resident() - before < 20 * 2**20, resident() - before
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    learnt = PlanCache()
    for i in range(20):
        learnt.keep(("probe", i), i)
        learnt.get(("probe", 0), int)
    assert len(learnt.entries) == MAX_PER_KIND
    assert learnt.get(("probe", 0), int) == 0  # asked for all the time


def test_a_scorer_can_be_copied_and_sent(model: nn.Module, x: Tensor) -> None:
    scorer = qualms.Scorer(model, ["regrad", "laplace(1,8)"], train=[x])
    want = scorer(x).scores
    for other in (copy.deepcopy(scorer), pickle.loads(pickle.dumps(scorer))):
        torch.testing.assert_close(other(x).scores, want)


def test_any_way_of_picking_inputs_will_do(model: nn.Module, x: Tensor) -> None:
    whole = qualms.Scorer(model, "entropy", class_names=list("abcde"), engine="sketch")(x)
    assert whole[::-1].ids == list(range(11))[::-1]
    assert whole[np.array([-1, 0], dtype=np.int8)].ids == [10, 0]
    assert whole[torch.tensor([10, 0], dtype=torch.uint8)].ids == [10, 0]
    for nothing in ([], np.array([]), slice(0, 0), torch.zeros(11, dtype=torch.bool)):
        assert whole[nothing].ids == []
    both = pyarrow.concat_tables([whole[:2].to_arrow(), whole[0:0].to_arrow()])
    assert both.num_rows == 2


def test_odd_arrays_are_read_or_refused(model: nn.Module, x: Tensor) -> None:
    class Doubles(Dataset[Any]):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"input": x[i].numpy(), "labels": 3}

    single = copy.deepcopy(model).float()
    want = qualms.score(single, x.float())
    for given in (x.numpy().astype(">f8"), x.numpy().astype(np.longdouble)):
        torch.testing.assert_close(qualms.score(single, given), want)
    assert len(qualms.score(single, Doubles())) == 11
    with pytest.raises(qualms.QualmsError, match="MaskedArray"):
        qualms.score(single, np.ma.masked_array(x.numpy(), mask=x.numpy() > 0))
    once = (part for part in [x])
    with pytest.raises(qualms.QualmsError, match="train yields no batches"):
        qualms.compare(model, x, ["laplace(1,8)", "laplace(2,8)"], train=once)


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
def test_inputs_that_influence_each_other_are_scored_as_if_each_were_alone(engine: Any) -> None:
    torch.manual_seed(0)
    model, x = evasive.Mixing().double(), torch.randn(5, 5, 6).double()
    scorer = qualms.Scorer(model, "regrad", engine=engine)
    alone = torch.cat([scorer(x[i : i + 1], first=i).scores["regrad"] for i in range(5)])
    torch.testing.assert_close(scorer(x).scores["regrad"], alone, rtol=1e-9, atol=0)


def test_entries_that_change_places_are_noticed() -> None:
    weights = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    before = sum_bits(weights)
    for i, j in ((0, 1), (0, 2), (7, 135), (128, 256), (2998, 2999), (0, 2999)):
        swapped = weights.clone().flatten()
        swapped[[i, j]] = swapped[[j, i]]
        assert sum_bits(swapped.view(3, 1000)) != before
    assert (
        sum_bits(weights.clone())
        == before
        == sum_bits(torch.cat([torch.zeros(1), weights.flatten()])[1:])
    )


def test_a_way_of_pushing_that_later_inputs_cannot_take_is_looked_for_again() -> None:
    class Doubled(torch.autograd.Function):  # without a forward-mode rule
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.head((2 * h if x.sum() > 0 else Doubled.apply(h)).tanh())

    torch.manual_seed(0)
    model, x = Sometimes().double(), torch.rand(4, 6).double()
    scorer = qualms.Scorer(model, "regrad+layers", engine="sketch")
    for batch in (x, -x, x):
        want = qualms.score(model, batch, "regrad+layers", engine="sketch")
        torch.testing.assert_close(scorer(batch).scores["regrad+layers"], want, rtol=1e-5, atol=0)


def test_coherence_says_what_a_model_hides_from_it() -> None:
    with pytest.raises(qualms.QualmsError, match="coherence needs the order"):
        qualms.score(evasive.Hidden().double(), torch.randn(3, 5, 6).double(), "coherence")


# A threshold belongs to what made its scores.


def test_a_threshold_that_knows_its_scorer_is_refused_by_any_other(
    model: nn.Module, x: Tensor
) -> None:
    def made(**how: Any) -> qualms.Scorer:
        return qualms.Scorer(
            how.pop("model", model), how.pop("methods", "regrad+layers+smooth(0.1,4)"), **how
        )

    scorer = made(layers="tensor", params="0.*")
    scores = next(iter(scorer(x).scores.values()))
    threshold = qualms.Threshold.from_scores(scores, 0.5, provenance=scorer.provenance)
    same = made(
        layers="tensor", params=lambda name: name.startswith("0."), threshold=threshold
    )  # the same parameters
    assert int(same(x).accepted.sum()) == 6
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[3].bias += 1e-6
    how: dict[str, Any] = {"layers": "tensor", "params": "0.*", "threshold": threshold}
    for differs, change in {
        r"method REGrad\(.*sigma=0\.1.*, not REGrad\(.*sigma=0\.2": {
            "methods": "regrad+layers+smooth(0.2,4)"
        },
        "method REGrad.*, not Entropy": {"methods": ["entropy", "regrad"]},
        r"engine exact, not Sketch\(tangents=16": {"engine": "sketch"},
        "layers tensor, not module": {"layers": "module"},
        "norm l2, not l1": {"norm": "l1"},
        "params 2 parameters, .*, not None": {"params": None},
        r"tolerance 0\.0, not 0\.1": {"tolerance": 0.1},
        "seed 0, not 1": {"seed": 1},
        "network .*, not ": {"model": other},
    }.items():
        with pytest.raises(qualms.QualmsError, match=f"other settings: {differs}"):
            made(**{**how, **change})


def test_weights_that_change_part_from_their_threshold(model: nn.Module, x: Tensor) -> None:
    scorer = qualms.Scorer(model, "entropy")
    threshold = qualms.Threshold.from_scores(
        scorer(x).scores["entropy"], provenance=scorer.provenance
    )
    held = qualms.Scorer(
        model, "entropy", threshold=threshold, engine="sketch", seed=3
    )  # which entropy does not ask
    assert held(x).accepted.any()
    with torch.no_grad():
        model[0].weight *= 2
    with pytest.raises(qualms.QualmsError, match="other settings: network"):
        held(x)


def test_an_engine_that_is_yet_to_be_chosen_is_compared_when_it_is(x: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 300)).double()
    auto = qualms.Scorer(model, "regrad")
    with pytest.raises(qualms.QualmsError, match="has not chosen an engine yet"):
        _ = auto.provenance
    by = {
        name: qualms.Scorer(model, "regrad", engine=name).provenance for name in ("exact", "sketch")
    }
    few = qualms.Scorer(model, "regrad", tolerance=0.03).provenance
    auto.choose_engine(x)
    assert auto.provenance == few
    assert (
        qualms.Scorer(model, "regrad", threshold=qualms.Threshold(1.0, 0, "given", few))(x).accepted
        is not None
    )
    for differs, wrong in {
        "engine Sketch": by["sketch"],
        "tolerance 0.0, not 0.03": by["exact"],
    }.items():
        later = qualms.Scorer(model, "regrad", threshold=qualms.Threshold(1.0, 0, "given", wrong))
        with pytest.raises(qualms.QualmsError, match=f"other settings: {differs}"):
            later(x)


def test_scores_that_need_no_engine_have_one_provenance_before_and_after_a_batch(
    model: nn.Module, x: Tensor
) -> None:
    for methods in ("heat", "entropy", ["heat", "regrad"], "perturb-x"):
        scorer = qualms.Scorer(model, methods)
        before = scorer.provenance
        scorer(x)
        assert scorer.provenance == before


def test_percentiles_are_by_the_scores_that_the_threshold_was_set_on(
    model: nn.Module, x: Tensor
) -> None:
    known = qualms.score(model, x, "entropy")
    threshold = qualms.Threshold.from_scores(known, 0.5)
    found = qualms.Scorer(model, ["entropy", "energy"], threshold=threshold)(x)
    want = [100 * int((known < one).sum()) / len(known) for one in known]
    assert found.percentile.tolist() == pytest.approx(want)
    table = found.columns()
    assert list(table)[-2:] == ["percentile", "accepted"]
    assert table["percentile"] == pytest.approx(want)
    with pytest.raises(qualms.QualmsError, match="pass threshold="):
        _ = qualms.Scorer(model, "entropy")(x).percentile


# Noise in pixels.


def test_noise_in_pixels_is_put_into_the_units_of_the_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 4)).double()
    pixels, std = torch.rand(5, 3, 8, 8, dtype=torch.double), (0.25, 0.5, 0.2)
    x = (pixels - 0.5) / torch.tensor(std, dtype=torch.double)[:, None, None]
    own = qualms.Smoothing((0.1 / 0.25, 0.1 / 0.5, 0.1 / 0.2), 4)
    want = qualms.score(model, x, qualms.methods.REGrad(smooth=own))
    spec = "regrad+smooth(0.1,4)"
    assert torch.equal(qualms.score(model, x, spec, pixel_std=std), want)
    assert torch.equal(qualms.compare(model, x, [spec, "msp"], pixel_std=std)[spec], want)
    assert torch.equal(qualms.score_with_error(model, x, spec, pixel_std=std)[0], want)
    order = want.argsort(descending=True)
    assert torch.equal(qualms.select(model, x, 3, spec, pixel_std=std), order[:3])
    spread = [
        qualms.select(model, x, 3, m, diversity=1.6, pixel_std=p)
        for m, p in ((spec, std), (qualms.methods.REGrad(smooth=own), None))
    ]
    assert torch.equal(*spread)
    assert (
        "sigma=(0.4, 0.2, 0.5)"
        in qualms.Scorer(model, spec, pixel_std=std, engine="exact").provenance.method
    )


def test_normalized_images_without_a_scale_are_warned_of_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    pixels = torch.rand(4, 3, 4, 4)
    scorer = qualms.Scorer(model, ["msp", "regrad+smooth(0.02,2)"])
    with pytest.warns(qualms.UnitsWarning) as told:
        scorer([4 * pixels - 2, 4 * pixels - 2, 5 * pixels])
    assert len(told) == 1
    assert re.search(
        r"from -1.98 to .*pass pixel_std=.*noise of regrad\+smooth\(0\.02,2\)", str(told[0].message)
    )
    with pytest.warns(qualms.UnitsWarning, match="noise of perturb-x"):
        qualms.select(model, 4 * pixels, 1, "perturb-x(0.1,2)")
    silent: list[tuple[Any, Tensor, Any]] = [
        ("regrad+smooth(0.02,2)", pixels, None),  # in pixels
        ("regrad+smooth(0.02,2)", 4 * pixels, 1.0),  # as they should be
        ("regrad", 4 * pixels, None),  # without noise
        (
            qualms.methods.REGrad(smooth=qualms.Smoothing(0.1, 2)),
            4 * pixels,
            None,
        ),  # set by whoever made it
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method, x, std in silent:
            qualms.score(model, x, method, pixel_std=std)
        qualms.score(model[1], torch.randn(4, 48), "regrad+smooth(0.02,2)")  # no images


@pytest.mark.usefixtures("as_users_meet_it")
def test_a_scale_that_is_none_is_told(model: nn.Module) -> None:
    for scale in (0, (), "0.5", (0.1, -1)):
        with pytest.raises(qualms.QualmsError, match=r"pixel_std=.* is invalid"):
            qualms.Scorer(model, "perturb-x", pixel_std=scale)  # type: ignore[arg-type]


# How far it is.


def test_a_terminal_shows_count_total_and_rate(
    model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    many = x.repeat(20, 1)
    want = qualms.score(model, many, "entropy")
    for given, total in (
        (many, "220"),
        (many.numpy(), "220"),
        (TensorDataset(many), "220"),
        ([many[:100], many[100:]], "220"),
        (iter([many]), None),
    ):
        screen = Terminal()
        monkeypatch.setattr(sys, "stderr", screen)
        assert torch.equal(qualms.score(model, given, "entropy", progress=True), want)
        shown = screen.getvalue()
        assert shown.startswith("\r\x1b[2Kscoring the first inputs …")
        assert ("220 of 220 inputs scored, " in shown) == (total is not None)
        assert "/s" in shown
    told: list[int] = []
    qualms.score(model, many, "entropy", progress=told.append)
    assert told == [64, 128, 192, 220]


def test_time_left_is_told_in_minutes() -> None:
    assert pace(30, 120, 60.0) == ", 2.0 s each, 3:00 left"
    assert pace(300, 600, 60.0) == ", 5.0/s, 1:00 left"
    assert pace(300, None, 60.0) == pace(300, 300, 60.0) == ", 5.0/s"
    assert pace(0, 5, 1.0) == ""
