"""Networks that nobody has thought of: the engines agree on random ones, or say what they cannot do.

`QUALMS_FUZZ=1` runs more of them, of other draws than the fixed ones: its value is their seed.
"""

import os
import time
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, assume, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import qualms
from qualms.errors import QualmsError, SlowWarning
from qualms.gradients.autograd import row_gradients
from qualms.gradients.directions import DIRECTIONS as ALL
from qualms.gradients.directions import Directions
from qualms.gradients.guard import untouched
from qualms.gradients.inputs import batches, count
from qualms.gradients.job import Job
from qualms.gradients.learnt import Learnt
from qualms.gradients.settings import Settings
from qualms.gradients.sketch.engine import SketchRun
from qualms.gradients.sketch.push import forward_mode
from tests.random_networks import SHAPES, Network, networks

FUZZ = int(os.environ.get("QUALMS_FUZZ", "0"))
EXAMPLES = 5000 if FUZZ else 300


@dataclass
class Figures:
    """What there is to say of all examples together."""

    examples: int = 0
    refused: list[str] = field(default_factory=list)  # by the sketch
    slow: int = 0
    by_differences: int = 0
    worst: float = 0.0
    begin: float = field(default_factory=time.process_time)


@dataclass(frozen=True)
class Way:
    """How the norms of an example are asked for."""

    norm: str
    layers: str
    smooth: bool
    filtered: bool
    batch_size: int | None

    @property
    def arguments(self) -> dict:
        return {
            "norm": self.norm,
            "layers": self.layers,
            "smoothing": qualms.Smoothing(0.1, draws=2) if self.smooth else None,
            "params": (lambda name: sum(map(ord, name)) % 3 > 0 or name.startswith("1.")) if self.filtered else None,
        }


WAYS = st.builds(
    Way, st.sampled_from(["l2", "l2", "l1"]), st.sampled_from(["module", "tensor", "block"]), st.booleans(),
    st.booleans(), st.sampled_from([None, 1, 2]),
)  # fmt: skip
FURTHER = st.sampled_from(["sketch", "gram", "nothing more", "sketch"])


def check_norms(network: Network, way: Way, figures: Figures) -> None:
    model, x = network.make()
    smooth = way.arguments
    if network.takes == "words":
        smooth = smooth | {"smoothing": None}
    want = qualms.class_gradient_norms(model, x, engine="reference", **smooth)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SlowWarning)
        have = qualms.class_gradient_norms(model, x, batch_size=way.batch_size, **smooth)
    figures.slow += bool(caught)
    assert have.layers == want.layers
    torch.testing.assert_close(have.probs, want.probs, rtol=1e-9, atol=1e-12)
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
    model, x = network.make()
    smoothing = qualms.Smoothing(0.1, draws=2) if smooth and network.takes != "words" else None
    with untouched(model) as inner, warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowWarning)
        batch = next(batches(x, inner))
        job = Job(inner, batch, range(count(batch)), Settings(engine=qualms.Sketch(2)), Directions(("classes",)), smoothing)
        work = SketchRun.on(job, Learnt())
        drawn = work.tangents([(list(job.selected), 1.0)])
        ((sample, logits),) = work.samples(drawn)
        exact = work.push(drawn) is forward_mode
        figures.by_differences += not exact
        for i in range(len(logits)):
            on = job.rows(slice(i, i + 1))
            want: Tensor | float = 0.0
            squares: Tensor | float = 0.0
            for r in range(on.per_input):
                z, found = row_gradients(inner, on.take([r]), job.selected, lambda z: ALL["classes"](z[:, None]).flatten(1, 2))
                if r == 0:
                    torch.testing.assert_close(logits[i : i + 1], z)
                flat = {name: g.reshape(len(g), -1) / on.per_input for name, g in found.items()}
                want = want + torch.stack([sum(flat[n] @ drawn[j][n].flatten() for n in flat) for j in (0, 1)])
                squares = squares + sum(g.square().sum(1) for g in flat.values())
            size = squares.sqrt()
            apart = (sample.projections[:, i] - want).abs() / (size + 1e-300)
            assert apart.max() <= (1e-9 if exact else 1e-6), (float(apart.max()), exact)


def check(network: Network, way: Way, further: str, figures: Figures) -> None:
    assume(network.differentiable())
    figures.examples += 1
    check_norms(network, way, figures)
    if further == "gram":
        check_gram(network)
    elif further == "sketch":
        try:
            check_sketch(network, way.smooth, figures)
        except QualmsError as error:  # a difference steps over a kink, where forward mode has no rule
            assert "central difference: " in str(error)
            figures.refused.append(str(error))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.usefixtures("as_users_meet_it")  # the checks of annotations, which other tests run with, take half the time
@pytest.mark.parametrize("takes", SHAPES)
def test_the_engines_agree_on_random_networks(takes: str) -> None:
    figures = Figures()

    @settings(max_examples=EXAMPLES // len(SHAPES), deadline=None, derandomize=not FUZZ, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(networks(takes), WAYS, FURTHER)
    def agree(network: Network, way: Way, further: str) -> None:
        check(network, way, further, figures)

    (seed(FUZZ)(agree) if FUZZ else agree)()
    print(takes, figures, time.process_time() - figures.begin)
