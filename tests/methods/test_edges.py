"""At the edges of what numbers hold a score is right, or an error says why there is none; it is
never NaN.
"""

import copy
import warnings
from decimal import Decimal

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.methods import KNN, QUAM
from qualms.methods.context import BatchContext
from qualms.methods.divergence import expected_kl, log_softmax, mutual_information
from qualms.methods.head_posterior import fit_head
from qualms.methods.method import to_finite
from qualms.methods.registry import METHODS
from qualms.random import generator
from tests.helpers import method_edges as edges
from tests.helpers.method_edges import (
    SITUATIONS,
    TRAIN,
    Situation,
    X,
    cnn,
    member_of,
    of_linear_layer,
)

FEW = {
    "mc-aa": "mc-aa(0.01,4)",
    "laplace": "laplace(1,4)",
    "quam": "quam(3)",
    "odin": "odin(1000,0.01)",
}
FEW |= {name: f"{name}(0.1,4)" for name in ("perturb-x", "perturb-theta", "inserted-dropout")}
FEW |= {name: f"{name}(4)" for name in ("mc-dropout", "mc-batchnorm")}
SPECS = [FEW.get(kind.name, kind.name) for kind in METHODS]
SPECS += [
    "regrad+layers",
    "exgrad+smooth(0.1,2)",
    "negrad+smooth(0.1,2)",
    "fisher+layers+smooth(0.1,2)",
]
MARGINS = [0.0, 5.0, 20.0, 37.0, 60.0, 80.0]


def scores(situation: Situation, double: bool = False) -> dict[str, Tensor | str]:
    """Every method's scores, or what its error says."""
    model, x, train = situation.model, situation.x, situation.train
    if double:
        model, x, train = copy.deepcopy(model).double(), x.double(), train.double()
    found: dict[str, Tensor | str] = {}
    scorer, numbers = (
        qualms.Scorer(model, SPECS, train=[train], models=[member_of(model)]),
        range(len(x)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qualms.errors.ProbabilitiesWarning)
        with scorer._open_model(
            x
        ) as subject:  # one method's error must not end the others', which share its passes
            passes = BatchContext(subject, x, numbers)
            for spec, method in scorer.methods.items():
                try:
                    found[spec] = to_finite(method.score(passes), passes.dtype, spec, numbers)
                except qualms.QualmsError as error:
                    found[spec] = str(error)
    return found


# In 32 bits the logits of a model have seven digits, and perturbed ones differ in fewer: what is
# left of them is right.
FOLLOWS_LOGITS = {"perturb-x", "perturb-theta", "mc-aa", "ensemble", "quam", "negrad+smooth"}
KINKS = {"mc-aa"}  # the sign of a gradient that is zero but for rounding


FAST = ("margin of 60",)


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in SITUATIONS]
)
def test_every_score_in_32_bits_is_that_in_64_or_an_error(name: str) -> None:
    single, double = scores(SITUATIONS[name]()), scores(SITUATIONS[name](), double=True)
    for spec in SPECS:
        have, want = single[spec], double[spec]
        if isinstance(
            have, str
        ):  # what 32 bits do not hold is told; what nobody can compute is told in 64 bits too
            held = isinstance(want, Tensor) and bool(
                (want.abs() < torch.finfo(torch.float32).max).all()
            )
            assert not held or "64" in have, (spec, have)
            continue
        assert isinstance(want, Tensor), (spec, want)
        assert have.isfinite().all(), spec
        assert want.isfinite().all(), spec
        base = spec.split("(")[0]
        if base in FOLLOWS_LOGITS:
            assert (
                spec == "quam(3)"
                or base in KINKS
                or torch.allclose(have.double(), want, rtol=0.05, atol=1e-6)
            ), spec
        else:
            atol = 1e-12 if spec == "mahalanobis" else 1e-43  # of a distance of zero
            torch.testing.assert_close(
                have, want.float(), rtol=2e-3, atol=atol, msg=lambda m, s=spec: f"{s}: {m}"
            )


