"""Networks that nobody has thought of: the engines agree on random ones, or say what they cannot
do.

`QUALMS_FUZZ=1` runs more of them, of other draws than the fixed ones: its value is their seed.
"""

import os
import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import qualms
from qualms.errors import QualmsError, SlowWarning
from qualms.gradients.batch import num_samples, take_samples
from qualms.gradients.directions import DIRECTIONS as ALL
from qualms.gradients.directions import Directions
from qualms.gradients.engines.sketch import SketchEngine, SketchRun
from qualms.gradients.input_data import batches
from qualms.gradients.isolation import preserve_state
from qualms.gradients.model_input import ModelInput
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Settings
from qualms.gradients.single_sample import sample_gradients
from qualms.gradients.sketching.jvp import forward_mode
from qualms.gradients.sketching.tangents import tangents_of_layers
from tests.helpers.random_networks import SHAPES, Network, networks

FUZZ = int(os.environ.get("QUALMS_FUZZ", "0"))
EXAMPLES = 5000 if FUZZ else 300
SMOOTHING = qualms.Smoothing(0.1, draws=2)


@dataclass
class Figures:
    """What there is to say of all examples together."""

    takes: str
    examples: int = 0
    worst: float = 0.0  # relative difference between the norms of the two engines
    slow: int = 0  # examples whose inputs ran one at a time
    sketched: int = 0
    by_differences: int = 0  # of those sketched
    refused: list[str] = field(default_factory=list)  # by the sketch
    begin: float = field(default_factory=time.process_time)

    def __str__(self) -> str:
        return (
            f"{self.takes}: {self.examples} networks, seed {FUZZ}: worst relative difference {self.worst:.1e}; "
            f"{self.slow} ran one input at a time; {self.sketched} sketched, {self.by_differences} of them by "
            f"differences, {len(self.refused)} refused {self.refused}; "
            f"{time.process_time() - self.begin:.0f} s of one core"
        )


@dataclass(frozen=True)
class Way:
    """How the norms of an example are asked for."""

    norm: str
    layers: str
    smooth: bool
    filtered: bool
    batch_size: int | None

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "norm": self.norm,
            "layers": self.layers,
            "smoothing": SMOOTHING if self.smooth else None,
            "params": (lambda name: sum(map(ord, name)) % 3 > 0 or name.startswith("1."))
            if self.filtered
            else None,
        }


WAYS = st.builds(
    Way, st.sampled_from(["l2", "l2", "l1"]), st.sampled_from(["module", "tensor", "block"]), st.booleans(),
    st.booleans(), st.sampled_from([None, 1, 2]),
)  # fmt: skip
FURTHER = st.sampled_from(["sketch", "gram", "nothing more", "sketch"])


def check_norms(network: Network, way: Way, figures: Figures) -> None:
    model, x = network.make()
    asked = way.arguments
    if network.takes == "words":
        asked["smoothing"] = None
    want = qualms.class_gradient_norms(model, x, engine="reference", **asked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SlowWarning)
        have = qualms.class_gradient_norms(model, x, batch_size=way.batch_size, **asked)
    figures.slow += bool(caught)
    assert have.layers == want.layers
    torch.testing.assert_close(have.probs, want.probs, rtol=1e-9, atol=1e-12)
    # As `assert_norms_equal` has it: 1e-9 for each class and layer, and rounding at the input's own
    # scale.
    scale = want.norms.amax(dim=(1, 2), keepdim=True)
    apart = (have.norms - want.norms).abs() / (want.norms + 1e-4 * scale + 1e-300)
    figures.worst = max(figures.worst, float(apart.max()))
    assert apart.max() <= 1e-9, float(apart.max())


