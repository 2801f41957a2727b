"""Models in which the values of the input decide what stands where: experts, early exits, texts
without padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Routed(nn.Module):
    """Which expert is used depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = x.mean(1)
        return torch.stack([self.experts[int(v[0] > 0)](v) for v in h])


class Experts(nn.Module):
    """Each input goes through the experts that it picks, in the order of its picking."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.fc = nn.Linear(6, 4), nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(1)
        best = chances.topk(2).indices
        out = []
        for row, p, picked in zip(x, chances, best, strict=True):
            out.append(sum(p[e] * self.experts[int(e)](row).tanh() for e in picked))
        return self.fc(torch.stack(out))


class EarlyExit(nn.Module):
    """An input that is large enough leaves after the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.exits = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.one(row) for row in x])

    def one(self, row: Tensor) -> Tensor:
        for block, leave in zip(self.blocks, self.exits, strict=True):
            row = block(row).tanh()
            logits: Tensor = leave(row)
            if logits.softmax(0).max() > 0.42:
                break
        return logits


class MatrixExperts(nn.Module):
    """Each word goes to the two experts that its router likes best, and experts keep their matrices
    in one parameter.

    With `bias` they are multiplied from the right, and a row of another parameter is added.
    """

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.router, self.fc = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 3)
        self.inner, self.outer = (
            nn.Parameter(torch.randn(4, 5, 6)),
            nn.Parameter(torch.randn(4, 6, 5)),
        )
        self.bias = nn.Parameter(torch.randn(4, 6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).flatten(0, 1)
        share, choice = self.router(h).softmax(-1).topk(2)
        asked = F.one_hot(choice, 4).permute(2, 1, 0)
        out = torch.zeros_like(h)
        for expert in (asked.sum((1, 2)) > 0).nonzero()[:, 0]:
            rank, word = torch.where(asked[expert])
            if self.bias is None:
                new = F.linear(F.linear(h[word], self.inner[expert]).tanh(), self.outer[expert])
            else:
                new = (h[word] @ self.inner[expert].T).tanh() @ self.outer[expert].T + self.bias[
                    expert
                ]
            out.index_add_(0, word, new * share[word, rank, None])
        return self.fc(torch.tanh(h + out).view(x.shape).sum(1))


class GatedWords(nn.Module):
    """Words without padding, in an operation without a rule, of whose results the logits need one
    alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.GRUCell(6, 6), nn.Linear(6, 3)
        self.start = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, :, 0] > 0
        words = self.cell(x[kept])
        first, _ = torch.linalg.qr(words[:, :, None] * self.start)
        owner = torch.arange(len(x))[:, None].expand_as(kept)[kept]
        return self.fc(x.new_zeros(len(x), 6).index_add(0, owner, words + first[:, :, 0].abs()))


class Unpads(nn.Module):
    """Only some positions of each input go through a layer; the numbers happen to add up to a
    multiple.
    """

    def __init__(self) -> None:
        super().__init__()
        self.e, self.c = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :, 0] > 0
        out = x.new_zeros(*x.shape[:2], 4)
        out[mask] = self.e(x[mask]).tanh()
        return self.c(out.sum(1))


class MasksPadding(nn.Module):
    """A mask is added to the biases of attention, but only in a batch that has anything to mask, as
    T5 does it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(30, 6), nn.Linear(6, 3)
        self.table = nn.Parameter(torch.randn(1, 6, 6))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h, bias = self.embed(input_ids), self.table
        if not attention_mask.all():
            bias = bias.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        return self.fc(((h @ h.mT + bias).softmax(-1) @ h).tanh().sum(1))


class CutsPositions(nn.Module):
    """Writes as many positions as an input has, from a table, into a tensor for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(30, 6), nn.Linear(6, 3)
        self.table = nn.Parameter(torch.randn(6, 6))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.zeros(*input_ids.shape, 6, dtype=self.table.dtype)
        for row, length in enumerate(attention_mask.sum(1).tolist()):
            places[row, :length] = self.table[6 - length :].tanh()
        return self.fc((self.embed(input_ids) + places).tanh().sum(1))


class ScaledInPlace(nn.Module):
    """Words that count are picked out, normalized, and changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :, 0] > 0
        out = torch.zeros_like(x)
        picked = self.norm(x[mask])
        picked.mul_(3)
        out[mask] = picked
        return self.fc(out.tanh().sum(1))
