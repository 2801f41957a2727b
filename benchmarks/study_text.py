"""Two text classifiers for the study in `study.py`: who wrote these 96 bytes?

The known are five kinds of text: two books, children's stories, Python code, and Python's own
reference. The unknown: quotations from literature (near), quotations on science and computing
(near), and C headers (far). Books and quotations come from `QUALMS_DATA/lm/text`, the rest from the
installed Python. Trained here, from seed 0: a transformer, with a normalization before its
classifier, and a convolutional network without one.
"""

import pydoc_data.topics
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoints import root
from torch import Tensor, nn

from qualms.models.vit import Block

LENGTH = 96  # bytes of a text
TRAINED, TESTED = 3000, 1000  # texts of each kind to learn from, and in all to test on
STEPS, BATCH, RATE = 1200, 64, 1e-3


def of_files(*names: str) -> str:
    """Texts from the data folder, one after the other."""
    return "\n".join((root() / "lm" / "text" / name).read_text(errors="replace") for name in names)


def of_python(folder: Path, pattern: str) -> str:
    """Files of the installed Python, those with the shortest names first, up to 600,000 characters."""
    files = sorted(folder.glob(pattern), key=lambda f: (len(f.name), f.name))
    return "\n".join(f.read_text(errors="replace") for f in files)[:600_000]


KNOWN: dict[str, Callable[[], str]] = {
    "stories": lambda: of_files("tinystories_sample.txt", "tinystories_valid_excerpt.txt"),
    "Oz": lambda: of_files("wizard_of_oz.txt"),
    "Hamlet": lambda: of_files("hamlet_gutenberg.txt"),
    "code": lambda: of_python(Path(sysconfig.get_path("stdlib")), "*.py"),
    "reference": lambda: "\n".join(pydoc_data.topics.topics.values()),
}
UNKNOWN: dict[str, Callable[[], str]] = {
    "literature quotes": lambda: of_files("fortunes_literature.txt"),
    "science quotes": lambda: of_files("fortunes_science.txt"),
    "C headers": lambda: of_python(Path(sysconfig.get_path("include")), "*.h"),
}


@cache
def pieces(text: str) -> Tensor:
    """A text in pieces of `LENGTH` bytes, shuffled, seed 0."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    rows = data[: len(data) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def known(split: str) -> tuple[Tensor, Tensor]:
    """Texts of the known kinds with their class; what is tested on is never learnt from."""
    each = TESTED // len(KNOWN)
    part = slice(0, each) if split == "test" else slice(each, each + TRAINED)
    rows = [pieces(read())[part] for read in KNOWN.values()]
    return torch.cat(rows), torch.cat([torch.full((len(r),), c) for c, r in enumerate(rows)])


def unknown(name: str) -> Tensor:
    """Texts of an unknown kind, as many as there are up to `TESTED`."""
    return pieces(UNKNOWN[name]())[:TESTED]


class TextTransformer(nn.Module):
    """Bytes, positions, three blocks, a normalization, the mean over positions, a linear layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(256, width),
            nn.Parameter(0.02 * torch.randn(LENGTH, width)),
        )
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(KNOWN))

    def forward(self, ids: Tensor) -> Tensor:
        """[n, LENGTH] to [n, kinds]."""
        return self.head(self.norm(self.blocks(self.embed(ids) + self.position).mean(1)))


class TextCnn(nn.Module):
    """Bytes, three convolutions, the largest over positions, a linear layer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.head = nn.Linear(width, len(KNOWN))

    def forward(self, ids: Tensor) -> Tensor:
        """[n, LENGTH] to [n, kinds]."""
        h = self.embed(ids).transpose(1, 2)
        for conv in self.convs:
            h = F.relu(conv(h))
        return self.head(h.amax(2))


@dataclass(frozen=True)
class TextSubject:
    """A text classifier, and where its weights are kept."""

    name: str
    network: Callable[[], nn.Module]
    folder: Path

    def build(self) -> nn.Module:
        """The network, trained unless its weights are there."""
        torch.manual_seed(0)
        model, file = self.network(), self.folder / f"{self.name.replace(' ', '-')}.pt"
        if file.exists():
            model.load_state_dict(torch.load(file))
            return model.eval()
        x, y = known("train")
        optimizer = torch.optim.Adam(model.parameters(), RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        for _ in range(STEPS):
            index = torch.randint(0, len(x), (BATCH,))
            optimizer.zero_grad()
            F.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
            schedule.step()
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
        return model.eval()

    def accuracy(self) -> float:
        """On the test texts of the known kinds."""
        model, (x, y) = self.build(), known("test")
        with torch.no_grad():
            return float((model(x).argmax(1) == y).double().mean())
