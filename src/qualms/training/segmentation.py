"""Training for segmentation: a class for every pixel, and pixels that do not count."""

import torch
import torch.nn.functional as F
from torch import nn

from qualms.data.normalization import Normalization
from qualms.data.scenes import IGNORED, Scenes
from qualms.deprecated import renamed_arguments
from qualms.progress import ProgressFn
from qualms.random import generator
from qualms.training.recipes import Recipe

RECIPE = Recipe(epochs=6, rate=5e-3, batch=8, adam=True, decay=0.0)


@renamed_arguments(normalisation="normalization", tell="progress")
def fit_scenes(
    model: nn.Module,
    scenes: Scenes,
    normalization: Normalization,
    recipe: Recipe = RECIPE,
    *,
    seed: int = 0,
    progress: ProgressFn | None = None,
) -> list[float]:
    """Train a model for segmentation in place, with Adam; it ends in evaluation mode.

    The rate falls along a cosine; there is no validation, so the last weights stay. Pixels labeled
    `IGNORED` do not count.

    Args:
        model: images [n, 1, h, w] in, logits [n, classes, h, w] out.
        scenes: the scenes to train on.
        normalization: the mean and standard deviation that the scenes' pixels are normalized by.
        recipe: the learning rate, epochs, batch size and weight decay.
        seed: decides the order of the scenes.
        progress: called with ("epochs", done, epochs) after each epoch.

    Returns:
        The mean loss of each epoch.
    """
    optimizer = torch.optim.Adam(model.parameters(), recipe.rate, weight_decay=recipe.decay)
    steps = recipe.epochs * -(-len(scenes) // recipe.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses = []
    model.train()
    for epoch in range(recipe.epochs):
        total = 0.0
        order = torch.randperm(len(scenes), generator=generator(seed, epoch))
        for index in order.split(recipe.batch):
            logits = model(normalization.apply(scenes.pixels[index]))
            loss = F.cross_entropy(logits, scenes.labels[index], ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(index)
        losses.append(total / len(scenes))
        if progress is not None:
            progress("epochs", epoch + 1, recipe.epochs)
    model.eval()
    return losses
