"""Which entries of a tensor inside a model belong to which row of the batch.

Models move the batch axis about ([time, batch, feature]), merge it with others ([batch · windows,
…]) or interleave it ([time · batch, feature]). The same operation seen on one row and on two rows
tells: the axis that doubles counts the rows, and the values of the first row tell the order inside
it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qualms.gradients.batch import NotBatchable


@dataclass(frozen=True)
class Layout:
    """Of `rows` rows, row r stands at entries r·per_row + j of `axis`, or at j·rows + r if
    interleaved (j < per_row).

    An axis of None means that there is a single row, which owns the whole tensor.
    """

    axis: int | None
    rows: int = 1
    per_row: int = 1
    interleaved: bool = False

    @classmethod
    def whole(cls) -> "Layout":
        """The layout of any tensor when the model runs on a single row."""
        return cls(None)

    def leading(self, t: Tensor) -> Tensor:
        """The tensor with its row axis first and the entries of a row next to each other:
        [rows·per_row, …].
        """
        if self.axis is None:
            return t
        t = t.movedim(self.axis, 0)
        if self.interleaved:
            t = t.unflatten(0, (self.per_row, self.rows)).transpose(0, 1).flatten(0, 1)
        return t

    def part(self, t: Tensor, row: int) -> Tensor:
        """What belongs to one row, shaped as if the model ran on that row alone."""
        if self.axis is None:
            return t
        if self.interleaved:
            return t.unflatten(self.axis, (self.per_row, self.rows)).select(self.axis + 1, row)
        return t.narrow(self.axis, row * self.per_row, self.per_row)

    def join(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `part`."""
        if self.axis is None:
            return parts[0]
        if self.interleaved:
            return torch.stack(parts, dim=self.axis + 1).flatten(self.axis, self.axis + 1)
        return torch.cat(parts, dim=self.axis)


def infer(one: Tensor, two: Tensor, shape: torch.Size | None, rows: int) -> Layout | None:
    """The layout of a tensor, seen on one row and on two; None if it does not depend on the number
    of rows.

    `shape` is the tensor's shape on `rows` rows, which must be what the layout says.
    """
    if one.ndim != two.ndim:
        raise NotBatchable("the number of axes depends on the batch size")
    grown = [axis for axis in range(one.ndim) if one.shape[axis] != two.shape[axis]]
    if not grown:
        _require(shape is None or shape == one.shape)
        return None
    axis = grown[0]
    per_row = one.shape[axis]
    _require(len(grown) == 1 and two.shape[axis] == 2 * per_row)
    expected = (*one.shape[:axis], rows * per_row, *one.shape[axis + 1 :])
    _require(shape is None or tuple(shape) == expected)
    if per_row == 1:
        return Layout(axis, rows)
    orders = [Layout(axis, 2, per_row), Layout(axis, 2, per_row, interleaved=True)]
    first, pair = one.detach().double(), two.detach().double()
    errors = [float((layout.part(pair, 0) - first).abs().max()) for layout in orders]
    scale = float(first.abs().max())
    close = [e <= 1e-2 * scale for e in errors]
    _require(any(close))
    # Values that fit both orders (positions, kinds of token) tell nothing: a row's entries then
    # follow each other, as they do in all but few models, and the check of the first rows'
    # gradients finds out if they do not.
    return Layout(axis, rows, per_row, interleaved=not close[0])


def _require(clear: bool) -> None:
    if not clear:
        raise NotBatchable("the rows of the batch cannot be told apart")
