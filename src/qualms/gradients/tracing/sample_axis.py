"""Finds which entries of a tensor inside a model belong to which row of the batch.

Models move the batch axis ([time, batch, feature]), merge it with others ([batch · windows, …]) or
interleave it ([time · batch, feature]). A tensor from a pass over one row is compared with the same
tensor from a pass over two rows: the axis that doubles counts the rows, and the values of the first
row show in which order.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qualms.gradients.batch import NotBatchable

# Difference between a row's values alone and in a pair, as a share of the largest value.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Layout:
    """Which entries of a tensor belong to which row of the batch.

    Row r has the entries r·per_row + j of `axis` (j < per_row), or j·rows + r if interleaved.

    Args:
        axis: the axis that counts the rows; None if there is a single row, which owns the whole
            tensor, whatever its shape.
        rows: number of rows.
        per_row: number of entries of each row.
        interleaved: whether the entries of a row are `rows` apart, not next to each other.
    """

    axis: int | None = None
    rows: int = 1
    per_row: int = 1
    interleaved: bool = False

    def leading(self, t: Tensor) -> Tensor:
        """Move the row axis to the front, with a row's entries side by side: [rows·per_row, …]."""
        if self.axis is None:
            return t
        t = t.movedim(self.axis, 0)
        if self.interleaved:
            t = t.unflatten(0, (self.per_row, self.rows)).transpose(0, 1).flatten(0, 1)
        return t

    def part(self, t: Tensor, row: int) -> Tensor:
        """Select the part of one row, in the shape it has when the model runs on that row alone."""
        if self.axis is None:
            return t
        if self.interleaved:
            return t.unflatten(self.axis, (self.per_row, self.rows)).select(self.axis + 1, row)
        return t.narrow(self.axis, row * self.per_row, self.per_row)

    def join(self, parts: list[Tensor]) -> Tensor:
        """Put the parts of all rows together, in order: the inverse of `part`."""
        if self.axis is None:
            return parts[0]
        if self.interleaved:
            return torch.stack(parts, dim=self.axis + 1).flatten(self.axis, self.axis + 1)
        return torch.cat(parts, dim=self.axis)


def infer_layout(one: Tensor, two: Tensor, shape: torch.Size | None, rows: int) -> Layout | None:
    """Find which axis of a tensor counts the rows, by comparing a pass on one row with one on two.

    Args:
        one: the tensor when the model runs on the first row alone.
        two: the tensor when it runs on the first row and another one.
        shape: shape of the tensor in the batch, which must fit the layout; None if not known.
        rows: number of rows of the batch.

    Returns:
        The layout, or None if the tensor does not depend on the number of rows.

    Raises:
        NotBatchable: if no axis, or more than one, counts the rows.
    """
    if one.ndim != two.ndim:
        raise NotBatchable("the number of axes depends on the batch size")
    # Axes whose size depends on the number of rows.
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
    return Layout(axis, rows, per_row, interleaved=_is_interleaved(one, two, axis))


def _is_interleaved(one: Tensor, two: Tensor, axis: int) -> bool:
    """Whether the first row's entries alternate with the second's, instead of coming before them.

    Values that fit both orders, such as position ids, do not decide. The entries of a row are then
    assumed to be adjacent, as they are in nearly all models; if they are not, the later check of
    the first rows' gradients fails.

    Args:
        one: the tensor when the model runs on the first row alone.
        two: the tensor when the model runs on the first row and another one.
        axis: the axis that doubles from `one` to `two`.
    """
    _require(one.numel() > 0)
    per_row = one.shape[axis]
    first, pair = one.detach().double(), two.detach().double()
    max_difference = TOLERANCE * float(first.abs().max())

    def fits(layout: Layout) -> bool:
        """Whether the first row's part of the pair has the values of the first row alone."""
        return float((layout.part(pair, 0) - first).abs().max()) <= max_difference

    if fits(Layout(axis, 2, per_row)):
        return False
    _require(fits(Layout(axis, 2, per_row, interleaved=True)))
    return True


def _require(is_clear: bool) -> None:
    """Raise NotBatchable unless a condition for identifying the batch axis holds."""
    if not is_clear:
        raise NotBatchable("the batch axis of a tensor inside the model cannot be identified")