def check_gram(network: Network) -> None:
    model, x = network.make()
    norms = qualms.class_gradient_norms(model, x)
    gram = qualms.class_gradient_gram(model, x)
    assert gram.layers == norms.layers
    directions = torch.eye(network.classes, dtype=torch.double) - norms.probs[:, None, :]
    squares = torch.einsum("bci,blij,bcj->bcl", directions, gram.gram, directions)
    scale = torch.einsum("blii->b", gram.gram)[:, None, None]
    assert ((squares - norms.norms**2).abs() <= 1e-8 * norms.norms**2 + 1e-10 * scale).all()


def check_sketch(network: Network, smooth: bool, figures: Figures) -> None:
    """The projections on two tangents, from which the sketch estimates norms, are those of the
    gradients.
    """
    model, x = network.make()
    smoothing = SMOOTHING if smooth and network.takes != "words" else None
    with preserve_state(model) as inner:
        batch, settings = next(batches(x, inner)), Settings(engine=qualms.Sketch(2))
        job = GradientRequest(
            inner, batch, range(num_samples(batch)), settings, Directions(("classes",)), smoothing
        )
        engine = SketchEngine(PlanCache())
        plan = engine.plan(job)
        drawn = tangents_of_layers(job, [(list(job.selected), 1.0)])
        ((sample, logits),) = engine.project(plan, job, drawn)
        by_differences = (
            SketchRun(plan, job, drawn, engine.cache).find_function() is not forward_mode
        )
        figures.by_differences += by_differences
        for i in range(len(logits)):
            want, size = projections(
                inner, job.make_rows(slice(i, i + 1)), job.selected, [drawn[0], drawn[1]]
            )
            apart = (sample.values[:, i] - want).abs()
            assert (apart <= (1e-6 if by_differences else 1e-9) * size + 1e-300).all(), float(
                (apart / size).max()
            )
            torch.testing.assert_close(
                logits[i : i + 1], inner(take_samples(batch, slice(i, i + 1)))
            )


def projections(
    model: nn.Module, on: ModelInput, selected: dict[str, Tensor], tangents: list[dict[str, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Of the class gradients of one input on each tangent [k, c], and the size of what they are
    made of [c].
    """
    want, squares = torch.zeros(()), torch.zeros(())
    for row in range(on.rows_per_sample):
        _, found = sample_gradients(
            model, on.take([row]), selected, lambda z: ALL["classes"](z[:, None]).flatten(1, 2)
        )
        flat = {name: g.reshape(len(g), -1) / on.rows_per_sample for name, g in found.items()}
        want = want + torch.stack([sum(flat[n] @ s[n].flatten() for n in flat) for s in tangents])
        squares = squares + sum(g.square().sum(1) for g in flat.values())
    return want, squares.sqrt()


def check(network: Network, way: Way, further: str, figures: Figures) -> None:
    assume(network.differentiable())
    figures.examples += 1
    if FUZZ and figures.examples % 100 == 0:
        print(figures, flush=True)
    check_norms(network, way, figures)
    if further == "gram":
        check_gram(network)
    elif further == "sketch":
        figures.sketched += 1
        try:
            check_sketch(network, way.smooth, figures)
        except QualmsError as error:
            if "central difference: " not in str(error):
                raise
            figures.refused.append(
                str(error)
            )  # a difference steps over a kink, where forward mode has no rule


@pytest.mark.slow
@pytest.mark.timeout(0 if FUZZ else 900)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.usefixtures(
    "as_users_meet_it"
)  # the checks of annotations, which other tests run with, take half the time
@pytest.mark.parametrize("takes", SHAPES)
def test_the_engines_agree_on_random_networks(takes: str) -> None:
    figures = Figures(takes)

    @settings(max_examples=EXAMPLES // len(SHAPES), deadline=None, derandomize=not FUZZ, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(networks(takes), WAYS, FURTHER)
    def agree(network: Network, way: Way, further: str) -> None:
        note(f"{network}, {way}, {further!r}")  # hypothesis itself may leave the values out
        check(network, way, further, figures)

    (seed(FUZZ)(agree) if FUZZ else agree)()
    print(figures)
    assert len(figures.refused) <= max(1, figures.sketched // 50), figures
