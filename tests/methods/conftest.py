"""A small network in double precision, its inputs, and every class gradient of it, by plain
autograd.
"""

import pytest
import torch

from tests.helpers.settings import Setting, layer_gradients, small_cnn


@pytest.fixture(scope="package")
def setting() -> Setting:
    torch.manual_seed(0)
    model = small_cnn().double().eval()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    for p in model.parameters():
        p.data *= 1.5
    x = torch.randn(4, 1, 8, 8, dtype=torch.double)
    logits = model(x).detach()
    return Setting(model, x, logits, logits.softmax(-1), [layer_gradients(model, one) for one in x])
