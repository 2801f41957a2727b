"""The epochs of a training run: train, measure, remember the best weights."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qualms.data import Images, Normalization
from qualms.gradients.model_input import call_model, validate_logits
from qualms.random import generator
from qualms.stream.sizes import EVALUATION_BATCH
from qualms.training.augment import augment
from qualms.training.recipes import Recipe

# Purposes of random generators, so that their numbers differ under one seed: the split of the
# images for validation, the order of an epoch's images, and all other draws of an epoch.
SPLIT, ORDER, DRAWS = range(3)


class TrainingRun:
    """The state of a training: model, optimizer and schedule, history and best weights so far.

    Args:
        model: the network, which is trained in place.
        recipe: the settings of optimizer and schedule.

    Attributes:
        optimizer: updates the model's parameters.
        schedule: changes the learning rate after each epoch.
        epoch: how many epochs are completed.
        history: a row for each finished epoch.
        best_epoch: the epoch of the best weights; 0 before the first validation.
        best_accuracy: the accuracy of the best weights on the validation images; -1 before the
            first validation.
        best_state: the best weights by name.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe
        self.optimizer, self.schedule = _make_optimizer(model, recipe)
        self.epoch = 0
        self.history: list[dict[str, int | float]] = []
        self.best_epoch = 0
        # Below every accuracy, so that the first epoch that is validated is kept.
        self.best_accuracy = -1.0
        self.best_state: dict[str, Tensor] = {}

    def train_epoch(
        self,
        images: Images,
        normalization: Normalization,
        seed: int,
    ) -> float:
        """Train for one epoch.

        Args:
            images: the training images, with labels.
            normalization: the mean and standard deviation that the images are normalized by.
            seed: decides the images' order, their augmentation and the model's dropout, together
                with the epoch's number.

        Returns:
            The sum of the images' losses, each taken before the step of its batch, divided by the
            number of images.
        """
        assert images.labels is not None
        self.model.train()
        device = next(self.model.parameters()).device
        shuffle = generator(seed, ORDER, self.epoch)
        order = torch.randperm(len(images), generator=shuffle)
        draws = generator(seed, DRAWS, self.epoch)
        loss_sum = 0.0
        # Restores the caller's global random generator in the end.
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            # The model's dropout draws from the global generator.
            torch.manual_seed(int(torch.randint(2**62, (), generator=draws)))
            for chosen in order.split(self.recipe.batch):
                if len(chosen) == 1 < len(images):
                    # A last batch of one image is left out: batch normalization needs a variance.
                    continue
                x = normalization.apply(images.pixels[chosen])
                y = images.labels[chosen]
                if self.recipe.augment:
                    x = augment(x, draws)
                loss_sum += self._step(x.to(device), y.to(device)) * len(chosen)
        self.schedule.step()
        self.epoch += 1
        return loss_sum / len(images)

    def _step(self, x: Tensor, y: Tensor) -> float:
        """Take one step of the optimizer; return the mean loss of the batch before the step.

        Args:
            x: the inputs of the batch, [n, c, h, w], on the model's device.
            y: the label of each input, [n].
        """
        loss = F.cross_entropy(_compute_logits(self.model, x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def remember_if_best(self, accuracy: float) -> None:
        """Copy the current weights to `best_state` if they are the best ones so far.

        Of equally good epochs, the first is kept.

        Args:
            accuracy: the accuracy of the current weights on the validation images.
        """
        if accuracy > self.best_accuracy:
            self.best_epoch = self.epoch
            self.best_accuracy = accuracy
            state = self.model.state_dict()
            # Cloned, since training goes on to change the model's own tensors.
            self.best_state = {name: value.detach().clone() for name, value in state.items()}


def _make_optimizer(
    model: nn.Module,
    recipe: Recipe,
) -> tuple[torch.optim.Optimizer, Any]:
    """Build Adam with a cosine schedule, or SGD with momentum and drops of the learning rate.

    Returns:
        The optimizer, and the schedule of its learning rate, which takes one step an epoch.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    schedulers = torch.optim.lr_scheduler
    optimizer: torch.optim.Optimizer
    if recipe.adam:
        optimizer = torch.optim.Adam(parameters, recipe.rate, weight_decay=recipe.decay)
        return optimizer, schedulers.CosineAnnealingLR(optimizer, recipe.epochs)
    optimizer = torch.optim.SGD(
        parameters,
        recipe.rate,
        momentum=recipe.momentum,
        weight_decay=recipe.decay,
    )
    return optimizer, schedulers.MultiStepLR(optimizer, list(recipe.drops))


@torch.no_grad()
def measure_accuracy(
    model: nn.Module,
    images: Images,
    normalization: Normalization,
) -> float:
    """Compute the share of images that a model classifies correctly, in evaluation mode.

    Args:
        model: the network; it is left in evaluation mode.
        images: the images, with labels.
        normalization: the mean and standard deviation that the images are normalized by.
    """
    assert images.labels is not None
    model.eval()
    device = next(model.parameters()).device
    correct = 0
    for chosen in torch.arange(len(images)).split(EVALUATION_BATCH):
        x = normalization.apply(images.pixels[chosen]).to(device)
        predicted = _compute_logits(model, x).argmax(1).cpu()
        correct += int((predicted == images.labels[chosen]).sum())
    return correct / len(images)


def _compute_logits(model: nn.Module, x: Tensor) -> Tensor:
    """Compute the logits of a batch, and check that they have a row for each input.

    Args:
        model: the network.
        x: the inputs, [n, c, h, w].

    Returns:
        The logits, [n, classes].
    """
    return validate_logits(call_model(model, x), len(x))
