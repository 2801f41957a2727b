"""Stability, determinism, precision, memory."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.directions import class_directions
from tests import networks as net
from tests.helpers.engines import OneByOne


@pytest.mark.parametrize("confidence", [1e-3, 1e-6, 1e-12])
def test_norms_are_accurate_when_one_class_has_nearly_all_the_probability(
    confidence: float,
) -> None:
    torch.manual_seed(0)
    model = net.mnist_cnn()
    x = torch.randn(4, 1, 12, 12)
    with torch.no_grad():
        model[-1].bias[2] += 5 - torch.tensor(confidence).log()
    have = qualms.class_gradient_norms(model, x).norms
    want = qualms.class_gradient_norms(model.double(), x.double(), engine="reference").norms
    torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=0)


@pytest.mark.parametrize("margin", [30, 60, 80])
@pytest.mark.parametrize("norm", ["l2", "l1"])
@pytest.mark.parametrize("model", ["cnn", "by features", "one at a time"])
def test_norms_of_a_confident_prediction_are_not_zero(model: str, norm: str, margin: float) -> None:
    torch.manual_seed(0)
    last = nn.Linear(4, 30)
    made = {
        "cnn": net.mnist_cnn,
        "by features": lambda: nn.Sequential(nn.Flatten(), nn.Linear(144, 4), nn.Tanh(), last),
        "one at a time": lambda: nn.Sequential(net.mnist_cnn(), OneByOne()),
    }[model]()
    x = torch.randn(3, 1, 12, 12)
    with torch.no_grad():
        next(m for m in reversed(list(made.modules())) if isinstance(m, nn.Linear)).bias[2] += (
            margin
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qualms.errors.SlowWarning)
        single = [
            qualms.class_gradient_norms(made, x, norm=norm, engine=e).norms
            for e in ("exact", "reference")
        ]
        want = qualms.class_gradient_norms(made.double(), x.double(), norm=norm).norms
        half = qualms.class_gradient_norms(made.bfloat16(), x.bfloat16(), norm=norm).norms
    assert (want > 0).all()
    for have in single:
        torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=0)
    assert (half > 0).all()


def test_the_direction_of_the_certain_class_does_not_cancel() -> None:
    logits = torch.tensor([[[40.0, 0.0, -1.0]]], dtype=torch.float32)
    direction = class_directions(logits)[0, 0, 0]
    others = torch.tensor([-40.0, -41.0], dtype=torch.double).exp()
    torch.testing.assert_close(
        direction, torch.stack([others.sum(), -others[0], -others[1]]), rtol=1e-12, atol=0
    )


@pytest.mark.slow
def test_float32_is_close_to_float64() -> None:
    torch.manual_seed(0)
    model, x = net.ResNet((8, 16, 32), 2, 10).eval(), torch.randn(6, 3, 16, 16)
    single = qualms.class_gradient_norms(model, x).norms
    double = qualms.class_gradient_norms(model.double(), x.double()).norms
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=0)


DEVICES = ["cpu"] + [name for name in ("cuda", "mps") if getattr(torch, name).is_available()]


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_gives_the_same_norms(device: str) -> None:
    torch.manual_seed(0)
    model, x = net.ResNet((8, 16), 1, 5).eval(), torch.randn(6, 3, 16, 16)
    want = qualms.class_gradient_norms(model, x, smoothing=0.1)
    have = qualms.class_gradient_norms(model.to(device), x.to(device), smoothing=0.1)
    assert have.norms.device.type == device
    torch.testing.assert_close(have.norms.cpu(), want.norms, rtol=1e-3, atol=1e-5)


def test_bfloat16_is_close_to_its_own_weights_in_float64() -> None:
    torch.manual_seed(0)
    model, x = net.ViT(batch_first=True).bfloat16(), torch.randn(6, 3, 8, 8).bfloat16()
    half = qualms.class_gradient_norms(model, x)
    double = qualms.class_gradient_norms(model.double(), x.double())
    assert half.norms.dtype == torch.float32
    total = [g.norms.double().square().sum(-1).sqrt() for g in (half, double)]
    torch.testing.assert_close(total[0], total[1], rtol=0.05, atol=0)


def test_positions_that_cancel_do_not_take_the_digits_with_them() -> None:
    """The mean over positions is removed after the layer, so the large common part of its input has
    no gradient.
    """

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fc = nn.Linear(64, 64), nn.Linear(64, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            return self.fc((h - h.mean(1, keepdim=True)).square().mean(1))

    torch.manual_seed(0)
    model, x = Centered(), torch.randn(4, 8, 64) + 100
    have = qualms.class_gradient_norms(model, x, params="layer.weight").norms
    want = qualms.class_gradient_norms(
        model.double(), x.double(), params="layer.weight", engine="reference"
    ).norms
    torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=0)


def test_the_last_layer_has_a_closed_form() -> None:
    """‖∇ log p_c‖² = ‖e_c - p‖² (‖h‖² + 1) for the last layer, h its input."""
    torch.manual_seed(0)
    model, x = net.mlp().double(), torch.randn(5, 3, 4, 4).double()
    have = qualms.class_gradient_norms(model, x, params="5.*")
    h = model[:5](x)
    p = model(x).softmax(-1)
    want = ((torch.eye(4) - p[:, None]) ** 2).sum(-1) * (h.square().sum(-1, keepdim=True) + 1)
    assert have.layers == ["5"]
    torch.testing.assert_close(have.norms[:, :, 0], want.sqrt())


def test_restricting_params_stops_the_backward_pass() -> None:
    class Watched(nn.Module):
        """Counts how often a gradient flows back into the early part."""

        backward_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if x.requires_grad:
                x.register_hook(self.count)
            return x

        def count(self, _: Tensor) -> None:
            Watched.backward_calls += 1

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(48, 8), Watched(), nn.Linear(8, 8), nn.Linear(8, 4)
    ).double()
    x = torch.randn(4, 3, 4, 4).double()
    whole = qualms.class_gradient_gram(model, x)
    assert Watched.backward_calls > 0
    Watched.backward_calls = 0
    late = qualms.class_gradient_gram(model, x, params=lambda name: name.startswith(("3", "4")))
    assert Watched.backward_calls == 0
    assert late.layers == ["3", "4"]
    torch.testing.assert_close(late.gram, whole.gram[:, 1:])


@pytest.mark.slow
def test_layers_can_be_modules_tensors_or_blocks() -> None:
    model, x = net.ResNet((4, 6), 2, 3), torch.randn(2, 3, 8, 8)
    tensors = qualms.class_gradient_norms(model, x, layers="tensor")
    modules = qualms.class_gradient_norms(model, x, layers="module")
    blocks = qualms.class_gradient_norms(model, x, layers="block")
    assert tensors.layers[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert modules.layers[:2] == ["conv1", "bn1"]
    assert blocks.layers == [
        "conv1",
        "bn1",
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
        "stages.1.1",
        "linear",
    ]
    for g in (modules, blocks):
        torch.testing.assert_close(g.norms.square().sum(-1), tensors.norms.square().sum(-1))


def test_layers_come_in_order_of_first_use_not_of_registration() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.Linear(5, 3), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    for engine in ("exact", "reference", "sketch"):
        assert qualms.class_gradient_norms(
            Backwards(), torch.randn(2, 4), engine=engine
        ).layers == ["first", "last"]


@pytest.mark.slow
def test_smoothing_depends_on_the_seed_and_the_input_number_alone() -> None:
    torch.manual_seed(0)
    model, x = net.mnist_cnn(), torch.randn(6, 1, 12, 12)
    smooth = qualms.Smoothing(0.3, 4)

    def norms(inputs: object, seed: int = 0, **more: int) -> Tensor:
        return qualms.class_gradient_norms(model, inputs, smoothing=smooth, seed=seed, **more).norms

    whole = norms(x)
    torch.testing.assert_close(norms(x, batch_size=4), whole)
    torch.testing.assert_close(norms([x[:2], x[2:]]), whole)
    torch.testing.assert_close(norms([(x[:5], torch.zeros(5)), (x[5:], torch.zeros(1))]), whole)
    assert torch.equal(norms(x), whole)
    assert not torch.allclose(norms(x, seed=1), whole)


def test_antithetic_draws_come_in_pairs() -> None:
    one = [
        qualms.Smoothing(sigma, draws=5).noise((2, 3), number=7, seed=0) for sigma in (0.1, (0.1,))
    ]
    assert torch.equal(*one)  # one value is that of all channels
    noise = qualms.Smoothing((0.1, 0.2), draws=5).noise((2, 3), number=7, seed=0)
    assert noise.shape == (6, 2, 3)
    assert torch.equal(noise[0], torch.zeros(2, 3))
    assert torch.equal(noise[1], -noise[2])
    assert torch.equal(noise[3], -noise[4])
    many = qualms.Smoothing((0.1, 0.2), draws=20_000, antithetic=False).noise(
        (2, 1), number=0, seed=0
    )[1:]
    torch.testing.assert_close(many.std(0).flatten(), torch.tensor([0.1, 0.2]), rtol=0.02, atol=0)


PEAK = """
import resource, torch, qualms
from tests.networks import ResNet
torch.manual_seed(0)
model, x = ResNet((64, 128, 256, 512), 2, 10), torch.randn(64, 3, 32, 32)
g = qualms.class_gradient_norms(model, x)
assert g.norms.shape == (64, 10, 41), g.norms.shape
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
def test_a_large_batch_stays_within_three_gibibytes() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=env
    )
    assert float(done.stdout) < 3


