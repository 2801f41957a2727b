"""Heat: its formula by hand, what leaves it as it is, and where it steps back."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.directions import contrast_directions
from qualms.methods import heat
from qualms.methods.head import Head
from qualms.methods.heat import head_trace, log_heat
from qualms.methods.noise import PURPOSE
from qualms.models.vit import vit_tiny
from qualms.random import generator
from tests.helpers.settings import Setting

Combined = Callable[[Tensor], Tensor]


def rectifiers(
    bias: bool = False, classes: int = 4, widths: tuple[int, ...] = (6, 12, 10, 8)
) -> nn.Sequential:
    torch.manual_seed(0)
    layers = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes, bias=bias)).double().eval()


def ratios(model: nn.Sequential, x: Tensor, blocks: list[nn.Module], head: nn.Linear) -> Tensor:
    """tr(P G_l P) / tr(P G_head P) of one input, for each block, from its Jacobians."""
    z = model(x[None])[0]

    def trace(*modules: nn.Module) -> Tensor:
        parameters = [p for m in modules for p in m.parameters()]
        rows = [torch.autograd.grad(v, parameters, retain_graph=True) for v in z]
        jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
        return (jacobian - jacobian.mean(0)).square().sum()

    return torch.stack(
        [trace(*block) if isinstance(block, tuple) else trace(block) for block in blocks]
    ) / trace(head)


def by_hand(
    model: nn.Sequential, x: Tensor, noise: Tensor, blocks: list[nn.Module], combined: Combined
) -> Tensor:
    """T · H(softmax(z / T)) of each input, from the Jacobians of the blocks and of the last layer."""
    unit = torch.stack([combined(ratios(model, y, blocks, model[-1])) for y in noise]).mean()
    t = torch.stack([(combined(ratios(model, y, blocks, model[-1])) - unit).exp() for y in x])
    p = (model(x) / t[:, None]).softmax(-1)
    return t * -(p * p.log()).sum(-1)


@pytest.mark.parametrize("bias", [True, False])
def test_the_trace_of_a_head_is_that_of_its_jacobian(bias: bool) -> None:
    torch.manual_seed(0)
    head, h = nn.Linear(3, 5, bias=bias).double(), torch.randn(3).double()
    rows = [torch.autograd.grad(z, list(head.parameters()), retain_graph=True) for z in head(h)]
    jacobian = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    want = (jacobian - jacobian.mean(0)).square().sum()
    torch.testing.assert_close(head_trace(Head(h[None], head.weight, head.bias))[0], want)


@pytest.mark.parametrize(("name", "combined"), [
    ("heat", lambda r: r.sum().log()), ("heat-geometric", lambda r: r.log().mean())])  # fmt: skip
def test_the_formula_by_hand(setting: Setting, name: str, combined: Combined) -> None:
    model = setting.model
    noise = torch.randn(32, 1, 8, 8, generator=generator(3, PURPOSE)).double()
    want = by_hand(model, setting.x, noise, [(model[0], model[1]), (model[5],)], combined)
    torch.testing.assert_close(
        qualms.score(model, setting.x, name, seed=3).exp(), want, rtol=1e-9, atol=0
    )


def test_of_many_blocks_the_last_three_count() -> None:
    model, x = rectifiers(widths=(6, 17, 19, 22, 20, 18)), torch.randn(4, 6).double()
    noise = torch.randn(32, 6, generator=generator(0, PURPOSE)).double()
    want = by_hand(model, x, noise, [model[4], model[6], model[8]], lambda r: r.sum().log())
    torch.testing.assert_close(qualms.score(model, x, "heat").exp(), want, rtol=1e-9, atol=0)


@pytest.mark.parametrize("margin", [0.0, 1e-3, 1.0, 30.0, 700.0, 1e4])
def test_no_confidence_is_too_high_for_it(margin: float) -> None:
    """Two classes: H = log(1 + s) + s·m / (1 + s), s = exp(-m)."""
    have = float(log_heat(torch.tensor([[margin, 0.0]]).double(), torch.ones(1).double()))
    if margin < 30:
        s = math.exp(-margin)
        assert have == pytest.approx(math.log(math.log1p(s) + s * margin / (1 + s)), rel=1e-12)
    else:
        assert have == pytest.approx(-margin + math.log1p(margin), rel=1e-12)


def test_log_heat_grows_with_temperature_and_ends_at_the_uniform_entropy() -> None:
    z, t = torch.tensor([[3.0, 1.0, 0.0]]).double(), torch.logspace(-6, 6, 25).double()
    values = log_heat(z.expand(25, -1), t)
    assert torch.isfinite(values).all()
    assert (values.diff() > 0).all()
    assert float(values[-1] - t[-1].log()) == pytest.approx(math.log(math.log(3)), abs=1e-9)


def test_noise_of_which_most_has_features_sets_the_unit() -> None:
    """At least one of the two units answers to three in four of the noise inputs, which shows that
    features grow.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    x = torch.rand(8, 2).double() + 0.1
    assert not torch.allclose(
        qualms.score(model, x, "heat").exp(), qualms.score(model, x, "entropy")
    )


