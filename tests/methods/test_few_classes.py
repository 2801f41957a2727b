"""`tolerance` with many classes: some of them stand for all; the error is reported, and within the
tolerance.
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.directions import Directions
from qualms.gradients.engines.class_sampling import SampledClasses, Tally, class_sizes, estimate
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings
from qualms.methods import REGrad
from qualms.methods.few_classes import FIRST, ClassSums
from tests import networks as net

CLASSES = 80
SPECS = ["regrad", "exgrad+layers(0.5)", "ungrad", "regrad+layers(0.3)+smooth(0.1,2)"]


def classifier(sharpness: float = 3.0) -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.Linear(32, CLASSES)
    with torch.no_grad():
        last.weight *= sharpness
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.ReLU(), last).double()


def inputs(number: int = 12) -> Tensor:
    noise = torch.Generator().manual_seed(1)
    return (
        torch.randn(number, 10, generator=noise).double() * torch.linspace(0.3, 4, number)[:, None]
    )


def convolutional() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = net.ResNet((4, 8), 1, CLASSES).eval().double()
    return model, torch.randn(4, 3, 8, 8, dtype=torch.double) * 3


class Pulled(nn.Module):
    """Subtracts the mean over the batch, so that inputs have to run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.inner(x)
        return z - (z * torch.arange(CLASSES)).mean(0)


def test_how_many_classes_a_pass_will_take_follows_the_tolerance() -> None:
    """All of them where no error is allowed, the fewest where any is; inputs count by themselves."""
    flat, steep = torch.zeros(1, CLASSES).double(), torch.linspace(0, 30, CLASSES).double()[None]

    def needed(logits: Tensor, tolerance: float) -> float:
        request = GradientRequest(
            nn.Identity(),
            logits,
            [0],
            Settings(tolerance=tolerance),
            Directions(("classes",)),
            smallest_lambda=0.3,
        )
        sums = ClassSums(request, [REGrad(layers=0.3)], PlanCache(), head=None)
        numbers = sums.choose_first_numbers(logits)
        return float(numbers.double().mean())

    assert needed(flat, 0.0) == needed(steep, 0.0) == CLASSES
    assert needed(flat, 0.9) == FIRST
    assert needed(steep, 0.006) == 15 < needed(flat, 0.006)
    assert needed(torch.cat([flat, steep, steep]), 0.006) == (CLASSES + 2 * 15) / 3


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS)
def test_the_error_is_reported_and_within_the_tolerance(spec: str) -> None:
    model, x = classifier(), inputs()
    want = qualms.score(model, x, spec, engine="exact")
    for tolerance in (0.03, 0.01):
        have, error = qualms.score_with_error(model, x, spec, tolerance=tolerance)
        assert (error <= tolerance * have).all()
        assert error.any() or tolerance < 0.02
        assert ((have - want).abs() <= 4.5 * error + tolerance * want).all()
        assert ((have - want).abs().mean() <= tolerance * want.mean()).all()


@pytest.mark.parametrize(
    "make", [convolutional, lambda: (classifier(0.1), inputs())], ids=["resnet", "undecided"]
)
def test_other_models_keep_within_the_tolerance(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    model, x = make()
    want = qualms.score(model, x, "regrad+layers", engine="exact")
    scored = qualms.Scorer(model, "regrad+layers", tolerance=0.04)(x)
    have, error = scored.scores["regrad+layers"], scored.errors["regrad+layers"]
    assert error.any()
    assert "error_regrad+layers" in scored.columns()
    assert (error <= 0.04 * have).all()
    assert ((have - want).abs() <= 4.5 * error).all()


def test_without_a_tolerance_every_class_counts() -> None:
    model, x = classifier(), inputs()
    want = qualms.score(model, x, "regrad", engine="reference")
    have, error = qualms.score_with_error(model, x, "regrad", tolerance=0.0)
    torch.testing.assert_close(have, want, rtol=1e-10, atol=0)
    assert not error.any()


def test_fewer_classes_are_pulled_back() -> None:
    class Watched(torch.autograd.Function):
        calls = 0

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, g: Tensor) -> Tensor:
            Watched.calls += 1
            return g

    class Watching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Watched.apply(x)

    model, x = (
        nn.Sequential(nn.Linear(10, 10, dtype=torch.double), Watching(), *classifier()),
        inputs(),
    )

    def calls(**more: float) -> int:
        Watched.calls = 0
        qualms.score(model, x, "regrad", params="0.*", **more)
        return Watched.calls

    assert calls(tolerance=0.5) < 30
    assert calls(tolerance=0.5) < calls(tolerance=0.005) <= calls() + 16 + 32


