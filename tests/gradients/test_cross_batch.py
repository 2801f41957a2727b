"""An input's score is its own: what else is in the batch, or came before it, does not matter."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qualms
from qualms.errors import QualmsError
from tests import scattered

DYNAMIC = {
    "experts": scattered.Experts,
    "early-exit": scattered.EarlyExit,
    "routed": scattered.Routed,
}


def made(build: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    model = build().double()
    return model, torch.randn(
        6, 5, 6, dtype=torch.double
    ) if build is scattered.Routed else torch.randn(6, 6).double()


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
@pytest.mark.parametrize("build", DYNAMIC.values(), ids=DYNAMIC)
def test_layer_weights_do_not_depend_on_the_other_inputs(
    build: Callable[[], nn.Module], engine: str
) -> None:
    model, x = made(build)
    together = qualms.score(model, x, "regrad+layers(0.5)", engine=engine)
    alone = [
        qualms.score(model, x[i : i + 1], "regrad+layers(0.5)", engine=engine)
        for i in range(len(x))
    ]
    backwards = qualms.score(model, x.flip(0), "regrad+layers(0.5)", engine=engine).flip(0)
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-9, atol=0)
    torch.testing.assert_close(backwards, together, rtol=1e-9, atol=0)


@pytest.mark.parametrize("engine", ["exact", "sketch"])
def test_a_scorer_that_met_other_paths_first_gives_the_same_scores(engine: str) -> None:
    model, x = made(scattered.Experts)
    whole = qualms.score(model, x, "regrad+layers(0.5)", engine=engine)
    scorer = qualms.Scorer(model, "regrad+layers(0.5)", engine=engine)
    for i in reversed(range(len(x))):
        torch.testing.assert_close(
            scorer(x[i : i + 1]).scores["regrad+layers(0.5)"], whole[i : i + 1], rtol=1e-9, atol=0
        )


def test_every_layer_of_a_model_with_many_paths_counts_in_the_models_order() -> None:
    model, x = made(scattered.Experts)
    names = ["gate", "fc", *(f"experts.{i}" for i in range(4))]
    for engine in ("exact", "sketch", "reference"):
        found = qualms.class_gradient_norms(model, x[:1], engine=engine)
        assert found.layers == names
        assert int((found.norms.sum((0, 1)) == 0).sum()) == 2  # two of four experts are picked


class Cube(torch.autograd.Function):
    """Keeps what it needs for its backward pass, as the softmax of DeBERTa does."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, *cotangent: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return cotangent[0] * 3 * x**2


class KeepsTensors(nn.Module):
    """One path, one layer that takes no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(Cube.apply(self.a(x)))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("engine", ["exact", "reference"])
def test_a_function_that_keeps_tensors_is_not_taken_for_a_path_that_varies(engine: Any) -> None:
    model, x = made(KeepsTensors)
    assert qualms.class_gradient_norms(model, x, engine=engine).layers == ["a", "c"]


class DropsOut(nn.Module):
    """Random in evaluation mode too, which a first input of negatives hides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Linear(6, 20), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.dropout(self.a(x.relu()) - self.a.bias, 0.5, training=True))


@pytest.mark.parametrize("engine", ["exact", "sketch"])
@pytest.mark.parametrize("batch_size", [None, 1, 2])
@pytest.mark.filterwarnings("ignore::qualms.errors.SlowWarning")
def test_randomness_that_the_first_input_hides_is_an_error(
    engine: str, batch_size: int | None
) -> None:
    torch.manual_seed(0)
    model, x = DropsOut(), torch.randn(6, 6)
    x[0] = -x[0].abs()
    with pytest.raises(QualmsError, match="not deterministic in evaluation mode"):
        qualms.score(model, x, "regrad", engine=engine, batch_size=batch_size)


@pytest.mark.parametrize("engine", ["exact", "sketch", "reference"])
@pytest.mark.filterwarnings("ignore::qualms.errors.SlowWarning")
def test_selected_parameters_that_only_some_inputs_use_are_zero_for_the_others(engine: str) -> None:
    model, x = made(scattered.Experts)
    used = qualms.class_gradient_norms(model, x)
    place = used.layers.index("experts.3")
    first = int(
        (used.norms[:, :, place].sum(1) == 0).nonzero()[0]
    )  # an input that takes other experts comes first
    order = [first, *(i for i in range(len(x)) if i != first)]
    have = qualms.score(model, x[order], "regrad", params="experts.3.*", engine=engine)
    uses = used.norms[order, :, place].sum(1) > 0
    assert bool(uses.any())
    assert torch.equal(have > 0, uses)
    assert (
        float(qualms.score(model, x[order][:1], "regrad", params="experts.3.*", engine=engine)) == 0
    )
