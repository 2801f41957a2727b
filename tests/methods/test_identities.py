"""What must hold for every method, whatever the model."""

import copy

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.methods.registry import METHODS
from qualms.models.cnn import mnist_cnn
from tests.helpers.settings import Setting, bert, training_text

NAMES = [kind.name for kind in METHODS]
STARRED = [*NAMES, "regrad+layers+smooth(0.1,4)"]


def train_batches() -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    return [torch.randn(16, 1, 8, 8, generator=noise).double() for _ in range(4)]


def all_scores(
    model: nn.Module, x: Tensor, members: tuple[nn.Module, ...], **more: object
) -> dict[str, Tensor]:
    return qualms.compare(model, x, STARRED, train=train_batches(), models=members, **more)


@pytest.fixture(scope="module")
def member(setting: Setting) -> nn.Module:
    other = copy.deepcopy(setting.model)
    with torch.no_grad():
        other[8].weight += 0.3 * torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    return other


def test_every_method_has_a_name_a_paper_needs_and_a_cost() -> None:
    listed = qualms.list_methods()
    assert len({m.name for m in listed}) == len(listed) == len(METHODS)
    assert all(m.paper and m.needs and m.cost for m in listed)


@pytest.mark.parametrize("name", STARRED)
def test_every_method_runs_on_the_papers_cnn(name: str) -> None:
    torch.manual_seed(0)
    model, other, x = mnist_cnn(), mnist_cnn(), torch.rand(3, 1, 28, 28)
    missing = {"mc-dropout": "needs a dropout layer", "mc-batchnorm": "needs batch normalization"}
    if name in missing:  # the paper's CNN has neither
        with pytest.raises(qualms.QualmsError, match=missing[name]):
            qualms.score(model, x, name, train=[x])
        return
    values = qualms.score(model, x, name, train=[torch.rand(80, 1, 28, 28)], models=[other])
    assert torch.isfinite(values).all()
    assert name == "negrad" or len(values.unique()) == 3


@pytest.mark.slow
def test_a_shift_of_all_logits_changes_nothing(setting: Setting, member: nn.Module) -> None:
    before = all_scores(setting.model, setting.x, (member,))
    shifted, moved_member = copy.deepcopy(setting.model), copy.deepcopy(member)
    with torch.no_grad():
        shifted[8].bias += 2.5
        moved_member[8].bias += 2.5
    after = all_scores(shifted, setting.x, (moved_member,))
    changed = {n for n in STARRED if not torch.allclose(before[n], after[n], rtol=1e-6, atol=1e-12)}
    energies = {"energy", "scale", "ash-s", "lts", "rankfeat", "react", "vim"}
    # The confounding label asks for each class on its own, so it too depends on the level of the
    # logits; quam's weight decay pulls at the bias.
    assert changed == energies | {"max-logit", "coherence", "confounding-label", "quam"}


@pytest.mark.slow
def test_permuting_the_classes_changes_nothing(setting: Setting, member: nn.Module) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])

    def permuted(model: nn.Module) -> nn.Module:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other[8].weight.copy_(model[8].weight[order])
            other[8].bias.copy_(model[8].bias[order])
        return other

    before = all_scores(setting.model, setting.x, (member,))
    after = all_scores(permuted(setting.model), setting.x, (permuted(member),))
    for name in set(STARRED) - {
        "laplace",
        "perturb-theta",
    }:  # their draws are tied to the place of a weight
        torch.testing.assert_close(before[name], after[name], rtol=1e-7, atol=1e-12, msg=name)


@pytest.mark.slow
def test_the_score_of_an_input_does_not_depend_on_the_rest_of_the_batch(
    setting: Setting, member: nn.Module
) -> None:
    whole = all_scores(setting.model, setting.x, (member,))
    in_parts = all_scores(setting.model, setting.x, (member,), batch_size=3)
    as_loader = all_scores(setting.model, [setting.x[:1], setting.x[1:]], (member,))
    for name in STARRED:
        torch.testing.assert_close(in_parts[name], whole[name], rtol=1e-8, atol=1e-13, msg=name)
        torch.testing.assert_close(as_loader[name], whole[name], rtol=1e-8, atol=1e-13, msg=name)


@pytest.mark.slow
def test_the_seed_decides(setting: Setting, member: nn.Module) -> None:
    one = all_scores(setting.model, setting.x, (member,), seed=1)
    again = all_scores(setting.model, setting.x, (member,), seed=1)
    other = all_scores(setting.model, setting.x, (member,), seed=2)
    assert all(torch.equal(one[n], again[n]) for n in STARRED)
    drawn = {
        "perturb-x",
        "perturb-theta",
        "mc-aa",
        "inserted-dropout",
        "laplace",
        "mc-dropout",
        STARRED[-1],
    }
    drawn |= {"heat", "heat-geometric", "recommended"}  # their noise inputs
    assert {n for n in STARRED if not torch.equal(one[n], other[n])} == drawn


def test_the_model_leaves_as_it_came(setting: Setting, member: nn.Module) -> None:
    model = copy.deepcopy(setting.model).train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    versions = [p._version for p in model.parameters()]
    buffers = [id(b) for b in model.buffers()]
    all_scores(model, setting.x, (member,))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert [p._version for p in model.parameters()] == versions
    assert [id(b) for b in model.buffers()] == buffers
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    assert model[1].momentum == 0.1


def test_exgrad_bounds_the_divergence_of_small_weight_perturbations(setting: Setting) -> None:
    """Proposition 4: KL(p(θ) ‖ p(θ + Δθ)) ≤ ‖Δθ‖ Σ_c p_c ‖∇ log p_c‖ when Δθ is small."""
    exgrad = qualms.score(setting.model, setting.x, "exgrad")
    noise = torch.Generator().manual_seed(0)
    for size in (1e-2, 1e-3):
        for _ in range(20):
            step = {
                n: torch.randn(p.shape, generator=noise).double()
                for n, p in setting.model.named_parameters()
            }
            length = sum(s.square().sum() for s in step.values()).sqrt()
            moved = {n: p + size * step[n] / length for n, p in setting.model.named_parameters()}
            log_q = torch.func.functional_call(setting.model, moved, setting.x).log_softmax(1)
            divergence = (setting.probs * (setting.probs.log() - log_q)).sum(1)
            assert (divergence <= size * exgrad).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_scores_are_float32(name: str) -> None:
    model, x = bert()
    if name in ("mc-batchnorm", "rankfeat", "gaia"):
        pytest.skip("the model has no batch normalization and no feature maps")
    out = qualms.score(
        model.bfloat16(), x, name, train=[training_text()], models=[bert()[0].bfloat16()]
    )
    assert out.dtype == torch.float32
    assert torch.isfinite(out).all()