def test_a_shift_of_all_logits_changes_nothing() -> None:
    model, x = rectifiers(bias=True), torch.randn(5, 6).double()
    before = qualms.score(model, x, "heat")
    model[-1].bias.data += 5
    torch.testing.assert_close(qualms.score(model, x, "heat"), before, rtol=1e-9, atol=0)


def test_a_factor_moved_between_layers_changes_the_sum_but_not_the_geometric_mean() -> None:
    model, x = rectifiers(), torch.randn(5, 6).double()
    before = qualms.compare(model, x, ["heat", "heat-geometric"])
    for layer, factor in (
        (0, 7.0),
        (2, 1 / 7),
        (4, 3.0),
        (6, 1 / 3),
    ):  # the last of them is the classifier
        model[layer].weight.data *= factor
    after = qualms.compare(model, x, ["heat", "heat-geometric"])
    torch.testing.assert_close(
        after["heat-geometric"], before["heat-geometric"], rtol=1e-9, atol=1e-12
    )
    assert (after["heat"] - before["heat"]).abs().max() > 0.01


def test_an_input_without_any_gradient_in_the_blocks_keeps_its_softmax() -> None:
    model, x = rectifiers(bias=True), torch.randn(5, 6).double()
    for layer in (0, 2, 4):
        model[layer].bias.data.fill_(-0.01)
    before = qualms.score(model, x, "heat")
    silent = torch.zeros(1, 6).double()  # no unit answers to it
    scored = qualms.Scorer(model, ["heat", "entropy"])(torch.cat([x, silent]))
    torch.testing.assert_close(scored.scores["heat"][:5], before)
    torch.testing.assert_close(scored.scores["heat"][5].exp(), scored.scores["entropy"][5])


@pytest.mark.parametrize("seed", [0, 3, 5])  # which draw such inputs
def test_noise_that_no_unit_answers_to_does_not_set_the_unit(seed: int) -> None:
    """Of 32 noise inputs some leave a narrow network without a gradient; the scores stay within
    reason.
    """
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 8), nn.ReLU(),
                          nn.Linear(8, 4)).double()  # fmt: skip
    scores = qualms.score(model, torch.randn(5, 6).double(), "heat", seed=seed)
    assert scores.abs().max() < 5


def test_a_head_that_is_parametrized_is_no_block() -> None:
    model, x = rectifiers(bias=True), torch.randn(5, 6).double()
    plain = qualms.score(model, x, "heat")
    nn.utils.parametrizations.weight_norm(model[-1])
    torch.testing.assert_close(qualms.score(model, x, "heat"), plain)


class Company(nn.Module):
    """Inputs influence each other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x - x.mean(0) / 2))


def test_company_does_not_matter_even_where_the_model_mixes_inputs() -> None:
    torch.manual_seed(0)
    model, x = Company().double(), torch.randn(3, 6).double()
    with pytest.warns(qualms.SlowWarning):
        together = qualms.score(model, x, "heat")
    alone = torch.cat([qualms.score(model, x[i : i + 1], "heat") for i in range(3)])
    torch.testing.assert_close(together, alone)


@pytest.mark.parametrize("classes", [2, 3, 10, 17, 18, 100])
def test_contrasts_are_the_centring_matrix(classes: int) -> None:
    v = contrast_directions(torch.zeros(1, 1, classes))[:, 0, 0]
    centring = torch.eye(classes).double() - 1 / classes
    assert len(v) == min(classes - 1, 16)
    torch.testing.assert_close(v.sum(1), torch.zeros(len(v)).double(), atol=1e-12, rtol=0)
    if classes <= 17:
        torch.testing.assert_close(v.T @ v, centring, atol=1e-12, rtol=0)
    else:
        assert float((v.T @ v).trace()) == pytest.approx(classes - 1)


def test_many_classes_are_estimated_and_rank_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model, x = rectifiers(bias=True, classes=60), 3 * torch.randn(200, 6).double()
    estimated = qualms.score(model, x, "heat")
    monkeypatch.setattr("qualms.gradients.directions.CONTRASTS", 1000)
    exact = qualms.score(model, x, "heat")
    assert not torch.equal(estimated, exact)
    ranks = torch.stack([estimated, exact]).argsort(1).argsort(1).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.97


class PostNorm(nn.Module):
    """Text in, a normalization before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.mix(self.embed(ids)).relu().mean(1)))


