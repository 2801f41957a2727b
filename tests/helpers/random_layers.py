"""The layers that random networks are made of: each with the options that it can be drawn with.

A layer takes and gives an image [c, h, w], a sequence [t, e] or a vector [e] for each row; words
are ids [t]. Options are plain numbers and names, drawn without regard to shapes: the builder makes
them fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

ANYTHING = "image sequence vector"
VOCABULARY = 6
parametrizations = torch.nn.utils.parametrizations
small, few, flag = st.integers(1, 4), st.integers(1, 2), st.booleans()


@dataclass
class Site:
    """Where a layer is put: the shape of what a row brings there, and the layers that are there
    already.
    """

    shape: tuple[int, ...]
    earlier: list[tuple[nn.Module, tuple[int, ...] | None]] = field(
        default_factory=list
    )  # None: gives another kind

    def matrices(self) -> list[nn.Parameter]:
        """The matrices of the network, which further layers may share."""
        return [p for m, _ in self.earlier for p in m.parameters() if p.ndim == 2]


@dataclass(frozen=True)
class Kind:
    """A kind of layer: what it takes and gives, its options, and how it is built."""

    takes: tuple[str, ...]
    gives: str | None  # None: what it takes
    options: dict[str, st.SearchStrategy[Any]]
    build: Callable[..., nn.Module]


KINDS: dict[str, Kind] = {}


def layer(
    takes: str, gives: str | None = None, **options: st.SearchStrategy[Any]
) -> Callable[..., Any]:
    """A row of `KINDS`."""

    def register(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        KINDS[build.__name__.strip("_")] = Kind(tuple(takes.split()), gives, options, build)
        return build

    return register


class Apply(nn.Module):
    """A function of the module, which holds what the function needs, and of its input."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            bare = isinstance(part, Tensor) and not isinstance(part, nn.Parameter)
            setattr(self, name, nn.Parameter(part) if bare else part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def normed(module: nn.Module, how: str) -> nn.Module:
    if how == "plain":
        return module
    if how == "by hand":  # standardized weights
        return (
            torch.nn.utils.parametrize.register_parametrization(module, "weight", Standardized())
            or module
        )
    return {"weight": parametrizations.weight_norm, "spectral": parametrizations.spectral_norm}[
        how
    ](module)


class Standardized(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / (w.square().mean() + 0.1).sqrt()


norms = st.sampled_from(["plain", "plain", "plain", "weight", "spectral", "by hand"])

# Images.


@layer("image", out=small, kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=few,
       padding=st.integers(0, 2), dilation=few, groups=small, bias=flag, norm=norms,
       mode=st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"]))  # fmt: skip
def conv(at: Site, out: int, kernel: Any, stride: int, padding: int, dilation: int, groups: int, bias: bool,
         norm: str, mode: str) -> nn.Module:  # fmt: skip
    c, h, w = at.shape
    groups = gcd(groups, c)
    if mode != "zeros":
        padding = min(padding, h - 1, w - 1)
    fit = [
        min(k, 1 + (size + 2 * padding - 1) // dilation)
        for k, size in zip(kernel, (h, w), strict=True)
    ]
    made = nn.Conv2d(c, out * groups, tuple(fit), stride, padding, dilation, groups, bias, mode)
    return normed(made, norm)


@layer("image", out=few, kernel=st.integers(1, 3), stride=few, padding=st.integers(0, 1), more=flag, dilation=few,
       groups=few, bias=flag)  # fmt: skip
def conv_transposed(at: Site, out: int, kernel: int, stride: int, padding: int, more: bool, dilation: int, groups: int,
                    bias: bool) -> nn.Module:  # fmt: skip
    c, h, w = at.shape
    groups = gcd(groups, c)
    if h * w > 36:
        stride = 1
    if (min(h, w) - 1) * stride + dilation * (kernel - 1) + 1 <= 2 * padding:
        padding = 0
    extra = int(more and max(stride, dilation) > 1)
    return nn.ConvTranspose2d(
        c, out * groups, kernel, stride, padding, extra, groups, bias, dilation
    )


@layer("image", kind=st.sampled_from(["batch", "group", "instance", "layer", "rms", "channels"]), affine=flag,
       running=flag, groups=small)  # fmt: skip
def image_norm(at: Site, kind: str, affine: bool, running: bool, groups: int) -> nn.Module:
    c = at.shape[0]
    running = (
        running or at.shape[1] * at.shape[2] == 1
    )  # torch refuses to normalize a single number by itself
    if kind == "batch" or (kind == "group" and c * at.shape[1] * at.shape[2] == gcd(groups, c)):
        return nn.BatchNorm2d(c, affine=affine, track_running_stats=running)
    if kind == "group":
        return nn.GroupNorm(gcd(groups, c), c, affine=affine)
    if kind == "instance":
        return nn.InstanceNorm2d(c, affine=affine, track_running_stats=running)
    if kind == "channels":  # over channels, which are the last axis meanwhile
        return Apply(lambda m, x: m.norm(x.movedim(1, -1)).movedim(-1, 1), norm=nn.LayerNorm(c))
    of = nn.LayerNorm if kind == "layer" else nn.RMSNorm
    return of(at.shape[-groups % 3 :], elementwise_affine=affine)


@layer("image", kind=st.sampled_from(["max", "mean", "adaptive", "lp"]))
def pool(at: Site, kind: str) -> nn.Module:
    if kind == "adaptive":
        return nn.AdaptiveAvgPool2d(2)
    if min(at.shape[1:]) < 2:
        return nn.Identity()
    return (
        nn.AvgPool2d(2, ceil_mode=True)
        if kind == "mean"
        else nn.MaxPool2d(2, 1 if kind == "lp" else 2)
    )


@layer(
    "image",
    kind=st.sampled_from(
        ["turn", "shuffle", "flip", "roll", "channels-last", "copy", "pad", "every-second"]
    ),
)
def moved(at: Site, kind: str) -> nn.Module:
    return {
        "turn": Apply(lambda m, x: x.transpose(2, 3)),
        "shuffle": Apply(
            lambda m, x: x.unflatten(1, (-1, gcd(2, x.shape[1]))).transpose(1, 2).flatten(1, 2)
        ),
        "flip": Apply(lambda m, x: x.flip(3)),
        "roll": Apply(lambda m, x: x.roll((1, 1), (2, 3))),
        "channels-last": Apply(lambda m, x: x.contiguous(memory_format=torch.channels_last)),
        "copy": Apply(lambda m, x: x.contiguous()),
        "pad": Apply(lambda m, x: F.pad(x, (0, 1, 0, 0, 0, 1)) if x.shape[1] < 5 else x),
        "every-second": Apply(lambda m, x: x[:, :, ::2, ::2]),
    }[kind]


@layer("image")
def squeeze_excite(at: Site) -> nn.Module:
    c = at.shape[0]

    def run(m: Any, x: Tensor) -> Tensor:
        return x * m.up(F.silu(m.down(x.mean((2, 3), keepdim=True)))).sigmoid()

    return Apply(run, down=nn.Conv2d(c, 2, 1), up=nn.Conv2d(2, c, 1))


@layer("image", "sequence", order=st.sampled_from(["pixels", "channels", "rows", "patches"]))
def as_sequence(at: Site, order: str) -> nn.Module:
    return {
        "pixels": Apply(lambda m, x: x.flatten(2).transpose(1, 2)),
        "channels": Apply(lambda m, x: x.flatten(2)),
        "rows": Apply(lambda m, x: x.permute(0, 2, 3, 1).flatten(2)),
        "patches": Apply(lambda m, x: F.unfold(x, 1).mT),
    }[order]


@layer("image", "vector", how=st.sampled_from(["flatten", "mean", "max", "view"]))
def image_as_vector(at: Site, how: str) -> nn.Module:
    return {
        "flatten": nn.Flatten(),
        "mean": Apply(lambda m, x: x.mean((2, 3))),
        "max": Apply(lambda m, x: x.amax((2, 3))),
        "view": Apply(lambda m, x: x.contiguous().view(len(x), -1)),
    }[how]
