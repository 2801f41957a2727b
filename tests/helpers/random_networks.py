"""Random networks: a plain specification that is drawn, printed and shrunk, and the network that is
built of it.

The layers are in `random_layers.py` (images), `random_sequences.py` and `random_forms.py`
(anything); here are those that hold other layers.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers import random_forms, random_sequences  # noqa: F401 (they add to KINDS)
from tests.helpers.random_layers import (
    ANYTHING,
    KINDS,
    VOCABULARY,
    Apply,
    Kind,
    Site,
    few,
    layer,
    normed,
    norms,
)

NORMALIZATIONS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
Layers = list[tuple[str, dict[str, Any]]]  # the name of each layer, and its options


@dataclass(frozen=True)
class Network:
    """What a random network is made of, and its inputs."""

    takes: str
    shape: tuple[int, ...]
    layers: Layers
    classes: int
    inputs: int
    seed: int
    memory: str = "plain"
    head: str = "plain"

    def make(self) -> tuple[nn.Module, Tensor]:
        """The network, as after training, and its inputs."""
        torch.manual_seed(self.seed)
        with torch.no_grad():
            model = Stack(Site(self.shape), self.layers, self.takes == "words")
            (features,) = model.gives
            head = normed(nn.Linear(features, self.classes), self.head)
            whole = nn.Sequential(model, head).double().eval()
            for m in whole.modules():
                if isinstance(m, NORMALIZATIONS):
                    # what is constant is not blown up, and with it rounding where the gradient is
                    # zero
                    m.eps = 0.1
                if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None:
                    m.running_mean.normal_()
                    m.running_var.uniform_(0.5, 2)
            for p in whole.parameters():
                if p.ndim == 1:
                    p += 0.1 * torch.randn_like(p)
        return whole, self._inputs()

    def differentiable(self) -> bool:
        """Whether torch itself can differentiate it: a change in place may have overwritten what
        that needs.
        """
        model, x = self.make()
        try:
            # In order: torch crashes at a GroupNorm of channels-last images that need no gradient.
            model(x[:1].contiguous()).sum().backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return False
        return True

    def _inputs(self) -> Tensor:
        shape = (self.inputs, *self.shape)
        if self.takes == "words":
            return torch.randint(0, VOCABULARY, shape)
        x = torch.randn(shape, dtype=torch.double)
        if (
            self.memory == "last axis first"
        ):  # channels-last images, sequences with the features before the time
            return x.movedim(1, -1).contiguous().movedim(-1, 1)
        return x.repeat_interleave(2, 0)[::2] if self.memory == "every second" else x


class Stack(nn.Module):
    """Layers one after another, each built for what the one before gives."""

    def __init__(self, at: Site, layers: Layers, words: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        shape, earlier = at.shape, at.earlier
        x = torch.zeros(2, *shape, dtype=torch.long if words else torch.float)
        for name, options in layers:
            module = KINDS[name].build(Site(shape, earlier), **options).eval()
            x = torch.randn_like(module(x.clone()))
            earlier.append((module, None if words or x.ndim != len(shape) + 1 else shape))
            words = False
            self.layers.append(module)
            shape = tuple(x.shape[1:])
        self.gives = shape

    def forward(self, x: Tensor) -> Tensor:
        for module in self.layers:
            x = module(x)
        return x


@layer("vector", "sequence", length=few)
def as_words(at: Site, length: int) -> nn.Module:
    """Cut into words, whether or not the features are a multiple of them."""
    return Apply(lambda m, x: F.pad(x, (0, -x.shape[1] % length)).unflatten(1, (length, -1)))


@layer(ANYTHING, back=st.integers(1, 4))
def again(at: Site, back: int) -> nn.Module:
    """A layer that the network has already, if one takes this shape."""
    fits = [m for m, shape in reversed(at.earlier) if shape == at.shape]
    return fits[(back - 1) % len(fits)] if fits else nn.Identity()


def residual(at: Site, inner: Layers, how: str) -> nn.Module:
    """Layers beside which their input is led on: added, in place or not, gated by a parameter, or
    concatenated.
    """
    stack = Stack(at, inner)

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.stack(x.clone())
        if how == "concatenated" and h.shape[2:] == x.shape[2:]:
            return torch.cat([x, h], 1)
        if h.shape != x.shape:
            return h
        if how == "in place":
            h = h.clone()
            h += x
            return h
        return x + m.gate * h if how == "gated" else x + h

    return Apply(
        run,
        stack=stack,
        **(
            {"gate": torch.randn(at.shape[0], *[1] * (len(at.shape) - 1))} if how == "gated" else {}
        ),
    )


KINDS["residual"] = Kind(("image", "sequence", "vector"), None, {}, residual)
RESIDUALS = st.sampled_from(["added", "in place", "gated", "concatenated"])


@st.composite
def layers_from(
    draw: st.DrawFn, family: str, most: int, inside: bool = False
) -> tuple[Layers, str]:
    """Some layers that begin with what the family gives, and the family that they end in."""
    found: Layers = []
    for _ in range(draw(st.integers(1, most))):
        names = [
            n
            for n, k in KINDS.items()
            if family in k.takes and not (inside and (k.gives or n == "residual"))
        ]
        name = draw(st.sampled_from(names))
        kind = KINDS[name]
        if name == "residual":
            inner, _ = draw(layers_from(family, 2, inside=True))
            found.append((name, {"inner": inner, "how": draw(RESIDUALS)}))
            continue
        found.append((name, {option: draw(values) for option, values in kind.options.items()}))
        family = kind.gives or family
    return found, family


SHAPES = {
    "image": st.tuples(st.integers(1, 4), st.integers(2, 5), st.integers(2, 5)),
    "sequence": st.tuples(st.integers(1, 4), st.integers(1, 4)),
    "vector": st.tuples(st.integers(1, 6)),
    "words": st.tuples(st.integers(1, 5)),
}
ENDS = {"image": "image_as_vector", "sequence": "sequence_as_vector", "words": "bag"}


@st.composite
def networks(draw: st.DrawFn, takes: str) -> Network:
    """A random network for inputs of this kind."""
    layers, family = draw(layers_from(takes, 6))
    if family in ENDS:
        end = ENDS[family]
        layers.append(
            (end, {option: draw(values) for option, values in KINDS[end].options.items()})
        )
    return Network(
        takes, draw(SHAPES[takes]), layers, draw(st.sampled_from([2, 3, 3, 3, 9])), draw(st.integers(1, 3)),
        draw(st.integers(0, 3)), draw(st.sampled_from(["plain", "last axis first", "every second"])), draw(norms),
    )  # fmt: skip
