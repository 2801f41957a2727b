"""What forward passes leave on the modules of a model, and how it is removed again.

Passes replace attributes and buffers (caches, counters, hook-based weight_norm), add entries to
dictionaries and lists, and write to tensors, also through their `.data`. All of it is put back,
except for writes to parameters, of which there is no copy.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DICTS = (dict, OrderedDict, defaultdict)
OTHER_CONTAINERS = (list, set, deque)
ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))

Contents = list[tuple[Any, Any]]  # containers, each with a shallow copy of what is in it


class ModuleContainers:
    """The dictionaries, lists, sets and tensors in which modules keep things.

    Args:
        modules: all modules of a model.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # A script's attributes are not Python's; its buffers are restored like all others.
        python_modules = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        self.dicts: list[Any] = []
        attributes: list[Any] = []
        for m in python_modules:
            self.dicts += [d for d in (vars(m), m._parameters, m._buffers) if d]
            for name, value in vars(m).items():
                if name not in ATTRIBUTES_OF_EVERY_MODULE:
                    attributes.append(value)
        self.dicts += [value for value in attributes if type(value) in DICTS]
        self.others = [value for value in attributes if type(value) in OTHER_CONTAINERS]
        self.tensors = [value for value in attributes if isinstance(value, Tensor)]

    def copy_all(self) -> Contents:
        """The contents of all containers."""
        return [(container, container.copy()) for container in (*self.dicts, *self.others)]

    def copy_dicts(self) -> Contents:
        """The contents of attributes and dictionaries only, where modules keep caches.

        This is for every single pass: lists may be long, and passes are many.
        """
        return [(container, container.copy()) for container in self.dicts]


def restore_contents(contents: Contents) -> None:
    """Put back what has changed in the containers."""
    for container, before in contents:
        if _holds_same(container, before):
            continue
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(before)
        else:
            container.update(before)


def _holds_same(container: Any, before: Any) -> bool:
    if len(container) != len(before) or not all(map(is_, container, before)):
        return False
    if type(container) not in DICTS:
        return True
    return all(map(is_, container.values(), before.values()))


class TensorCopy(NamedTuple):
    """A tensor with its version counter and value at some moment."""

    tensor: Tensor
    version: int
    value: Tensor


def copy_tensors(tensors: Iterable[Tensor]) -> list[TensorCopy]:
    """Copies of tensors, one for each object; those on the meta device have no values."""
    distinct = {id(t): t for t in tensors if not t.is_meta}
    return [TensorCopy(t, _version(t), t.detach().clone()) for t in distinct.values()]


@torch.no_grad()
def restore_tensors(copies: Iterable[TensorCopy]) -> None:
    """Write back the values of tensors that have changed.

    Values are compared, not versions: a write to `.data` leaves the version as it was.
    """
    for copy in copies:
        if _differs(copy):
            copy.tensor.copy_(copy.value)


def _differs(copy: TensorCopy) -> bool:
    t, version, value = copy
    if t.layout == torch.strided:
        return not torch.equal(t, value)
    return _version(t) != version


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
