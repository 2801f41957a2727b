"""Gradient norms at the edges of what 32 bits hold, by every engine: right, or an error that says
what is wrong.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.directions import Directions
from qualms.gradients.last_layer import FeatureGradients
from qualms.gradients.layer_table import layer_table
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import inner_products, root_of_squares
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings
from qualms.gradients.tracing import outer_product
from qualms.gradients.tracing.outer_product import Outer
from tests import networks as net
from tests.helpers.engines import OneByOne

IMAGES = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(0))


class ByPairs(nn.Module):
    """Few positions of many features: squares come from the inner products of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.Linear(36, 40), nn.Linear(40, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(x.reshape(len(x), 4, 36)).relu().mean(1))


class Twice(nn.Module):
    """A weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.Linear(144, 144), nn.Linear(144, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer(self.layer(x.flatten(1))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": net.mnist_cnn,
    "by pairs": ByPairs,
    "by features": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(144, 4), nn.Tanh(), nn.Linear(4, 30)
    ),
    "twice": Twice,
    "one at a time": lambda: nn.Sequential(net.mnist_cnn(), OneByOne()),
}


def made(model: str, head: float) -> nn.Module:
    """The model with the weights of its last layer multiplied by a number: so are all gradients
    before it.
    """
    torch.manual_seed(0)
    found = MODELS[model]()
    with torch.no_grad():
        next(m for m in reversed(list(found.modules())) if isinstance(m, nn.Linear)).weight.mul_(
            head
        )
    return found


def norms(model: nn.Module, x: Tensor, **more: object) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", qualms.errors.SlowWarning)
        return qualms.class_gradient_norms(model, x, **more).norms.double()


@pytest.mark.parametrize("engine", ["exact", "reference"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_whose_squares_are_zero_in_32_bits_have_their_norms(
    model: str, engine: str
) -> None:
    have, want = (
        norms(made(model, 1e-25).to(dtype), IMAGES.to(dtype), engine=engine)
        for dtype in (torch.float32, torch.double)
    )
    assert (want[..., 0] < 1e-22).all()
    torch.testing.assert_close(have, want, rtol=1e-3, atol=0)


@pytest.mark.parametrize("model", ["by pairs", "twice"])
def test_gradients_whose_squares_are_infinite_in_32_bits_have_their_norms(model: str) -> None:
    x = IMAGES * 1e22
    have, want = (
        norms(made(model, 1e-3).to(dtype), x.to(dtype), params=lambda name: "fc" not in name)
        for dtype in (torch.float32, torch.double)
    )
    assert have.isfinite().all()
    torch.testing.assert_close(have, want, rtol=2e-3, atol=1e-30)


@pytest.mark.parametrize("model", ["by pairs", "twice", "one at a time"])
@pytest.mark.parametrize("head", [1e-25, 1e22])
def test_inner_products_that_32_bits_do_not_hold_have_the_right_cosines(
    model: str, head: float
) -> None:
    found = []
    for dtype in (torch.float32, torch.double):
        job = _job(made(model, head).to(dtype), IMAGES.to(dtype))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", qualms.errors.SlowWarning)
            gram = layer_table([replace(job, gram=True)], PlanCache()).values.sum(1)
        length = gram.diagonal(dim1=1, dim2=2).sqrt()
        found.append(gram / length[:, :, None] / length[:, None, :])
    assert (length > 0).all()
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def _job(model: nn.Module, x: Tensor) -> GradientRequest:
    """The gradients of all logits by all layers but the last."""
    settings = Settings(params=lambda name: "fc" not in name and not name.startswith("0.8"))
    return GradientRequest(model.eval(), x, range(len(x)), settings, Directions(("logits",)), None)


class Written:
    """How often gradients were computed again with more care, or written out for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.again, self.shapes = 0, list[tuple[int, ...]]()
        again, added_up, squares = (
            Outer._recompute_in_double,
            FeatureGradients._squares_of_sums,
            outer_product.sum_of_squares,
        )

        def counted_again(outer: Outer, products: Tensor, d: Tensor, which: list[int]) -> None:
            self.again += len(which)
            again(outer, products, d, which)

        def counted_sums(kept: FeatureGradients, factors: Tensor, x: Tensor, b: int) -> Tensor:
            self.again += len(x)
            return added_up(kept, factors, x, b)

        def counted_squares(g: Tensor) -> Tensor:
            self.shapes.append(tuple(g.shape))
            return squares(g)

        monkeypatch.setattr(Outer, "_recompute_in_double", counted_again)
        monkeypatch.setattr(FeatureGradients, "_squares_of_sums", counted_sums)
        monkeypatch.setattr(outer_product, "sum_of_squares", counted_squares)


