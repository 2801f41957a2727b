"""The sketch engine: exact projections, estimates of the right thing, error bars that hold, bounded
memory.
"""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

import qualms
from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples, take_samples
from qualms.gradients.directions import DIRECTIONS as ALL
from qualms.gradients.directions import Directions
from qualms.gradients.engines.sketch import SketchEngine
from qualms.gradients.input_data import batches
from qualms.gradients.isolation import preserve_state
from qualms.gradients.layers import layer_weights
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings
from qualms.gradients.single_sample import sample_gradients
from qualms.gradients.sketching.jvp import JVP_FUNCTIONS, JvpFunction
from qualms.gradients.sketching.projections import Projections, cauchy_scale, normal_scale
from qualms.gradients.sketching.tangents import tangents_of_layers
from tests import networks as net
from tests.cases import CASES, Case
from tests.helpers.engines import SMOOTHINGS, WITHOUT_DERIVATIVE

DIRECTIONS = ("classes", "uniform")
BY_DIFFERENCES = {  # no forward-mode rule
    "weight-norm", "hidden-from-function-modes", "tied-padding", "module-of-two-names-by-differences",
}  # fmt: skip


@pytest.mark.parametrize(
    "smoothing",
    [None, pytest.param(SMOOTHINGS["smoothed"], marks=pytest.mark.slow)],
    ids=list(SMOOTHINGS),
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_projections_are_those_of_the_gradients(
    case: Case, smoothing: qualms.Smoothing | None
) -> None:
    model, x = case.make()
    with preserve_state(model) as inner:
        batch = take_samples(next(batches(x, inner)), slice(0, 3))
        settings = Settings(engine=qualms.Sketch(2))
        job = GradientRequest(
            inner, batch, range(num_samples(batch)), settings, Directions(DIRECTIONS), smoothing
        )
        engine = SketchEngine(PlanCache())
        plan = engine.plan(job)
        drawn = tangents_of_layers(job, [(list(job.selected), 1.0)])
        tangents = [drawn[j] for j in (0, 1)]
        if case.name in WITHOUT_DERIVATIVE:
            with pytest.raises(QualmsError, match="cannot push tangents"):
                list(engine.project(plan, job, drawn))
            return
        ((sample, logits),) = engine.project(plan, job, drawn)
        have = sample.values
        for i in range(len(logits)):
            on = job.make_rows(slice(i, i + 1))
            total: dict[str, Tensor] = {}
            for r in range(on.rows_per_sample):
                z, found = sample_gradients(
                    inner, on.take([r]), job.selected, lambda z: _all_directions(z).flatten(1, 2)
                )
                if r == 0:
                    torch.testing.assert_close(logits[i : i + 1], z)
                total |= {
                    name: total.get(name, 0) + g / on.rows_per_sample for name, g in found.items()
                }
            flat = {name: g.reshape(len(g), -1) for name, g in total.items()}
            want = torch.stack([sum(flat[n] @ s[n].flatten() for n in flat) for s in tangents])
            size = sum(g.square().sum(1) for g in flat.values()).sqrt()
            tolerance = 1e-6 if case.name in BY_DIFFERENCES else 1e-9
            assert ((have[:, i] - want).abs() <= tolerance * size + 1e-300).all()


@pytest.mark.parametrize("push", JVP_FUNCTIONS.values(), ids=JVP_FUNCTIONS)
def test_a_module_of_two_names_keeps_its_own_weights(push: JvpFunction) -> None:
    torch.manual_seed(0)
    model, x = net.two_names().double(), torch.randn(2, 5, 6, dtype=torch.double)
    weight, logits = model[0].weight, model(x)
    tangent = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    push(model, ModelInput(x, 1), tangent)
    assert model[0].weight is weight
    assert torch.equal(model(x), logits)


def _all_directions(logits: Tensor) -> Tensor:
    return torch.cat([ALL[name](logits[:, None]) for name in DIRECTIONS])


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("smoothing", SMOOTHINGS.values(), ids=SMOOTHINGS)
def test_many_tangents_give_the_norms_of_every_layer(
    norm: str, smoothing: qualms.Smoothing | None
) -> None:
    torch.manual_seed(0)
    model, x = net.mlp().double(), torch.randn(3, 3, 4, 4, dtype=torch.double)
    exact = qualms.class_gradient_norms(model, x, norm=norm, smoothing=smoothing)
    sketch = qualms.class_gradient_norms(
        model, x, norm=norm, smoothing=smoothing, engine=qualms.Sketch(400)
    )
    assert sketch.layers == exact.layers
    torch.testing.assert_close(sketch.probs, exact.probs)
    torch.testing.assert_close(sketch.norms, exact.norms, rtol=0.3, atol=0)
    assert sketch.error is not None
    apart = (sketch.norms - exact.norms).abs() / sketch.error
    assert apart.max() < 4.5
    assert 0.3 < apart.square().mean().sqrt() < 2


@pytest.mark.slow
@pytest.mark.parametrize("combine", ["quadrature", "sum"])
@pytest.mark.parametrize(
    "spec", ["regrad+layers(0.7)", "exgrad+layers(0.7)+smooth(0.1)", "gradnorm"]
)
def test_many_tangents_give_the_score(spec: str, combine: str) -> None:
    torch.manual_seed(0)
    model, x = net.mlp().double(), torch.randn(4, 3, 4, 4, dtype=torch.double)
    have, error = qualms.score_with_error(model, x, spec, engine=qualms.Sketch(800, combine))
    want = qualms.score(model, x, spec)
    if combine == "quadrature" and "+layers" in spec:
        smooth = qualms.Smoothing(0.1) if "smooth" in spec else None
        g = qualms.class_gradient_norms(model, x, smoothing=smooth)
        squares = (g.norms * layer_weights(len(g.layers), 0.7)).square()
        weights = g.probs.sqrt() if "regrad" in spec else g.probs
        want = (weights * squares.sum(-1).sqrt()).sum(-1)
    torch.testing.assert_close(have, want, rtol=0.2, atol=0)
    assert ((have - want).abs() < 4 * error).all()


@pytest.mark.slow
def test_the_error_bar_is_the_spread_over_seeds() -> None:
    torch.manual_seed(0)
    model, x = net.mlp(), torch.randn(3, 3, 4, 4)
    for combine in ("quadrature", "sum"):
        engine = qualms.Sketch(16, combine)
        runs = [
            qualms.score_with_error(model, x, "regrad+layers", engine=engine, seed=s)
            for s in range(40)
        ]
        spread = torch.stack([scores for scores, _ in runs]).std(0)
        told = torch.stack([error for _, error in runs]).median(0).values
        assert ((told / spread > 0.6) & (told / spread < 1.6)).all(), (combine, told / spread)


def test_other_engines_have_no_error_of_that_kind() -> None:
    model, x = net.mlp(), torch.randn(3, 3, 4, 4)
    scores, error = qualms.score_with_error(model, x)
    assert torch.equal(scores, qualms.score(model, x))
    assert torch.equal(error, torch.zeros(3))


@pytest.mark.slow
def test_scores_do_not_depend_on_the_batch_size() -> None:
    torch.manual_seed(0)
    model, x = net.mnist_cnn().double(), torch.randn(7, 1, 12, 12, dtype=torch.double)
    whole = qualms.score(model, x, engine="sketch")
    assert torch.equal(qualms.score(model, x, engine="sketch"), whole)
    for more in ({"batch_size": 2}, {"budget": 2**18}):
        torch.testing.assert_close(qualms.score(model, x, engine="sketch", **more), whole)
    torch.testing.assert_close(qualms.score(model, [x[:3], x[3:]], engine="sketch"), whole)
    assert not torch.allclose(qualms.score(model, x, engine="sketch", seed=1), whole)


def test_inputs_are_ranked_as_by_the_exact_engine() -> None:
    torch.manual_seed(0)
    model, x = net.ResNet((8, 16), 2, 10), torch.randn(64, 3, 12, 12) * torch.rand(64, 1, 1, 1) * 3
    exact = qualms.score(model, x, "regrad+layers")
    for engine in ("sketch", qualms.Sketch(32, "sum")):
        assert spearmanr(exact, qualms.score(model, x, "regrad+layers", engine=engine))[0] > 0.97


def test_estimates_of_scale_have_no_bias_to_speak_of() -> None:
    noise = torch.Generator().manual_seed(0)
    normal = torch.randn(5, 20_000, 1, generator=noise, dtype=torch.double)
    assert abs(float(normal_scale(normal).mean()) - 1) < 0.01
    cauchy = torch.randn(9, 20_000, 1, generator=noise, dtype=torch.double) / torch.randn(
        9, 20_000, 1, generator=noise, dtype=torch.double
    )
    assert abs(float(cauchy_scale(cauchy).log().mean())) < 0.01


@pytest.mark.parametrize("k", [2, 4, 21])
def test_the_cauchy_scale_is_the_likeliest(k: int) -> None:
    t = torch.empty(k, 40, 3, dtype=torch.double).cauchy_(
        generator=torch.Generator().manual_seed(1)
    )
    best = cauchy_scale(t)

    def likelihood(scale: Tensor) -> Tensor:
        return (scale / (scale.square() + t.square())).log().sum(0)

    for factor in (0.99, 1.01):
        assert (likelihood(best) > likelihood(best * factor)).all()


def test_a_gradient_of_zero_has_norm_and_error_zero() -> None:
    for distribution in ("normal", "cauchy"):
        sample = Projections(torch.zeros(8, 2, 3, dtype=torch.double), distribution)
        assert torch.equal(sample.estimate_norms(), torch.zeros(2, 3, dtype=torch.double))
        assert torch.equal(
            sample.error(sample.estimate_norms()), torch.zeros(2, 3, dtype=torch.double)
        )
    model, x = net.mlp(), torch.randn(3, 3, 4, 4)
    assert torch.equal(qualms.score(model, x, "negrad", engine="sketch"), torch.zeros(3))


def test_a_model_without_a_derivative_is_refused_by_name_of_the_way_out() -> None:
    class Rounds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.round()

        @staticmethod
        def backward(
            ctx: object, g: Tensor
        ) -> Tensor:  # straight through: not the derivative of what it computes
            return g

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Rounds.apply(self.first(x)))

    with pytest.raises(qualms.QualmsError, match="use engine='exact'"):
        qualms.score(Quantized(), torch.randn(3, 4), engine="sketch")