def linear(margin: float, dtype: torch.dtype) -> tuple[nn.Sequential, Tensor]:
    """A layer whose logits are its bias, but for 2e-3 that come from the input."""
    model = nn.Sequential(nn.Linear(3, 4)).to(dtype)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.copy_(torch.tensor([0.5, margin + 0.75, -0.25, 0.0]))
    return model, torch.tensor([[0.5, -0.25, 0.125]], dtype=dtype)


@pytest.mark.parametrize("engine", ["exact", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("margin", [*MARGINS, 90.0, 400.0, 700.0, 800.0, 1000.0])
def test_scores_of_a_linear_layer_have_a_closed_form_at_any_margin(
    margin: float, dtype: torch.dtype, engine: str
) -> None:
    model, x = linear(margin, dtype)
    want = of_linear_layer(model(x)[0].tolist(), x[0].tolist())
    found = qualms.compare(model, x, list(want), engine=engine)
    tiny = torch.finfo(dtype).smallest_normal
    for name, value in want.items():
        expected = torch.tensor([float(value)], dtype=torch.double)
        rtol = 1e-6 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(
            found[name].double(),
            expected,
            rtol=rtol,
            atol=1e-3 * tiny,
            msg=lambda m, n=name: f"{n}: {m}",
        )


CONFIDENCE = ["msp", "entropy", "gen", "energy", "max-logit", "regrad", "exgrad", "fisher", "heat"]
CONFIDENCE += ["regrad+layers", "recommended"]


@pytest.mark.parametrize("engine", ["exact", "reference", "sketch"])
def test_more_confident_inputs_score_lower_and_are_never_tied(engine: str) -> None:
    model = nn.Sequential(nn.Linear(1, 3, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [0.0], [-0.5]]))
    margins = torch.tensor([[1.0], [5.0], [16.0], [20.0], [37.0], [38.0], [50.0], [60.0], [80.0]])
    specs = [
        s
        for s in CONFIDENCE
        if s not in ("regrad", "regrad+layers", "heat", "recommended") or engine != "sketch"
    ]
    for name, found in qualms.compare(model, margins, specs, engine=engine).items():
        assert (found.diff() < 0).all(), (name, found)
        if name in ("msp", "entropy", "gen", "regrad", "exgrad", "fisher"):
            assert (found > 0).all(), name


def test_mutual_information_keeps_its_digits_and_is_never_negative() -> None:
    base = torch.tensor([0.0, 1.0, 2.5], dtype=torch.double)
    for margin in (0.0, 20.0, 40.0, 90.0, 600.0):
        for step in (1e-7, 1e-3, 1.0, 30.0):
            logits = base + torch.tensor(
                [[0, 0, margin], [step, 0, margin - step], [0, 2 * step, margin]]
            )
            found = float(mutual_information(log_softmax(logits)[None]))
            want = edges.mutual_information([edges.probabilities(z) for z in logits.tolist()])
            assert float(abs(Decimal(found) - want) / want) < 1e-6, (margin, step)
            against = float(expected_kl(log_softmax(logits[1:])[None], log_softmax(logits[:1])))
            q, p = (
                [edges.probabilities(z) for z in logits[1:].tolist()],
                edges.probabilities(logits[0].tolist()),
            )
            want = sum(edges.divergence(one, p) for one in q) / len(q)
            assert float(abs(Decimal(against) - want) / want) < 1e-6, (margin, step)
    alike = log_softmax(torch.randn(50, 1, 7, dtype=torch.double).expand(-1, 9, -1))
    assert (mutual_information(alike) == 0).all()


def test_opposite_certainties_have_all_the_mutual_information_there_is() -> None:
    logits = torch.tensor([[[1e4, 0.0], [0.0, 1e4]]], dtype=torch.double)
    torch.testing.assert_close(
        mutual_information(log_softmax(logits)), torch.tensor([2.0]).double().log()
    )
    assert float(expected_kl(log_softmax(logits)[:, :1], log_softmax(logits)[:, 1])) == 1e4


@pytest.mark.parametrize("margin", [10.0, 20.0, 40.0, 70.0])
def test_the_adversarial_step_is_right_where_the_model_is_certain(margin: float) -> None:
    # The likeliest class loses most by steps against the first number, which no other class reads.
    model = nn.Sequential(nn.Linear(2, 2, bias=True))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[5.0, 0.0], [1.0, 0.0]]))
        model[0].bias.copy_(torch.tensor([margin, 0.0]))
    found, want = (
        qualms.score(m, torch.zeros(1, 2).to(m[0].weight), "mc-aa(0.1,50)")
        for m in (model, copy.deepcopy(model).double())
    )
    torch.testing.assert_close(found, want.float(), rtol=1e-4, atol=0)
    rows = 0.1 * 4 * _uniform(50)
    logits = torch.stack([margin + rows, torch.zeros(50).double()], dim=1)
    torch.testing.assert_close(
        want, mutual_information(log_softmax(logits)[None]), rtol=1e-6, atol=0
    )


