"""Which layers carry a score, also where there are too many classes to measure all of them."""

import pytest
import torch

from qualms.gradients.settings import Settings
from qualms.methods import parse
from qualms.report.layer_chart import layer_sums


@pytest.mark.parametrize("spec", ["regrad+layers", "exgrad", "fisher"])
def test_some_of_many_classes_tell_what_each_layer_adds(spec: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 128), torch.nn.ReLU(), torch.nn.Linear(128, 300)
    ).double()
    x = torch.randn(4, 6).double()
    names, exact = layer_sums(model, x, {"m": parse(spec)}, Settings("exact"))
    also, few = layer_sums(model, x, {"m": parse(spec)})
    assert names == also == ["Linear · 0", "Linear · 2"]
    shares = [sums["m"] / sums["m"].sum(1, keepdims=True) for sums in (exact, few)]
    assert shares[1] == pytest.approx(shares[0], abs=0.05)
    assert few["m"] != pytest.approx(exact["m"], rel=1e-9)
