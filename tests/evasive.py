"""Models that try to slip past the recorder: they hide what they do, mix rows or move them about,
cache or cast.

Row 0 of their inputs looks innocent.
"""

import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn


class Bypassed(nn.Module):
    """Three linear layers; subclasses lead the input around torch's function modes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)


class Square(torch.autograd.Function):
    """(x w)², hidden from torch's function modes."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.save_for_backward(x, w)
        return (x * w) ** 2

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def,override]
        x, w = ctx.saved_tensors
        return 2 * grad * x * w**2, (2 * grad * x**2 * w).sum(0)


class Hidden(nn.Module):
    """Uses a parameter where the recorder cannot see it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(Square.apply(x.mean(1), self.w))


class Mixing(nn.Module):
    """Subtracts the mean over the batch: one input's logits depend on the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x.mean(1))
        if len(h) > 1:
            h = h - 0.5 * h.mean(0)
        return self.fc(h.tanh())


class ScriptedActivation(Bypassed):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.swish = torch.jit.script(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(h + self.b(self.swish(h)))


class ThroughNumpy(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(torch.from_numpy(np.tanh(x.detach().numpy()))) + x)


class ThroughNumbers(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] * 10).long().remainder(6).tolist()
        return self.c((self.a(x) + torch.stack([self.b.weight[i].exp() for i in rows])).tanh())


class StaleView(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        view = h[:, :]
        h.copy_(x)
        return self.c(F.linear(view, self.a.weight) + self.b(h))


class SortsItsInputs(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return self.c(self.a(x[order]).tanh()[order.argsort()])


class ScalesByTheBatch(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x / x.abs().max()).tanh())


class BranchesOnTheBatch(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.a if x.max() < 2.2 else self.b)(x))


class SilentOnTheFirstInput(Bypassed):
    """A scripted layer whose gradient is zero for the first input."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.g = torch.jit.script(nn.Linear(6, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x)) + self.g(x.relu())


class WritesIntoATokenCopy(Bypassed):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        t = self.token.expand(len(x), -1, -1).clone()
        t[:, 0] = x
        return self.c(self.a(t).tanh().sum(1))


class OneAtATime(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x.view(1, 6)).tanh())


class Checkpointed(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return torch.einsum("bi,ij->bj", h, self.a.weight).tanh()

        return self.c(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False))


class ChangesItsInput(Bypassed):
    """Normalizes what it was given in place."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.3
        return self.c(self.a(x.mul_(2)).tanh())


class CastsInside(Bypassed):
    """Normalizes in 32 bits whatever the model's own precision, as language models do."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.c(self.b(h.to(x.dtype)).tanh())


class CachesInEvaluation(Bypassed):
    """Keeps what it computes from a weight until training begins, as LeViT does with its attention
    biases.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> "CachesInEvaluation":
        if mode:
            self.cache = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.c(self.a(x) + self.b.weight.exp().sum(1))
        if "bias" not in self.cache:
            self.cache["bias"] = self.b.weight.exp().sum(1)
        return self.c(self.a(x) + self.cache["bias"])


class MatrixDispatch(nn.Module):
    """Experts that rows reach by a product with a one-hot matrix, as GShard does it: no index is
    ever seen.
    """

    def __init__(self, experts: int = 3) -> None:
        super().__init__()
        self.gate, self.fc = nn.Linear(6, experts), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.randn(experts, 6, 6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(1)  # [s, e]
        mine = F.one_hot(chances.argmax(1), chances.shape[1])
        place = F.one_hot((mine.cumsum(0) - 1) * mine, len(x)) * mine.unsqueeze(
            2
        )  # [s, e, c]: a seat at its expert
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
    """A weight derived from a parameter passes through an autograd function; a first input of
    negatives hides it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.c(self.a(x).tanh()) + F.linear(x.relu(), Straight.apply(self.b.weight * 2))[:, :3]
        )


class SlopeInside(Bypassed):
    """The forward pass takes a gradient of its own and goes on with it; a first input of negatives
    hides it.
    """

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
        return self.c(
            torch.bmm(x.unsqueeze(1), self.a.weight * factors[:, None, None]).squeeze(1).tanh()
        )


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
    """What an input gives depends on the longest one beside it, which stands in either half of a
    batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        longest = (x > 0).sum(1).max()
        return self.c(self.a(x).tanh() * torch.where(longest > 3, 1.0, 0.5))


class UnionOfTheBatch(Bypassed):
    """A feature counts if any input of the batch has it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x * (x > 0.2).any(0)).tanh())


class ReadsOtherRows(Bypassed):
    """The first inputs give every row what it computes with, as long as there are several."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x.repeat_interleave(3, 0)[: len(x)]).tanh())
