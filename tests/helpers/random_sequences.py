"""Layers of random networks that take sequences or words."""

from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.random_layers import VOCABULARY, Apply, Site, few, flag, layer, small

# Sequences.


@layer(
    "sequence",
    heads=few,
    batch_first=flag,
    bias=flag,
    bias_kv=flag,
    zero=flag,
    mask=flag,
    across=flag,
)
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


@layer(
    "sequence",
    heads=few,
    width=few,
    bias=st.sampled_from(["none", "learned", "causal"]),
    together=flag,
)
def attention_by_hand(at: Site, heads: int, width: int, bias: str, together: bool) -> nn.Module:
    t, e = at.shape

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(x).unflatten(2, (3, heads, width)).permute(2, 0, 3, 1, 4)
        if together:
            h = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=m.table if bias == "learned" else None,
                is_causal=bias == "causal",
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
    inner = nn.TransformerEncoderLayer(
        e, gcd(2, e), 3, 0.1, act, batch_first=True, norm_first=first
    )
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


@layer(
    "sequence",
    "vector",
    cell=st.sampled_from(["LSTMCell", "GRUCell", "RNNCell"]),
    learned=flag,
    bias=flag,
)
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
def conv_1d(
    at: Site, out: int, kernel: int, stride: int, groups: int, transposed: bool
) -> nn.Module:
    t, e = at.shape
    groups, kernel = gcd(groups, e), min(kernel, t)
    of = nn.ConvTranspose1d if transposed and t < 7 else nn.Conv1d
    inner = of(e, out * groups, kernel, stride, groups=groups)
    return Apply(lambda m, x: m.inner(x.transpose(1, 2)).transpose(1, 2), inner=inner)


WORDS = ("token", "positions", "mix", "einsum", "addmm", "mixer", "bilinear", "roll", "turn")


@layer("sequence", kind=st.sampled_from(WORDS))
def words(at: Site, kind: str) -> nn.Module:
    t, e = at.shape
    return {
        "token": lambda: Apply(lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1), w=torch.randn(1, 1, e)),
        "positions": lambda: Apply(lambda m, x: x + m.table(torch.arange(t)), table=nn.Embedding(t, e)),
        "mix": lambda: Apply(lambda m, x: m.left @ x @ m.right, left=torch.randn(t, t), right=torch.randn(e, 2)),
        "einsum": lambda: Apply(lambda m, x: torch.einsum("bte,tef->btf", x, m.w), w=torch.randn(t, e, 2)),
        "addmm": lambda: Apply(
            lambda m, x: torch.addmm(m.b, x.reshape(-1, e), m.w).view(len(x), t, 3),
            b=torch.randn(3),
            w=torch.randn(e, 3),
        ),
        "mixer": lambda: Apply(lambda m, x: m.inner(x.mT).mT, inner=nn.Linear(t, t)),
        "bilinear": lambda: Apply(lambda m, x: m.inner(x, x.flip(1)), inner=nn.Bilinear(e, e, 2)),
        "roll": lambda: Apply(lambda m, x: x.roll(1, 1)),
        "turn": lambda: Apply(lambda m, x: x.transpose(1, 2)),
    }[kind]()  # fmt: skip


@layer(
    "sequence",
    "vector",
    how=st.sampled_from(["mean", "first", "last", "max", "flatten", "query", "gate"]),
)
def sequence_as_vector(at: Site, how: str) -> nn.Module:
    e = at.shape[1]
    return {
        "mean": lambda: Apply(lambda m, x: x.mean(1)),
        "first": lambda: Apply(lambda m, x: x[:, 0]),
        "last": lambda: Apply(lambda m, x: x[:, -1]),
        "max": lambda: Apply(lambda m, x: x.amax(1)),
        "flatten": lambda: nn.Flatten(),
        "query": lambda: Apply(
            lambda m, x: ((x @ m.q).softmax(1).unsqueeze(1) @ x).squeeze(1), q=torch.randn(e)
        ),
        "gate": lambda: Apply(lambda m, x: (m.gate(x).softmax(1) * x).sum(1), gate=nn.Linear(e, 1)),
    }[how]()


@layer("sequence", "image")
def as_image(at: Site) -> nn.Module:
    return Apply(lambda m, x: x.unsqueeze(1))


# Words.


@layer("words", "sequence", size=small, padding=flag, sparse=flag, scale=flag)
def embedding(at: Site, size: int, padding: bool, sparse: bool, scale: bool) -> nn.Module:
    made = nn.Embedding(VOCABULARY, size, padding_idx=0 if padding else None, sparse=sparse)
    return (
        Apply(lambda m, x: m.table(x) * m.scale, table=made, scale=torch.randn(size))
        if scale
        else made
    )


@layer("words", "vector", size=small, padding=flag, mode=st.sampled_from(["sum", "mean", "max"]))
def bag(at: Site, size: int, padding: bool, mode: str) -> nn.Module:
    return nn.EmbeddingBag(VOCABULARY, size, mode=mode, padding_idx=0 if padding else None)
