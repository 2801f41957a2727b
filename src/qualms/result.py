"""`Scored`: the scores of some inputs, with the model's predictions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qualms.deprecated import RenamedAttribute
from qualms.errors import QualmsError
from qualms.threshold import Threshold

Table = dict[str, list[Any]]


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of n inputs by method, with what the model predicts for them.

    If the model answers at many positions, there is a number for each of them: [n, tokens] or [n,
    height, width].

    Args:
        scores: one number for each input, by method; higher always means more uncertain.
        errors: the standard errors of scores that are estimates, by a sketch or within a
            `tolerance`; 0 for others, and NaN where they are unknown (`heat` with more than 17
            classes).
        probs: p(y | x).
        ids: the inputs' numbers, or names in their place.
        class_names: the names of the classes, in the order of the logits, if they are known.
        threshold: the highest score of the first method that is accepted, if there is one.
        sketched: the names of the methods whose scores are estimates, with standard errors.
        notes: remarks of methods on their scores, such as that `heat` is the entropy here.
        classes: which classes the columns of `probs` belong to, if these are not all: the likeliest
            ones at each position, and -1 where a position is masked and its scores are NaN.
        target_log_probs: log p of the targets at each position, if there were targets.
        sequence: ‖∇θ Σ_t log p(y_t)‖ of the targets y_t divided by their number, if there were
            targets, and a gradient score without modifiers from whose tangents it follows.
        of_spans: whether the second axis of the scores counts spans of tokens.

    Example:
        ```python
        import torch
        import qualms

        model, animals = torch.nn.Linear(4, 3), ["cat", "dog", "bird"]
        scorer = qualms.Scorer(model, ["entropy", "regrad"], class_names=animals)
        part = scorer(torch.randn(5, 4)) + scorer(torch.randn(2, 4), first=5)
        print(len(part), part.ids, part.scores["regrad"], part.predicted_names)
        print(part[part.confidence > 0.5].to_arrow().column_names)
        ```
    """

    scores: dict[str, Float[Tensor, "n ..."]]
    errors: dict[str, Float[Tensor, "n ..."]]
    probs: Float[Tensor, "n ... c"]
    ids: Sequence[Any]
    class_names: tuple[str, ...] | None = None
    threshold: Threshold | None = None
    sketched: tuple[str, ...] = ()
    notes: dict[str, str] = field(default_factory=dict)
    classes: Int[Tensor, "n ... c"] | None = None
    target_log_probs: Float[Tensor, "n ..."] | None = None
    sequence: Float[Tensor, " n"] | None = None
    of_spans: bool = False

    @property
    def prediction(self) -> Int[Tensor, "n ..."]:
        """The most probable class of each input, or of each position; -1 where masked."""
        if self.classes is None:
            return self.probs.argmax(-1)
        # The classes of each position are sorted, the likeliest first.
        return self.classes[..., 0]

    @property
    def confidence(self) -> Float[Tensor, "n ..."]:
        """The probability of each input's most probable class."""
        return self.probs.amax(-1)

    @property
    def predicted_names(self) -> list[Any]:
        """The name of the most probable class of each input or position; None where masked."""
        if self.class_names is None:
            raise QualmsError("the classes have no names; pass class_names= to Scorer.")
        return _name_classes(self.prediction.tolist(), self.class_names)

    @property
    def accepted(self) -> Bool[Tensor, "n ..."]:
        """Whether the first method's score of each input is at most the threshold."""
        if self.threshold is None:
            raise QualmsError(
                "there is no threshold for accepting inputs; pass threshold= to Scorer."
            )
        return self.threshold.accept(self._first_scores)

    @property
    def percentile(self) -> Float[Tensor, "n ..."]:
        """What percentage of the threshold's calibration scores each score exceeds; NaN for NaN."""
        if self.threshold is None:
            raise QualmsError(
                "there is no threshold to compare inputs with; pass threshold= to Scorer."
            )
        scores = self._first_scores
        percentiles = self.threshold.percentile(scores).view(scores.shape)
        # `Threshold.percentile` gives a masked position, whose score is NaN, 100.
        return percentiles.masked_fill(scores.isnan().to(percentiles.device), torch.nan)

    @property
    def _first_scores(self) -> Float[Tensor, "n ..."]:
        """The scores of the first method, which the threshold is compared with."""
        return next(iter(self.scores.values()))

    def __len__(self) -> int:
        """Return n, the number of inputs."""
        return len(self.probs)

    def __getitem__(self, index: Any) -> "Scored":
        """Select some of the inputs by a slice, a mask, or a list of their indices."""
        indices = _to_indices(index, len(self))
        rows = torch.tensor(indices, dtype=torch.long, device=self.probs.device)
        return replace(
            self,
            scores={name: scores[rows] for name, scores in self.scores.items()},
            errors={name: errors[rows] for name, errors in self.errors.items()},
            probs=self.probs[rows],
            ids=[self.ids[i] for i in indices],
            classes=_take_rows(self.classes, rows),
            target_log_probs=_take_rows(self.target_log_probs, rows),
            sequence=_take_rows(self.sequence, rows),
        )

    def __add__(self, other: object) -> "Scored":
        """Concatenate two results of one scorer, as in `scorer(x) + scorer(y)`."""
        return Scored.concatenate([self, other]) if isinstance(other, Scored) else NotImplemented

    @staticmethod
    def concatenate(parts: "Iterable[Scored]") -> "Scored":
        """Join several `Scored` of one scorer, in the order given.

        Texts shorter than the longest are padded with masked positions.

        Args:
            parts: one or more parts, with the same methods, classes and threshold.
        """
        parts = list(parts)
        if not parts:
            raise QualmsError("the list of Scored to concatenate is empty; pass at least one.")
        first = parts[0]
        for part in parts[1:]:
            if part._layout != first._layout:
                raise QualmsError(
                    f"the parts differ in their methods, classes or threshold ({part._layout} and "
                    f"{first._layout}); concatenate results of the same scorer."
                )
        ids: list[Any] = []
        notes: dict[str, str] = {}
        for part in parts:
            ids.extend(part.ids)
            notes.update(part.notes)
        scores: dict[str, Tensor] = {}
        errors: dict[str, Tensor] = {}
        for name in first.scores:
            scores[name] = _join([part.scores[name] for part in parts])
            errors[name] = _join([part.errors[name] for part in parts])
        return replace(
            first,
            scores=scores,
            errors=errors,
            probs=_join([part.probs for part in parts]),
            ids=ids,
            notes=notes,
            classes=_join([part.classes for part in parts]),
            target_log_probs=_join([part.target_log_probs for part in parts]),
            sequence=_join([part.sequence for part in parts]),
        )

    concatenated = RenamedAttribute("concatenate")

    @property
    def _layout(self) -> tuple[object, ...]:
        """What two results must have in common to be concatenated: methods, classes, threshold,
        and which optional tensors they have.
        """
        layout = (
            tuple(self.scores),
            self.probs.shape[-1],
            self.class_names,
            self.threshold,
            self.sketched,
        )
        optional = (self.classes, self.target_log_probs, self.sequence)
        has_optional = tuple(tensor is not None for tensor in optional)
        # Left out if there are none, so that errors stay short.
        return (*layout, *has_optional) if any(has_optional) else layout

    def columns(self) -> Table:
        """Create a table with a row for each input, as lists by the name of the column.

        The columns are `id`, `prediction`, `confidence` and `score_METHOD` for each method; a score
        that is an estimate is followed by its standard error, `error_METHOD`. With a threshold come
        `percentile`, if it keeps the scores that it was calibrated on, and `accepted`. Scores at
        many positions have a row for each position that is not masked, with its `position`, or its
        `row` and `column`; scores of spans have a `span`.
        """
        scores = self._first_scores
        # For each row of the table, where its score stands in the tensor: [rows, axes].
        coordinates = torch.arange(len(self))[:, None]
        if scores.ndim > 1:
            coordinates = (~scores.isnan()).nonzero()
        # One tensor of indices for each axis, to index tensors like the scores.
        at = tuple(coordinates.to(scores.device).unbind(1))
        # A prediction belongs to a position, not to a span or a whole text.
        has_predictions = scores.shape == self.prediction.shape and not self.of_spans
        table: Table = {"id": [self.ids[i] for i in coordinates[:, 0].tolist()]}
        for axis, name in enumerate(_name_axes(scores.ndim, has_predictions), 1):
            table[name] = coordinates[:, axis].tolist()
        if has_predictions:
            predicted = self.prediction[at].tolist()
            if self.class_names:
                predicted = _name_classes(predicted, self.class_names)
            table["prediction"] = predicted
            table["confidence"] = self.confidence[at].tolist()
        for name, values in self.scores.items():
            table[f"score_{name}"] = values[at].tolist()
            if name in self.sketched:
                table[f"error_{name}"] = self.errors[name][at].tolist()
        if self.threshold is not None:
            if self.threshold.reference:
                table["percentile"] = self.percentile.to(scores.device)[at].tolist()
            table["accepted"] = self.accepted[at].tolist()
        return table

    def to_arrow(self) -> Any:
        """Convert `columns()` to a `pyarrow.Table`."""
        try:
            import pyarrow
        except ImportError:
            raise QualmsError(
                "to_arrow needs pyarrow; run pip install '.[app]' in a clone of qualms."
            ) from None
        ids_are_numbers = all(isinstance(input_id, int) for input_id in self.ids)
        # The types of columns by name; all others are float64.
        types = dict.fromkeys(("position", "row", "column", "span"), pyarrow.int64())
        types["id"] = pyarrow.int64() if ids_are_numbers else pyarrow.string()
        types["prediction"] = pyarrow.string() if self.class_names else pyarrow.int64()
        types["accepted"] = pyarrow.bool_()
        arrays = {}
        for name, values in self.columns().items():
            arrays[name] = pyarrow.array(values, types.get(name, pyarrow.float64()))
        return pyarrow.table(arrays)

    def to_pandas(self) -> Any:
        """Convert `columns()` to a `pandas.DataFrame`, with ids as its index."""
        try:
            import pandas
        except ImportError:
            raise QualmsError("to_pandas needs pandas; run pip install pandas.") from None
        return pandas.DataFrame(self.columns()).set_index("id")


