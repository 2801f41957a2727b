"""The model leaves as it came."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.errors import QualmsError
from qualms.gradients.batch import take_samples
from qualms.gradients.input_data import validate_batch
from tests import evasive
from tests import networks as net
from tests.cases import CASES, Case
from tests.helpers.engines import WITHOUT_DERIVATIVE
from tests.helpers.model_state import fingerprint, same


@pytest.mark.parametrize(
    "engine",
    ["exact", *(pytest.param(e, marks=pytest.mark.slow) for e in ("reference", qualms.Sketch(2)))],
    ids=["exact", "reference", "sketch"],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_changes(case: Case, engine: str | qualms.Sketch) -> None:
    model, x = case.make()
    x = take_samples(validate_batch(x), slice(0, 3))
    if not isinstance(model, torch.fx.GraphModule):
        model.train()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = fingerprint(model)
    kept = copy.deepcopy(x)
    refused = case.name in WITHOUT_DERIVATIVE and isinstance(engine, qualms.Sketch)
    with pytest.raises(QualmsError, match="cannot push") if refused else nullcontext():
        qualms.class_gradient_norms(model, x, smoothing=(0.1, 2), engine=engine)
    after = fingerprint(model)
    for key in before:
        assert same(before[key], after[key]), key
    assert same(kept, x)


def test_nothing_changes_after_an_error() -> None:
    model, x = net.mlp().train(), torch.randn(2, 7)
    before = fingerprint(model)
    with pytest.raises(qualms.QualmsError):
        qualms.class_gradient_norms(model, x)
    assert all(same(before[key], fingerprint(model)[key]) for key in before)


def test_it_works_under_no_grad_and_inference_mode() -> None:
    model, x = net.mlp(), torch.randn(3, 3, 4, 4)
    want = qualms.class_gradient_norms(model, x).norms
    with torch.no_grad():
        assert torch.equal(qualms.class_gradient_norms(model, x).norms, want)
    with torch.inference_mode():
        assert torch.equal(qualms.class_gradient_norms(model, x.clone()).norms, want)


class Writes(nn.Module):
    """Does something to a tensor of its own in its forward pass."""

    def __init__(self, write: Callable[["Writes"], object]) -> None:
        super().__init__()
        self.fc, self.write = nn.Linear(4, 3), write
        self.register_buffer("calls", torch.zeros(()))
        self.scratch, self.seen = torch.zeros(2), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return self.fc(x)


WRITES: dict[str, Callable[[Writes], object]] = {
    "a buffer": lambda m: m.calls.add_(1),
    "a buffer's data": lambda m: m.calls.data.add_(1),
    "an attribute's data": lambda m: m.scratch.data.add_(1),
    "a list": lambda m: m.seen.append(1),
    "another buffer": lambda m: setattr(m, "calls", m.calls + 1),
    "another parameter": lambda m: setattr(m.fc, "bias", nn.Parameter(torch.ones(3))),
}


@pytest.mark.parametrize("engine", ["exact", "reference"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_the_model_itself_writes_is_put_back(
    write: Callable[[Writes], object], engine: str
) -> None:
    model, x = Writes(write), torch.randn(2, 4)
    before = fingerprint(model)
    qualms.class_gradient_norms(model, x, engine=engine)
    after = fingerprint(model)
    for key in before:
        assert same(before[key], after[key]), key
    assert model.calls == 0
    assert not model.scratch.any()
    assert model.seen == []


class KeepsItsInput(nn.Linear):
    """Has no buffer before its first forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("latest", x.detach())
        return super().forward(x)


def test_a_models_first_buffer_is_removed_if_it_registers_it_itself() -> None:
    model = KeepsItsInput(3, 2)
    qualms.score(model, torch.rand(2, 3))
    assert not dict(model.named_buffers())


def test_a_parameter_that_the_model_changes_is_an_error() -> None:
    def swap(m: Writes) -> None:
        m.fc.weight.data.copy_(m.fc.weight.flip(0))

    changes: list[Callable[[Writes], object]] = [
        lambda m: m.fc.weight.data.mul_(1.0001),
        lambda m: m.fc.bias.data.add_(1),
        lambda m: setattr(m.fc.weight, "data", m.fc.weight.detach() * 2),
        swap,
    ]
    for change in changes:
        with pytest.raises(
            qualms.QualmsError,
            match=r"modifies its parameter fc\.(weight|bias) in its forward pass",
        ):
            qualms.score(Writes(change), torch.randn(1, 4), "entropy")


def test_an_input_that_the_model_changes_stays_the_users() -> None:
    model, x = evasive.ChangesItsInput(), torch.randn(3, 6)
    kept = x.clone()
    for engine in ("exact", "reference", qualms.Sketch(4)):
        scores = qualms.score(model, x, "regrad", engine=engine)
        assert torch.equal(x, kept)
        assert torch.equal(qualms.score(model, x, "regrad", engine=engine), scores)
    for method in ("mc-aa", "perturb-x", "perturb-theta", "energy"):
        qualms.score(model, x, method)
        assert torch.equal(x, kept)


