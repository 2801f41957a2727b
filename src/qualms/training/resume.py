"""The file from which an interrupted training resumes.

It is a checkpoint of torch's with the best weights as `state_dict`, the settings that decide the
outcome, and, until the training is complete, the state of model, optimizer and schedule. What is
read from it is checked before the model changes, as a file may be damaged or made to do harm.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qualms.data import Normalization
from qualms.disk import atomic_write, explain_write_failure
from qualms.errors import QualmsError, explain_failure, reason
from qualms.models.checkpoint import load_torch_file
from qualms.training.epochs import TrainingRun


def write_run(
    run: TrainingRun,
    path: Path,
    settings: dict[str, Any],
    about: dict[str, Any],
) -> None:
    """Write the state of a training to a checkpoint file, completely or not at all.

    Args:
        run: the state of the training.
        path: the path of the checkpoint file.
        settings: the settings that decide the outcome of the training, to compare when it resumes.
        about: more entries to write, such as the network's name.
    """
    is_complete = run.epoch == run.recipe.epochs
    content = {
        **about,
        "state_dict": run.best_state,
        "settings": settings,
        "complete": is_complete,
        "history": run.history,
        "best": {"epoch": run.best_epoch, "accuracy": run.best_accuracy},
    }
    if not is_complete:
        content["resume"] = {
            "epoch": run.epoch,
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "schedule": run.schedule.state_dict(),
        }
    with explain_write_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # An open file, not a path: given a path, torch hides why writing failed.
        with atomic_write(path) as part, open(part, "wb") as file:
            torch.save(content, file)


def resume_run(
    run: TrainingRun,
    path: Path,
    settings: dict[str, Any],
) -> None:
    """Restore the state of an earlier run from its checkpoint file, if the file exists.

    Args:
        run: a new run, before its first epoch; the state is restored into it.
        path: the path of the checkpoint file, which need not exist.
        settings: the settings that decide the outcome of the training.

    Raises:
        QualmsError: if the settings in the file differ, or if the file is damaged.
    """
    if not path.exists():
        return
    content, saved_settings = _read_run(path)
    for key in {**saved_settings, **settings}:
        if saved_settings.get(key) != settings.get(key):
            raise QualmsError(
                f"{path} comes from a training run with another {key} ({saved_settings.get(key)}, not "
                f"{settings.get(key)}); choose another file, or delete it."
            )

    def explain(error: Exception) -> QualmsError:
        """Create the error that the checkpoint file is damaged, with the reason and advice."""
        return QualmsError(f"{path} is damaged ({reason(error)}); delete it, and train again.")

    with explain_failure(explain):
        _restore(run, content)


def trained_with(path: str | Path) -> Normalization | None:
    """Read the normalization that a checkpoint of `fit` was trained with.

    Args:
        path: the path of the checkpoint.

    Returns:
        The normalization; None for other files. Damaged files also give None: reading
        their weights reports what is wrong.

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

    def explain(error: Exception) -> QualmsError:
        """Create an error of the class that is caught below, where its message is dropped."""
        return QualmsError(f"{path} names no normalization ({reason(error)}).")

    try:
        with explain_failure(explain):
            _, settings = _read_run(Path(path))
            return Normalization(tuple(settings["mean"]), tuple(settings["std"]))
    except QualmsError:
        return None