def require_names(names: tuple[str, ...] | None, num_classes: int) -> None:
    """Raise an error if there are class names, but not one for each class.

    Args:
        names: the names of the classes; None if they have none.
        num_classes: the number of logits of the model.
    """
    if names is not None and len(names) != num_classes:
        raise QualmsError(
            f"there are {len(names)} class_names but {num_classes} logits; pass one name per class."
        )


def _name_classes(classes: list[Any], names: tuple[str, ...]) -> list[Any]:
    """Replace class indices in nested lists by the names of the classes, and -1 by None.

    Args:
        classes: class indices, or lists of them, nested as the axes of a tensor.
        names: the names of all classes.
    """
    named: list[Any] = []
    for entry in classes:
        if isinstance(entry, list):
            named.append(_name_classes(entry, names))
        else:
            named.append(names[entry] if entry >= 0 else None)
    return named


def _name_axes(ndim: int, has_predictions: bool) -> tuple[str, ...]:
    """Return a column name for each axis of a tensor of scores, except for the axis of inputs.

    Args:
        ndim: the number of axes, including the first, which counts the inputs.
        has_predictions: whether each score has a prediction; otherwise the scores are of spans, or
            of whole texts.
    """
    if not has_predictions:
        # Scores of whole texts have one axis, so no name.
        return ("span",)[: ndim - 1]
    known: dict[int, tuple[str, ...]] = {1: (), 2: ("position",), 3: ("row", "column")}
    return known.get(ndim) or tuple(f"axis_{i}" for i in range(1, ndim))


