# %% [markdown]
"""A first look: train a small network on some handwritten digits, and ask what it does not know
about others.

    python examples/quickstart.py            (or cell by cell, in an editor that knows `# %%`)

The digits 0 to 6 of scikit-learn's bundled dataset are learnt; 7, 8 and 9 are never shown. A good
score is higher for them. Runs in a few seconds and needs no other data.
"""

# %% The data, and the paper's CNN trained on a part of it.
import torch

import qualms
from qualms.data import DATASETS, Images, load
from qualms.models.cnn import paper_cnn
from qualms.training import RECIPES, fit

KNOWN = 7
torch.manual_seed(0)
digits, normalization = (
    load("digits", split="train").convert(1, 16),
    DATASETS["digits"].normalization,
)


def some(wanted: torch.Tensor) -> Images:
    """The digits where this is true."""
    return digits.take(wanted.nonzero().squeeze(1))


assert digits.labels is not None
early = torch.arange(len(digits)) < 1000
learnt, test, unknown = (
    some(w)
    for w in (
        early & (digits.labels < KNOWN),
        ~early & (digits.labels < KNOWN),
        digits.labels >= KNOWN,
    )
)
model = paper_cnn(channels=1, size=16, classes=KNOWN)
fit(model, learnt, RECIPES["digits"].shortened(10), normalization)

# %% How well does each score tell the digits it has learnt from those it has not?
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
x_learnt, x_test, x_unknown = (
    normalization.apply(images.pixels) for images in (learnt, test, unknown)
)
batches, std = (
    list(x_learnt.split(256)),
    normalization.std,
)  # noise is in pixels from 0 to 1, and std scales it
inside, outside = (
    qualms.compare(model, x, specs, train=batches, pixel_std=std) for x in (x_test, x_unknown)
)
print(f"{len(test)} held-out digits from 0 to {KNOWN - 1}, {len(unknown)} from {KNOWN} to 9.\n")
print(f"{'score (higher = more uncertain)':34} AUROC, %")
for spec in specs:
    print(f"{spec:34} {100 * qualms.metrics.auroc(inside[spec], outside[spec]):5.1f}")

# %% Accept what the model knows.
threshold = qualms.Threshold.from_scores(inside[specs[0]], coverage=0.95)
passed = threshold.accept(outside[specs[0]]).float().mean()
print(f"\nAccepting 95 % of the digits it knows lets {passed:.0%} of the unknown ones through.")
