"""`Scored`: what a scorer says of some inputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.threshold import Threshold


@dataclass(frozen=True, eq=False)
class Scored:
    """Scores of n inputs by method, with what the model predicts for them.

    Of a model that answers at many positions there is a number for each position: [n, tokens], [n,
    height, width].

    Args:
        scores: one number for each input, by method; higher always means more uncertain.
        errors: the standard errors of scores that are estimates, by a sketch or within a
            `tolerance`; 0 for others, and NaN where nobody knows it (`heat` with more than 17
            classes).
        probs: p(y | x).
        ids: the inputs' numbers, or names in their place.
        class_names: of the columns of `probs`, if they are known.
        threshold: the highest score of the first method that is accepted, if there is one.
        sketched: the methods whose scores are estimates, with standard errors.
        notes: what a method has to say of its scores, by method: such as that `heat` is the entropy
            here.
        classes: which classes `probs` are of, if these are not all: the likeliest ones at each
            position, and -1 where a position is masked and its scores are NaN.
        target_log_probs: log p of the targets at each position, if there were targets.
        sequence: ‖∇θ Σ_t log p(y_t)‖ of the targets y_t divided by their number, if there were
            targets, and a gradient score without modifiers whose tangents tell it.
        of_spans: the second axis of the scores counts spans of tokens.

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
        """The most probable class of each input."""
        return self.probs.argmax(-1) if self.classes is None else self.classes[..., 0]

    @property
    def confidence(self) -> Float[Tensor, "n ..."]:
        """The probability of each input's most probable class."""
        return self.probs.amax(-1)

    @property
    def predicted_names(self) -> list[Any]:
        """The most probable class of each input, or of each of its positions, by name; None where
        that is masked.
        """
        if self.class_names is None:
            raise QualmsError("the classes have no names; pass class_names= to Scorer.")
        return _named(self.prediction.tolist(), self.class_names)

    @property
    def accepted(self) -> Bool[Tensor, "n ..."]:
        """Which inputs the model can be trusted with: the first method's score is within the
        threshold.
        """
        if self.threshold is None:
            raise QualmsError(
                "there is no threshold to accept inputs by; pass threshold= to Scorer."
            )
        return self.threshold.accept(next(iter(self.scores.values())))

    def __len__(self) -> int:
        return len(self.probs)

    def __getitem__(self, index: Any) -> "Scored":
        """Some of the inputs: a slice, a mask, or their positions."""
        positions = _positions(index, len(self))
        at = torch.tensor(positions, dtype=torch.long, device=self.probs.device)
        return replace(
            self,
            scores={name: s[at] for name, s in self.scores.items()},
            errors={name: e[at] for name, e in self.errors.items()},
            probs=self.probs[at],
            ids=[self.ids[i] for i in positions],
            classes=None if self.classes is None else self.classes[at],
            target_log_probs=None if self.target_log_probs is None else self.target_log_probs[at],
            sequence=None if self.sequence is None else self.sequence[at],
        )

    def __add__(self, other: object) -> "Scored":
        return Scored.concatenated([self, other]) if isinstance(other, Scored) else NotImplemented

    @staticmethod
    def concatenated(parts: "Iterable[Scored]") -> "Scored":
        """All parts in one, in the order given; texts shorter than the longest are filled up with
        masked positions.
        """
        parts = list(parts)
        if not parts:
            raise QualmsError("there is no Scored to put together; pass at least one.")
        first = parts[0]
        for part in parts[1:]:
            if part._kind != first._kind:
                raise QualmsError(
                    f"two parts differ in their methods, classes or threshold ({part._kind} and {first._kind}); put "
                    "together what one scorer gave."
                )
        return replace(
            first,
            scores={name: _joined([part.scores[name] for part in parts]) for name in first.scores},
            errors={name: _joined([part.errors[name] for part in parts]) for name in first.errors},
            probs=_joined([part.probs for part in parts]),
            ids=[one for part in parts for one in part.ids],
            notes={name: note for part in parts for name, note in part.notes.items()},
            classes=_joined([part.classes for part in parts]),
            target_log_probs=_joined([part.target_log_probs for part in parts]),
            sequence=_joined([part.sequence for part in parts]),
        )

    @property
    def _kind(self) -> tuple[object, ...]:
        """What parts of one whole have in common."""
        at_positions = [t is not None for t in (self.classes, self.target_log_probs, self.sequence)]
        kind = (
            tuple(self.scores),
            self.probs.shape[-1],
            self.class_names,
            self.threshold,
            self.sketched,
        )
        return (*kind, *(at_positions if any(at_positions) else ()))

    @property
    def percentile(self) -> Float[Tensor, "n ..."]:
        """How many percent of the scores that the threshold was set on are lower than the first
        method's score.
        """
        if self.threshold is None:
            raise QualmsError(
                "there is no threshold to compare inputs with; pass threshold= to Scorer."
            )
        decides = next(iter(self.scores.values()))
        found = self.threshold.percentile(decides).view(decides.shape)
        return found.masked_fill(decides.isnan().to(found.device), torch.nan)

    def columns(self) -> dict[str, list[Any]]:
        """A table with a row for each input: `id`, `prediction`, `confidence` and `score_METHOD`
        for each method.

        A score that is an estimate has its standard error beside it, in `error_METHOD`. With a
        threshold follow `percentile`, if it holds the scores that it was set on, and `accepted`.
        Scores of many positions have a row for each that is not masked, with its `position`, or its
        `row` and `column`; scores of spans have a `span`.
        """
        decides = next(iter(self.scores.values()))
        rows = (
            (~decides.isnan()).nonzero() if decides.ndim > 1 else torch.arange(len(self))[:, None]
        )
        table: dict[str, list[Any]] = {"id": [self.ids[i] for i in rows[:, 0].tolist()]}
        whole = (
            decides.shape == self.prediction.shape and not self.of_spans
        )  # else of spans, or of whole texts
        for axis, name in enumerate(_axes(decides.ndim, whole), 1):
            table[name] = rows[:, axis].tolist()
        at = tuple(rows.to(decides.device).unbind(1))
        if whole:
            predicted = self.prediction[at].tolist()
            table["prediction"] = (
                _named(predicted, self.class_names) if self.class_names else predicted
            )
            table["confidence"] = self.confidence[at].tolist()
        for name, values in self.scores.items():
            table[f"score_{name}"] = values[at].tolist()
            if name in self.sketched:
                table[f"error_{name}"] = self.errors[name][at].tolist()
        if self.threshold is not None and self.threshold.reference:
            table["percentile"] = self.percentile.to(decides.device)[at].tolist()
        if self.threshold is not None:
            table["accepted"] = self.accepted[at].tolist()
        return table

    def to_arrow(self) -> Any:
        """`columns()` as a pyarrow.Table."""
        try:
            import pyarrow
        except ImportError:
            raise QualmsError(
                "to_arrow needs pyarrow; pip install '.[app]' in a clone of qualms."
            ) from None
        kinds = {
            "prediction": pyarrow.string() if self.class_names else pyarrow.int64(),
            "accepted": pyarrow.bool_(),
        }
        kinds |= dict.fromkeys(("position", "row", "column", "span"), pyarrow.int64())
        kinds["id"] = (
            pyarrow.int64() if all(isinstance(one, int) for one in self.ids) else pyarrow.string()
        )
        columns = self.columns()
        arrays = [
            pyarrow.array(values, kinds.get(name, pyarrow.float64()))
            for name, values in columns.items()
        ]
        return pyarrow.table(arrays, names=list(columns))

    def to_pandas(self) -> Any:
        """`columns()` as a pandas.DataFrame, with ids as its index."""
        try:
            import pandas
        except ImportError:
            raise QualmsError("to_pandas needs pandas; pip install pandas.") from None
        return pandas.DataFrame(self.columns()).set_index("id")


