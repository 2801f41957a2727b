"""Proposition 3: with enough data around x and a network that fits it, ∂ log p(y|x,θ*) / ∂θ is 0 at
x and near it.

Small ReLU networks, trained here on clusters of points, and the norms of their class gradients g_c
= ∂ log p_c / ∂θ. The bias of the last layer alone gives ‖g_c‖ ≥ ‖e_c - p‖, so that g_y = 0 needs
p_y = 1, which no finite θ reaches.
"""

import torch
from torch import Tensor, nn

import qualms
from qualms.random import generator

SCORES = ["exgrad", "regrad", "ungrad"]
CENTRES = 3 * torch.tensor([[0.0, 1.0], [-0.87, -0.5], [0.87, -0.5]], dtype=torch.double)
STEPS = (10, 30, 100, 300, 1000)
AMBIGUOUS_SIZES = (90, 900, 5400)
DISTANCES = (1.0, 2.0, 5.0, 10.0, 30.0, 100.0)


def clusters(count: int, seed: int, spread: float = 0.4) -> tuple[Tensor, Tensor]:
    """Three round clusters, each a class of its own."""
    y = torch.arange(count) % 3
    return CENTRES[y] + spread * torch.randn(
        count, 2, generator=generator(seed, 1), dtype=torch.double
    ), y


def perceptron(inputs: int, width: int, classes: int, seed: int) -> nn.Sequential:
    """Two hidden layers of ReLUs, or none if the width is 0."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if width == 0:
            return nn.Sequential(nn.Linear(inputs, classes)).double()
        hidden = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*hidden, nn.Linear(width, classes)).double()


def train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
) -> torch.optim.Optimizer:
    """Adam on all the data at once; the optimizer comes back, to go on with."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


