# %% [markdown]
"""Segmentation: a network classifies every pixel of a scene. Which pixels belong to something that
it has never seen?

    python examples/pixels.py [page.html]

A network learns scenes of the digits 0 to 7, in about a minute; letters are pasted into test scenes. A
good score is higher at their pixels. The page shows image, prediction and scores side by side.
Needs no other data.
"""

# %% A small U-Net, trained on scenes.
import sys

import torch

import qualms
from qualms.data import Images
from qualms.data.scenes import CLASSES, NORMALIZATION, UNKNOWN, scenes
from qualms.metrics import pixel_metrics
from qualms.models.fcn import FCN
from qualms.report.maps import Maps, write_maps
from qualms.training.segmentation import RECIPE, fit_scenes

torch.manual_seed(0)
model = FCN(classes=len(CLASSES))
fit_scenes(model, scenes(800, "train"), NORMALIZATION, RECIPE.shortened(5))

# %% Scores at every pixel: the classes are axis 1 of what the network returns.
methods = ["entropy", "energy", "gen", "regrad", "fisher"]
test = scenes(24, "test", unknown="letters")
scored = qualms.Scorer(model, methods, class_dim=1)(NORMALIZATION.apply(test.pixels))
known = test.labels < len(CLASSES)
right = (scored.prediction == test.labels)[known].double().mean()
print(f"{right:.1%} of {int(known.sum())} known pixels are predicted right")

# %% How well does each score separate the pixels of letters from all others?
print(
    f"\n{'score':10} {'AUROC':>7} {'AUPR':>7} {'FPR95':>7}   %, {int((test.labels == UNKNOWN).sum())} unknown pixels"
)
for method in methods:
    found = pixel_metrics(scored.scores[method], test.labels, unknown=UNKNOWN)
    print(f"{method:10}", *(f"{100 * value:7.1f}" for value in found.values()))

# %% Look at them.
page = write_maps(
    Maps(
        title="What a network for digits does not know about these scenes",
        images=Images("scenes", test.pixels, None),
        prediction=scored.prediction.numpy(),
        scores={method: scores.numpy() for method, scores in scored.scores.items()},
        labels=test.labels.numpy(),
        classes=CLASSES,
        unknown=(UNKNOWN,),
        about={"network": "a U-Net of 128,000 weights", "unknown objects": "letters"},
    ),
    sys.argv[1] if len(sys.argv) > 1 else "scenes.html",
)
print(f"\nopen {page}")