def _uniform(draws: int) -> Tensor:
    return -(2 * torch.rand(draws, generator=generator(0, 0)) - 1).double()


def test_smoothed_negrad_of_a_certain_input_is_not_zero() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([0.0, 50.0, 1.0]))
    x = torch.randn(3, 2, generator=torch.Generator().manual_seed(0))
    single = qualms.score(model, x, "negrad+smooth(0.5,4)")
    assert (single > 0).all()
    want = qualms.score(model.double(), x.double(), "negrad+smooth(0.5,4)", engine="reference")
    torch.testing.assert_close(single, want.float(), rtol=1e-2, atol=0)
    assert (qualms.score(model, x.double(), "negrad") == 0).all()


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e-14, 1.0, 1e22, 1e36])
def test_knn_does_not_depend_on_the_size_of_features(size: float) -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight /= size
    x, train = (
        torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),
        TRAIN.flatten(1)[:, :6],
    )
    train = torch.cat([train, train[:1].expand(10, -1), torch.zeros(1, 6)])
    z, known = (t / t.norm(dim=1, keepdim=True).clamp_min(1e-12) for t in (x, train))
    want = torch.cdist(z.double(), known.double()).sort(dim=1).values[:, 2]
    found = qualms.score(model, x * size, KNN(3), train=[train * size])
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=0)


def test_mahalanobis_is_never_negative_and_does_not_depend_on_the_size_of_features() -> None:
    wide = TRAIN.flatten(1)[:, :6] * torch.tensor([1.0, 1e-3, 1e-6, 1.0, 1.0, 0.0])
    model, x = nn.Sequential(nn.Linear(6, 2)), wide[:9] + 3
    found = []
    for size in (1e-15, 1.0, 1e15):
        small = copy.deepcopy(model)
        with torch.no_grad():
            small[0].weight /= size
        found.append(qualms.score(small, x * size, "mahalanobis", train=[wide * size]))
        near = qualms.score(
            small,
            wide * size,
            "mahalanobis",
            train=[(wide * size, torch.zeros(48, dtype=torch.long))],
        )
        assert (near >= 0).all()
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=0)
    torch.testing.assert_close(found[2], found[1], rtol=1e-2, atol=0)


def test_fdbd_does_not_depend_on_the_size_of_features() -> None:
    model, x, train = (
        nn.Sequential(nn.Linear(6, 3, bias=False)),
        X.flatten(1)[:, :6],
        TRAIN.flatten(1)[:, :6],
    )
    found = [
        qualms.score(model, x * size, "fdbd", train=[train * size]) for size in (1e-25, 1.0, 1e25)
    ]
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[2], found[1])
    assert qualms.score(model, x[:1], "fdbd", train=[x[:1]]).isfinite().all()