def levit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LevitConfig, LevitForImageClassification

    torch.manual_seed(0)
    config = LevitConfig(
        image_size=64, hidden_sizes=[8, 12, 16], num_attention_heads=[1, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4],
        attention_ratio=[1, 1, 1], mlp_ratio=[1, 1, 1], down_ops=[["Subsample", 4, 2, 1, 1, 2]] * 2, num_labels=3,
    )  # fmt: skip
    model = LevitForImageClassification(config).double()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return model, {"pixel_values": torch.randn(3, 3, 64, 64, dtype=torch.double)}


@pytest.mark.slow
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("mode", [False, True], ids=["evaluating", "training"])
def test_a_model_that_caches_in_evaluation_mode_has_all_its_gradients(
    mode: bool, used: bool
) -> None:
    model, x = levit()
    want = qualms.class_gradient_norms(copy.deepcopy(model.eval()), x, engine="reference")
    biased = next(name for name, m in model.named_modules() if hasattr(m, "attention_bias_cache"))
    assert want.norms[..., want.layers.index(biased)].all()
    if used:
        with torch.no_grad():
            model(**x)  # which leaves a cache without a graph
    model.train(mode)
    for _ in range(2):
        found = qualms.class_gradient_norms(model, x)
        assert found.layers == want.layers
        torch.testing.assert_close(found.norms, want.norms, rtol=1e-9, atol=1e-12)
    cached = [m.attention_bias_cache for m in model.modules() if hasattr(m, "attention_bias_cache")]
    assert all(bool(cache) == (used and not mode) for cache in cached)
    copy.deepcopy(model)


class Merging(nn.Linear):
    """Adds a product of two small matrices to its weight when evaluation begins, as some adapters
    do.
    """

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(3, 2))
        self.merged = False

    def train(self, mode: bool = True) -> "Merging":
        if self.merged == mode:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).detach()
            self.merged = not mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return z if self.merged else z + x @ self.down.T @ self.up.T


class FrozenNorm(nn.Module):
    """A norm that stays in evaluation mode whatever it is told, and a part that is in training mode
    on its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.fc = nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.norm(x)))


@pytest.mark.parametrize("mode", [False, True], ids=["evaluating", "training"])
@pytest.mark.parametrize("build", [Merging, FrozenNorm])
def test_modes_are_switched_by_the_modules_own_methods_and_put_back(
    build: type[nn.Module], mode: bool
) -> None:
    model, x = build().train(mode), torch.randn(3, 4)
    if isinstance(model, FrozenNorm):
        model.drop.train(not mode)
    before = fingerprint(model)
    want = qualms.class_gradient_norms(copy.deepcopy(model).eval(), x, engine="reference").norms
    torch.testing.assert_close(qualms.class_gradient_norms(model, x).norms, want)
    after = fingerprint(model)
    for key in before.keys() - {"parameters"}:
        assert same(before[key], after[key]), key
    assert all(
        torch.equal(a[-1], b[-1])
        for a, b in zip(before["parameters"], after["parameters"], strict=True)
    )


@pytest.mark.parametrize(
    "engine", ["exact", pytest.param(qualms.Sketch(4), marks=pytest.mark.slow)]
)
def test_threads_get_what_one_thread_gets(engine: qualms.Sketch | str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    model.train()
    other = nn.Sequential(*model[:-1], nn.Linear(16, 5))  # which shares modules with it
    batches = [torch.randn(2, 3, 4, 4) for _ in range(3)]
    scorer = qualms.Scorer(model, ["regrad", "mc-dropout(4)"], engine=engine)
    before = fingerprint(model)
    want = [
        (scorer(x).scores["regrad"], qualms.score(other, x, "regrad", engine=engine))
        for x in batches
    ]
    shared = qualms.Scorer(model, ["regrad", "mc-dropout(4)"], engine=engine)
    with ThreadPoolExecutor(4) as pool:
        ones = [pool.submit(lambda x=x: shared(x).scores["regrad"]) for x in batches * 2]
        others = [pool.submit(qualms.score, other, x, "regrad", engine=engine) for x in batches * 2]
        for i in range(len(ones)):
            assert torch.equal(ones[i].result(), want[i % 3][0])
            assert torch.equal(others[i].result(), want[i % 3][1])
    after = fingerprint(model)
    for key in before:
        assert same(before[key], after[key]), key


def test_it_works_where_new_tensors_go_elsewhere() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + torch.arange(3)

    model, x = Makes(), torch.randn(3, 4)
    methods = ["regrad+layers+smooth(0.1, 2)", "perturb-theta(0.01, 2)", "entropy"]
    for engine in ("exact", qualms.Sketch(2), "reference"):
        want = qualms.compare(model, x, methods, engine=engine)
        with torch.device("meta"):
            have = qualms.compare(model, x, methods, engine=engine)
        assert all(torch.equal(have[m], want[m]) for m in methods)
