"""Models that move the rows of a batch about, hide what they do, or leave parameters out for some inputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.networks import Bypassed


class MatrixDispatch(nn.Module):
    """Experts that rows reach by a product with a one-hot matrix, as GShard does it: no index is ever seen."""

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate, self.fc = nn.Linear(6, experts), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.randn(experts, 6, 6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(1)  # [s, e]
        mine = F.one_hot(chances.argmax(1), chances.shape[1])
        place = F.one_hot((mine.cumsum(0) - 1) * mine, len(x)) * mine.unsqueeze(2)  # [s, e, c]: a seat at its expert
        dispatch = place.to(x)
        seated = torch.einsum("sec,sm->ecm", dispatch, x)
        out = torch.bmm(seated, self.weight).tanh()
        return self.fc(torch.einsum("sec,ecm->sm", dispatch * chances.unsqueeze(2), out))


class PermutesByAMatrix(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        order = F.one_hot(x.sum(1).argsort(), len(x)).to(x)
        return self.c(order.T @ self.a(order @ x).tanh())


class ReordersByAList(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort().tolist()
        back = sorted(range(len(order)), key=order.__getitem__)
        return self.c(self.a(x[order]).tanh()[back])


class SortsByLength(nn.Module):
    """A speech model that sorts its inputs by length for the recurrent layer, and back again."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0).sum(1).tolist()
        order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        out = self.cell(x[order])[0].sum(1)
        return self.fc(out[[order.index(i) for i in range(len(order))]])


class Straight(torch.autograd.Function):
    """Rounds, with the gradient of not rounding, as in training for few bits."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return (w * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class RoundedWeight(Bypassed):
    """A weight derived from a parameter passes through an autograd function; a first input of negatives hides it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x).tanh()) + F.linear(x.relu(), Straight.apply(self.b.weight * 2))[:, :3]


class SlopeInside(Bypassed):
    """The forward pass takes a gradient of its own and goes on with it; a first input of negatives hides it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.relu().requires_grad_()
            energy = self.b(at).square().sum()
            slope = torch.autograd.grad(energy, at, create_graph=True)[0]
        return self.c(self.a(x).tanh() + slope * at)


class FactorFromNumbers(Bypassed):
    """A layer's weight is scaled by a number that nearly every input has in common."""

    def forward(self, x: Tensor) -> Tensor:
        factors = torch.tensor([1 + 2e-5 * v for v in x.sum(1).tanh().tolist()], dtype=x.dtype)
        return self.c(torch.bmm(x.unsqueeze(1), self.a.weight * factors[:, None, None]).squeeze(1).tanh())


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


class NegativeIndex(nn.Module):
    """The last matrix of a parameter by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.fc = nn.Parameter(torch.randn(3, 6, 6) / 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x @ self.weight[-1]).tanh() @ self.weight[2] + x @ self.weight[0])


class FaintBranch(Bypassed):
    """Rows change places in a branch that counts for next to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        order = F.one_hot(x.sum(1).argsort(), len(x)).to(x)
        return self.c(self.a(x).tanh() + 1e-7 * (order.T @ self.b(order @ x).tanh()))


class LongestOfTheBatch(Bypassed):
    """What an input gives depends on the longest one beside it, which stands in either half of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        longest = (x > 0).sum(1).max()
        return self.c(self.a(x).tanh() * torch.where(longest > 3, 1.0, 0.5))


class UnionOfTheBatch(Bypassed):
    """A feature counts if any input of the batch has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x * (x > 0.2).any(0)).tanh())