def test_dead_units_and_a_black_image_cost_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(144, 20), nn.ReLU(), nn.Linear(20, 4), nn.ReLU(), nn.Linear(4, 30)
    )
    x = torch.cat([IMAGES, torch.zeros_like(IMAGES[:1])])
    features = model[:-1](x)
    assert (features == 0).any()
    assert (features > 0).any(1).all()
    found = Written(monkeypatch)
    have = norms(model, x)
    assert found.again == 0
    torch.testing.assert_close(have, norms(model.double(), x.double()), rtol=1e-3, atol=1e-6)


def test_a_black_image_is_not_written_out_for_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("by pairs", 1.0)
    x = torch.cat([IMAGES, torch.zeros_like(IMAGES[:1])])
    found = Written(monkeypatch)
    have = norms(model, x, params="layer.weight")
    assert (have[3] == 0).all()
    assert (have[:3] > 0).all()
    assert not [shape for shape in found.shapes if shape[1] == 36 * 40]
    job = GradientRequest(
        model.eval(), x, range(4), Settings(params="layer.weight"), Directions(("logits",)), None
    )
    gram = layer_table([replace(job, gram=True)], PlanCache()).values
    assert (gram[3] == 0).all()
    assert found.again == 0


def test_inner_products_beside_gradients_of_zeros_keep_their_digits() -> None:
    g = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    g *= torch.tensor([[1.0, 0.0, 1e-25, 1e3], [1.0, 0.0, 1.0, 1.0], [1e25, 0.0, 1e-25, 1e-3]])[
        :, :, None
    ]
    torch.testing.assert_close(inner_products(g), g.double() @ g.double().mT, rtol=1e-4, atol=0)


