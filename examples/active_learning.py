# %% [markdown]
"""Active learning in a loop of your own: label what the model knows least, and compare with
labeling at random.

    python examples/active_learning.py

Two seeds and few cycles, so that it runs in a minute: enough to see how it works, not to decide
which choice is better.
"""

# %% The data: a start of 20 labels, a pool to choose from, and a test set.
import torch
from torch import Tensor, nn

import qualms
from qualms.data import DATASETS, load
from qualms.metrics import accuracy
from qualms.models import load_model
from qualms.training import Recipe, fit

CYCLES, MORE = 3, 20
train, test, normalization = (
    load("digits", split="train"),
    load("digits"),
    DATASETS["digits"].normalization,
)
pool, validation = torch.arange(0, 800), train.take(slice(1000, 1400))
recipe = Recipe(epochs=30, rate=0.05, batch=16, validate_every=5)


def trained(labeled: Tensor, seed: int) -> nn.Module:
    """Train a new network on the labels so far."""
    torch.manual_seed(seed)
    model = load_model("digits-cnn")
    fit(model, train.take(labeled), recipe, normalization, validation=validation, seed=seed)
    return model


def judged(model: nn.Module) -> float:
    """Compute its accuracy on the test set."""
    with torch.no_grad():
        return accuracy(model(normalization.apply(test.pixels)), test.labels)


# %% The loop: train, choose, label.
for choice in ("at random", "most uncertain", "uncertain and different"):
    lines = []
    for seed in range(2):
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
        labeled, left = pool[order[:20]], pool[order[20:]]
        shares = []
        for _ in range(CYCLES + 1):
            model = trained(labeled, seed)
            shares.append(judged(model))
            inputs = normalization.apply(train.take(left).pixels)
            if choice == "at random":
                chosen = torch.arange(MORE)  # the pool is in random order already
            else:
                spread = None if choice == "most uncertain" else 3
                chosen = qualms.select(model, inputs, MORE, "regrad+layers", diversity=spread)
            keep = torch.ones(len(left), dtype=torch.bool).index_fill(0, chosen, False)
            labeled, left = torch.cat([labeled, left[chosen]]), left[keep]
        lines.append(shares)
    means = torch.tensor(lines).mean(0)
    print(
        f"{choice:24} accuracy after 20, 40, 60, 80 labels:",
        *(f"{100 * share:.1f} %" for share in means.tolist()),
    )