class Words(nn.Module):
    """Word 0 is padding, which the first inputs do not have; looked up by `look_up`."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.head, self.look_up = (
            nn.Parameter(torch.randn(20, 6)),
            nn.Linear(6, 4),
            look_up,
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.look_up(ids, self.weight).sum(1).tanh())


@pytest.mark.slow
@pytest.mark.parametrize(
    "look_up",
    [
        lambda ids, w: nn.functional.embedding(ids, w, padding_idx=0),
        lambda ids, w: torch.embedding(w, ids, 0),
        lambda ids, w: torch.ops.aten.embedding(w, ids, 0),
    ],
)
def test_padding_has_no_gradient_however_it_is_looked_up(
    look_up: Callable[[Tensor, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model, ids = Words(look_up).double(), torch.randint(1, 20, (12, 5))
    ids[8:, 2:] = 0
    exact = qualms.class_gradient_norms(model, ids, params="weight")
    sketch = qualms.class_gradient_norms(model, ids, params="weight", engine=qualms.Sketch(400))
    torch.testing.assert_close(sketch.norms, exact.norms, rtol=0.2, atol=0)


def test_gradients_scaled_by_frequency_are_refused() -> None:
    model = Words(lambda ids, w: nn.functional.embedding(ids, w, scale_grad_by_freq=True))
    with pytest.raises(qualms.QualmsError, match="frequency"):
        qualms.score(model, torch.randint(1, 20, (4, 5)), "regrad", engine="sketch")


def test_a_random_model_is_refused() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) + torch.randn(len(x), 3)

    with pytest.raises(qualms.QualmsError, match="random"):
        qualms.score(Noisy(), torch.randn(3, 4), engine="sketch")


@pytest.mark.parametrize(
    "engine",
    ["exact", pytest.param(qualms.Sketch(400), marks=pytest.mark.slow)],
    ids=["exact", "sketch"],
)
def test_masked_classes_do_not_hide_that_inputs_influence_each_other(
    engine: str | qualms.Sketch,
) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.tensor([0.0, 0.0, 0.0, 0.0, -1e9], dtype=x.dtype)
            return self.fc(x - (x.mean(0) if len(x) > 2 else 0)) + mask

    torch.manual_seed(0)
    model, x = Mixing().double(), torch.randn(6, 4, dtype=torch.double) + 3
    have = qualms.score(model, x, "regrad", engine=engine)
    want = qualms.score(model, x, "regrad", engine="reference")
    torch.testing.assert_close(have, want, rtol=1e-9 if engine == "exact" else 0.15, atol=0)


@pytest.mark.slow
def test_half_precision_gives_numbers_or_an_error() -> None:
    torch.manual_seed(0)
    model, x = net.mlp().half(), torch.randn(3, 3, 4, 4).half()
    g = qualms.class_gradient_norms(model, x, engine=qualms.Sketch(200))
    assert g.norms.dtype == torch.float32
    torch.testing.assert_close(
        g.norms, qualms.class_gradient_norms(model, x).norms, rtol=0.3, atol=0
    )
    with torch.no_grad():
        model[-1].weight *= 3e4
    with pytest.raises(qualms.QualmsError):
        qualms.class_gradient_norms(model, x, engine="sketch")


@pytest.mark.parametrize("bad", [{"tangents": 1}, {"tangents": 0}])
def test_bad_options_are_named(bad: dict[str, object]) -> None:
    with pytest.raises(qualms.QualmsError, match="the sketch has"):
        qualms.Sketch(**bad)


PEAK = """
import resource, torch, qualms
from torch import nn
torch.manual_seed(0)
body = nn.Sequential(nn.Embedding(30_000, 64), nn.Flatten(), nn.Linear(8 * 64, 64), nn.GELU())
model = nn.Sequential(body, nn.Linear(64, 30_000)).eval()
x = torch.randint(0, 30_000, (96, 8))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
scores = qualms.score(model, x, "regrad+layers", engine="sketch", budget=2**26)
assert scores.shape == (96,) and bool(torch.isfinite(scores).all())
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10)
"""


@pytest.mark.slow
def test_a_vocabulary_of_thirty_thousand_words_stays_within_the_budget() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=env
    )
    assert (
        float(done.stdout) < 512
    )  # MiB; the gradients of all classes of one input would take 450 GiB
