"""Fewer backward passes than classes: the same norms as with all of them, to the last digits."""

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.last_layer import LastProduct
from tests import wide
from tests.helpers.engines import SMOOTHINGS, assert_norms_equal


def with_all_passes(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor, **more: object
) -> Tensor:
    with monkeypatch.context() as patched:
        patched.setattr(LastProduct, "is_cheaper", lambda *_: False)
        return qualms.class_gradient_norms(model, x, **more).norms


@pytest.mark.parametrize("smoothing", SMOOTHINGS.values(), ids=SMOOTHINGS)
@pytest.mark.parametrize("certain", [0.0, 10.0, 23.0, 40.0])
def test_confident_inputs_keep_their_digits(
    certain: float, smoothing: qualms.Smoothing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = wide.Wide(bias=False, certain=certain).double(), torch.randn(8, 5, 6).double()
    have = qualms.class_gradient_norms(model, x, smoothing=smoothing)
    assert certain < 23 or float(1 - have.probs.amax()) < 1e-8
    want = with_all_passes(monkeypatch, model, x, smoothing=smoothing)
    torch.testing.assert_close(have.norms, want, rtol=1e-9, atol=0)
    single = qualms.class_gradient_norms(model.float(), x.float(), smoothing=smoothing).norms
    torch.testing.assert_close(single.double(), want, rtol=1e-3, atol=0)


@pytest.mark.parametrize("apart", [1e-2, 1e-4, 1e-6])
def test_features_that_cancel_do_not_take_the_digits_with_them(
    apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two features are nearly the same, and some classes see little but their difference."""
    torch.manual_seed(0)
    model, x = wide.Wide(bias=False).double(), torch.randn(8, 5, 6).double()
    with torch.no_grad():
        model.c.weight[1] = model.c.weight[0] + apart * torch.randn(12)
        model.c.bias[1] = model.c.bias[0]
        model.fc.weight[20:] = model.fc.weight[0] + torch.randn(20, 1) * torch.tensor(
            [1.0, -1.0, 0.0]
        )
        model.certain[0] = 30
    have = qualms.class_gradient_norms(model, x).norms
    torch.testing.assert_close(have, with_all_passes(monkeypatch, model, x), rtol=1e-9, atol=0)


@pytest.mark.slow
def test_there_are_two_more_passes_than_features() -> None:
    passes = 0

    class Counting(wide.Wide):
        def features(self, x: Tensor) -> Tensor:
            h = super().features(x)
            if h.requires_grad and len(h) == 8:
                h.register_hook(count)
            return h

    def count(_: Tensor) -> None:
        nonlocal passes
        passes += 1

    torch.manual_seed(0)
    model, x = Counting().double(), torch.randn(8, 5, 6).double()
    have = qualms.class_gradient_norms(model, x).norms
    assert passes == 2 + 3 + 2  # and two that show that rows keep their places
    passes = 0
    assert_norms_equal(have, qualms.class_gradient_norms(model, x, budget=10**5).norms)
    assert passes == 0  # fewer inputs at once
    qualms.class_gradient_norms(model, x, norm="l1")
    assert passes == 40 + 1


def test_a_frozen_last_layer_is_passed_as_well() -> None:
    torch.manual_seed(0)
    model, x = wide.Wide().double(), torch.randn(8, 5, 6).double()
    part = qualms.class_gradient_norms(model, x, params="b.*")
    whole = qualms.class_gradient_norms(model, x)
    assert_norms_equal(part.norms, whole.norms[:, :, [whole.layers.index("b")]])


def test_one_bias_for_all_classes_has_no_gradient() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.weight, self.bias = (
                nn.Linear(4, 3),
                nn.Parameter(torch.randn(3, 60)),
                nn.Parameter(torch.ones(1)),
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, torch.tanh(self.body(x)), self.weight)

    torch.manual_seed(0)
    model, x = Shared().double(), torch.randn(4, 4, dtype=torch.double)
    have = qualms.class_gradient_norms(model, x, layers="tensor")
    want = qualms.class_gradient_norms(model, x, layers="tensor", engine="reference")
    assert have.layers == want.layers
    assert_norms_equal(have.norms, want.norms)
