"""How the tangents of a sketch are drawn, and that several of them may be pushed at once."""

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.batch import take_samples
from qualms.gradients.input_data import batches
from qualms.gradients.model_input import ModelInput
from qualms.gradients.sketching.jvp import JVP_FUNCTIONS, Jvp, forward_mode
from qualms.gradients.sketching.tangents import TangentDistribution
from tests import networks as net
from tests.cases import CASES, Case

SEVERAL = ("mnist-cnn", "resnet-18", "transformer-encoder", "conv1d-text")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in SEVERAL], ids=str)
def test_one_input_takes_several_tangents_at_once(case: Case) -> None:
    model, x = case.make()
    batch = next(batches(x, model))
    together = qualms.Scorer(model, "regrad+layers", engine=qualms.Sketch(5))
    want = together(batch).scores["regrad+layers"]
    alone = qualms.Scorer(model, "regrad+layers", engine=qualms.Sketch(5))
    for _ in range(2):
        torch.testing.assert_close(
            alone(take_samples(batch, [0])).scores["regrad+layers"], want[:1], rtol=1e-7, atol=0
        )
    assert [
        found for key, found in alone._cache.entries.items() if key[0] == "stacked tangents"
    ] == [True]
    assert not any(key[0] == "stacked tangents" for key in together._cache.entries)


def test_where_several_tangents_cannot_be_pushed_at_once_one_by_one_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x = net.mlp().double(), torch.randn(1, 3, 4, 4, dtype=torch.double)
    want = qualms.score(model, x, "regrad", engine="sketch")

    def off(
        model: nn.Module, on: ModelInput, s: dict[str, Tensor], is_stacked: bool = False
    ) -> Jvp:
        z, dz = forward_mode(model, on, s, is_stacked)
        return Jvp(z, dz * (1 + is_stacked))

    monkeypatch.setattr("qualms.gradients.engines.sketch.forward_mode", off)
    monkeypatch.setitem(JVP_FUNCTIONS, "forward mode", off)
    torch.testing.assert_close(qualms.score(model, x, "regrad", engine="sketch"), want)


def test_large_parameters_have_signs_for_tangents() -> None:
    like = {
        "large": torch.empty(70, 70, dtype=torch.double),
        "small": torch.empty(9, dtype=torch.double),
    }
    distribution = TangentDistribution(like, [(["large", "small"], 0.5)], "normal", False, 3)
    drawn = [distribution.draw(j) for j in range(200)]
    large, small = (torch.stack([s[name].flatten() for s in drawn]) for name in like)
    assert torch.equal(large.abs(), torch.full_like(large, 0.5))
    assert small.abs().unique().numel() == small.numel()
    for entries in (large, small):  # independent, of mean zero and variance a²
        assert float(entries.mean().abs()) < 0.05
        assert float(entries.square().mean().sqrt()) == pytest.approx(0.5, rel=0.1)
    g = torch.randn(70 * 70, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    assert float((large @ g).square().mean().sqrt() / (0.5 * g.norm())) == pytest.approx(
        1, abs=0.15
    )
    products = large @ large.T / (0.25 * 4900)
    assert float((products - torch.eye(200)).abs().max()) < 6 / 70