@pytest.mark.parametrize("make", [
    lambda: (vit_tiny(5), torch.randn(3, 3, 32, 32)), lambda: (PostNorm(), torch.randint(0, 50, (3, 7)))])  # fmt: skip
def test_behind_a_normalization_it_is_the_entropy_and_says_so(
    make: Callable[[], tuple[nn.Module, Tensor]],
) -> None:
    torch.manual_seed(0)
    model, x = make()
    scored = qualms.Scorer(model.double(), ["heat", "entropy"])(
        x.double() if x.is_floating_point() else x
    )
    torch.testing.assert_close(scored.scores["heat"].exp(), scored.scores["entropy"])
    assert scored.notes == {
        "heat": "the norm of the classifier's features hardly grows with the input, so heat equals "
        "the entropy (T = 1)."
    }
    assert (scored[:1] + scored[1:]).notes == scored.notes


def test_a_linear_model_has_no_block_and_says_so() -> None:
    scored = qualms.Scorer(nn.Linear(4, 3).double(), ["heat", "entropy"])(
        torch.randn(5, 4).double()
    )
    torch.testing.assert_close(scored.scores["heat"].exp(), scored.scores["entropy"])
    assert "no selected weights come before the classifier" in scored.notes["heat"]


class Bag(nn.Module):
    """Text in, features of free length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc1, self.fc2 = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.fc2(self.fc1((self.embed(ids) * mask[:, :, None]).sum(1)).relu())


def test_blocks_that_no_noise_reaches_have_no_ratio_and_it_says_so() -> None:
    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = nn.Linear(6, 4), nn.Linear(10, 3)
            self.block.bias.data.fill_(-100)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([x, self.block(x).relu()], 1))

    scored = qualms.Scorer(Skipping().double(), ["heat", "entropy"])(torch.randn(4, 6).double())
    torch.testing.assert_close(scored.scores["heat"].exp(), scored.scores["entropy"])
    assert "the last blocks get no gradient for most noise inputs" in scored.notes["heat"]


def test_text_is_measured_against_random_ids() -> None:
    torch.manual_seed(0)
    model = Bag().double()
    x = {"ids": torch.randint(0, 50, (6, 7)), "mask": torch.ones(6, 7, dtype=torch.long)}
    scorer = qualms.Scorer(model, ["heat", "entropy"])
    scored = scorer(x)
    assert not scored.notes
    assert (scored.scores["heat"].exp() - scored.scores["entropy"]).abs().max() > 1e-3
    alone = scorer({name: t[2:3] for name, t in x.items()}, first=2)
    torch.testing.assert_close(alone.scores["heat"], scored.scores["heat"][2:3])


@pytest.mark.parametrize("lengths", [(2, 60), (60, 2)])
def test_batches_of_two_lengths_have_scores_of_one_kind(lengths: tuple[int, int]) -> None:
    """In short texts no unit answers to most inputs of noise; what the first batch decides holds
    for both.
    """
    torch.manual_seed(0)
    model = Bag().double()
    model.fc1.bias.data -= 3
    batches = [
        {"ids": torch.randint(0, 50, (3, n)), "mask": torch.ones(3, n, dtype=torch.long)}
        for n in lengths
    ]
    scored = qualms.Scorer(model, ["heat", "recommended", "gen", "entropy"])(batches)
    s = {name: values.exp() if name == "heat" else values for name, values in scored.scores.items()}
    plain = torch.isclose(s["heat"], s["entropy"])
    if lengths[0] == 2:
        assert plain.all()
        assert torch.equal(s["recommended"], s["gen"])
        assert "so heat equals the entropy" in scored.notes["heat"]
    else:
        assert not plain[:3].any()
        assert torch.equal(s["recommended"], scored.scores["heat"])
        assert "heat" not in scored.notes


def test_masks_and_types_beside_the_ids_are_those_of_plain_text() -> None:
    seen: dict[str, Tensor] = {}

    class Watched(Bag):
        def forward(self, ids: Tensor, key_padding_mask: Tensor, token_type_ids: Tensor) -> Tensor:
            if len(ids) > 3:
                seen.update(padding=key_padding_mask, types=token_type_ids)
            return super().forward(ids, ~key_padding_mask + 0 * token_type_ids)

    torch.manual_seed(0)
    beside = {
        "key_padding_mask": torch.ones(3, 7, dtype=torch.bool),
        "token_type_ids": torch.ones(3, 7).long(),
    }
    beside["key_padding_mask"][:, :5] = False
    qualms.score(Watched(), {"ids": torch.randint(0, 50, (3, 7)), **beside}, "heat")
    assert len(seen["padding"]) > 3
    assert not seen["padding"].any()
    assert not seen["types"].any()


class Positions(nn.Module):
    """A table of positions is read before that of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.position, self.embed = nn.Embedding(512, 16), nn.Embedding(50, 16)
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.position(torch.arange(ids.shape[1])) + self.embed(ids)
        return self.fc2(self.fc1(h.sum(1)).relu())