def test_norms_that_32_bits_do_not_hold_are_told() -> None:
    model = made("by pairs", 1e20)
    with pytest.raises(qualms.QualmsError, match="the gradients of input 0 overflow float32"):
        qualms.class_gradient_gram(model, IMAGES)


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
def test_one_tiny_input_in_a_batch_keeps_its_own_norms(engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(144, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False)
    )
    x = IMAGES * torch.tensor([1e-24, 1.0, 1e15])[:, None, None, None]
    found = qualms.compare(model, x, ["ungrad"], engine=engine, params="1.*")
    want = qualms.compare(model.double(), x.double(), ["ungrad"], params="1.*")
    for name, values in want.items():
        close = {"rtol": 0.5 if engine == "sketch" else 1e-3, "atol": 0.0}
        torch.testing.assert_close(found[name].double(), values, **close)
        assert (found[name] > 0).all()


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
@pytest.mark.slow
@pytest.mark.parametrize("lam", [0.3, 5.0])
def test_150_layers_with_weights_that_fade_are_added_up_right(engine: str, lam: float) -> None:
    torch.manual_seed(0)
    middle = [layer for _ in range(148) for layer in (nn.Linear(3, 3), nn.Tanh())]
    model = nn.Sequential(nn.Linear(3, 3), *middle, nn.Linear(3, 2))
    x = torch.randn(2, 3)
    found = qualms.score(model, x, f"regrad+layers({lam})", engine=engine)
    deep = model.double()
    log_p = [deep(one[None].double())[0].log_softmax(0) for one in x]
    layers = [m for m in deep if isinstance(m, nn.Linear)]
    assert len(layers) == 150
    want = []
    for of_input in log_p:
        total = 0.0
        for value in of_input:
            for place, layer in enumerate(layers, 1):
                g = torch.autograd.grad(value, list(layer.parameters()), retain_graph=True)
                norm = float(torch.cat([t.flatten() for t in g]).norm())
                total += math.exp(float(value.detach()) / 2 + lam * (place - 150)) * norm
        want.append(total)
    rtol = 0.5 if engine == "sketch" else 1e-4
    torch.testing.assert_close(found.double(), torch.tensor(want).double(), rtol=rtol, atol=0)


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
def test_weights_of_layers_that_no_number_holds_are_told(engine: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    with pytest.raises(qualms.QualmsError):
        qualms.score(model, torch.randn(2, 3), "regrad+layers(-800)", engine=engine)


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
@pytest.mark.parametrize("margin", [20.0, 37.0, 60.0, 80.0])
def test_confident_predictions_have_their_gradients(engine: str, margin: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(5, 8)
    with torch.no_grad():
        model[2].bias[1] += margin
    specs = ["regrad", "exgrad", "fisher", "ungrad", "isotropic", "regrad+layers"]
    found = qualms.compare(model, x, specs, engine=engine)
    want = qualms.compare(model.double(), x.double(), specs, engine="reference")
    for name, values in want.items():
        assert (found[name] > 0).all() or float(values.min()) < 1e-37, name
        rtol = 0.6 if engine == "sketch" else 1e-4
        torch.testing.assert_close(found[name].double(), values, rtol=rtol, atol=1e-42)


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
def test_zero_weights_and_dead_units_have_zero_gradients_before_them(engine: str) -> None:
    for dead in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        with torch.no_grad():
            if dead:
                model[0].bias -= 1e6
            else:
                model[2].weight.zero_()
        found = qualms.class_gradient_norms(model, torch.randn(3, 8), engine=engine)
        assert (found.norms[..., 0] == 0).all()
        assert (found.norms[..., 1] > 0).all()


@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("engine", ["exact", "reference"])
def test_a_parameter_without_entries_has_no_gradient(engine: str, used: bool) -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.none = nn.Linear(2, 3), nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.last(x)
            return z + self.none.sum() if used else z

    torch.manual_seed(0)
    model, x = Empty().double(), torch.randn(3, 2).double()
    found = qualms.class_gradient_norms(model, x, engine=engine)
    want = qualms.class_gradient_norms(model.last, x).norms[..., 0]
    for layer, norms in zip(found.layers, found.norms.unbind(-1), strict=True):
        torch.testing.assert_close(norms, want if layer == "last" else torch.zeros_like(want))
    assert "last" in found.layers


def test_sizes_at_both_ends_of_64_bits_have_the_root_of_their_squares() -> None:
    for size in (4e-322, 1e-200, 1.0, 1e200, 1.2e308):
        found = root_of_squares(torch.tensor([3 * (size / 4), size], dtype=torch.double))
        torch.testing.assert_close(
            float(found), 5 * (size / 4), rtol=1e-15 if size > 1e-300 else 0.02, atol=0
        )
    assert float(root_of_squares(torch.zeros(3).double())) == 0
    assert float(root_of_squares(torch.tensor([1.0, torch.inf]).double())) == math.inf


def test_a_float16_model_whose_gradients_overflow_is_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)).half()
    with torch.no_grad():
        model[0].weight.mul_(1e-3)
        model[1].weight.mul_(1e-3)
        model[2].weight.fill_(6e4)
    x = torch.zeros(2, 8).half()
    with torch.no_grad():
        model[0].bias.zero_()
        model[1].bias.zero_()
    for engine in ("exact", "reference", "sketch"):
        try:
            found = qualms.score(model, x, "ungrad", engine=engine)
        except qualms.QualmsError:
            continue
        assert found.isfinite().all()