def _read_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint that `write_run` wrote.

    Returns:
        All entries of the checkpoint by name, and the one that holds the settings.

    Raises:
        QualmsError: if the file is not such a checkpoint.
    """

    def explain(_: Exception) -> QualmsError:
        """Create the error that the file is not a checkpoint of a training."""
        return QualmsError(f"{path} is not a checkpoint of this training run; choose another file.")

    with explain_failure(explain):
        # `{**…}` raises an error unless the content is a dict; a tensor would only warn when
        # indexed by a name.
        content = {**load_torch_file(path)}
        return content, {**content["settings"]}


def _restore(run: TrainingRun, content: dict[str, Any]) -> None:
    """Restore the state of a training from the entries that `write_run` wrote.

    Args:
        run: the run that gets the state; it has a model of the same architecture.
        content: the entries of the checkpoint file by name, which may be damaged.

    Raises:
        Exception: of any class, before the model is changed, if an entry is not what it should be.
    """
    is_complete = content["complete"] is True
    # `{**…}` raises an error unless the entry is a dict.
    best = {**content["best"]}
    resume_state = {**content.get("resume", {})}
    run.epoch = run.recipe.epochs if is_complete else resume_state["epoch"]
    run.history = [{**row} for row in content["history"]]
    run.best_epoch = best["epoch"]
    run.best_accuracy = best["accuracy"]
    for epoch in (run.epoch, run.best_epoch):
        if type(epoch) is not int or not 0 <= epoch <= run.recipe.epochs:
            raise ValueError(f"its epochs {(run.epoch, run.best_epoch)} are out of range")
    best_state = {**content["state_dict"]}
    # Before the first validation, the best accuracy is -1, and there are no best weights.
    is_accuracy = -1 <= run.best_accuracy <= 1
    if not is_accuracy or not _is_state_of(run.model, best_state or run.model.state_dict()):
        raise ValueError("its weights are not the network's")
    # `detach` drops backward hooks, which a harmful file may define.
    run.best_state = {name: value.detach() for name, value in best_state.items()}
    if is_complete:
        return
    if not _is_state_of(run.model, resume_state["model"]):
        raise ValueError("its last weights are not the network's")
    _require_same_types(run.schedule.state_dict(), resume_state["schedule"])
    optimizer = {**resume_state["optimizer"]}
    _require_optimizer_state(run.optimizer, optimizer)
    run.optimizer.load_state_dict(optimizer)
    run.schedule.load_state_dict(resume_state["schedule"])
    run.model.load_state_dict(resume_state["model"])


def _is_state_of(model: nn.Module, state: Mapping[str, Any]) -> bool:
    """Whether `state` has tensors of the same names, shapes and dtypes as the model's state."""
    own_state = model.state_dict()
    if state.keys() != own_state.keys():
        return False
    for name, own_value in own_state.items():
        value = state[name]
        if not isinstance(value, Tensor):
            return False
        if value.shape != own_value.shape or value.dtype != own_value.dtype:
            return False
    return True


def _require_optimizer_state(
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> None:
    """Raise a ValueError unless an optimizer can load a saved state.

    Args:
        optimizer: the optimizer that is to load the state.
        state: what the `state_dict` of an earlier optimizer returned, as read from a file.
    """
    _require_same_types(optimizer.state_dict()["param_groups"], state["param_groups"])
    # `state_dict` numbers parameters in this order.
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        for value in values.values():
            # Adam's step counts have no axes, unlike its averages, which have a parameter's shape.
            if isinstance(value, Tensor) and value.ndim and value.shape != shapes[index]:
                raise ValueError("its optimizer belongs to another network")


def _require_same_types(ours: Any, theirs: Any) -> None:
    """Raise a ValueError if nested values differ in type, in keys of dicts, or in length of lists.

    Values of other types could be loaded, and fail later, in training. Numbers and strings may
    differ in value; int and float count as one type.

    Args:
        ours: settings of this run: a number, a string, or a dict, list or tuple of settings.
        theirs: the same settings, as read from a file.
    """
    are_numbers = isinstance(ours, (int, float)) and type(theirs) in (int, float)
    if type(ours) is not type(theirs) and not are_numbers:
        raise ValueError(f"it has a {type(theirs).__name__} in place of a {type(ours).__name__}")
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            raise ValueError("it has other settings")
        for key in ours:
            _require_same_types(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        # `strict` raises a ValueError if the lengths differ.
        for our_item, their_item in zip(ours, theirs, strict=True):
            _require_same_types(our_item, their_item)
