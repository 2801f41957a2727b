# %% [markdown]
"""A first look: train a small network on some handwritten digits, and score what it does not know
about others.

    python examples/quickstart.py            (or cell by cell, in an editor that supports `# %%`)

The network is trained on the digits 0 to 6 of scikit-learn's bundled dataset and never sees 7, 8
and 9. A good score is higher for them. Runs in a few seconds and needs no other data.
"""

# %% The data, and the paper's CNN trained on a part of it.
import torch

import qualms
from qualms.data import DATASETS, Images, load
from qualms.models.cnn import paper_cnn
from qualms.training import RECIPES, fit

KNOWN = 7
torch.manual_seed(0)
digits = load("digits", split="train").convert(1, 16)
normalization = DATASETS["digits"].normalization


def take(wanted: torch.Tensor) -> Images:
    """The digits where this is true."""
    return digits.take(wanted.nonzero().squeeze(1))


assert digits.labels is not None
is_known = digits.labels < KNOWN
is_early = torch.arange(len(digits)) < 1000
train, test, unknown = take(is_early & is_known), take(~is_early & is_known), take(~is_known)
model = paper_cnn(channels=1, size=16, classes=KNOWN)
fit(model, train, RECIPES["digits"].shortened(10), normalization)

# %% How well does each score separate the digits it was trained on from the others?
specs = [
    "regrad+layers+smooth",
    "regrad",
    "exgrad",
    "entropy",
    "energy",
    "gen",
    "coherence",
    "laplace",
]
x_train = normalization.apply(train.pixels)
batches = list(x_train.split(256))
std = normalization.std  # noise is in pixels from 0 to 1, and std scales it
inside = qualms.compare(
    model, normalization.apply(test.pixels), specs, train=batches, pixel_std=std
)
outside = qualms.compare(
    model, normalization.apply(unknown.pixels), specs, train=batches, pixel_std=std
)
print(f"{len(test)} held-out digits from 0 to {KNOWN - 1}, {len(unknown)} from {KNOWN} to 9.\n")
print(f"{'score (higher = more uncertain)':34} AUROC, %")
for spec in specs:
    print(f"{spec:34} {100 * qualms.metrics.auroc(inside[spec], outside[spec]):5.1f}")

# %% Accept what the model knows.
threshold = qualms.Threshold.from_scores(inside[specs[0]], coverage=0.95)
passed = threshold.accept(outside[specs[0]]).float().mean()
print(f"\nAccepting 95 % of the digits it knows lets {passed:.0%} of the unknown ones through.")
