"""Each score against its formula, computed again the plain way."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import qualms
from qualms.gradients.settings import Smoothing
from qualms.methods import METHODS, GradientScore, gradients, logits
from qualms.methods.coherence import Coherence, coherence, collinearity
from qualms.methods.features import activation_spread, ash_s, clafr, gradnorm_huang, lts, scale
from qualms.methods.heat import log_heat
from qualms.methods.perturb_inputs import odin
from qualms.methods.training_distances import fdbd, knn, vector_lengths
from qualms.methods.training_laplace_quam import quam
from qualms.methods.training_react_vim import react
from qualms.models.cnn import paper_cnn
from qualms.random import generator
from tests.helpers.settings import Setting, layer_gradients, smoothed_gradients

WEIGHTS = {
    "regrad": lambda p: p.sqrt(),
    "exgrad": lambda p: p,
    "ungrad": lambda p: torch.full_like(p, 1 / len(p)),
    "fisher": lambda p: p,
    "isotropic": lambda p: p.square(),
}
POWERS = {"fisher": 2, "isotropic": 2}  # of the norms


def score(setting: Setting, method: str, **more: object) -> Tensor:
    return qualms.score(setting.model, setting.x, method, **more)


@pytest.mark.parametrize("engine", ["exact", "reference"])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(
    "modifiers", ["", "+layers(0.4)", "+layers(0)", "+smooth(0.1,4)", "+layers+smooth(0.1,3)"]
)
def test_class_weighted_gradient_norms(
    setting: Setting, name: str, modifiers: str, engine: str
) -> None:
    have = score(setting, name + modifiers, engine=engine, seed=3)
    lam = {"(0.4)": 0.4, "(0)": 0.0}.get(modifiers.removeprefix("+layers").split("+")[0], 0.3)
    for b, x in enumerate(setting.x):
        g = setting.gradients[b]
        if "smooth" in modifiers:
            g = smoothed_gradients(
                setting.model, x, Smoothing(0.1, 4 if "4" in modifiers else 3), b, seed=3
            )
        depth = len(g[0])
        if "layers" in modifiers:
            norms = [
                sum(math.exp(lam * (m + 1 - depth)) * v.norm() for m, v in enumerate(g_c))
                for g_c in g
            ]
        else:
            norms = [torch.cat(g_c).norm() for g_c in g]
        want = (WEIGHTS[name](setting.probs[b]) * torch.stack(norms) ** POWERS.get(name, 1)).sum()
        torch.testing.assert_close(have[b], want, rtol=1e-9, atol=0)


def test_isotropic_adds_up_the_gradients_of_probabilities(setting: Setting) -> None:
    parameters = list(setting.model.parameters())
    for b, have in enumerate(score(setting, "isotropic")):
        probs = setting.model(setting.x[b : b + 1])[0].softmax(0)
        gradients = [torch.autograd.grad(p, parameters, retain_graph=True) for p in probs]
        want = sum(g.square().sum() for of_class in gradients for g in of_class)
        torch.testing.assert_close(have, want, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_fisher_is_the_limit_of_perturbed_weights(setting: Setting) -> None:
    sigma = 1e-4
    have = 2 / sigma**2 * score(setting, f"perturb-theta({sigma},2000)")
    torch.testing.assert_close(have, score(setting, "fisher"), rtol=0.1, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", POWERS)
def test_a_sketch_of_squared_norms_knows_its_error(setting: Setting, name: str) -> None:
    exact = score(setting, name)
    have, error = qualms.score_with_error(setting.model, setting.x, name, engine=qualms.Sketch(400))
    assert ((have - exact).abs() < 4 * error).all()
    assert (error < 0.1 * exact).all()  # √(2/400) for a single direction


@pytest.mark.parametrize("spec", ["fisher", "isotropic"])
def test_squared_norms_keep_within_a_tolerance_with_fewer_classes(spec: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 200)
    ).double()
    x = torch.randn(8, 6).double()
    want = qualms.score(model, x, spec, engine="exact")
    have, error = qualms.score_with_error(model, x, spec, tolerance=0.05)
    assert ((error > 0) & (error <= 0.05 * have)).all()
    assert ((have / want - 1).abs() < 0.15).all()
    both = qualms.compare(model, x, ["regrad", spec], tolerance=0.05)
    assert ((both[spec] / want - 1).abs() < 0.15).all()


def test_l1_norms(setting: Setting) -> None:
    have = score(setting, "exgrad", norm="l1")
    for b in range(len(setting.x)):
        norms = torch.stack([setting.class_gradient(b, c).abs().sum() for c in range(5)])
        torch.testing.assert_close(have[b], (setting.probs[b] * norms).sum())


def test_layers_can_be_tensors(setting: Setting) -> None:
    have = score(setting, "exgrad+layers(0.5)", layers="tensor")
    log_p = setting.model(setting.x[:1])[0].log_softmax(0)
    parameters = list(setting.model.parameters())
    want = 0.0
    for c in range(5):
        norms = [g.norm() for g in torch.autograd.grad(log_p[c], parameters, retain_graph=True)]
        want += setting.probs[0, c] * sum(
            math.exp(0.5 * (i + 1 - 8)) * n for i, n in enumerate(norms)
        )
    torch.testing.assert_close(have[0], want.detach())


def test_gradnorm_is_the_norm_of_the_mean_gradient(setting: Setting) -> None:
    for engine in ("exact", "reference"):
        have = score(setting, "gradnorm", engine=engine)
        for b in range(len(setting.x)):
            mean = torch.stack([setting.class_gradient(b, c) for c in range(5)]).mean(0)
            torch.testing.assert_close(have[b], mean.norm(), rtol=1e-9, atol=0)


def test_negrad_is_zero(setting: Setting) -> None:
    have = score(setting, "negrad")
    assert (have == 0).all()
    as_written = score(setting, "negrad", engine="reference")
    assert (as_written < 1e-13 * score(setting, "exgrad")).all()
    smooth = score(setting, "negrad+smooth(0.5,4)")
    g = smoothed_gradients(setting.model, setting.x[1], Smoothing(0.5, 4), 1, seed=0)
    want = sum(setting.probs[1, c] * torch.cat(g[c]) for c in range(5)).norm()
    torch.testing.assert_close(smooth[1], want, rtol=1e-9, atol=0)


def test_gradnorm_huang_is_minus_the_l1_norm_over_the_last_weight(setting: Setting) -> None:
    have = score(setting, "gradnorm-huang")
    for b, x in enumerate(setting.x):
        loss = (
            -setting.model(x[None])[0].log_softmax(0).mean()
        )  # cross-entropy to the uniform distribution
        (g,) = torch.autograd.grad(loss, [setting.model[8].weight])
        torch.testing.assert_close(have[b], -g.abs().sum())


def test_confounding_label(setting: Setting) -> None:
    for engine in ("exact", "reference"):
        have = score(setting, "confounding-label", engine=engine)
        for b, x in enumerate(setting.x):
            loss = F.binary_cross_entropy_with_logits(
                setting.model(x[None]), torch.ones(1, 5).double()
            )
            g = torch.autograd.grad(loss, list(setting.model.parameters()))
            torch.testing.assert_close(have[b], -torch.cat([t.flatten() for t in g]).norm())


def test_scores_of_the_logits(setting: Setting) -> None:
    z, p = setting.logits, setting.probs
    want = {
        "entropy": -(p * p.log()).sum(1),
        "msp": 1 - p.max(1).values,
        "max-logit": -z.max(1).values,
        "energy": -z.exp().sum(1).log(),
        "exgrad-v": -(p - 0.2).abs().sum(1),
        "gen": (p**0.1 * (1 - p) ** 0.1).sum(1),
        "gen(0.5,2)": (p.sort(1).values[:, -2:] ** 0.5 * (1 - p.sort(1).values[:, -2:]) ** 0.5).sum(
            1
        ),
    }
    have = qualms.compare(setting.model, setting.x, list(want))
    for name in want:
        torch.testing.assert_close(have[name], want[name])


def kl(q: Tensor, p: Tensor) -> Tensor:
    return (q * (q / p).log()).sum(-1)


def mutual_information(q: Tensor) -> Tensor:
    """q [n, c] of one input."""
    mean = q.mean(0)
    return -(mean * mean.log()).sum() + (q * q.log()).sum(1).mean()


def test_perturb_x(setting: Setting) -> None:
    have = score(setting, "perturb-x(0.05,7)", seed=2)
    for b, x in enumerate(setting.x):
        noise = Smoothing(0.05, 7, antithetic=False).noise((1, 8, 8), b, seed=2)[1:]
        q = setting.model(x + noise.double()).softmax(1)
        torch.testing.assert_close(have[b], kl(q, setting.probs[b]).mean().detach())


def test_perturb_theta(setting: Setting) -> None:
    have = score(setting, "perturb-theta(0.05,3)", seed=2)
    total = torch.zeros(4).double()
    for draw in range(3):
        noise = generator(2, draw)
        moved = {
            n: p + 0.05 * torch.randn(p.shape, generator=noise).double()
            for n, p in setting.model.named_parameters()
        }
        q = torch.func.functional_call(setting.model, moved, setting.x).softmax(1)
        total += kl(q, setting.probs).detach() / 3
    torch.testing.assert_close(have, total)


def test_mc_aa(setting: Setting) -> None:
    have = score(setting, "mc-aa(0.3,6)", seed=5)
    for b, one in enumerate(setting.x):
        x = one[None].clone().requires_grad_()
        z = setting.model(x)
        (g,) = torch.autograd.grad(F.cross_entropy(z, z.argmax(1)), x)
        steps = 0.3 * (2 * torch.rand(6, generator=generator(5, b)) - 1).double()
        q = setting.model(one + steps[:, None, None, None] * g.sign()).softmax(1).detach()
        torch.testing.assert_close(have[b], mutual_information(q))


def test_inserted_dropout(setting: Setting) -> None:
    have = score(setting, "inserted-dropout(0.4,6)", seed=5)
    kept = torch.rand(6, 12, generator=generator(5, 0)) >= 0.4
    h = setting.model[:8](setting.x)
    for b in range(4):
        q = setting.model[8](h[b] * kept / 0.6).softmax(1).detach()
        torch.testing.assert_close(have[b], mutual_information(q))


def test_mc_dropout(setting: Setting) -> None:
    have = score(setting, "mc-dropout(6)", seed=5)
    h = setting.model[:7](setting.x)
    kept = torch.cat([torch.rand(1, 12, generator=generator(5, draw)) >= 0.3 for draw in range(6)])
    for b in range(4):
        q = setting.model[8](h[b] * kept / 0.7).softmax(1).detach()
        torch.testing.assert_close(have[b], mutual_information(q))


def test_mc_batchnorm(setting: Setting) -> None:
    torch.manual_seed(1)
    train = [torch.randn(10, 1, 8, 8).double() for _ in range(3)]
    have = score(setting, "mc-batchnorm(3)", train=train)
    draws = []
    for batch in train:
        inside = setting.model[0](batch)
        mean, variance = inside.mean((0, 2, 3)).detach(), inside.var((0, 2, 3)).detach()
        h = F.batch_norm(
            setting.model[0](setting.x),
            mean,
            variance,
            setting.model[1].weight,
            setting.model[1].bias,
        )
        draws.append(setting.model[2:](h).softmax(1).detach())
    for b in range(4):
        torch.testing.assert_close(have[b], mutual_information(torch.stack(draws)[:, b]))


def test_ensemble(setting: Setting) -> None:
    torch.manual_seed(2)
    other = paper_cnn(1, 8, 5).double()
    have = score(setting, "ensemble", models=[other])
    q = torch.stack([setting.probs, other(setting.x).softmax(1).detach()])
    for b in range(4):
        torch.testing.assert_close(have[b], mutual_information(q[:, b]))


def test_coherence(setting: Setting) -> None:
    have = score(setting, "coherence")
    for b, x in enumerate(setting.x):
        z = setting.model(x[None])[0]
        late = [*setting.model[5].parameters(), *setting.model[8].parameters()]
        rows = [
            torch.cat([t.flatten() for t in torch.autograd.grad(v, late, retain_graph=True)])
            for v in z
        ]
        jacobian = torch.stack(rows)
        unit = F.normalize(jacobian, dim=1)
        cosines = (unit @ unit.T) ** 2
        kappa = (cosines.sum() - cosines.trace()) / 20
        p = z.softmax(0).detach()
        norms = ((torch.eye(5) - p) @ jacobian).norm(dim=1)
        want = kappa**4 * (p.sqrt() * norms).sum() / z.detach().exp().sum().sqrt()
        torch.testing.assert_close(have[b], want)
    assert "experimental" in Coherence.paper


def test_a_logit_without_gradient_has_no_direction_and_others_keep_theirs() -> None:
    """Two gradients at 60 degrees, the third zero: of the three pairs one has a squared cosine, of
    1/4.
    """
    jacobian = torch.tensor([[1.0, 0.0], [0.5, math.sqrt(0.75)], [0.0, 0.0]]).double()
    torch.testing.assert_close(
        collinearity((jacobian @ jacobian.T)[None]), torch.tensor([0.25 / 3]).double()
    )


def test_gradnorm_of_two_classes_by_hand() -> None:
    """With C = 2 and a linear model the mean gradient is ½(1 - 2p, 2p - 1) ⊗ (x, 1)."""
    model = torch.nn.Linear(2, 2).double()
    x = torch.tensor([[3.0, 4.0]]).double()
    p = model(x).softmax(1)[0, 0].detach()
    want = (1 - 2 * p).abs() / 2 * math.sqrt(2) * math.sqrt(25 + 1)
    torch.testing.assert_close(qualms.score(model, x, "gradnorm")[0], want)


def test_layer_gradients_of_the_tests_are_right(setting: Setting) -> None:
    """The judge of this file against a finite difference."""
    g = layer_gradients(setting.model, setting.x[0])
    weight = setting.model[8].weight
    before = setting.model(setting.x[:1])[0].log_softmax(0).detach()
    with torch.no_grad():
        weight[2, 3] += 1e-6
        after = setting.model(setting.x[:1])[0].log_softmax(0)
        weight[2, 3] -= 1e-6
    place = 2 * 12 + 3
    have = torch.stack([g_c[3][place] for g_c in g])
    torch.testing.assert_close(have, (after - before) / 1e-6, rtol=1e-4, atol=1e-6)


# The functions alone, without a model, against numbers by hand.

Z = torch.tensor([[0.0, math.log(2), math.log(5)]]).double()  # p = (1, 2, 5) / 8
P = Z.softmax(-1)
NORMS = torch.tensor([[4.0, 2.0, 1.0]]).double()
OF_NORMS = {
    "regrad": (gradients.regrad(NORMS, P.log()), (4 + 2 * 2**0.5 + 5**0.5) / 8**0.5),
    "exgrad": (gradients.exgrad(NORMS, P), 13 / 8),
    "ungrad": (gradients.ungrad(NORMS), 7 / 3),
    "fisher": (gradients.fisher(NORMS, P), 29 / 8),
    "isotropic": (gradients.isotropic(NORMS, P), 57 / 64),
}
OF_LOGITS = {
    "entropy": (
        logits.entropy(P.log()),
        (math.log(8) + 2 * math.log(4) + 5 * math.log(1.6)) / 8,
    ),
    "msp": (logits.msp(P.log()), 3 / 8),
    "max-logit": (logits.max_logit(Z), -math.log(5)),
    "energy": (logits.energy(Z), -math.log(8)),
    "gen": (logits.gen(P.log(), gamma=0.5, top=2), (15**0.5 + 12**0.5) / 8),
    "exgrad-v": (logits.exgrad_v(Z), -(5 + 2 + 7) / 24),
    "odin": (odin(2 * Z, temperature=2.0), -math.log(15 / 8)),
    "heat": (log_heat(Z, torch.ones(1).double()).exp(), logits.entropy(P.log())),
}


@pytest.mark.parametrize("name", [*OF_NORMS, *OF_LOGITS])
def test_functions_of_norms_and_of_logits_by_hand(name: str) -> None:
    have, want = (OF_NORMS | OF_LOGITS)[name]
    torch.testing.assert_close(have, torch.as_tensor(want).double().expand(1))


@pytest.mark.parametrize("name", OF_NORMS)
def test_functions_of_norms_have_the_weights_of_their_classes(name: str) -> None:
    kind = next(kind for kind in METHODS if kind.name == name)
    assert issubclass(kind, GradientScore)
    want = (kind().weights_at(Z) * NORMS**kind.power).sum(-1)
    torch.testing.assert_close(OF_NORMS[name][0], want)


def test_functions_of_gradients_are_the_scores(setting: Setting) -> None:
    every = torch.stack(
        [torch.stack([setting.class_gradient(b, c) for c in range(5)]) for b in range(4)]
    )
    torch.testing.assert_close(gradients.gradnorm(every), score(setting, "gradnorm"))
    as_written = gradients.negrad(every, setting.probs)
    assert (as_written < 1e-13 * score(setting, "exgrad")).all()
    torch.testing.assert_close(
        gradients.negrad(every, torch.eye(5)[:4].double())[1], every[1, 1].norm()
    )
    torch.testing.assert_close(
        gradients.confounding_label(every[:, 0]), -every[:, 0].square().sum(1).sqrt()
    )


def test_functions_of_features_by_hand() -> None:
    h = torch.tensor([[3.0, 0.0, 4.0, -5.0]]).double()
    weight, bias = torch.eye(2, 4).double(), torch.tensor([1.0, 0.0]).double()
    z = F.linear(h, weight, bias)  # (4, 0)
    torch.testing.assert_close(activation_spread(h, 75.0), torch.tensor([7 / 4]).double())
    r = 7 / 4
    want = {
        "scale": -math.log(math.exp(3 * math.exp(r) + 1) + 1),
        "ash_s": -math.log(math.e + 1),  # of (0, 0, 4, 0), all of whose weights are zero
        "lts": -math.log(math.exp(4 * r**2) + 1),
        "gradnorm_huang": -12 * abs(2 / (1 + math.exp(-4)) - 1),
        "clafr": (41 / 50) ** 0.5,
        "react": -math.log(math.exp(2 + 1) + 1),
    }
    have = {
        "scale": scale(z, bias, h, 75.0),
        "ash_s": ash_s(h, weight, bias, 75.0),
        "lts": lts(z, h, 75.0),
        "gradnorm_huang": gradnorm_huang(z, h),
        "clafr": clafr(h, weight),
        "react": react(h, weight, bias, 2.0),
    }
    for name in want:
        assert have[name].item() == pytest.approx(want[name]), name


def test_functions_of_distances_and_of_models_by_hand() -> None:
    known = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]]).double()
    one = torch.tensor([[1.0, 0.0]]).double()
    for k, want in ((1, 0.0), (2, 2**0.5), (3, 2.0), (9, 2.0)):
        assert knn(one, known, vector_lengths(known), k).item() == pytest.approx(want)
    z, weight = torch.tensor([[3.0, 1.0]]).double(), torch.tensor([[3.0, 0.0], [0.0, 4.0]]).double()
    have = fdbd(z, one, weight, torch.tensor([1.0, 2.0]).double())
    assert have.item() == pytest.approx(-(2 / 5) / 2)
    divergence = torch.tensor([[0.0, 1.0, 4.0]]).double()
    losses = torch.tensor([[0.0, math.log(2), math.log(4)]]).double()
    assert quam(divergence, losses, 1.0).item() == pytest.approx((0 + 1 / 2 + 4 / 4) / (7 / 4))
    gram = torch.tensor([[[1.0, 0.5], [0.5, 1.0]]]).double()  # κ = 1/4, ‖g_c‖ = 1/2
    want_coherence = (1 / 4) ** 4 * 2 * 0.5**0.5 * 0.5 / 2**0.5
    assert coherence(torch.zeros(1, 2).double(), gram).item() == pytest.approx(want_coherence)
