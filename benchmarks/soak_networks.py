"""Small networks of every kind for `soak.py`, with weights that are the same each time they are
made.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

INPUTS, CLASSES, WORDS, LENGTH, WIDTH = 6, 5, 20, 7, 8


def images(count: int = INPUTS) -> Tensor:
    """Pixels from 0 to 1."""
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def words() -> Tensor:
    """Texts of the same length, as ids."""
    return torch.randint(1, WORDS, (INPUTS, LENGTH), generator=torch.Generator().manual_seed(1))


def cnn() -> nn.Module:
    """Convolutions, batch normalization and dropout, so that every method of the registry has what
    it asks for.
    """
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 8, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(72, 24),
        nn.GELU(),
        nn.Linear(24, CLASSES),
    )


class Block(nn.Module):
    """Two convolutions and what goes past them; writes in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """As it says."""
        h = self.relu(self.norms[0](self.convs[0](x)))
        h = self.norms[1](self.convs[1](h))
        h += x
        return self.relu(h)


class ResNet(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = (
            nn.Conv2d(3, WIDTH, 3, stride=2),
            nn.Sequential(Block(WIDTH), Block(WIDTH)),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        found: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return found


class ViT(nn.Module):
    """Patches, a class token, torch's encoder, and enough classes for a tolerance to save some."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, WIDTH, 4, 4), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], 1) + self.position
        found: Tensor = self.head(self.encoder(h)[:, 0])
        return found


class Recurrent(nn.Module):
    """Words through a recurrent layer, the last step to the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = (
            nn.Embedding(WORDS, WIDTH),
            nn.GRU(WIDTH, WIDTH, batch_first=True),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        found: Tensor = self.head(self.cell(self.embedding(ids))[0][:, -1])
        return found


class Text(nn.Module):
    """The mean of the words' vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = (
            nn.Embedding(WORDS, WIDTH, padding_idx=0),
            nn.Linear(WIDTH, WIDTH),
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        found: Tensor = self.head(self.hidden(self.embedding(ids).mean(1)).tanh())
        return found


class Language(nn.Module):
    """Logits of the next word at every word; words to come are not seen, and the head is the
    embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.query, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, [texts, words, vocabulary]."""
        length = ids.shape[1]
        h = self.embedding(ids) + self.position(torch.arange(length))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        weights = (self.query(h) @ h.transpose(1, 2)).masked_fill(~seen, -torch.inf).softmax(2)
        found: Tensor = (h + self.mix(weights @ h).tanh()) @ self.embedding.weight.T
        return found


class Raising(nn.Module):
    """A network with a defect of its own, which shows in the middle of a pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """No logits."""
        self.inner(x)
        raise ZeroDivisionError("a defect of the network")


@dataclass(frozen=True)
class Kind:
    """How a network is made, and whether it takes images or words."""

    make: Callable[[], nn.Module]
    pictures: bool


NETWORKS = {
    "cnn": Kind(cnn, pictures=True),
    "resnet": Kind(ResNet, pictures=True),
    "vit": Kind(ViT, pictures=True),
    "recurrent": Kind(Recurrent, pictures=False),
    "text": Kind(Text, pictures=False),
}


def made(name: str, seed: int = 0) -> nn.Module:
    """A network, the same each time."""
    torch.manual_seed(seed)
    return (Language() if name == "language" else NETWORKS[name].make()).eval()