def mean_gradient(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The norm of the gradient of the mean of log p(y|x) over the training data: what an optimum
    makes 0.
    """
    loss = nn.functional.cross_entropy(model(x), y)
    return float(
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    )


def label_norms(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """‖g_y‖ over all weights, for each input's own label y."""
    norms = qualms.class_gradient_norms(model, x).norms.square().sum(-1).sqrt()
    return norms[torch.arange(len(y)), y]


def smallest_possible(probs: Tensor) -> Tensor:
    """Σ_c p_c ‖e_c - p‖: what the last layer's bias alone adds to ExGrad, whatever the rest of the
    network is.
    """
    apart = torch.eye(probs.shape[1], dtype=probs.dtype) - probs[:, None]
    return (probs * apart.norm(dim=-1)).sum(-1)


def training_goes_on(steps: tuple[int, ...] = STEPS, seed: int = 0) -> dict[str, list[float]]:
    """Medians over fresh points of the training clusters, and `near` them (0.2 away), as training
    goes on.

    `label` is ‖g_y‖; `weights` the norm of θ, which keeps growing: the optimum is at infinity.
    """
    (x, y), (fresh, label) = clusters(300, seed), clusters(90, seed + 1)
    shift = torch.randn(fresh.shape, generator=generator(seed, 2), dtype=torch.double)
    near = fresh + 0.2 * shift / shift.norm(dim=1, keepdim=True)
    model, done, optimizer = perceptron(2, 32, 3, seed), 0, None
    rows: dict[str, list[float]] = {key: [] for key in ("label", "near", *SCORES, "weights")}
    for goal in steps:
        optimizer = train(model, x, y, goal - done, optimizer)
        done = goal
        rows["label"].append(float(label_norms(model, fresh, label).median()))
        rows["near"].append(float(label_norms(model, near, label).median()))
        for name, values in qualms.compare(model, fresh, SCORES).items():
            rows[name].append(float(values.median()))
        rows["weights"].append(
            float(torch.cat([p.detach().flatten() for p in model.parameters()]).norm())
        )
    return rows


def ambiguous(
    sizes: tuple[int, ...] = AMBIGUOUS_SIZES, flips: float = 0.3, seed: int = 0
) -> dict[str, list[float]]:
    """The labels of class 0 are class 1 instead with probability 0.3, however much data there is.

    At fresh points of that cluster: `mean`, the norm of the gradient averaged over the training
    data (what training makes vanish), `label` (median ‖g_y‖ for the more probable class), `exgrad`,
    `least` (its lower bound), and `error`, how far p is from the true (0.7, 0.3, 0). `clean` is
    ExGrad at the cluster whose labels are sure.
    """
    truth = torch.tensor([1 - flips, flips, 0.0], dtype=torch.double)
    rows: dict[str, list[float]] = {
        key: [] for key in ("mean", "label", "exgrad", "least", "error", "clean")
    }
    for size in sizes:
        x, y = clusters(size, seed)
        flipped = (y == 0) & (torch.rand(size, generator=generator(seed, 3)) < flips)
        model = perceptron(2, 8, 3, seed)
        given = torch.where(flipped, 1, y)
        train(model, x, given, 600)
        rows["mean"].append(mean_gradient(model, x, given))
        fresh, label = clusters(90, seed + 1)
        unsure = fresh[label == 0]
        probs = model(unsure).softmax(-1).detach()
        rows["label"].append(float(label_norms(model, unsure, label[label == 0]).median()))
        rows["exgrad"].append(float(qualms.score(model, unsure, "exgrad").median()))
        rows["least"].append(float(smallest_possible(probs).median()))
        rows["error"].append(float((probs - truth).abs().max(1).values.median()))
        rows["clean"].append(float(qualms.score(model, fresh[label == 2], "exgrad").median()))
    return rows


def too_small(seed: int = 0) -> dict[str, float]:
    """A linear model on two classes of which each has two opposite corners: trained to the optimum,
    it knows nothing.

    `mean` is the norm of the mean gradient, `label` the median norm of a single one.
    """
    y = torch.arange(200) % 2
    corner = torch.tensor([[2.0, 2.0], [2.0, -2.0], [-2.0, -2.0], [-2.0, 2.0]], dtype=torch.double)
    x = corner[torch.arange(200) % 4] + 0.3 * torch.randn(
        200, 2, generator=generator(seed, 4), dtype=torch.double
    )
    model = perceptron(2, 0, 2, seed)
    train(model, x, y, 800)
    return {"mean": mean_gradient(model, x, y), "label": float(label_norms(model, x, y).median())}


def wrong_labels(steps: int = 500, share: float = 0.1, seed: int = 0) -> dict[str, float]:
    """A wide network learns by heart 200 points in 10 dimensions, a tenth of them mislabeled.

    Medians of ‖g_y‖ at the mislabeled points for the wrong label (`wrong`) and for the true one
    (`true`), at the correctly labeled points (`right`), at points 1 away from the mislabeled ones
    for the learnt label (`near_wrong`), against the same around the correctly labeled
    (`near_right`).
    """
    noise = generator(seed, 5)
    y = torch.arange(200) % 2
    x = torch.randn(200, 10, generator=noise, dtype=torch.double)
    x[:, 0] += 3.0 * (2 * y - 1)
    wrong = torch.rand(200, generator=noise) < share
    given = torch.where(wrong, 1 - y, y)
    model = perceptron(10, 64, 2, seed)
    train(model, x, given, steps)
    shift = torch.randn(x.shape, generator=noise, dtype=torch.double)
    near = x + shift / shift.norm(dim=1, keepdim=True)
    at, at_true, around = (
        label_norms(model, x, given),
        label_norms(model, x, y),
        label_norms(model, near, given),
    )
    return {
        "wrong": float(at[wrong].median()),
        "true": float(at_true[wrong].median()),
        "right": float(at[~wrong].median()),
        "near_wrong": float(around[wrong].median()),
        "near_right": float(around[~wrong].median()),
    }


def far_away(distances: tuple[float, ...] = DISTANCES, seed: int = 0) -> dict[str, list[float]]:
    """Inputs in 60 directions, at multiples of the clusters' distance from the center: nothing like
    them was ever seen.

    `exgrad` and `regrad` are medians there, `below` the share of directions in which ExGrad is
    below its median at fresh points of the clusters (`known`).
    """
    model = perceptron(2, 32, 3, seed)
    train(model, *clusters(300, seed), 300)
    known = qualms.score(model, clusters(90, seed + 1)[0], "exgrad").median()
    angle = torch.arange(60, dtype=torch.double) * 2 * torch.pi / 60
    circle = 3 * torch.stack([angle.cos(), angle.sin()], 1)
    rows: dict[str, list[float]] = {
        "exgrad": [],
        "regrad": [],
        "below": [],
        "known": [float(known)],
    }
    for distance in distances:
        scores = qualms.compare(model, distance * circle, ["exgrad", "regrad"])
        rows["exgrad"].append(float(scores["exgrad"].median()))
        rows["regrad"].append(float(scores["regrad"].median()))
        rows["below"].append(float((scores["exgrad"] < known).double().mean()))
    return rows
