"""Which inputs to label next: the most uncertain, or uncertain ones whose gradients differ."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qualms
from qualms.gradients.layers import layer_weights
from qualms.gradients.settings import Settings
from qualms.methods.registry import parse
from qualms.selection import DIVERSITY_TANGENTS, gradient_features, k_center
from tests.helpers.model_state import fingerprint, same

SPECS = (
    "confounding-label",
    "regrad+layers(0.4)",
    *(
        pytest.param(spec, marks=pytest.mark.slow)
        for spec in ("regrad", "exgrad", "ungrad", "gradnorm")
    ),
    pytest.param("regrad+layers+smooth(0.3,4)", marks=pytest.mark.slow),
)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 4)
    ).double()


def inputs(n: int, seed: int = 1) -> Tensor:
    return 2 * torch.randn(n, 6, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


def true_features(model: nn.Module, x: Tensor, spec: str) -> Tensor:
    """The weighted gradients themselves, by plain autograd: one row for each input."""
    method: Any = parse(spec)
    parameters = list(model.parameters())
    layers = len(parameters) // 2
    a = layer_weights(layers, method.layers or 0.0).repeat_interleave(
        2
    )  # weight and bias of each layer

    def gradients_and_probs(one: Tensor) -> tuple[Tensor, Tensor]:
        z = model(one[None])[0]
        log_p = z.log_softmax(-1)
        p = log_p.exp().detach()
        losses = {
            "regrad": log_p,
            "exgrad": log_p,
            "ungrad": log_p,
            "gradnorm": log_p.mean(0, keepdim=True),
            "confounding-label": nn.functional.binary_cross_entropy_with_logits(
                z, torch.ones_like(z)
            ).reshape(1),
        }[method.name]
        found = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        return torch.stack(
            [torch.cat([w * g.flatten() for w, g in zip(a, gs, strict=True)]) for gs in found]
        ), p

    rows = []
    for number, one in enumerate(x):
        copies = [one]
        if method.smooth is not None:
            copies = list(one + method.smooth.noise((6,), number, seed=0).double())
        smoothed = torch.stack([gradients_and_probs(copy)[0] for copy in copies]).mean(0)
        p = gradients_and_probs(one)[1]
        weights = {"regrad": p.sqrt(), "exgrad": p, "ungrad": torch.full_like(p, 1 / 4)}.get(
            method.name, torch.ones(1)
        )
        rows.append((weights[:, None] * smoothed).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("spec", ["regrad+layers+smooth", "entropy", "gradnorm"])
def test_the_most_uncertain_come_first(spec: str) -> None:
    model, pool = network(), inputs(30)
    scores = qualms.score(model, pool, spec)
    picked = qualms.select(model, pool, 7, spec)
    assert picked.tolist() == sorted(range(30), key=lambda i: -float(scores[i]))[:7]


def test_equal_scores_keep_the_order_of_the_pool() -> None:
    pool = inputs(1).repeat(40, 1)
    assert qualms.select(network(), pool, 40, "entropy").tolist() == list(range(40))


def test_settings_reach_the_score() -> None:
    model, pool = network(), inputs(30)
    noisy = "regrad+smooth(3,1)"
    assert (
        qualms.select(model, pool, 30, noisy, seed=1).tolist()
        == qualms.score(model, pool, noisy, seed=1).argsort(descending=True).tolist()
        != qualms.select(model, pool, 30, noisy).tolist()
    )


@pytest.mark.parametrize("spec", SPECS)
def test_distances_between_features_are_those_between_the_gradients(spec: str) -> None:
    model, pool = network(), inputs(12)
    want = torch.pdist(true_features(model, pool, spec))
    features = gradient_features(
        model, pool, range(12), parse(spec), Settings(qualms.Sketch(DIVERSITY_TANGENTS * 4))
    )
    error = (torch.pdist(features.double()) / want - 1).abs()
    expected = 1 / math.sqrt(2 * DIVERSITY_TANGENTS * 4)
    assert error.mean() < 1.2 * expected
    assert error.max() < 5 * expected


def test_candidates_keep_their_own_numbers_which_decide_their_draws() -> None:
    model, pool = network(), inputs(12)
    method, settings = parse("regrad+layers+smooth(1,2)"), Settings(qualms.Sketch(4))
    everything = gradient_features(model, pool, range(12), method, settings)
    some = [9, 2, 3, 11]
    for read in (pool, list(pool.split(5)), list(pool.split(1))):
        torch.testing.assert_close(
            gradient_features(model, read, some, method, settings), everything[some]
        )


@pytest.mark.slow
def test_inputs_of_different_lengths_are_taken() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(20, 5), nn.Linear(5, 3)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.out(self.table(input_ids).mean(1).tanh())

    torch.manual_seed(0)
    model = Words()
    pool = [
        {"input_ids": torch.randint(20, (4, length)), "labels": torch.zeros(4)}
        for length in (3, 7, 3)
    ]
    method, settings = parse("regrad+smooth"), Settings(qualms.Sketch(4))
    whole = gradient_features(model, pool, range(12), method, settings)
    one_by_one = [gradient_features(model, pool, [i], method, settings) for i in range(12)]
    torch.testing.assert_close(whole, torch.cat(one_by_one))
    assert len(set(qualms.select(model, pool, 5, diversity=2).tolist())) == 5


def _settings(more: dict[str, Any]) -> Settings:
    return Settings(
        qualms.Sketch(8),
        **{"granularity" if key == "layers" else key: v for key, v in more.items()},
    )


@pytest.mark.parametrize("more", [{"params": "4.*"}, {"layers": "tensor"}, {"seed": 3}], ids=str)
def test_settings_reach_the_features(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qualms.selection.DIVERSITY_TANGENTS", 8)
    model, pool, spec = network(), inputs(40), "regrad+layers(2)"
    candidates = qualms.select(model, pool, 40, spec, **more)
    features = gradient_features(model, pool, candidates.tolist(), parse(spec), _settings(more))
    other = gradient_features(
        model, pool, candidates.tolist(), parse(spec), Settings(qualms.Sketch(8))
    )
    picked = qualms.select(model, pool, 20, spec, diversity=2, **more).tolist()
    assert (
        picked
        == candidates[k_center(features, 20)].tolist()
        != candidates[k_center(other, 20)].tolist()
    )


def test_k_center_picks_the_farthest_point_each_time() -> None:
    points = torch.randn(25, 3, generator=torch.Generator().manual_seed(0))
    picked = [0]
    for _ in range(9):
        gaps = [
            min(math.dist(points[i].tolist(), points[j].tolist()) for j in picked)
            for i in range(25)
        ]
        picked.append(max(range(25), key=gaps.__getitem__))
    assert k_center(points, 10) == picked
    assert k_center(torch.ones(4, 2), 4) == [
        0,
        1,
        2,
        3,
    ]  # duplicates: each once, the more uncertain first


@pytest.mark.parametrize("spec", ["regrad", "exgrad+layers", "gradnorm"])
def test_each_diverse_pick_is_the_candidate_with_the_farthest_gradients(spec: str) -> None:
    model, pool = network(), inputs(24)
    candidates = qualms.score(model, pool, spec).argsort(descending=True)[:15].tolist()
    picked = qualms.select(model, pool, 6, spec, diversity=2.5).tolist()
    assert picked[0] == candidates[0]
    between = torch.cdist(*[true_features(model, pool, spec)] * 2)
    for i in range(1, 6):
        gaps = between[:, picked[:i]].amin(1)
        # Two estimated distances are compared, each off by 9 % or so.
        assert gaps[picked[i]] > 0.7 * gaps[candidates].max()
    assert set(picked) <= set(candidates)


def test_near_duplicates_of_one_uncertain_input_do_not_take_all_labels() -> None:
    model, others = network(), inputs(30)
    worst = others[qualms.select(model, others, 1)]
    nearly = worst + 1e-5 * inputs(20, seed=2)
    pool = torch.cat([nearly, others])
    duplicates = {*range(20), 20 + int(qualms.select(model, others, 1))}
    assert set(qualms.select(model, pool, 6).tolist()) <= duplicates
    diverse = qualms.select(model, pool, 6, diversity=7).tolist()
    assert diverse[0] == int(qualms.select(model, pool, 1))
    assert len(set(diverse)) == 6
    assert len(set(diverse) & duplicates) == 1


def test_every_cluster_of_uncertain_inputs_gets_a_label() -> None:
    model = network()
    centers = inputs(5)
    pool = centers.repeat(8, 1) + 1e-3 * inputs(40, seed=3)
    picked = qualms.select(model, pool, 5, diversity=8)
    assert sorted(int(i) % 5 for i in picked) == [0, 1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("diversity", [None, 3])
def test_the_batch_size_does_not_matter(
    diversity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qualms.selection.DIVERSITY_TANGENTS", 8)
    model, pool = network(), inputs(30)
    want = qualms.select(model, pool, 6, diversity=diversity)
    loader = DataLoader(TensorDataset(pool, torch.zeros(30)), batch_size=7)
    for read, batch_size in ((pool, 1), (pool, 4), (loader, None), (list(pool.split(11)), 3)):
        found = qualms.select(model, read, 6, diversity=diversity, batch_size=batch_size)
        assert found.tolist() == want.tolist()


@pytest.mark.parametrize("diversity", [None, 2])
def test_the_model_leaves_as_it_came(diversity: int | None) -> None:
    model, pool = network().train(), inputs(10)
    model[0].weight.requires_grad_(False)
    before, kept = fingerprint(model), pool.clone()
    qualms.select(model, pool, 3, diversity=diversity)
    after = fingerprint(model)
    for key in before:
        assert same(before[key], after[key]), key
    assert torch.equal(pool, kept)


def test_a_one_shot_iterator_is_enough_without_diversity() -> None:
    model, pool = network(), inputs(20)
    assert (
        qualms.select(model, iter(pool.split(6)), 4).tolist()
        == qualms.select(model, pool, 4).tolist()
    )
    with pytest.raises(
        qualms.QualmsError,
        match="read only once, but diversity reads it twice; pass a list or a loader",
    ):
        qualms.select(model, iter(pool.split(6)), 4, diversity=2)


@pytest.mark.parametrize("spec", ["entropy", "perturb-x", "coherence", "gradnorm-huang"])
def test_diversity_needs_a_gradient_score(spec: str) -> None:
    with pytest.raises(
        qualms.QualmsError, match=f"diversity needs a gradient score.* {spec} is not one"
    ):
        qualms.select(network(), inputs(10), 2, spec, diversity=2)


def test_errors() -> None:
    model, pool = network(), inputs(10)
    with pytest.raises(qualms.QualmsError, match="k=0 is invalid"):
        qualms.select(model, pool, 0)
    with pytest.raises(qualms.QualmsError, match="k is 11, but the pool has only 10 inputs"):
        qualms.select(model, pool, 11)
    for diversity in (0.9, math.inf, math.nan):
        with pytest.raises(qualms.QualmsError, match=r"diversity=.* is invalid"):
            qualms.select(model, pool, 2, diversity=diversity)
    with pytest.raises(qualms.QualmsError, match="L2 distances between gradients, not l1"):
        qualms.select(model, pool, 2, diversity=2, norm="l1")
    with pytest.raises(qualms.QualmsError, match="the gradients of negrad are all zero"):
        qualms.select(model, pool, 2, "negrad", diversity=2)
    with pytest.raises(qualms.QualmsError, match=r"'regard' .* is not a method"):
        qualms.select(model, pool, 2, "regard")


def test_a_loader_that_shuffles_is_refused() -> None:
    loader = DataLoader(TensorDataset(inputs(10)), batch_size=4, shuffle=True)
    with pytest.raises(qualms.QualmsError, match="shuffle=False"):
        qualms.select(network(), loader, 2)
