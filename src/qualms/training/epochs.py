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

# Seeds differ by purpose, so that random numbers do not coincide.
SPLIT, ORDER, DRAWS = range(3)


class TrainingRun:
    """The state of a training: model, optimizer and schedule, history and best weights so far.

    Args:
        model: the network, which is trained in place.
        recipe: the settings of optimizer and schedule.

    Attributes:
        optimizer: updates the model's parameters.
        schedule: changes the learning rate after each epoch.
        epoch: how many epochs are done.
        history: a row for each finished epoch.
        best_epoch: the epoch of the best weights; 0 before the first validation.
        best_accuracy: the accuracy of the best weights on the validation images; -1 before the
            first validation.
        best_state: the best weights by name.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.optimizer, self.schedule = _make_optimizer(model, recipe)
        self.epoch = 0
        self.history: list[dict[str, int | float]] = []
        self.best_epoch, self.best_accuracy = 0, -1.0
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
            The mean loss of the images.
        """
        assert images.labels is not None
        self.model.train()
        device = next(self.model.parameters()).device
        shuffle = generator(seed, ORDER, self.epoch)
        order = torch.randperm(len(images), generator=shuffle)
        draws = generator(seed, DRAWS, self.epoch)
        total = 0.0
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            # For the model's own dropout.
            torch.manual_seed(int(torch.randint(2**62, (), generator=draws)))
            for index in order.split(self.recipe.batch):
                if len(index) == 1 < len(images):
                    # One image is left out: batch normalization needs a variance.
                    continue
                x = normalization.apply(images.pixels[index])
                y = images.labels[index]
                if self.recipe.augment:
                    x = augment(x, draws)
                total += self._step(x.to(device), y.to(device)) * len(index)
        self.schedule.step()
        self.epoch += 1
        return total / len(images)

    def _step(self, x: Tensor, y: Tensor) -> float:
        """Take one step of the optimizer; return the mean loss of the batch before the step.

        Args:
            x: the inputs of the batch, on the model's device.
            y: the label of each input.
        """
        loss = F.cross_entropy(_logits(self.model, x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def remember_if_best(self, accuracy: float) -> None:
        """Keep a copy of the present weights if their accuracy is above that of all epochs before.

        The first of equally good epochs stays.

        Args:
            accuracy: the accuracy of the present weights on the validation images.
        """
        if accuracy > self.best_accuracy:
            self.best_epoch, self.best_accuracy = self.epoch, accuracy
            state = self.model.state_dict()
            self.best_state = {name: value.detach().clone() for name, value in state.items()}


def _make_optimizer(model: nn.Module, recipe: Recipe) -> tuple[torch.optim.Optimizer, Any]:
    """Build Adam with a cosine schedule, or SGD with momentum and drops of the learning rate.

    Returns:
        The optimizer, and the schedule, which takes one step an epoch.
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
def measure_accuracy(model: nn.Module, images: Images, normalization: Normalization) -> float:
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
    for index in torch.arange(len(images)).split(EVALUATION_BATCH):
        x = normalization.apply(images.pixels[index]).to(device)
        predicted = _logits(model, x).argmax(1).cpu()
        correct += int((predicted == images.labels[index]).sum())
    return correct / len(images)


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    """Compute the logits of a batch, after checking that they are one row for each input."""
    return validate_logits(call_model(model, x), len(x))