@pytest.mark.parametrize(
    "spec", ["regrad+layers(0.3)", pytest.param("exgrad+smooth(0.1,2)", marks=pytest.mark.slow)]
)
def test_a_score_depends_on_the_input_and_the_seed_alone(spec: str) -> None:
    model, x = classifier(), inputs(5)
    whole = qualms.score(model, x, spec, tolerance=0.02)
    assert torch.equal(qualms.score(model, x, spec, tolerance=0.02), whole)
    torch.testing.assert_close(
        qualms.score(model, x, spec, tolerance=0.02, batch_size=2), whole, rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        qualms.score(model, [x[:2], x[2:]], spec, tolerance=0.02), whole, rtol=1e-9, atol=0
    )
    assert not torch.allclose(
        qualms.score(model, x, spec, tolerance=0.02, seed=1), whole, rtol=1e-6
    )


def test_one_pass_serves_all_scores_and_strangers_are_exact() -> None:
    model, x = classifier(), inputs()
    specs = ["regrad", "exgrad+layers(0.5)", "gradnorm", "entropy"]
    together, want = (
        qualms.Scorer(model, specs, tolerance=0.05)(x),
        qualms.compare(model, x, specs, engine="exact"),
    )
    for spec in specs[:2]:
        off, error = (together.scores[spec] - want[spec]).abs(), together.errors[spec]
        assert (error <= 0.05 * together.scores[spec]).all()
        assert (off <= 3 * error).all()
        assert off.any()
    for spec in specs[2:]:
        torch.testing.assert_close(together.scores[spec], want[spec])


def test_inputs_that_run_alone_have_classes_of_their_own() -> None:
    model, x = Pulled(), inputs(3)
    want = qualms.score(model, x, "regrad", batch_size=1, engine="exact")
    with pytest.warns(qualms.SlowWarning):
        have, error = qualms.score_with_error(model, x, "regrad", tolerance=0.05)
    assert ((have - want).abs() <= 4.5 * error).all()


def test_estimates_have_the_right_mean_and_error() -> None:
    noise = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5, 200, generator=noise, dtype=torch.double)
    norms = 1 + 0.2 * torch.randn(5, 200, generator=noise, dtype=torch.double)
    weights = logits.softmax(-1).sqrt()
    terms = weights * norms
    found = []
    for seed in range(400):
        drawn = SampledClasses(("drawn",), lambda p: class_sizes(p.sqrt(), p), 24, seed)
        classes, chances = drawn.draw(logits)
        assert all(len(set(row)) == 24 for row in classes.tolist())
        found.append(torch.stack(estimate(terms.gather(-1, classes), chances)))
    value, error = torch.stack(found).unbind(1)
    spread = value.std(0)
    assert ((value.mean(0) - terms.sum(-1)).abs() < 4 * spread / 400**0.5).all()
    told = error.square().mean(0).sqrt()
    assert ((told / spread > 0.7) & (told / spread < 1.5)).all()


def test_chances_follow_the_sizes_and_the_largest_are_certain() -> None:
    logits = torch.linspace(0, 12, 60, dtype=torch.double)[None]
    chances = SampledClasses(("drawn",), lambda p: class_sizes(p, p), 16, 0).chances(logits)[0]
    assert float(chances.sum()) == pytest.approx(16)
    assert (chances.diff() >= -1e-12).all()
    assert float(chances[-1]) == 1 > float(chances[0]) > 0
    certain = torch.full((1, 60), -1e4, dtype=torch.double)
    certain[0, 3] = 0  # all other probabilities are exactly zero
    classes, chances = SampledClasses(("drawn",), lambda p: class_sizes(p, p), 16, 0).draw(certain)
    value, error = estimate(
        torch.zeros(1, 16).scatter(1, (classes == 3).long().argmax(1, keepdim=True), 2.0), chances
    )
    assert (float(value), float(error)) == (2.0, 0.0)


def test_classes_in_a_periodic_order_do_not_fall_in_with_the_steps() -> None:
    classes, number = 96, 12
    sizes = torch.ones(4, classes, dtype=torch.double) / classes
    norms = (
        (1 + torch.arange(classes) % 2).double().expand(4, -1)
    )  # every second class has twice the gradient
    deviations = []
    for seed in range(60):
        some = SampledClasses(("drawn",), lambda _: sizes, number, seed)
        drawn, chances = some.draw(torch.zeros(4, classes))
        value, error = estimate(norms.gather(-1, drawn), chances)
        deviations.append(float((value - norms.sum(-1))[0] / error[0]))
    assert 0.7 < torch.tensor(deviations).square().mean().sqrt() < 1.4  # in standard errors


