"""The network for segmentation: a class for every pixel, by its surroundings, and scores at every
pixel.
"""

import pytest
import torch

import qualms
from qualms.models.fcn import FCN


def test_the_network_is_small_and_names_every_pixel() -> None:
    model = FCN(9).eval()
    assert sum(p.numel() for p in model.parameters()) < 200_000
    assert model(torch.rand(2, 1, 24, 48)).shape == (2, 9, 24, 48)


def test_a_pixel_is_judged_by_its_surroundings_and_not_by_the_other_images_of_a_batch() -> None:
    model, x = FCN(9).eval(), torch.rand(3, 1, 48, 48)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-4, atol=1e-5)
    far = x.clone()
    far[:, :, 24, 24] = 5.0
    changed = (model(x) - model(far)).abs().amax((0, 1)) > 0
    assert changed[24, 24]
    assert changed[16, 24]  # an object away
    assert not changed[0, 0]


def test_every_pixel_is_scored_by_its_own_logits() -> None:
    torch.manual_seed(0)
    model, x = FCN(9).eval(), torch.rand(2, 1, 16, 24)
    part = qualms.Scorer(model, ["entropy", "energy"], class_dim=1)(x)
    with torch.no_grad():
        logits = model(x).double()
    log_p = logits.log_softmax(1)
    torch.testing.assert_close(
        part.scores["entropy"].double(), -(log_p.exp() * log_p).sum(1), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        part.scores["energy"].double(), -logits.logsumexp(1), rtol=1e-4, atol=1e-5
    )
    assert torch.equal(part.prediction, logits.argmax(1))


@pytest.mark.slow
def test_gradients_at_all_pixels_agree_with_the_exact_ones_at_a_few() -> None:
    torch.manual_seed(0)
    model, x = FCN(9).eval(), torch.rand(1, 1, 16, 24)
    some = [0, 100, 200, 383]  # pixels, row by row
    methods = ["regrad", "fisher"]
    sketch = qualms.Scorer(model, methods, class_dim=1, engine=qualms.Sketch(tangents=256))(x)
    exact = qualms.Scorer(model, methods, class_dim=1, positions=some, engine="exact")(x)
    for method, most in (
        ("regrad", 0.15),
        ("fisher", 0.3),
    ):  # the first is a norm, the other its square
        ratio = sketch.scores[method].flatten()[some] / exact.scores[method].flatten()
        assert float((ratio - 1).abs().max()) < most, method