def _take_rows(tensor: Tensor | None, rows: Int[Tensor, " k"]) -> Tensor | None:
    """Select k rows of a tensor by their indices; return None for None."""
    return None if tensor is None else tensor[rows]


def _join(parts: Sequence[Any]) -> Any:
    """Concatenate tensors [n, tokens, …] along n; pad texts that are shorter than the longest.

    Args:
        parts: the tensors, with any n and, if they have a second axis, any number of tokens; or
            None for all.

    Returns:
        The concatenated tensor; None if the parts are None.
    """
    if parts[0] is None:
        return None
    if len({t.shape[1:] for t in parts}) == 1:
        return torch.cat(list(parts))
    # Only the axis of tokens can be padded.
    if len({t.shape[2:] for t in parts}) > 1:
        raise QualmsError(
            f"positions of shapes {tuple(parts[0].shape[1:])} and {tuple(parts[-1].shape[1:])} "
            "cannot be concatenated; keep them separate, as Scorer.stream does."
        )
    longest = max(t.shape[1] for t in parts)
    return torch.cat([_pad(t, longest) for t in parts])


def _pad(values: Tensor, length: int) -> Tensor:
    """Pad the second axis of a tensor with masked positions: NaN in floats, -1 in class indices.

    Args:
        values: the tensor, [n, tokens, …].
        length: the number of tokens in the result.
    """
    missing = torch.nan if values.is_floating_point() else -1
    padded = values.new_full((len(values), length, *values.shape[2:]), missing)
    padded[:, : values.shape[1]] = values
    return padded


def _to_indices(index: Any, length: int) -> list[int]:
    """Convert what a user put in brackets after a `Scored` to a list of indices from 0.

    Args:
        index: a slice, a mask with an entry for each input, or a list of indices; as a list, array
            or tensor.
        length: the number of inputs.

    Raises:
        QualmsError: if it is none of these, or if an index is out of range.
    """
    if isinstance(index, slice):
        return list(range(length))[index]
    array = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    if array.size == 0 and array.ndim == 1:
        # NumPy reads an empty list as floats.
        array = array.astype(int)
    is_mask = array.dtype.kind == "b" and array.shape == (length,)
    are_indices = array.dtype.kind in "iu" and array.ndim == 1
    if are_indices:
        are_indices = not bool(((array < -length) | (array >= length)).any())
    if not is_mask and not are_indices:
        raise QualmsError(
            f"a Scored of {length} inputs cannot be indexed by {index!r}; pass a slice, a mask of "
            "as many entries or a list of positions, or [3:4] or [[3]] for one input."
        )
    # Turns masks and negative indices into indices from 0.
    return [int(i) for i in np.arange(length)[array]]
