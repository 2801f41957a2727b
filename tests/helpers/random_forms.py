"""Layers of random networks that take anything: parameters in every form, activations, norms,
mixtures of experts.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.random_layers import (
    ANYTHING,
    Apply,
    Site,
    few,
    flag,
    layer,
    normed,
    norms,
    small,
)

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
    """On the last axis; tied to a matrix that the network has already, as it is or transposed, if
    one fits.
    """
    features = at.shape[-1]
    for p in at.matrices() if tied else ():
        if p.shape[1] == features:
            made = nn.Linear(features, p.shape[0], bias)
            made.weight = p
            return made
        if p.shape[0] == features:
            return Apply(lambda m, x: F.linear(x, m.p.T), p=p)
    return normed(nn.Linear(features, out, bias), norm)


@layer(
    "sequence vector",
    kind=st.sampled_from(["layer", "rms", "batch", "group", "instance"]),
    affine=flag,
)
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
    "chosen by the input": lambda m, x: (
        x
        * m.w.flatten()[(x.flatten(1).sum(1) > 0).long() % m.w.numel()].view(
            -1, *[1] * (x.ndim - 1)
        )
    ),
    "clamped": lambda m, x: torch.minimum(x, m.w.abs() + 1).clamp_min_(-2),
    "outer": lambda m, x: x + x.flatten(1).mean(1).view(-1, *[1] * (x.ndim - 1)) * m.w,
    # type: ignore[arg-type,return-value]
    "out of place sum": lambda m, x: sum([x, m.w * x.relu(), m.v]),
}


@layer(ANYTHING, kind=st.sampled_from(list(BARE)), axis=st.sampled_from(["first", "last", "none"]))
def bare(at: Site, kind: str, axis: str) -> nn.Module:
    """A parameter in plain arithmetic: one number for each channel or word, for each feature, or
    for all.
    """
    shape = [1] * len(at.shape)
    if axis == "first":
        shape[0] = at.shape[0]
    elif axis == "last":
        shape[-1] = at.shape[-1]
    return Apply(BARE[kind], w=torch.randn(shape), v=torch.randn(shape))


def words(x: Tensor) -> Tensor:
    return x.reshape(len(x), -1, x.shape[-1])


def only_the_positive(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    counts = x.sum(-1) > 0
    return x.new_zeros(*x.shape[:-1], len(b)).masked_scatter(
        counts.unsqueeze(-1), F.linear(x[counts], w, b)
    )


# A matrix in other forms than a linear layer, and layers that see their rows in another order or
# company. e: features.
ODD: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "sliced": lambda m, x: F.linear(x, m.w[1:], m.b[1:]),
    "cut in two": lambda m, x: torch.cat([F.linear(x, part) for part in m.w.chunk(2)], -1),
    "used as a scale": lambda m, x: F.linear(x, m.w) + x.sum(-1, keepdim=True) * m.w.sum(1),
    "tensordot": lambda m, x: torch.tensordot(x, m.w.T, 1),
    "transposed view": lambda m, x: x @ m.w.view(m.w.shape[1], -1),
    "expanded": lambda m, x: (words(x) @ m.w.T.expand(len(x), -1, -1)).reshape(*x.shape[:-1], -1),
    "of a product": lambda m, x: F.linear(x, m.w @ m.w.T @ m.w, m.b),
    "batch second": lambda m, x: F.layer_norm(F.linear(x.movedim(0, -2), m.w), m.b.shape, m.b, eps=0.1).movedim(-2, 0),
    "batch last": lambda m, x: (m.w @ x.movedim(0, -1)).movedim(-1, 0),
    "merged": lambda m, x: F.linear(x.reshape(-1, x.shape[-1]), m.w, m.b).view(*x.shape[:-1], -1),
    "row by row": lambda m, x: torch.stack([F.linear(row, m.w, m.b) for row in x]),
    "one at a time": lambda m, x: torch.cat([F.linear(row, m.w, m.b) for row in x.split(1)]),
    "vmap": lambda m, x: torch.vmap(lambda row: F.linear(row, m.w, m.b).tanh())(x),
    "checkpointed": lambda m, x: checkpoint(lambda h: F.linear(h, m.w).tanh(), x, use_reentrant=False),
    "sorted by values": lambda m, x: F.linear(x.sort(-1).values, m.w, m.b),
    "rows sorted": lambda m, x: F.linear(x[(order := x.flatten(1).sum(1).argsort())], m.w)[order.argsort()],
    "only the positive": lambda m, x: only_the_positive(x, m.w, m.b),
    "fourier": lambda m, x: torch.fft.irfft(torch.fft.rfft(F.linear(x, m.w), 4) * torch.fft.rfft(m.b, 4), 4),
    "distances": lambda m, x: (x.unsqueeze(-2) - m.w).square().sum(-1),
    "cosines": lambda m, x: F.linear(F.normalize(x, dim=-1, eps=0.1), F.normalize(m.w, dim=-1)),
    "cumulated": lambda m, x: F.linear(x, m.w.softmax(-1)).cumsum(-1),
    "numbers of the batch": lambda m, x: F.linear(x, m.w) * len(x) / max(1, x.shape[0]),
}  # fmt: skip


@layer("sequence vector", kind=st.sampled_from(list(ODD)), out=st.integers(2, 3))
def odd(at: Site, kind: str, out: int) -> nn.Module:
    """A matrix [out, e] and a vector [out] in a form of their own."""
    return Apply(ODD[kind], w=torch.randn(out, at.shape[-1]), b=torch.randn(out))


@layer(
    "sequence vector",
    number=st.integers(2, 3),
    top=few,
    how=st.sampled_from(["index", "mask", "loop", "dense", "matrices", "one-hot"]),
)
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
            out = torch.stack(
                [
                    sum(p[i] * m.each[int(i)](row) for i in chosen)
                    for row, p, chosen in zip(h, shares, choice, strict=True)
                ]
            )
        elif how == "one-hot":
            out = torch.einsum(
                "ni,nf,ife->ne", F.one_hot(choice[:, 0], number).to(h), h, m.matrices
            )
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
