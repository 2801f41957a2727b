"""From bytes to what a network was trained on."""

import pytest
import torch

import qualms
from qualms.data import Normalization


def test_each_channel_gets_its_own_mean_and_deviation() -> None:
    pixels = torch.tensor([0, 255, 51], dtype=torch.uint8).reshape(1, 3, 1, 1)
    x = Normalization((0.5, 0.0, 0.1), (0.25, 2.0, 0.1)).apply(pixels)
    assert x.dtype == torch.float32
    torch.testing.assert_close(x.flatten(), torch.tensor([-2.0, 0.5, 1.0]))


def test_noise_in_pixels_is_divided_by_the_deviation() -> None:
    assert Normalization((0.0,), (0.5,)).in_model_units(0.02) == pytest.approx(0.04)
    assert Normalization((0.0, 0.0), (0.5, 0.25)).in_model_units(0.02) == pytest.approx(
        (0.04, 0.08)
    )


def test_noise_in_model_units_is_that_noise_on_the_pixels() -> None:
    n = Normalization((0.1, 0.2, 0.3), (0.2, 0.3, 0.4))
    dark, bright = (
        n.apply(torch.full((1, 3, 1, 1), v, dtype=torch.uint8)).flatten() for v in (100, 151)
    )
    torch.testing.assert_close(bright - dark, torch.tensor(n.in_model_units(51 / 255)))


def test_errors() -> None:
    with pytest.raises(qualms.QualmsError, match="2 means and 1 standard deviations"):
        Normalization((0.0, 0.0), (1.0,))
    with pytest.raises(qualms.QualmsError, match="0 means"):
        Normalization((), ())
    with pytest.raises(qualms.QualmsError, match="must be above 0"):
        Normalization((0.0,), (0.0,))
    with pytest.raises(qualms.QualmsError, match="must be above 0"):
        Normalization((0.0,), (float("nan"),))
    with pytest.raises(
        qualms.QualmsError, match=r"1 channels, but the normalization has 3.*convert\(3, size\)"
    ):
        Normalization((0.0,) * 3, (1.0,) * 3).apply(torch.zeros(1, 1, 2, 2, dtype=torch.uint8))
