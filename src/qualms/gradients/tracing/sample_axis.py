"""Finds which entries of a tensor inside a model belong to which row of the batch.

Models move the batch axis ([time, batch, feature]), merge it with others ([batch · windows, …]) or
interleave it ([time · batch, feature]). A tensor from a pass over one row is compared with the same
tensor from a pass over two rows: the axis that doubles is the batch axis, and the values of the
first row show in which order.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qualms.gradients.batch import NotBatchable

# The largest difference allowed between a row's values in a pass on that row alone and in a pass on
# two rows, as a share of the row's largest value.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class Layout:
    """Which entries of a tensor belong to which row of the batch.

    Along `axis`, entry j of row r (j < entries_per_row) has the index r·entries_per_row + j, or
    j·num_rows + r if the rows are interleaved.

    Args:
        axis: the batch axis; None if there is a single row, which owns the whole tensor, whatever
            its shape.
        num_rows: number of rows of the batch.
        entries_per_row: number of entries that each row has along `axis`.
        is_interleaved: whether the entries of a row are `num_rows` apart, not next to each other.
    """

    axis: int | None = None
    num_rows: int = 1
    entries_per_row: int = 1
    is_interleaved: bool = False

    def rows_first(self, t: Tensor) -> Tensor:
        """Move the batch axis to the front, with a row's entries next to each other.

        Returns:
            The tensor as [num_rows·entries_per_row, *other axes]; unchanged if `axis` is None.
        """
        if self.axis is None:
            return t
        t = t.movedim(self.axis, 0)
        if self.is_interleaved:
            by_entry_and_row = t.unflatten(0, (self.entries_per_row, self.num_rows))
            t = by_entry_and_row.transpose(0, 1).flatten(0, 1)
        return t

    def select_row(self, t: Tensor, row: int) -> Tensor:
        """Select the part of one row, in the shape it has when the model runs on that row alone.

        Args:
            t: a tensor with this layout.
            row: index of the row.
        """
        if self.axis is None:
            return t
        if self.is_interleaved:
            by_entry_and_row = t.unflatten(self.axis, (self.entries_per_row, self.num_rows))
            return by_entry_and_row.select(self.axis + 1, row)
        return t.narrow(self.axis, row * self.entries_per_row, self.entries_per_row)

    def join_rows(self, row_parts: list[Tensor]) -> Tensor:
        """Join the parts of all rows to one tensor: the inverse of `select_row`.

        Args:
            row_parts: the part of each row, in order.
        """
        if self.axis is None:
            return row_parts[0]
        if self.is_interleaved:
            return torch.stack(row_parts, dim=self.axis + 1).flatten(self.axis, self.axis + 1)
        return torch.cat(row_parts, dim=self.axis)


def infer_layout(
    one: Tensor,
    two: Tensor,
    shape: torch.Size | None,
    num_rows: int,
) -> Layout | None:
    """Find the batch axis of a tensor, by comparing a pass on one row with one on two.

    Args:
        one: the tensor when the model runs on the first row alone.
        two: the tensor when it runs on the first row and another one.
        shape: shape of the tensor in the batch, which must fit the layout; None if not known.
        num_rows: number of rows of the batch.

    Returns:
        The layout, or None if the tensor does not depend on the number of rows.

    Raises:
        NotBatchable: if it is not clear which axis is the batch axis.
    """
    if one.ndim != two.ndim:
        raise NotBatchable("the number of axes depends on the batch size")
    # The axes whose size depends on the number of rows.
    growing_axes = [axis for axis in range(one.ndim) if one.shape[axis] != two.shape[axis]]
    if not growing_axes:
        _require_clear(shape is None or shape == one.shape)
        return None
    axis = growing_axes[0]
    entries_per_row = one.shape[axis]
    _require_clear(len(growing_axes) == 1 and two.shape[axis] == 2 * entries_per_row)
    expected_shape = (*one.shape[:axis], num_rows * entries_per_row, *one.shape[axis + 1 :])
    _require_clear(shape is None or tuple(shape) == expected_shape)
    if entries_per_row == 1:
        return Layout(axis, num_rows)
    is_interleaved = _is_interleaved(one, two, axis)
    return Layout(axis, num_rows, entries_per_row, is_interleaved)


def _is_interleaved(one: Tensor, two: Tensor, axis: int) -> bool:
    """Whether the entries of two rows alternate along an axis, instead of row after row.

    If the values fit both orders, as position ids do, the entries of a row are assumed to be
    adjacent, as they are in nearly all models. If they are not, the check of the first rows'
    gradients in `gradients/plan.py` fails.

    Args:
        one: the tensor when the model runs on the first row alone.
        two: the tensor when the model runs on the first row and another one.
        axis: the axis that doubles from `one` to `two`.
    """
    _require_clear(one.numel() > 0)
    entries_per_row = one.shape[axis]
    # Converted, as booleans cannot be subtracted, and subtracting integers may overflow.
    first, pair = one.detach().double(), two.detach().double()
    max_difference = TOLERANCE * float(first.abs().max())

    def fits(layout: Layout) -> bool:
        """Whether a layout of the pair selects the values that the first row has alone."""
        return float((layout.select_row(pair, 0) - first).abs().max()) <= max_difference

    adjacent = Layout(axis, num_rows=2, entries_per_row=entries_per_row)
    if fits(adjacent):
        return False
    _require_clear(fits(replace(adjacent, is_interleaved=True)))
    return True


def _require_clear(is_clear: bool) -> None:
    """Raise NotBatchable unless a condition that identifies the batch axis of a tensor holds."""
    if not is_clear:
        raise NotBatchable("the batch axis of a tensor inside the model cannot be identified")
