"""Recurrent layers step by step are the fused ones, forwards and in forward mode."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.directions import Directions
from qualms.gradients.engines.sketch import SketchEngine, SketchRun
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings
from qualms.gradients.sketching.jvp import forward_mode
from qualms.gradients.sketching.tangents import tangents_of_layers
from qualms.gradients.tracing.rules.recurrent_layers import Unrolled
from tests import recurrent

LAYERS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu-rnn": lambda *sizes, **how: nn.RNN(*sizes, nonlinearity="relu", **how),
}
SWITCHES = ("bias", "bidirectional", "batch_first")


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # torch's own, of the rules it compiles on first use
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("on", list(itertools.product((False, True), repeat=3)), ids=str)
def test_unrolled_layers_give_what_fused_ones_give(kind: str, on: tuple[bool, ...]) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind](3, 4, num_layers=2, **dict(zip(SWITCHES, on, strict=True))).double()
    theta = {name: p.detach() for name, p in layer.named_parameters()}
    x = torch.randn(5, 5, 3).double()
    begin = torch.randn(2 if kind == "lstm" else 1, 4 if layer.bidirectional else 2, 5, 4)

    def run(theta: dict[str, Tensor], x: Tensor, begin: Tensor) -> tuple[Tensor, ...]:
        state = tuple(begin) if kind == "lstm" else begin[0]
        steps, last = torch.func.functional_call(layer, theta, (x, state))
        return steps, *(last if kind == "lstm" else (last,))

    at = (theta, x, begin.double())
    along = (
        {n: torch.randn_like(p) for n, p in theta.items()},
        torch.randn_like(x),
        torch.randn_like(at[2]),
    )
    want = torch.func.jvp(
        run, at, along
    )  # in double precision torch takes its own steps one by one
    with torch.no_grad(), Unrolled():
        have = torch.func.jvp(run, at, along)
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_forward_mode_runs_recurrent_networks_in_single_precision(layer: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    model, ids = recurrent.Recurrent(layer, batch_first=True).eval(), torch.randint(0, 20, (4, 6))
    settings = Settings(engine=qualms.Sketch(2))
    request = GradientRequest(model, ids, range(4), settings, Directions(("classes",)))
    cache = PlanCache()
    tangents = tangents_of_layers(request, [(list(request.selected), 1.0)])
    run = SketchRun(SketchEngine(cache).plan(request), request, tangents, cache)
    assert run.find_function() is forward_mode


def test_dropout_between_layers_that_is_not_switched_off_is_left_to_torch() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(3, 4, num_layers=2, dropout=0.5), torch.randn(5, 2, 3)
    torch.manual_seed(1)
    want, _ = layer(x)
    torch.manual_seed(1)
    with Unrolled():
        have, _ = layer(x)
    torch.testing.assert_close(have, want)


class LastStep(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.head = LAYERS[kind](3, 4, batch_first=True), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("kind", LAYERS)
def test_a_single_sequence_is_sketched_as_in_a_batch(kind: str) -> None:
    """Alone, its tangents would share a pass, which recurrent layers do not support."""
    torch.manual_seed(0)
    model, x = LastStep(kind).double(), torch.randn(3, 6, 3).double()
    alone = qualms.score(model, x[:1], "regrad+layers", engine="sketch")
    together = qualms.score(model, x, "regrad+layers", engine="sketch")
    torch.testing.assert_close(alone, together[:1], rtol=1e-9, atol=0)
