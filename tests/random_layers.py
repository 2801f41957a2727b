"""The layers that random networks are made of: each with the options that it can be drawn with.

A layer takes and gives an image [c, h, w], a sequence [t, e] or a vector [e] for each row; words are ids [t]. Options
are plain numbers and names, drawn without regard to shapes: the builder makes them fit.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

VOCABULARY = 6
parametrizations = torch.nn.utils.parametrizations
small, few, flag = st.integers(1, 4), st.integers(1, 2), st.booleans()


@dataclass
class Site:
    """Where a layer is put: the shape of what a row brings there, and the layers that are there already."""

    shape: tuple[int, ...]
    earlier: list[tuple[nn.Module, tuple[int, ...] | None]] = field(default_factory=list)  # None: gives another kind

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


def layer(takes: str, gives: str | None = None, **options: st.SearchStrategy[Any]) -> Callable[..., Any]:
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
    if how == "by hand":  # standardised weights
        return torch.nn.utils.parametrize.register_parametrization(module, "weight", Standardised()) or module
    return {"weight": parametrizations.weight_norm, "spectral": parametrizations.spectral_norm}[how](module)


class Standardised(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w / (w.square().mean() + 0.1).sqrt()


norms = st.sampled_from(["plain", "plain", "plain", "weight", "spectral", "by hand"])

# Images.


@layer("image", out=small, kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)), stride=few, padding=st.integers(0, 2),
       dilation=few, groups=small, bias=flag, norm=norms,
       mode=st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"]))  # fmt: skip
def conv(at: Site, out: int, kernel: Any, stride: int, padding: int, dilation: int, groups: int, bias: bool,
         norm: str, mode: str) -> nn.Module:  # fmt: skip
    c, h, w = at.shape
    groups = gcd(groups, c)
    if mode != "zeros":
        padding = min(padding, h - 1, w - 1)
    fit = [min(k, 1 + (size + 2 * padding - 1) // dilation) for k, size in zip(kernel, (h, w), strict=True)]
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
    return nn.ConvTranspose2d(c, out * groups, kernel, stride, padding, extra, groups, bias, dilation)


@layer("image", kind=st.sampled_from(["batch", "group", "instance", "layer", "rms", "channels"]), affine=flag,
       running=flag, groups=small)  # fmt: skip
def image_norm(at: Site, kind: str, affine: bool, running: bool, groups: int) -> nn.Module:
    c = at.shape[0]
    if kind == "batch" or (kind == "group" and c * at.shape[1] * at.shape[2] == gcd(groups, c)):
        return nn.BatchNorm2d(c, affine=affine, track_running_stats=running)
    if kind == "group":
        return nn.GroupNorm(gcd(groups, c), c, affine=affine)
    if kind == "instance":
        if at.shape[1] * at.shape[2] == 1:
            running = True
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
    return nn.AvgPool2d(2, ceil_mode=True) if kind == "mean" else nn.MaxPool2d(2, 1 if kind == "lp" else 2)


@layer("image", kind=st.sampled_from(["turn", "shuffle", "flip", "roll", "channels-last", "copy", "pad", "every-second"]))
def moved(at: Site, kind: str) -> nn.Module:
    return {
        "turn": Apply(lambda m, x: x.transpose(2, 3)),
        "shuffle": Apply(lambda m, x: x.unflatten(1, (-1, gcd(2, x.shape[1]))).transpose(1, 2).flatten(1, 2)),
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


# Sequences.


@layer("sequence", heads=few, batch_first=flag, bias=flag, bias_kv=flag, zero=flag, mask=flag, across=flag)
def attention(at: Site, heads: int, batch_first: bool, bias: bool, bias_kv: bool, zero: bool, mask: bool,
              across: bool) -> nn.Module:  # fmt: skip
    t, e = at.shape
    width = e * heads // gcd(heads, e)

    def run(m: Any, x: Tensor) -> Tensor:
        q, k = m.ask(x), m.ask(x) if not across else x
        q, k = (q, k) if batch_first else (q.transpose(0, 1), k.transpose(0, 1))
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1) if mask else None
        h = m.attention(q, k, k, attn_mask=hidden, need_weights=mask)[0]
        return h if batch_first else h.transpose(0, 1)

    inner = nn.MultiheadAttention(width, heads, bias=bias, add_bias_kv=bias_kv, add_zero_attn=zero,
                                  batch_first=batch_first, **({"kdim": e, "vdim": e} if across else {}))  # fmt: skip
    return Apply(run, ask=nn.Linear(e, width), attention=inner)


@layer("sequence", heads=few, width=few, bias=st.sampled_from(["none", "learned", "causal"]), together=flag)
def attention_by_hand(at: Site, heads: int, width: int, bias: str, together: bool) -> nn.Module:
    t, e = at.shape

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(2, (3, heads, width)).permute(2, 0, 3, 1, 4)
        if together:
            h = F.scaled_dot_product_attention(
                q, k, v, attn_mask=m.table if bias == "learned" else None, is_causal=bias == "causal"
            )
        else:
            table = m.table if bias == "learned" else torch.zeros(t, t, dtype=x.dtype)
            if bias == "causal":
                table = table.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
            h = (q @ k.mT / width**0.5 + table).softmax(-1) @ v
        return m.out(h.transpose(1, 2).reshape(len(x), t, heads * width))

    table = {"table": torch.randn(heads, t, t)} if bias == "learned" else {}
    return Apply(run, qkv=nn.Linear(e, 3 * heads * width), out=nn.Linear(heads * width, e), **table)


@layer("sequence", first=flag, gelu=flag)
def transformer(at: Site, first: bool, gelu: bool) -> nn.Module:
    e, act = at.shape[1], "gelu" if gelu else "relu"
    inner = nn.TransformerEncoderLayer(e, gcd(2, e), 3, 0.1, act, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(inner, 1, enable_nested_tensor=False)


@layer("sequence", cell=st.sampled_from(["LSTM", "GRU", "RNN", "RNN-relu"]), size=few, layers=few, both=flag, bias=flag,
       batch_first=flag, projected=flag)  # fmt: skip
def recurrent(at: Site, cell: str, size: int, layers: int, both: bool, bias: bool, batch_first: bool,
              projected: bool) -> nn.Module:  # fmt: skip
    more: dict[str, Any] = {"proj_size": 1} if projected and cell == "LSTM" and size > 1 else {}
    if cell == "RNN-relu":
        more = {"nonlinearity": "relu"}
    made = getattr(nn, cell.removesuffix("-relu"))(
        at.shape[1], size, layers, bias=bias, batch_first=batch_first, bidirectional=both, **more
    )

    def run(m: Any, x: Tensor) -> Tensor:
        return m.cell(x)[0] if batch_first else m.cell(x.transpose(0, 1))[0].transpose(0, 1)

    return Apply(run, cell=made)


@layer("sequence", "vector", cell=st.sampled_from(["LSTMCell", "GRUCell", "RNNCell"]), learned=flag, bias=flag)
def cells(at: Site, cell: str, learned: bool, bias: bool) -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        first = m.first.expand(len(x), 2) if learned else x.new_zeros(len(x), 2)
        state: Any = (first, first) if cell == "LSTMCell" else first
        for step in x.unbind(1):
            state = m.cell(step, state)
        return state[0] if cell == "LSTMCell" else state

    first = {"first": torch.randn(1, 2)} if learned else {}
    return Apply(run, cell=getattr(nn, cell)(at.shape[1], 2, bias=bias), **first)


@layer("sequence", out=small, kernel=st.integers(1, 3), stride=few, groups=few, transposed=flag)
def conv_1d(at: Site, out: int, kernel: int, stride: int, groups: int, transposed: bool) -> nn.Module:
    t, e = at.shape
    groups, kernel = gcd(groups, e), min(kernel, t)
    of = nn.ConvTranspose1d if transposed and t < 7 else nn.Conv1d
    inner = of(e, out * groups, kernel, stride, groups=groups)
    return Apply(lambda m, x: m.inner(x.transpose(1, 2)).transpose(1, 2), inner=inner)


@layer("sequence", kind=st.sampled_from(["token", "positions", "mix", "einsum", "addmm", "mixer", "bilinear", "roll", "turn"]))  # fmt: skip
def words(at: Site, kind: str) -> nn.Module:
    t, e = at.shape
    return {
        "token": lambda: Apply(lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1), w=torch.randn(1, 1, e)),
        "positions": lambda: Apply(lambda m, x: x + m.table(torch.arange(t)), table=nn.Embedding(t, e)),
        "mix": lambda: Apply(lambda m, x: m.left @ x @ m.right, left=torch.randn(t, t), right=torch.randn(e, 2)),
        "einsum": lambda: Apply(lambda m, x: torch.einsum("bte,tef->btf", x, m.w), w=torch.randn(t, e, 2)),
        "addmm": lambda: Apply(
            lambda m, x: torch.addmm(m.b, x.reshape(-1, e), m.w).view(len(x), t, 3), b=torch.randn(3), w=torch.randn(e, 3)
        ),
        "mixer": lambda: Apply(lambda m, x: m.inner(x.mT).mT, inner=nn.Linear(t, t)),
        "bilinear": lambda: Apply(lambda m, x: m.inner(x, x.flip(1)), inner=nn.Bilinear(e, e, 2)),
        "roll": lambda: Apply(lambda m, x: x.roll(1, 1)),
        "turn": lambda: Apply(lambda m, x: x.transpose(1, 2)),
    }[kind]()  # fmt: skip


@layer("sequence", "vector", how=st.sampled_from(["mean", "first", "last", "max", "flatten", "query", "gate"]))
def sequence_as_vector(at: Site, how: str) -> nn.Module:
    t, e = at.shape
    return {
        "mean": lambda: Apply(lambda m, x: x.mean(1)),
        "first": lambda: Apply(lambda m, x: x[:, 0]),
        "last": lambda: Apply(lambda m, x: x[:, -1]),
        "max": lambda: Apply(lambda m, x: x.amax(1)),
        "flatten": lambda: nn.Flatten(),
        "query": lambda: Apply(lambda m, x: ((x @ m.q).softmax(1).unsqueeze(1) @ x).squeeze(1), q=torch.randn(e)),
        "gate": lambda: Apply(lambda m, x: (m.gate(x).softmax(1) * x).sum(1), gate=nn.Linear(e, 1)),
    }[how]()


@layer("sequence", "image")
def as_image(at: Site) -> nn.Module:
    return Apply(lambda m, x: x.unsqueeze(1))


# Words.


@layer("words", "sequence", size=small, padding=flag, sparse=flag, scale=flag)
def embedding(at: Site, size: int, padding: bool, sparse: bool, scale: bool) -> nn.Module:
    made = nn.Embedding(VOCABULARY, size, padding_idx=0 if padding else None, sparse=sparse)
    return Apply(lambda m, x: m.table(x) * m.scale, table=made, scale=torch.randn(size)) if scale else made


@layer("words", "vector", size=small, padding=flag, mode=st.sampled_from(["sum", "mean", "max"]))
def bag(at: Site, size: int, padding: bool, mode: str) -> nn.Module:
    return nn.EmbeddingBag(VOCABULARY, size, mode=mode, padding_idx=0 if padding else None)
