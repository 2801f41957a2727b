"""Training with a validation set that chooses the best epoch.

Every random choice of an epoch follows from the seed and the epoch's number, so a run that was
interrupted and resumed from its checkpoint ends with the same weights, bit for bit, as one that was
not (on the same machine and with the same number of threads).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qualms.data import Images, Normalization
from qualms.deprecated import renamed_arguments
from qualms.disk import require_writable
from qualms.errors import QualmsError
from qualms.models.fingerprint import fingerprint
from qualms.progress import ProgressFn
from qualms.random import generator
from qualms.training.epochs import SPLIT, TrainingRun, measure_accuracy
from qualms.training.recipes import Recipe
from qualms.training.resume import resume_run, write_run


@dataclass(frozen=True)
class TrainingResult:
    """The course of a training, and which weights it chose.

    Args:
        history: for each epoch its number and mean loss, and the accuracy on the validation images
            where it was measured.
        best_epoch: the epoch whose weights the model has now.
        validation_accuracy: the accuracy of these weights on the validation images.

    Example:
        ```python
        import torch
        from qualms.data import Images, Normalization
        from qualms.training import Recipe, fit

        pixels = torch.zeros(40, 1, 4, 4, dtype=torch.uint8)
        images = Images("squares", pixels, torch.arange(40) % 2)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        result = fit(model, images, Recipe(epochs=2, rate=0.1), Normalization((0.5,), (0.5,)))
        for row in result.history:
            print(row["epoch"], row["loss"], row["validation_accuracy"])
        ```
    """

    history: list[dict[str, int | float]]
    best_epoch: int
    validation_accuracy: float


@renamed_arguments(normalisation="normalization", tell="progress")
def fit(
    model: nn.Module,
    images: Images,
    recipe: Recipe,
    normalization: Normalization,
    *,
    validation: Images | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    about: dict[str, Any] | None = None,
    progress: ProgressFn | None = None,
) -> TrainingResult:
    """Train the model in place, and keep the weights that do best on validation images.

    The model ends in evaluation mode.

    Args:
        model: the network; training starts from its present weights, on their device.
        images: training images with labels.
        recipe: epochs, learning rate and other settings of the training.
        normalization: the mean and standard deviation that the model's inputs are normalized by.
        validation: images to choose the best epoch by; by default the recipe's share of `images`.
        seed: decides the order of the images, their augmentation, and which ones are kept for
            validation.
        checkpoint: a file that is written after each epoch and holds the best weights as
            `state_dict`. If the file exists, training resumes from it; if that training is
            complete, nothing is computed.
        about: more entries to write into the file, such as the network's name.
        progress: called with ("epochs", done, epochs) after each epoch.

    Returns:
        The losses and accuracies of the epochs, and which epoch's weights the model has now.

    Example:
        ```python
        import torch
        from qualms.data import Images, Normalization
        from qualms.training import Recipe, fit

        torch.manual_seed(0)
        labels = torch.arange(40) % 2
        # dark or bright:
        pixels = (200 * labels).to(torch.uint8).reshape(40, 1, 1, 1).expand(40, 1, 4, 4)
        images = Images("squares", pixels, labels)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        result = fit(model, images, Recipe(epochs=3, rate=0.1), Normalization((0.5,), (0.5,)))
        print(result.best_epoch, result.validation_accuracy)
        ```
    """
    if images.labels is None:
        raise QualmsError(f"{images.name} has no labels to learn from; pass images with labels.")
    if validation is None:
        images, validation = _split(images, recipe.validation, seed)
    settings = _describe_run(model, images, validation, recipe, normalization, seed)
    run = TrainingRun(model, recipe)
    if checkpoint is not None:
        resume_run(run, Path(checkpoint), settings)
        if run.epoch < recipe.epochs:
            # Checked now, before an epoch is trained that could not be saved.
            require_writable(checkpoint)
    while run.epoch < recipe.epochs:
        loss = run.train_epoch(images, normalization, seed)
        row: dict[str, int | float] = {"epoch": run.epoch, "loss": loss}
        if run.epoch % recipe.validate_every == 0 or run.epoch == recipe.epochs:
            row["validation_accuracy"] = measure_accuracy(model, validation, normalization)
            run.remember_if_best(row["validation_accuracy"])
        run.history.append(row)
        if checkpoint is not None:
            write_run(run, Path(checkpoint), settings, about or {})
        if progress is not None:
            progress("epochs", run.epoch, recipe.epochs)
    model.load_state_dict(run.best_state)
    model.eval()
    return TrainingResult(run.history, run.best_epoch, run.best_accuracy)


def _split(images: Images, share: float, seed: int) -> tuple[Images, Images]:
    """Split images at random into those to train on and those kept for validation.

    Args:
        images: all images.
        share: the share of the images that is kept for validation.
        seed: decides which images are kept.

    Returns:
        The images to train on, and those for validation.
    """
    order = torch.randperm(len(images), generator=generator(seed, SPLIT))
    num_validation = max(1, round(share * len(images)))
    if num_validation >= len(images):
        raise QualmsError(
            f"{images.name} has {len(images)} images, too few to keep {share:.0%} for validation; "
            "pass more images, or validation=."
        )
    return images.take(order[num_validation:]), images.take(order[:num_validation])


def _describe_run(
    model: nn.Module,
    images: Images,
    validation: Images,
    recipe: Recipe,
    normalization: Normalization,
    seed: int,
) -> dict[str, Any]:
    """Return the settings that decide the outcome of a training.

    They are saved in its checkpoint, and a training resumes only if they are equal. Their types are
    such that `torch.load(weights_only=True)` reads them.

    Args:
        model: the network with the weights that training starts from.
        images: the images to train on.
        validation: the images that choose the best epoch.
        recipe: the recipe of the training.
        normalization: the mean and standard deviation that the images are normalized by.
        seed: the seed of all random draws.
    """
    return {
        "seed": seed,
        "images": images.fingerprint(),
        "validation": validation.fingerprint(),
        "start": fingerprint(model),
        **asdict(recipe),
        "mean": normalization.mean,
        "std": normalization.std,
    }