def test_the_vocabulary_is_that_of_the_embedding_that_reads_the_ids() -> None:
    torch.manual_seed(0)
    assert torch.isfinite(qualms.score(Positions(), torch.randint(0, 50, (4, 7)), "heat")).all()


def test_what_stands_beside_the_input_without_a_name_is_an_error() -> None:
    x = (torch.randint(0, 50, (3, 7)), torch.ones(3, 7, dtype=torch.long))
    with pytest.raises(
        qualms.QualmsError, match=r"tuple.* has no known neutral value; pass a dict"
    ):
        qualms.score(Bag(), x, "heat")


def test_a_model_that_refuses_noise_is_told_of_the_noise() -> None:
    class Category(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.fc1, self.fc2 = nn.Embedding(5, 4), nn.Linear(7, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc1(torch.cat([self.embed(x[:, 0].long()), x[:, 1:]], 1)).relu())

    with pytest.raises(
        qualms.QualmsError, match="heat needs to run the model on 32 noise inputs, but this failed"
    ):
        qualms.score(Category(), torch.ones(3, 4), "heat")


def test_noise_is_tried_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    original = heat.noise_inputs
    monkeypatch.setattr(heat, "noise_inputs", lambda *a: tried.append(1) or original(*a))
    scorer = qualms.Scorer(model := rectifiers(bias=True), "heat")
    first = scorer(x := torch.randn(5, 6).double()).scores["heat"]
    torch.testing.assert_close(scorer(x).scores["heat"], first, rtol=0, atol=0)
    assert len(tried) == 1
    model[2].weight.data *= 2
    scorer(x)
    assert len(tried) == 2


def test_logits_that_no_linear_layer_makes_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.Tanh())
    with pytest.raises(qualms.QualmsError, match="needs logits from a final linear layer"):
        qualms.score(model, torch.randn(2, 4), "heat")


@pytest.mark.parametrize("name", ["heat", "recommended", "coherence"])
def test_an_input_that_the_model_does_not_take_is_told_as_such(name: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(qualms.QualmsError, match="does not accept x of"):
        qualms.score(model, torch.randn(4, 5), name)


def test_noise_too_loud_for_the_models_numbers_counts_as_growth() -> None:
    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Exponential(), nn.Linear(8, 3))
    scored = qualms.Scorer(model, "heat")(torch.randn(4, 6))
    assert torch.isfinite(scored.scores["heat"]).all()
    assert not scored.notes


def test_estimated_traces_have_no_known_error() -> None:
    few, many = (
        qualms.score_with_error(rectifiers(classes=c), torch.randn(3, 6).double(), "heat")
        for c in (17, 18)
    )
    assert (few[1] == 0).all()
    assert many[1].isnan().all()


def test_which_parameters_count_does_not_change_what_the_classifier_is() -> None:
    """A weight that is computed from others, without a bias to find its layer by."""
    model, x = rectifiers(), torch.randn(5, 6).double()
    want = qualms.score(model, x, "heat", params=lambda name: name[0] in "24")
    nn.utils.parametrizations.weight_norm(model[6])
    found = qualms.score(model, x, "heat", params=lambda name: name[0] in "24")
    torch.testing.assert_close(found, want, rtol=1e-9, atol=0)
