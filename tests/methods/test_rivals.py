"""The rivals that need no data, each against its paper's formula, computed again the plain way."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.methods import ODIN
from qualms.models.cifar_resnet import resnet20
from tests.helpers.settings import Setting, bert

SHAPING = ("scale", "ash-s", "lts")
NEEDS_MAPS = ("rankfeat", "gaia")


def energy(logits: Tensor) -> float:
    return -math.log(sum(math.exp(z) for z in logits.tolist()))


def features_of(setting: Setting) -> Tensor:
    return setting.model[:8](setting.x).detach()


def test_scale(setting: Setting) -> None:
    have = qualms.score(setting.model, setting.x, "scale(70)")
    for b, h in enumerate(features_of(setting)):
        top = sorted(h.tolist())[-4:]  # 12 - round(12 · 0.7)
        new = h * math.exp(h.sum().item() / sum(top))
        assert have[b].item() == pytest.approx(energy(setting.model[8](new)))


def test_ash_s(setting: Setting) -> None:
    have = qualms.score(setting.model, setting.x, "ash-s(70)")
    for b, h in enumerate(features_of(setting)):
        least = sorted(h.tolist())[-4]
        kept = torch.where(h >= least, h, 0.0)
        new = kept * math.exp(h.sum().item() / kept.sum().item())
        assert have[b].item() == pytest.approx(energy(setting.model[8](new)))


def test_lts(setting: Setting) -> None:
    have = qualms.score(setting.model, setting.x, "lts(70)")
    for b, h in enumerate(features_of(setting)):
        factor = (h.sum().item() / sum(sorted(h.tolist())[-4:])) ** 2
        assert have[b].item() == pytest.approx(energy(factor * setting.logits[b]))


def test_the_defaults_are_the_papers(setting: Setting) -> None:
    """The largest 15, 10 and 5 of a hundred features."""
    torch.manual_seed(0)
    model, x = nn.Linear(100, 3).double(), torch.rand(4, 100).double()
    for name, kept in {"scale": 15, "lts": 5}.items():
        r = x.sum(1) / x.sort(1).values[:, -kept:].sum(1)
        logits = model(x * r.exp()[:, None]) if name == "scale" else model(x) * r[:, None] ** 2
        torch.testing.assert_close(qualms.score(model, x, name), -logits.logsumexp(1).detach())
    pruned = torch.where(x >= x.sort(1).values[:, -10:-9], x, 0.0)
    logits = model(pruned * (x.sum(1) / pruned.sum(1)).exp()[:, None])
    torch.testing.assert_close(qualms.score(model, x, "ash-s"), -logits.logsumexp(1).detach())


@pytest.mark.parametrize("name", SHAPING)
def test_negative_features_leave_scores_finite(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1000, 3)
    x = torch.stack([torch.randn(1000), -torch.rand(1000), torch.zeros(1000), torch.rand(1000)])
    for spec in (name, f"{name}(0.01)", f"{name}(99.99)"):
        assert torch.isfinite(qualms.score(model, x, spec)).all()
    # Without a positive feature, r is 1.
    scaled = model(x[1:2] * math.e) if name == "scale" else model(x[1:2])
    if name != "ash-s":
        torch.testing.assert_close(qualms.score(model, x, name)[1:2], -scaled.logsumexp(1).detach())


def test_negative_features_count_as_zero_in_what_the_largest_hold() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(20, 3).double(), torch.randn(4, 20).double()
    positive = x.clamp(min=0)
    r = positive.sum(1) / positive.sort(1).values[:, -3:].sum(1)
    torch.testing.assert_close(
        qualms.score(model, x, "lts(85)"), -(model(x) * r[:, None] ** 2).logsumexp(1).detach()
    )


@pytest.mark.parametrize("epsilon", [0.05, (0.05,)])
def test_odin(setting: Setting, epsilon: float | tuple[float, ...]) -> None:
    have = qualms.score(setting.model, setting.x, ODIN(10.0, epsilon))
    for b, one in enumerate(setting.x):
        x = one[None].clone().requires_grad_()
        loss = -(setting.model(x) / 10).softmax(1).max().log()
        (gradient,) = torch.autograd.grad(loss, x)
        q = (setting.model(x - 0.05 * gradient.sign()) / 10).softmax(1)
        assert have[b].item() == pytest.approx(-(q.max().log() + math.log(5)).item(), rel=1e-9)


def test_odins_step_has_a_size_for_each_channel() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).double(),
        torch.rand(2, 3, 2, 2).double(),
    )
    levels = (0.1, 0.2, 0.3)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(-(model(x) / 1000).log_softmax(1).amax(1).sum(), x)
    near = x - torch.tensor(levels).reshape(3, 1, 1) * gradient.sign()
    want = -((model(near) / 1000).softmax(1).amax(1).log() + math.log(3))
    torch.testing.assert_close(qualms.score(model, x.detach(), ODIN(epsilon=levels)), want.detach())
    with pytest.raises(qualms.QualmsError, match="odin has 2 values of epsilon"):
        qualms.score(model, x.detach(), ODIN(epsilon=(0.1, 0.2)))


def test_odin_moves_token_ids_at_their_embeddings() -> None:
    model, x = bert()
    model = model.double().eval()
    have = qualms.score(model, x, ODIN(10.0, 0.05))
    embedded = model.bert.embeddings.word_embeddings(x["input_ids"]).detach().requires_grad_()
    given = {k: v for k, v in x.items() if k != "input_ids"}
    loss = -(model(inputs_embeds=embedded, **given).logits / 10).log_softmax(1).amax(1).sum()
    (gradient,) = torch.autograd.grad(loss, embedded)
    q = (model(inputs_embeds=embedded - 0.05 * gradient.sign(), **given).logits / 10).softmax(1)
    torch.testing.assert_close(have, -(q.amax(1).log() + math.log(q.shape[1])).detach())


def test_odin_tells_many_inputs_apart_at_the_papers_temperature() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 1000), torch.randn(200, 64)
    assert len(qualms.score(model, x, "odin").unique()) == 200


def test_odin_says_if_its_step_is_lost_to_rounding() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(16, 3).bfloat16(), (torch.rand(40, 16) + 0.5).bfloat16()
    for some in (x, x[:1]):
        with pytest.raises(
            qualms.QualmsError, match=r"odin's step .* lost to rounding .* bfloat16; pass a larger"
        ):
            qualms.score(model, some, "odin")
    assert torch.isfinite(qualms.score(model, x, ODIN(epsilon=0.1))).all()
    constant = nn.Linear(16, 3)
    nn.init.zeros_(constant.weight)
    assert torch.isfinite(
        qualms.score(constant, x.float(), "odin")
    ).all()  # a step of nothing is not lost


def test_clafr(setting: Setting) -> None:
    have = qualms.score(setting.model, setting.x, "clafr")
    weight = setting.model[8].weight.detach()
    for b, h in enumerate(features_of(setting)):
        nearest = (
            weight.T @ torch.linalg.lstsq(weight.T, h[:, None]).solution
        )  # of all combinations of the rows
        assert have[b].item() == pytest.approx(((h - nearest[:, 0]).norm() / h.norm()).item())


def test_clafr_says_where_it_would_be_zero() -> None:
    with pytest.raises(qualms.QualmsError, match=r"5 classes for 4 features.*use energy"):
        qualms.score(nn.Linear(4, 5), torch.rand(3, 4), "clafr")
    assert qualms.score(nn.Linear(4, 3), torch.zeros(2, 4), "clafr").tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clafr_in_16_bits_is_clafr(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(2048, 10).to(dtype), torch.rand(4, 2048).to(dtype)
    want = qualms.score(copy.deepcopy(model).float(), x.float(), "clafr")
    torch.testing.assert_close(qualms.score(model, x, "clafr"), want, rtol=1e-4, atol=0)


def test_clafr_of_a_zero_weight_is_an_error() -> None:
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    with pytest.raises(qualms.QualmsError, match=r"all zero.*clafr is the same for every input"):
        qualms.score(model, torch.rand(3, 4), "clafr")


def test_rankfeat(setting: Setting) -> None:
    have = qualms.score(setting.model, setting.x, "rankfeat")
    for b, one in enumerate(setting.x):
        matrix = setting.model[:4](one[None]).detach().reshape(4, 9)
        vector = torch.ones(9, dtype=torch.double)
        for _ in range(500):  # the power method
            vector = matrix.T @ (matrix @ vector)
            vector /= vector.norm()
        rest = matrix - torch.outer(matrix @ vector, vector)
        assert have[b].item() == pytest.approx(
            energy(setting.model[4:](rest.reshape(1, 4, 3, 3))[0])
        )


class Pooled(nn.Module):
    """A squeeze-and-excitation block on the way, whose pooling is not the last; pooled in one of
    several ways.
    """

    def __init__(self, pooling: str) -> None:
        super().__init__()
        self.pooling = pooling
        self.conv, self.squeeze, self.fc = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 1), nn.Linear(6, 3)

    def maps(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        return x * self.squeeze(nn.functional.adaptive_avg_pool2d(x, 1)).sigmoid()

    def rest(self, x: Tensor) -> Tensor:
        if self.pooling == "last axis":  # as in Swin
            return self.fc(x.permute(0, 2, 3, 1).mean((1, 2)))
        if self.pooling == "by name":
            return self.fc(torch.mean(input=x, dim=(2, 3)))
        if self.pooling == "max":
            return self.fc(nn.functional.max_pool2d(x, x.shape[2:]).flatten(1))
        if self.pooling == "flat":
            return self.fc(x.flatten(2).mean(2))
        if self.pooling == "by axes":
            return self.fc(x.mean(3).mean(2))
        if self.pooling == "last axis by axes":
            return self.fc(x.permute(0, 2, 3, 1).mean(1).mean(1))
        if self.pooling == "einsum":
            return self.fc(torch.einsum("bchw->bc", x))
        return self.fc(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.maps(x))


@pytest.mark.parametrize(
    "pooling", ["module", "last axis", "by name", "max", "flat", "by axes", "last axis by axes"]
)
def test_rankfeat_finds_the_last_map(pooling: str) -> None:
    torch.manual_seed(0)
    model, x = Pooled(pooling).double().eval(), torch.rand(3, 1, 9, 7).double()
    left, values, right = model.maps(x).detach().flatten(2).svd()
    values[:, 0] = 0
    want = -model.rest((left * values[:, None] @ right.mT).unflatten(2, (7, 5))).logsumexp(1)
    torch.testing.assert_close(qualms.score(model, x, "rankfeat"), want.detach())


def test_rankfeat_does_not_take_the_map_of_a_gate_for_the_last() -> None:
    with pytest.raises(qualms.QualmsError, match="rankfeat needs a last feature map"):
        qualms.score(Pooled("einsum"), torch.rand(2, 1, 9, 7), "rankfeat")


def test_rankfeat_does_not_take_a_convolution_for_a_pooling() -> None:
    torch.manual_seed(0)
    body, last = nn.Conv2d(1, 6, 3, 2, 1), nn.Linear(6, 3)
    strided = nn.Sequential(
        body, nn.ReLU(), nn.Conv2d(6, 6, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), last
    )
    with pytest.raises(qualms.QualmsError, match="rankfeat needs a last feature map"):
        qualms.score(strided, torch.rand(2, 1, 4, 4), "rankfeat")
    assert torch.isfinite(qualms.score(strided, torch.rand(2, 1, 8, 8), "rankfeat")).all()


def test_rankfeat_with_as_many_channels_as_rows() -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 1, 8, 7).double()  # a map of 6 x 5, and 6 channels
    plain, last = Pooled("module").double(), Pooled("last axis").double()
    last.load_state_dict(plain.state_dict())
    torch.testing.assert_close(
        qualms.score(last, x, "rankfeat"), qualms.score(plain, x, "rankfeat")
    )


def densities(maps: list[Tensor], logits: Tensor) -> Tensor:
    gradients = torch.autograd.grad(logits.max(1).values.sum(), maps)
    return torch.cat([(g != 0).double().mean((2, 3)) for g in gradients], dim=1).square().mean(1)


def test_gaia(setting: Setting) -> None:
    normalized = setting.model[:2](setting.x)
    want = densities([normalized], setting.model[2:](normalized))
    torch.testing.assert_close(qualms.score(setting.model, setting.x, "gaia"), want)
    plain = nn.Sequential(setting.model[0], *setting.model[2:])
    convolved = plain[:1](setting.x)
    want = densities([convolved], plain[1:](convolved))
    torch.testing.assert_close(qualms.score(plain, setting.x, "gaia"), want)


def test_gaia_takes_gradients_by_maps_before_they_are_changed_in_place(setting: Setting) -> None:
    model = copy.deepcopy(setting.model)
    model[2].inplace = True
    for p in model.parameters():
        p.requires_grad_(False)
    assert torch.equal(
        qualms.score(model, setting.x, "gaia"), qualms.score(setting.model, setting.x, "gaia")
    )
    assert not any(p.requires_grad for p in model.parameters())


def test_gaia_on_a_residual_network() -> None:
    torch.manual_seed(0)
    model, x = resnet20().double().eval(), torch.rand(3, 3, 32, 32).double()
    maps: list[Tensor] = []
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    hooks = [
        m.register_forward_hook(lambda _m, _x, out: maps.append(out) or out.clone()) for m in norms
    ]
    want = densities(maps, model(x))
    for hook in hooks:
        hook.remove()
    assert len(maps) == len(norms)
    torch.testing.assert_close(qualms.score(model, x, "gaia"), want)
    torch.testing.assert_close(qualms.score(model, x, "gaia", batch_size=1), want)


def test_gaia_takes_no_single_pixel_for_a_map() -> None:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]
    model = nn.Sequential(
        *first, nn.Conv2d(4, 5, 4), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3)
    )
    model, x = model.double().eval(), torch.randn(4, 1, 6, 6).double()
    normalized = model[:2](x)
    torch.testing.assert_close(
        qualms.score(model, x, "gaia"), densities([normalized], model[2:](normalized))
    )


def test_gaia_says_that_smooth_activations_tell_it_nothing() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    for x in (torch.rand(2, 1, 8, 8), torch.rand(1, 1, 8, 8)):
        with pytest.raises(qualms.QualmsError, match=r"GELU.*use energy"):
            qualms.score(model, x, "gaia")


def test_gaia_is_not_misled_by_a_rectifier_behind_its_maps() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(144, 16), nn.ReLU(), nn.Linear(16, 3)
    )
    with pytest.raises(qualms.QualmsError, match="zero equally often for all noise inputs"):
        qualms.score(model, torch.randn(6, 3, 8, 8), "gaia")


class Activated(nn.Module):
    """Feature maps with one of several activations and a maximum over windows that overlap or not."""

    def __init__(self, activation: Callable[[Tensor], Tensor], window: int, step: int) -> None:
        super().__init__()
        self.activation, self.window, self.step = activation, window, step
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.activation(self.conv(x)), self.window, self.step)
        return self.fc(x.flatten(1))


@pytest.mark.parametrize(
    ("activation", "window", "step"),
    [
        (lambda x: x.clamp_min(0), 2, 2),
        (lambda x: x.clone().clamp_(0), 2, 2),
        (lambda x: torch.maximum(x, torch.zeros(())), 2, 2),
        (lambda x: torch.where(x > 0, x, torch.zeros(())), 2, 2),
        (nn.functional.gelu, 4, 1),
    ],
)
def test_whether_gaia_answers_does_not_depend_on_the_batch(
    activation: Callable[[Tensor], Tensor], window: int, step: int
) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(3, 1, 8, 8), Activated(activation, window, step)
    model(x)
    together = qualms.score(model, x, "gaia")
    assert torch.equal(torch.cat([qualms.score(model, one[None], "gaia") for one in x]), together)


def test_gaia_of_one_input_twice_is_no_error(setting: Setting) -> None:
    twice = qualms.score(setting.model, setting.x[[0, 0]], "gaia")
    assert twice[0] == twice[1]


@pytest.mark.parametrize("name", NEEDS_MAPS)
def test_a_model_without_feature_maps_is_told_the_alternatives(name: str) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(qualms.QualmsError, match=rf"{name} needs .*feature map.*; use energy"):
        qualms.score(flat, torch.rand(2, 1, 4, 4), name)


def test_rankfeat_does_not_take_the_patches_of_a_transformer_for_its_last_map() -> None:
    from qualms.models.vit import vit_small

    with pytest.raises(qualms.QualmsError, match="rankfeat needs a last feature map"):
        qualms.score(vit_small(), torch.rand(2, 3, 32, 32), "rankfeat")


@pytest.mark.parametrize("name", SHAPING)
def test_shaping_needs_a_linear_head(name: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.fc(x)

    with pytest.raises(qualms.QualmsError, match="linear layer on one vector"):
        qualms.score(Normed(), torch.rand(2, 4), name)
