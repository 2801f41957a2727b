"""Models with more classes than features before the last layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Wide(nn.Module):
    """More classes than features before the last layer, so that fewer backward passes than classes
    will do.
    """

    def __init__(self, bias: bool = True, certain: float = 0.0) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = (
            nn.Linear(6, 12),
            nn.LayerNorm(12),
            nn.Linear(12, 12),
            nn.Linear(12, 3),
        )
        self.fc = nn.Linear(3, 40, bias=bias)
        self.register_buffer("certain", torch.zeros(40).index_fill(0, torch.tensor(7), certain))

    def features(self, x: Tensor) -> Tensor:
        h = self.b(self.norm(self.a(x).tanh())).tanh()
        return self.c(self.b(h).tanh().mean(1)).tanh()  # one layer is used twice

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            self.features(x), self.fc.weight, self.certain if self.fc.bias is None else self.fc.bias
        )


class WideInOtherWays(Wide):
    """The same with a last layer of another form."""

    def __init__(self, form: str) -> None:
        super().__init__(bias=False)
        self.form = form
        self.matrix = nn.Parameter(torch.randn(3, 40))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if self.form == "matmul":
            return h @ self.matrix
        if self.form == "addmm":
            return torch.addmm(self.certain, h, self.matrix)
        if self.form == "view":
            return self.fc(h.unsqueeze(1)).squeeze(1)
        if self.form == "features-used-again":
            return self.fc(h) + h.sum(1, keepdim=True) * self.certain.index_fill(
                0, torch.tensor(3), 1.0
            )
        if self.form == "derived-weight":
            return h @ (self.matrix * self.norm.weight.sum())
        raise ValueError(self.form)


class WideTied(nn.Module):
    """The last layer's weight is also the embedding: more classes than features, and a weight of
    two uses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(40, 3), nn.Linear(3, 3)
        self.output = nn.Linear(3, 40, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.hidden(self.embedding(ids)).tanh().mean(1))