@pytest.mark.slow
def test_the_budget_cuts_batches() -> None:
    torch.manual_seed(0)
    model, x = net.mnist_cnn(), torch.randn(32, 1, 12, 12)
    calls = []
    model.register_forward_hook(lambda _m, args, _o: calls.append(len(args[0])))
    whole = qualms.class_gradient_norms(model, x, budget=2**30)
    assert max(calls) == 32
    calls.clear()
    cut = qualms.class_gradient_norms(model, x, budget=2**20)
    assert 1 < max(calls) < 32
    torch.testing.assert_close(cut.norms, whole.norms)


@pytest.mark.parametrize("engine", ["exact", "reference"])
@pytest.mark.parametrize("inputs", [1, 3])
def test_the_memory_format_of_images_does_not_change_the_norms(engine: str, inputs: int) -> None:
    torch.manual_seed(0)
    model, x = net.AroundInstanceNorm().double(), torch.randn(inputs, 4, 8, 8, dtype=torch.double)
    plain, last = (
        qualms.class_gradient_norms(model, x.contiguous(memory_format=f), engine=engine).norms
        for f in (torch.contiguous_format, torch.channels_last)
    )
    torch.testing.assert_close(last, plain, rtol=1e-9, atol=1e-13)


GROUPS_FIRST = """
import torch, qualms
from torch import nn
torch.manual_seed(0)
class ByKeyword(nn.GroupNorm):
    def forward(self, h):
        return nn.functional.group_norm(input=h, num_groups=2, weight=self.weight, bias=self.bias)
after = nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(60, 3)
x = torch.randn(3, 3, 3, 5).contiguous(memory_format=torch.channels_last)
for engine in ("exact", "reference"):
    for norm in (nn.GroupNorm(2, 4), ByKeyword(2, 4)):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), norm, *after)
        for _ in range(30):
            qualms.class_gradient_norms(model, x, params=lambda name: not name.startswith("0."), engine=engine)
            qualms.class_gradient_norms(model[1:], model[0](x).detach(), engine=engine)
"""


@pytest.mark.slow
def test_group_normalization_of_what_has_no_gradient_does_not_end_the_process() -> None:
    # torch's derivative writes where nothing is, if the images are in channels-last format.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", GROUPS_FIRST], check=True, env=env)