def test_quam_says_when_its_steps_do_not_fit_32_bits() -> None:
    situation = SITUATIONS["features of 1e22"]()
    with pytest.raises(qualms.QualmsError, match=r"too large for quam's steps .* float64"):
        qualms.score(situation.model, X, QUAM(steps=2), train=[TRAIN])


def test_a_prior_that_is_lost_beside_the_curvature_is_told() -> None:
    h = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * 1e9
    with pytest.raises(qualms.QualmsError, match="too small: it is lost"):
        fit_head([(h, torch.zeros(40, 2))], torch.zeros(2, 3), None, structure="full")


def test_the_kronecker_posterior_holds_shifts_of_all_logits_by_the_prior_alone() -> None:
    h = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * 1e9
    posterior = fit_head([(h, torch.zeros(40, 3))], torch.zeros(3, 3), None, structure="kron")
    of_logits = posterior.functional_variance(h[:4])
    shift = of_logits.sum((1, 2)) / 9  # the variance of the mean logit
    torch.testing.assert_close(shift, h[:4].double().square().sum(1) / 3, rtol=1e-6, atol=0)


@pytest.mark.parametrize("spec", ["coherence", "fisher", "isotropic", "mahalanobis"])
def test_what_32_bits_do_not_hold_is_an_error_that_names_method_and_input(spec: str) -> None:
    model, x = cnn(), X.clone()
    with torch.no_grad():
        if spec == "coherence":
            model[8].bias -= 1e4
        elif spec != "mahalanobis":
            model[5].weight *= 1e22
            model[8].weight *= 1e-22
    x[2] *= 1e25 if spec == "mahalanobis" else 1.0
    number = 2 if spec == "mahalanobis" else 0
    with pytest.raises(
        qualms.QualmsError, match=rf"{spec} of input {number} is .* overflows float32"
    ):
        qualms.score(model, x, spec, train=[TRAIN])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_in_16_bits_are_finite_and_near_those_of_the_same_weights(
    dtype: torch.dtype,
) -> None:
    model = cnn().to(dtype)
    member, double = member_of(model), copy.deepcopy(model).double()
    x, train = X.to(dtype), TRAIN.to(dtype)
    for spec in SPECS:
        found = qualms.score(model, x, spec, train=[train], models=[member])
        want = qualms.score(
            double,
            x.double(),
            spec,
            train=[train.double()],
            models=[copy.deepcopy(member).double()],
        )
        assert found.dtype == torch.float32
        assert found.isfinite().all(), spec
        if spec.split("(")[0] not in (*FOLLOWS_LOGITS, "gaia", "mahalanobis"):
            torch.testing.assert_close(
                found.double(),
                want,
                rtol=0.1,
                atol=0.02 * float(want.abs().max()),
                msg=lambda m, s=spec: f"{s}: {m}",
            )


@pytest.mark.slow
def test_activations_that_overflow_16_bits_are_told() -> None:
    model = cnn().half()
    for spec in SPECS:
        with pytest.raises(qualms.QualmsError, match=r"contains? NaN or infinity"):
            qualms.score(
                model, X.half() * 6e4, spec, train=[TRAIN.half()], models=[member_of(model)]
            )


def test_all_logits_equal_is_the_most_that_a_prediction_can_be_uncertain() -> None:
    model = nn.Sequential(nn.Linear(3, 4))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(7.0)
    found = qualms.compare(
        model, torch.ones(2, 3), ["entropy", "msp", "exgrad-v", "gradnorm", "negrad", "heat"]
    )
    log4 = torch.tensor(4.0).log()
    want = {
        "entropy": log4,
        "msp": 0.75,
        "exgrad-v": 0.0,
        "gradnorm": 0.0,
        "negrad": 0.0,
        "heat": log4.log(),
    }
    for name, value in want.items():
        torch.testing.assert_close(found[name], torch.full((2,), float(value)), rtol=1e-6, atol=0)
