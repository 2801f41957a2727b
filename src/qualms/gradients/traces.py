"""What forward passes leave on the modules of a model, and how it is taken off again.

Attributes and buffers are replaced (caches, counters, hook-based weight_norm), entries added to
dictionaries and lists, tensors written to, by their `.data` too. All of it is put back, except for
writes into parameters, of which there is no copy.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

DICTS = (dict, OrderedDict, defaultdict)
OTHERS = (list, set, deque)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ModuleSnapshot:
    """The places where modules keep things, whose contents can be noted and put back."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # A script's attributes are not Python's; its buffers are restored like all others.
        ours = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
        own = [
            value for m in ours for name, value in vars(m).items() if name not in OF_EVERY_MODULE
        ]
        self.dicts: list[Any] = [d for m in ours for d in (vars(m), m._parameters, m._buffers) if d]
        self.dicts += [value for value in own if type(value) in DICTS]
        self.others: list[Any] = [value for value in own if type(value) in OTHERS]
        self.tensors = [value for value in own if isinstance(value, Tensor)]

    def noted(self) -> list[tuple[Any, Any]]:
        """All places with what is in them."""
        return [(place, place.copy()) for place in (*self.dicts, *self.others)]

    def noted_before_a_pass(self) -> list[tuple[Any, Any]]:
        """Attributes and dictionaries alone, where caches are: lists may be long, and passes are
        many.
        """
        return [(place, place.copy()) for place in self.dicts]


def put_back(noted: list[tuple[Any, Any]]) -> None:
    """Places that have changed hold again what was noted."""
    for place, before in noted:
        if not _same(place, before):
            place.clear()
            (place.extend if isinstance(place, (list, deque)) else place.update)(before)


def _same(place: Any, before: Any) -> bool:
    if len(place) != len(before) or not all(map(is_, place, before)):
        return False
    return type(place) not in DICTS or all(map(is_, place.values(), before.values()))


Copies = list[tuple[Tensor, int, Tensor]]


def copies_of(tensors: list[Tensor]) -> Copies:
    """Tensors with their versions and values."""
    some = {id(t): t for t in tensors if not t.is_meta}
    return [(t, _version(t), t.detach().clone()) for t in some.values()]


@torch.no_grad()
def restore(copies: Copies) -> None:
    """Tensors that have changed get their values back. Values are compared: `.data` leaves the
    version as it was.
    """
    for t, version, value in copies:
        changed = not torch.equal(t, value) if t.layout == torch.strided else _version(t) != version
        if changed:
            t.copy_(value)


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version