def require_names(names: tuple[str, ...] | None, classes: int) -> None:
    """An error if there are other names than classes."""
    if names is not None and len(names) != classes:
        raise QualmsError(
            f"there are {len(names)} class_names and {classes} logits; give one name for each class."
        )


def _named(classes: list[Any], names: tuple[str, ...]) -> list[Any]:
    """The names of classes in lists of lists; None for -1."""
    return [
        _named(c, names) if isinstance(c, list) else names[c] if c >= 0 else None for c in classes
    ]


def _axes(number: int, whole: bool) -> tuple[str, ...]:
    """What the axes of scores beyond the first are called."""
    if not whole:
        return ("span",)[: number - 1]
    return {1: (), 2: ("position",), 3: ("row", "column")}.get(
        number, tuple(f"axis_{i}" for i in range(1, number))
    )


def _joined(parts: Sequence[Any]) -> Any:
    """Tensors one after the other; where their second axes differ, those of tokens, shorter ones
    are filled up.
    """
    if parts[0] is None:
        return None
    if len({t.shape[1:] for t in parts}) == 1:
        return torch.cat(list(parts))
    if len({t.shape[2:] for t in parts}) > 1:
        raise QualmsError(
            f"positions of shapes {tuple(parts[0].shape[1:])} and {tuple(parts[-1].shape[1:])} do not fit together; "
            "keep them apart, as Scorer.stream does."
        )
    longest = max(t.shape[1] for t in parts)
    filled = []
    for t in parts:
        whole = t.new_full(
            (len(t), longest, *t.shape[2:]), torch.nan if t.is_floating_point() else -1
        )
        whole[:, : t.shape[1]] = t
        filled.append(whole)
    return torch.cat(filled)


def _positions(index: Any, length: int) -> list[int]:
    """The positions that a slice, a mask or a list of positions picks."""
    if isinstance(index, slice):
        return list(range(length))[index]
    found = np.asarray(index.cpu() if isinstance(index, Tensor) else index)
    found = found.astype(int) if found.size == 0 and found.ndim == 1 else found
    whole = found.dtype.kind == "b" and found.shape == (length,)
    numbers = found.dtype.kind in "iu" and found.ndim == 1
    if not whole and (not numbers or bool(((found < -length) | (found >= length)).any())):
        raise QualmsError(
            f"a Scored of {length} inputs is cut by a slice, a mask of as many entries, or a list of positions, not by "
            f"{index!r}; for one input use [3:4] or [[3]]."
        )
    return [int(i) for i in np.arange(length)[found]]
