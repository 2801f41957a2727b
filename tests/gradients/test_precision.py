"""Models of 64 bits that compute with 32 inside are compared at the precision that is really there."""

from typing import Any

import pytest
import torch
from torch import nn

import qualms
from qualms.gradients.precision import CoarsestCast
from tests import evasive


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=12, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    return LlamaForSequenceClassification(config), {"input_ids": torch.randint(1, 30, (6, 5))}


def casts_inside() -> tuple[nn.Module, Any]:
    return evasive.CastsInside(), torch.randn(6, 6, dtype=torch.double)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("build", [casts_inside, pytest.param(llama, marks=pytest.mark.slow)])
def test_the_sketch_runs_what_casts_to_32_bits_inside(build: Any, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = build()
    model = model.double().eval()
    for p in model.parameters():
        if p.ndim == 1:
            p.data += 0.1 * torch.randn_like(p)
    want = qualms.class_gradient_norms(model, x, engine="reference")
    have = qualms.class_gradient_norms(model, x)
    assert have.layers == want.layers
    assert have.general == []
    torch.testing.assert_close(have.norms, want.norms, rtol=1e-5, atol=1e-7)
    ratio = qualms.score(model, x, "regrad", engine=qualms.Sketch(64)) / qualms.score(
        model, x, "regrad"
    )
    assert (ratio - 1).abs().max() < 0.4  # 1/sqrt(2·64) is the standard error


def test_the_narrowest_type_on_the_way_is_found() -> None:
    def seen(work: Any, x: torch.Tensor) -> torch.dtype:
        with CoarsestCast() as casts:
            out = work(x)
        return casts.precision_of(out)

    x = torch.randn(3, dtype=torch.double)
    assert seen(lambda x: x.exp(), x) is torch.double
    assert seen(lambda x: x.float().exp().double(), x) is torch.float
    assert seen(lambda x: x.softmax(0, dtype=torch.float).double(), x) is torch.float
    assert seen(lambda x: x.float().half().double(), x) is torch.half
    assert (
        seen(lambda x: x * (x > 0).float() * torch.ones(3), x) is torch.double
    )  # constants are exact
    assert seen(lambda x: x.double(), x.float()) is torch.double
