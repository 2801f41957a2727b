"""Random networks: a plain specification that is drawn, printed and shrunk, and the network that is built of it.

`tests/random_layers.py` has the layers that take images or sequences; here are those that take anything, and those
that hold other layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.random_layers import KINDS, VOCABULARY, Apply, Kind, Site, few, flag, layer, normed, norms, small

ANYTHING = "image sequence vector"
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
                if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None:
                    m.running_mean.normal_()
                    m.running_var.uniform_(0.5, 2)
            for p in whole.parameters():
                if p.ndim == 1:
                    p += 0.1 * torch.randn_like(p)
        return whole, self._inputs()

    def differentiable(self) -> bool:
        """Whether torch itself can differentiate it: a change in place may have overwritten what that needs."""
        model, x = self.make()
        try:
            model(x[:1]).sum().backward()
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
        if self.memory == "last axis first":  # channels-last images, sequences with the features before the time
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


ACTIVATIONS: dict[str, Callable[[int], nn.Module]] = {
    "relu": lambda width: nn.ReLU(),
    "relu in place": lambda width: nn.ReLU(inplace=True),
    "gelu": lambda width: nn.GELU(),
    "tanh": lambda width: nn.Tanh(),
    "silu in place": lambda width: nn.SiLU(inplace=True),
    "leaky": lambda width: nn.LeakyReLU(0.1),
    "elu in place": lambda width: nn.ELU(inplace=True),
    "hardswish": lambda width: nn.Hardswish(),
    "softplus": lambda width: nn.Softplus(),
    "softmax": lambda width: nn.Softmax(1),
    "prelu": lambda width: nn.PReLU(),
    "prelu each": lambda width: nn.PReLU(width),
    "rrelu": lambda width: nn.RReLU(),
    "dropout": lambda width: nn.Dropout(0.5),
}


@layer(ANYTHING, kind=st.sampled_from(list(ACTIVATIONS)))
def activation(at: Site, kind: str) -> nn.Module:
    return ACTIVATIONS[kind](at.shape[0])


@layer(ANYTHING, out=small, bias=flag, norm=norms, tied=flag)
def linear(at: Site, out: int, bias: bool, norm: str, tied: bool) -> nn.Module:
    """On the last axis; tied to a matrix that the network has already, as it is or transposed, if one fits."""
    features = at.shape[-1]
    for p in at.matrices() if tied else ():
        if p.shape[1] == features:
            made = nn.Linear(features, p.shape[0], bias)
            made.weight = p
            return made
        if p.shape[0] == features:
            return Apply(lambda m, x: F.linear(x, m.p.T), p=p)
    return normed(nn.Linear(features, out, bias), norm)


@layer("sequence vector", kind=st.sampled_from(["layer", "rms", "batch", "group", "instance"]), affine=flag)
def norm(at: Site, kind: str, affine: bool) -> nn.Module:
    if kind == "layer":
        return nn.LayerNorm(at.shape[-1], elementwise_affine=affine)
    if kind == "rms":
        return nn.RMSNorm(at.shape[-1], elementwise_affine=affine)
    if kind == "batch" or len(at.shape) == 1:
        return nn.BatchNorm1d(at.shape[0], affine=affine)
    if kind == "group" and max(at.shape) > 1:
        return nn.GroupNorm(1, at.shape[0], affine=affine)
    return nn.InstanceNorm1d(at.shape[0], affine=affine, track_running_stats=at.shape[1] == 1)


def in_place(x: Tensor, change: Callable[[Tensor], Any]) -> Tensor:
    x = x.clone()
    change(x)
    return x


BARE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scale": lambda m, x: x * m.w,
    "shift": lambda m, x: m.w + x,
    "from": lambda m, x: m.w - x,
    "power": lambda m, x: x.square().add(1).pow(m.w),
    "where": lambda m, x: torch.where(x > 0, x, m.w),
    "maximum": lambda m, x: torch.maximum(x, m.w),
    "lerp": lambda m, x: torch.lerp(x, x.tanh(), m.w.sigmoid()),
    "addcmul": lambda m, x: torch.addcmul(m.w, x, m.v),
    "divided": lambda m, x: x / (1 + m.w.square()),
    "in place": lambda m, x: in_place(x, lambda h: h.mul_(m.w)),
    "in place on a part": lambda m, x: in_place(x, lambda h: h[:, :1].add_(m.w[:1])),
    "written into": lambda m, x: in_place(x, lambda h: h[:, 0].copy_(x[:, -1] * m.w[0])),
    "concatenated": lambda m, x: torch.cat([x, m.w.expand_as(x)[:, :1]], 1),
    "stacked": lambda m, x: torch.stack([x, m.w.expand_as(x)]).sum(0),
    "of its own values": lambda m, x: x * (m.w * m.v).tanh().sum(),
    "chosen by the input": lambda m, x: x * m.w.flatten()[(x.flatten(1).sum(1) > 0).long() % m.w.numel()].view(-1, *[1] * (x.ndim - 1)),
    "clamped": lambda m, x: torch.minimum(x, m.w.abs() + 1).clamp_min_(-2),
    "outer": lambda m, x: x + x.flatten(1).mean(1).view(-1, *[1] * (x.ndim - 1)) * m.w,
    "out of place sum": lambda m, x: sum([x, m.w * x.relu(), m.v]),  # type: ignore[arg-type,return-value]
}


@layer(ANYTHING, kind=st.sampled_from(list(BARE)), axis=st.sampled_from(["first", "last", "none"]))
def bare(at: Site, kind: str, axis: str) -> nn.Module:
    """A parameter in plain arithmetic: one number for each channel or word, for each feature, or for all."""
    shape = [1] * len(at.shape)
    if axis == "first":
        shape[0] = at.shape[0]
    elif axis == "last":
        shape[-1] = at.shape[-1]
    return Apply(BARE[kind], w=torch.randn(shape), v=torch.randn(shape))


@layer("sequence vector", number=st.integers(2, 3), top=few, how=st.sampled_from(["index", "mask", "loop", "dense", "matrices", "one-hot"]))  # fmt: skip
def experts(at: Site, number: int, top: int, how: str) -> nn.Module:
    """A mixture of experts: the values of each word decide which of them it meets."""
    e = at.shape[-1]

    def run(m: Any, x: Tensor) -> Tensor:
        h = x.reshape(-1, e)
        shares = m.gate(h).softmax(-1)
        share, choice = shares.topk(top)
        out = torch.zeros_like(h)
        if how == "dense":
            out = sum(shares[:, i : i + 1] * f(h) for i, f in enumerate(m.each))
        elif how == "loop":
            out = torch.stack([sum(p[i] * m.each[int(i)](row) for i in chosen) for row, p, chosen in zip(h, shares, choice, strict=True)])
        elif how == "one-hot":
            out = torch.einsum("ni,nf,ife->ne", F.one_hot(choice[:, 0], number).to(h), h, m.matrices)
        elif how == "matrices":
            out = (h.unsqueeze(1) @ m.matrices[choice[:, 0]]).squeeze(1) * share[:, :1]
        else:
            for i, f in enumerate(m.each):
                word, rank = torch.where(choice == i)
                if how == "index" and len(word):
                    out = out.index_add(0, word, f(h[word]) * share[word, rank, None])
                elif how == "mask":
                    mine = choice[:, 0] == i
                    out[mine] = f(h[mine]) * share[mine, :1]
        return out.view(x.shape)

    parts = {"matrices": torch.randn(number, e, e)} if how in ("matrices", "one-hot") else {}
    each = {} if parts else {"each": nn.ModuleList([nn.Linear(e, e) for _ in range(number)])}
    return Apply(run, gate=nn.Linear(e, number), **parts, **each)


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
    """Layers beside which their input is led on: added, in place or not, gated by a parameter, or concatenated."""
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

    return Apply(run, stack=stack, **({"gate": torch.randn(at.shape[0], *[1] * (len(at.shape) - 1))} if how == "gated" else {}))


KINDS["residual"] = Kind(("image", "sequence", "vector"), None, {}, residual)
RESIDUALS = st.sampled_from(["added", "in place", "gated", "concatenated"])


@st.composite
def layers_from(draw: st.DrawFn, family: str, most: int, inside: bool = False) -> tuple[Layers, str]:
    """Some layers that begin with what the family gives, and the family that they end in."""
    found: Layers = []
    for _ in range(draw(st.integers(1, most))):
        names = [n for n, k in KINDS.items() if family in k.takes and not (inside and (k.gives or n == "residual"))]
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
        layers.append((end, {option: draw(values) for option, values in KINDS[end].options.items()}))
    return Network(
        takes, draw(SHAPES[takes]), layers, draw(st.sampled_from([2, 3, 3, 7])), draw(st.integers(1, 3)),
        draw(st.integers(0, 3)), draw(st.sampled_from(["plain", "last axis first", "every second"])), draw(norms),
    )  # fmt: skip