def deep(classes: int = 400) -> nn.Sequential:
    """Blocks that narrow toward the classifier: a pass to the last of them takes a small part of
    the work.
    """
    torch.manual_seed(0)
    widths = [32, 160, 160, 160, 160, 24, 24]
    blocks = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    last = nn.Linear(widths[-1], classes)
    with torch.no_grad():
        last.weight *= 3
    return nn.Sequential(*blocks, last).double()


@pytest.mark.parametrize("spec", ["regrad", "fisher", "exgrad+smooth(0.1,2)"])
def test_sums_over_all_layers_have_the_right_mean_and_an_error_that_holds(spec: str) -> None:
    """Over 20 seeds: the true sum is within two standard errors nearly always, and they are not
    much too wide.
    """
    model, x = deep(), torch.randn(6, 32, generator=torch.Generator().manual_seed(2)).double()
    want = qualms.score(model, x, spec, engine="exact", seed=0)
    scorers = [qualms.Scorer(model, spec, tolerance=0.03, seed=seed) for seed in range(20)]
    parts = [scorer(x) for scorer in scorers] if "smooth" not in spec else [scorers[0](x)]
    off = torch.stack([part.scores[spec] for part in parts]) - want
    error = torch.stack([part.errors[spec] for part in parts])
    assert (error <= 0.03 * want * 1.1).all()
    if len(parts) > 1:
        assert (off.abs() <= 2 * error).double().mean() > 0.9
        assert (off.mean(0).abs() < 3 * error.square().mean(0).sqrt() / 20**0.5).all()
        assert off.square().mean().sqrt() > 0.25 * error.square().mean().sqrt()
    else:
        assert (off.abs() <= 4 * error).all()


def test_classes_that_were_measured_count_when_more_are_needed() -> None:
    """Turns add up: their mean is the sum, and their error falls as that of one draw of as many
    classes.
    """
    noise = torch.Generator().manual_seed(0)
    sizes = torch.rand(3, 120, generator=noise, dtype=torch.double) ** 20
    sizes /= sizes.sum(-1, keepdim=True)
    terms = sizes * (1 + 0.3 * torch.randn(3, 120, generator=noise, dtype=torch.double))
    every, spread = torch.arange(3), torch.tensor([[0.3]]).double()
    found = []
    for seed in range(400):
        tally = Tally.empty(1, sizes.clone())
        for turn in range(2):
            draws = torch.Generator().manual_seed(1000 * turn + seed)
            classes, chances = tally.draw(every, 16, draws)
            tally.add(every, classes, chances, terms.gather(-1, classes)[None], spread)
        value, error = tally.total(every)
        found.append(torch.stack([value[0], error[0]]))
    assert tally.is_certain.any(-1).all()
    assert (tally.num_drawn < 32).all()  # what is certain is measured once
    value, error = torch.stack(found).unbind(1)
    true = value.std(0)
    assert ((value.mean(0) - terms.sum(-1)).abs() < 4 * true / 400**0.5).all()
    told = error.square().mean(0).sqrt()
    assert ((told / true > 0.8) & (told / true < 1.6)).all()


def test_further_classes_are_drawn_only_where_the_error_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = classifier(), inputs()
    turns: list[tuple[int, int]] = []
    measure = ClassSums._measure

    def watched(self: ClassSums, index: Tensor, number: int, turn: int, tally: Tally) -> float:
        turns.append((turn, len(index)))
        return measure(self, index, number, turn, tally)

    monkeypatch.setattr(ClassSums, "_measure", watched)
    scored = qualms.Scorer(model, "regrad", tolerance=0.04)(x)
    assert (scored.errors["regrad"] <= 0.04 * scored.scores["regrad"]).all()
    assert sum(inputs for turn, inputs in turns if turn == 0) == len(x)
    assert 0 < sum(inputs for turn, inputs in turns if turn > 0) < len(x)


def test_scores_of_many_classes_depend_on_the_input_and_the_seed_alone() -> None:
    model, x = deep(), torch.randn(5, 32).double()
    whole = qualms.score(model, x, "regrad", tolerance=0.03)
    for how in ({"batch_size": 2}, {"batch_size": 1}):
        torch.testing.assert_close(
            qualms.score(model, x, "regrad", tolerance=0.03, **how), whole, rtol=1e-9, atol=0
        )
    assert not torch.allclose(
        qualms.score(model, x, "regrad", tolerance=0.03, seed=1), whole, rtol=1e-6
    )
