"""Training for segmentation: a class for every pixel, and pixels that do not count."""

import math

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

    The learning rate falls along a cosine. There is no validation, so the weights of the last epoch
    are kept. Pixels labeled `IGNORED` do not count.

    Args:
        model: the model, from images [n, 1, h, w] to logits [n, classes, h, w].
        scenes: the scenes to train on.
        normalization: the mean and standard deviation that the scenes' pixels are normalized by.
        recipe: the learning rate, epochs, batch size and weight decay.
        seed: decides the order of the scenes.
        progress: called with ("epochs", done, epochs) after each epoch.

    Returns:
        The mean loss of each epoch.
    """
    optimizer = torch.optim.Adam(model.parameters(), recipe.rate, weight_decay=recipe.decay)
    steps_per_epoch = math.ceil(len(scenes) / recipe.batch)
    num_steps = recipe.epochs * steps_per_epoch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    epoch_losses = []
    model.train()
    for epoch in range(recipe.epochs):
        loss_sum = 0.0
        order = torch.randperm(len(scenes), generator=generator(seed, epoch))
        for chosen in order.split(recipe.batch):
            logits = model(normalization.apply(scenes.pixels[chosen]))
            loss = F.cross_entropy(logits, scenes.labels[chosen], ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += float(loss.detach()) * len(chosen)
        epoch_losses.append(loss_sum / len(scenes))
        if progress is not None:
            progress("epochs", epoch + 1, recipe.epochs)
    model.eval()
    return epoch_losses
