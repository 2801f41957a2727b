"""Situations at the edges of what numbers hold, and what scores must be there, in decimals of many
digits.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, getcontext

import torch
from torch import Tensor, nn

from tests.helpers.settings import small_cnn

getcontext().prec = 600
getcontext().Emin, getcontext().Emax = -(10**9), 10**9
X = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))
TRAIN = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(3))


@dataclass(frozen=True)
class Situation:
    """A model in 32 bits, inputs, and training inputs."""

    model: nn.Sequential
    x: Tensor = X
    train: Tensor = TRAIN


def cnn(classes: int = 5) -> nn.Sequential:
    """A network on which every method runs."""
    torch.manual_seed(0)
    model = small_cnn()
    model[-1] = nn.Linear(12, classes)
    return model.eval()


def scaled(**layers: float) -> nn.Sequential:
    """The network with the weights of some layers, given as `l5`, multiplied by a number."""
    model = cnn()
    with torch.no_grad():
        for name, by in layers.items():
            for p in model[int(name[1:])].parameters():
                p *= by
    return model


def shifted(layer: int, by: float | list[float], classes: int = 5) -> nn.Sequential:
    """The network with something added to the biases of a layer."""
    model = cnn(classes)
    with torch.no_grad():
        model[layer].bias += torch.tensor(by)
    return model


def pixel() -> Situation:
    """Images of one pixel."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)
    )
    model.append(nn.Linear(4, 3))
    return Situation(model.eval(), X[:, :, :1, :1], TRAIN[:, :, :1, :1])


def deep() -> Situation:
    """150 linear layers."""
    torch.manual_seed(0)
    layers = [layer for _ in range(74) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return Situation(
        nn.Sequential(
            nn.Flatten(), nn.Linear(64, 4), *layers, nn.Dropout(0.3), nn.Linear(4, 3)
        ).eval()
    )


SITUATIONS: dict[str, Callable[[], Situation]] = {
    "margin of 20": lambda: Situation(shifted(8, [0, 0, 20.0, 0, 0])),
    "margin of 37": lambda: Situation(shifted(8, [0, 0, 37.0, 0, 0])),
    "margin of 60": lambda: Situation(shifted(8, [0, 0, 60.0, 0, 0])),
    "margin of 800": lambda: Situation(shifted(8, [0, 0, 800.0, 0, 0])),
    "logits of ±1e4": lambda: Situation(shifted(8, [1e4, -1e4, 0, 5e3, -5e3])),
    "two classes": lambda: Situation(cnn(2)),
    "two classes, margin of 50": lambda: Situation(shifted(8, [50.0, 0], classes=2)),
    "one pixel": pixel,
    "all weights zero": lambda: Situation(scaled(l0=0, l1=0, l5=0, l8=0)),
    "last layer zero": lambda: Situation(scaled(l8=0)),
    "dead ReLUs": lambda: Situation(shifted(5, -1e3)),
    "constant inputs": lambda: Situation(cnn(), torch.ones_like(X)),
    "inputs of zeros": lambda: Situation(cnn(), torch.zeros_like(X)),
    "inputs of 1e20": lambda: Situation(cnn(), X * 1e20),
    "inputs of 1e-30": lambda: Situation(cnn(), X * 1e-30),
    "features of 1e-25": lambda: Situation(scaled(l5=1e-25)),
    "features of 1e22": lambda: Situation(_large_features()),
    "last weights of 1e-25": lambda: Situation(scaled(l8=1e-25)),
    "150 layers": deep,
    "one training input": lambda: Situation(cnn(), X, TRAIN[:1]),
    "one training input, many times": lambda: Situation(
        cnn(), X, TRAIN[:1].expand(40, -1, -1, -1).contiguous()
    ),
    "two training inputs, many times": lambda: Situation(cnn(), X, TRAIN[:2].repeat(20, 1, 1, 1)),
    "inputs that are the training inputs": lambda: Situation(cnn(), X, X),
}


def _large_features() -> nn.Sequential:
    model = scaled(l5=1e22)
    with torch.no_grad():
        model[8].weight *= 1e-22
    return model


def member_of(model: nn.Sequential) -> nn.Sequential:
    """Another model for an ensemble, with a last layer that differs."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        noise = torch.randn(other[-1].weight.shape, generator=torch.Generator().manual_seed(1))
        other[-1].weight += 0.1 * other[-1].weight.abs().max() * noise.to(other[-1].weight)
    return other


# The formulas of papers, with numbers that cannot under- or overflow.


def probabilities(logits: list[float]) -> list[Decimal]:
    """softmax(z)."""
    each = [Decimal(z).exp() for z in logits]
    return [e / sum(each) for e in each]


def entropy(p: list[Decimal]) -> Decimal:
    """-Σ p log p."""
    return -sum(q * q.ln() for q in p)


def mutual_information(q: list[list[Decimal]]) -> Decimal:
    """H(mean) - mean H."""
    mean = [sum(column) / len(q) for column in zip(*q, strict=True)]
    return entropy(mean) - sum(map(entropy, q)) / len(q)


def divergence(q: list[Decimal], p: list[Decimal]) -> Decimal:
    """KL(q ‖ p)."""
    return sum(a * (a / b).ln() for a, b in zip(q, p, strict=True))


def of_linear_layer(logits: list[float], x: list[float]) -> dict[str, Decimal]:
    """Every score of a linear layer W x + b that has a closed form: ‖∇ log p_c‖ = ‖e_c - p‖
    sqrt(‖x‖² + 1).
    """
    p, c, z = probabilities(logits), len(logits), [Decimal(z) for z in logits]
    length = (sum(Decimal(v) ** 2 for v in x) + 1).sqrt()
    norms = [length * sum(((i == k) - p[i]) ** 2 for i in range(c)).sqrt() for k in range(c)]
    confounding = length * sum((1 / (1 + v.exp())) ** 2 for v in z).sqrt() / c
    from_uniform = sum(abs(q - Decimal(1) / c) for q in p)
    return {
        "msp": 1 - max(p),
        "entropy": entropy(p),
        "gen": sum((Decimal("0.1") * (q * (1 - q)).ln()).exp() for q in p),
        "energy": -sum(v.exp() for v in z).ln(),
        "max-logit": -max(z),
        "exgrad-v": -from_uniform,
        "gradnorm-huang": -from_uniform * sum(abs(Decimal(v)) for v in x),
        "heat": entropy(p).ln(),  # nothing comes before the classifier, so that T is 1
        "regrad": sum(q.sqrt() * n for q, n in zip(p, norms, strict=True)),
        "exgrad": sum(q * n for q, n in zip(p, norms, strict=True)),
        "ungrad": sum(norms) / c,
        "fisher": sum(q * n**2 for q, n in zip(p, norms, strict=True)),
        "isotropic": sum((q * n) ** 2 for q, n in zip(p, norms, strict=True)),
        "gradnorm": length * sum((Decimal(1) / c - q) ** 2 for q in p).sqrt(),
        "confounding-label": -confounding,
        "negrad": Decimal(0),
    }
