"""Training with a validation set that chooses the best epoch, and a file from which a killed run
goes on.

Every random choice of an epoch follows from the seed and the epoch's number, so a run that was
interrupted ends with the same weights, bit for bit, as one that was not (on the same machine and
with the same number of threads).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qualms.data import Images, Normalization
from qualms.disk import atomic_write, explain_write_failure, require_writable
from qualms.errors import QualmsError, reason
from qualms.gradients.model_input import call_model, validate_logits
from qualms.models.checkpoint import load_torch_file
from qualms.models.fingerprint import fingerprint
from qualms.progress import ProgressFn
from qualms.random import generator
from qualms.training.augment import augmented
from qualms.training.recipes import Recipe

SPLIT, ORDER, DRAWS = range(3)  # purposes of random numbers
EVALUATED_AT_ONCE = 500


@dataclass(frozen=True)
class Fitted:
    """How the training went: a row for each epoch, and the epoch whose weights the model has now.

    Example:
        ```python
        import torch
        from qualms.data import Images, Normalization
        from qualms.training import Recipe, fit

        pixels = torch.zeros(40, 1, 4, 4, dtype=torch.uint8)
        images = Images("squares", pixels, torch.arange(40) % 2)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        fitted = fit(model, images, Recipe(epochs=2, rate=0.1), Normalization((0.5,), (0.5,)))
        for row in fitted.history:
            print(row["epoch"], row["loss"], row["validation_accuracy"])
        ```
    """

    history: list[dict[str, int | float]]
    best_epoch: int
    validation_accuracy: float


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
) -> Fitted:
    """Train the model in place; it ends in evaluation mode, with the weights that did best on
    validation images.

    Args:
        model: where its parameters are is where the work is done. Its present weights are the
            start.
        images: training images with labels.
        recipe: how.
        normalization: what the model receives is normalized by it.
        validation: images to choose the best epoch by; by default the recipe's share of `images`.
        seed: decides the order of the images, their augmentation, and which ones are kept for
            validation.
        checkpoint: a file that is written after each epoch and holds the best weights as
            `state_dict`. If it is there, training goes on from it; if it is complete, nothing is
            computed.
        about: what else to write into it, such as the network's name.
        progress: called with ("epochs", done, epochs) after each.

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
        fitted = fit(model, images, Recipe(epochs=3, rate=0.1), Normalization((0.5,), (0.5,)))
        print(fitted.best_epoch, fitted.validation_accuracy)
        ```
    """
    if images.labels is None:
        raise QualmsError(f"{images.name} has no labels to learn from; pass images with labels.")
    if validation is None:
        images, validation = _split(images, recipe.validation, seed)
    settings = _settings(model, images, validation, recipe, normalization, seed)
    state = _Run(model, recipe)
    if checkpoint is not None:
        state.go_on_from(Path(checkpoint), settings)
        if state.epoch < recipe.epochs:
            require_writable(checkpoint)  # before there is an epoch to lose
    while state.epoch < recipe.epochs:
        loss = state.one_epoch(images, normalization, seed)
        row: dict[str, int | float] = {"epoch": state.epoch, "loss": loss}
        if state.epoch % recipe.validate_every == 0 or state.epoch == recipe.epochs:
            row["validation_accuracy"] = _accuracy(model, validation, normalization)
            state.remember_if_best(row["validation_accuracy"])
        state.history.append(row)
        if checkpoint is not None:
            state.write(Path(checkpoint), settings, about or {})
        if progress is not None:
            progress("epochs", state.epoch, recipe.epochs)
    model.load_state_dict(state.best_state)
    model.eval()
    return Fitted(state.history, state.best_epoch, state.best_accuracy)


class _Run:
    """What changes from epoch to epoch."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        parameters = [p for p in model.parameters() if p.requires_grad]
        if recipe.adam:
            self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
                parameters, recipe.rate, weight_decay=recipe.decay
            )
            self.schedule: Any = torch.optim.lr_scheduler.CosineAnnealingLR(
                self.optimizer, recipe.epochs
            )
        else:
            self.optimizer = torch.optim.SGD(
                parameters, recipe.rate, momentum=recipe.momentum, weight_decay=recipe.decay
            )
            self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, list(recipe.drops))
        self.epoch, self.history = 0, list[dict[str, int | float]]()
        self.best_epoch, self.best_accuracy = 0, -1.0
        self.best_state: dict[str, Tensor] = {}

    def one_epoch(self, images: Images, normalization: Normalization, seed: int) -> float:
        """Train for one epoch, in an order that the seed decides, and return the mean loss."""
        assert images.labels is not None
        self.model.train()
        device = next(self.model.parameters()).device
        order = torch.randperm(len(images), generator=generator(seed, ORDER, self.epoch))
        noise = generator(seed, DRAWS, self.epoch)
        total = 0.0
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
            torch.manual_seed(
                int(torch.randint(2**62, (), generator=noise))
            )  # for the model's own dropout
            for index in order.split(self.recipe.batch):
                if len(index) == 1 < len(images):
                    continue  # batch normalization has no variance to divide by
                x, y = normalization.apply(images.pixels[index]), images.labels[index].to(device)
                x = (augmented(x, noise) if self.recipe.augment else x).to(device)
                loss = F.cross_entropy(_logits(self.model, x), y)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += float(loss.detach()) * len(index)
        self.schedule.step()
        self.epoch += 1
        return total / len(images)

    def remember_if_best(self, accuracy: float) -> None:
        """The first of equally good epochs stays."""
        if accuracy > self.best_accuracy:
            self.best_epoch, self.best_accuracy = self.epoch, accuracy
            self.best_state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}

    def write(self, path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
        """The whole state, in one move: a file that is there is complete."""
        content = {
            **about,
            "state_dict": self.best_state,
            "settings": settings,
            "complete": self.epoch == self.recipe.epochs,
            "history": self.history,
            "best": {"epoch": self.best_epoch, "accuracy": self.best_accuracy},
            "resume": {
                "epoch": self.epoch,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
            },
        }
        if self.epoch == self.recipe.epochs:
            del content["resume"]
        with explain_write_failure(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as part, open(part, "wb") as file:
                torch.save(
                    content, file
                )  # not by its name: torch would not say what the disk refused

    def go_on_from(self, path: Path, settings: dict[str, Any]) -> None:
        """Take up the state of an earlier run with the same settings."""
        if not path.exists():
            return
        try:
            found = _contents(path)
            known = {**found["settings"]}
        except Exception:
            raise QualmsError(
                f"{path} is not a checkpoint of this training; choose another file."
            ) from None
        if known != settings:
            other = next(k for k in {**known, **settings} if known.get(k) != settings.get(k))
            raise QualmsError(
                f"{path} comes from a training with another {other} ({known.get(other)}, not {settings.get(other)}); "
                "choose another file, or delete it."
            )
        try:
            self._take(found)
        except Exception as error:
            raise QualmsError(
                f"{path} is damaged ({reason(error)}); delete it, and train anew."
            ) from None

    def _take(self, found: dict[str, Any]) -> None:
        """What a file holds; an error of any kind, before the model is changed, if it is not what
        `write` wrote.
        """
        best, rest = {**found["best"]}, {**found.get("resume", {})}
        self.epoch = self.recipe.epochs if found["complete"] is True else rest["epoch"]
        self.history, self.best_state = (
            [{**row} for row in found["history"]],
            {**found["state_dict"]},
        )
        self.best_epoch, self.best_accuracy = best["epoch"], best["accuracy"]
        epochs = (self.epoch, self.best_epoch)
        if not all(type(epoch) is int and 0 <= epoch <= self.recipe.epochs for epoch in epochs):
            raise ValueError(f"it is after the epochs {epochs}")
        if not -1 <= self.best_accuracy <= 1 or not _alike(
            self.best_state or self.model.state_dict(), self.model
        ):
            raise ValueError("its weights are not the network's")
        self.best_state = {
            name: t.detach() for name, t in self.best_state.items()
        }  # without hooks that a file may name
        if found["complete"] is not True:
            if not _alike(rest["model"], self.model):
                raise ValueError("its last weights are not the network's")
            _require_same_kinds(self.schedule.state_dict(), rest["schedule"])
            optimizer = {**rest["optimizer"]}
            _require_same_kinds(
                self.optimizer.state_dict()["param_groups"], optimizer["param_groups"]
            )
            shapes = [p.shape for group in self.optimizer.param_groups for p in group["params"]]
            for number, kept in optimizer["state"].items():
                if any(
                    isinstance(v, Tensor) and v.ndim and v.shape != shapes[number]
                    for v in kept.values()
                ):
                    raise ValueError("its optimizer is another network's")
            self.optimizer.load_state_dict(optimizer)
            self.schedule.load_state_dict(rest["schedule"])
            self.model.load_state_dict(rest["model"])


def trained_with(path: str | Path) -> Normalization | None:
    """The normalization that a checkpoint of `fit` was trained with; None for other files.

    Example:
        ```python
        import torch
        from qualms.data import Images, Normalization
        from qualms.training import Recipe, fit, trained_with

        pixels = torch.zeros(40, 1, 4, 4, dtype=torch.uint8)
        images = Images("squares", pixels, torch.arange(40) % 2)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
        recipe, scale = Recipe(epochs=1, rate=0.1), Normalization((0.5,), (0.25,))
        fit(model, images, recipe, scale, checkpoint="squares.pt")
        assert trained_with("squares.pt") == Normalization((0.5,), (0.25,))
        ```
    """
    try:
        found = {**_contents(Path(path))["settings"]}
        return Normalization(tuple(found["mean"]), tuple(found["std"]))
    except Exception:  # whatever is wrong with it is told by those who read its weights
        return None


def _contents(path: Path) -> dict[str, Any]:
    """What a file holds by name. A tensor would take a name too, with a warning of torch's."""
    return {**load_torch_file(path)}


def _alike(state: dict[str, Tensor], model: nn.Module) -> bool:
    """Whether these are tensors of the same names, shapes and types as the model's."""
    own = model.state_dict()
    return state.keys() == own.keys() and all(
        isinstance(state[k], Tensor) and (state[k].shape, state[k].dtype) == (v.shape, v.dtype)
        for k, v in own.items()
    )


def _require_same_kinds(ours: Any, theirs: Any) -> None:
    """An error if values that are there in both are of different kinds, or if keys differ."""
    number = isinstance(ours, (int, float)) and type(theirs) in (int, float)
    if type(ours) is not type(theirs) and not number:
        raise ValueError(
            f"it has a {type(theirs).__name__} in the place of a {type(ours).__name__}"
        )
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            raise ValueError("it has other settings")
        for key in ours:
            _require_same_kinds(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            _require_same_kinds(one, other)


def _split(images: Images, share: float, seed: int) -> tuple[Images, Images]:
    order = torch.randperm(len(images), generator=generator(seed, SPLIT))
    kept = max(1, round(share * len(images)))
    if kept >= len(images):
        raise QualmsError(
            f"{images.name} has {len(images)} images, too few to keep {share:.0%} for validation."
        )
    return images.take(order[kept:]), images.take(order[:kept])


def _settings(
    model: nn.Module,
    images: Images,
    validation: Images,
    recipe: Recipe,
    normalization: Normalization,
    seed: int,
) -> dict[str, Any]:
    """What decides the outcome, in types that a weights-only file holds."""
    data = {
        "images": images.fingerprint(),
        "validation": validation.fingerprint(),
        "start": fingerprint(model),
    }
    return {
        "seed": seed,
        **data,
        **asdict(recipe),
        "mean": normalization.mean,
        "std": normalization.std,
    }


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    return validate_logits(call_model(model, x), len(x))


@torch.no_grad()
def _accuracy(model: nn.Module, images: Images, normalization: Normalization) -> float:
    assert images.labels is not None
    model.eval()
    device = next(model.parameters()).device
    right = 0
    for index in torch.arange(len(images)).split(EVALUATED_AT_ONCE):
        x = normalization.apply(images.pixels[index]).to(device)
        right += int((_logits(model, x).argmax(1).cpu() == images.labels[index]).sum())
    return right / len(images)
