"""How the outputs of a model with many positions are read: logits for every token of a text, or for
every pixel.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.methods.at_positions import NOWHERE

# "mean", "max", "sum", or a quantile between 0 and 1.
Reduce = str | float | None
# For each input, where its spans start and end.
Spans = Sequence[Sequence[tuple[int, int]]]

_MANY_POSITIONS = "only for models that predict at many positions; pass class_dim=."


def next_tokens(ids: Int[Tensor, "b t"], mask: Tensor | None = None) -> Int[Tensor, "b t"]:
    """Return the token that follows each token of some texts, as `targets` of a language model.

    Args:
        ids: the token ids of the texts.
        mask: which tokens are not padding, as returned by tokenizers; None for no padding.

    Returns:
        The following token at each position, -100 where there is none.

    Example:
        ```python
        import torch
        import qualms

        assert qualms.next_tokens(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, -100]]
        ```
    """
    following = torch.full_like(ids, NOWHERE)
    following[:, :-1] = ids[:, 1:]
    if mask is not None:
        # Both the token and the one after it must be text, not padding.
        has_next = mask[:, 1:].bool() & mask[:, :-1].bool()
        following[:, :-1].masked_fill_(~has_next, NOWHERE)
    return following


@dataclass(frozen=True)
class Positions:
    """How a model's outputs at many positions are read, and at which positions scores are wanted.

    Attributes:
        class_dim: the axis of the classes in the model's logits.
        reduce: how the scores of an input's positions become one number; None keeps a score for
            each position.
        chosen: the indices of the positions to score, counted row by row; None for all positions.
        ignore_index: positions whose target is this number are not scored.
    """

    class_dim: int
    reduce: Reduce = None
    chosen: tuple[int, ...] | None = None
    ignore_index: int | None = None

    @classmethod
    def read(
        cls,
        class_dim: int | None,
        reduce: Reduce,
        chosen: Sequence[int] | None,
        ignore_index: int | None,
    ) -> "Positions | None":
        """Check the arguments of a `Scorer` that concern positions, and collect them.

        Args:
            class_dim: the axis of the classes in the model's logits; None if the model gives one
                output for each input.
            reduce: how the scores of an input's positions become one number.
            chosen: the indices of the positions to score; None for all positions.
            ignore_index: positions whose target is this number are not scored.

        Returns:
            The checked arguments; None if `class_dim` is None.
        """
        require_reduction(reduce)
        if class_dim is None:
            if (reduce, chosen, ignore_index) != (None, None, None):
                raise QualmsError(f"reduce, positions and ignore_index are {_MANY_POSITIONS}")
            return None
        if not isinstance(class_dim, int):
            raise QualmsError(
                f"class_dim={class_dim!r} is not a whole number; use -1 for language models."
            )
        if chosen is None:
            return cls(class_dim, reduce, None, ignore_index)
        if not chosen or not all(isinstance(position, int) for position in chosen):
            raise QualmsError(
                f"positions={list(chosen)!r} is not a list of whole numbers; pass one or more "
                "positions, numbered row by row."
            )
        return cls(class_dim, reduce, tuple(chosen), ignore_index)


@dataclass(frozen=True)
class PositionTargets:
    """The mask, targets and spans that come with the inputs, each with one entry for each input.

    Attributes:
        mask: which positions count; None for all.
        targets: the true class at each position, if known.
        spans: (start, end) of each span of tokens that gets one score; None without spans.
    """

    mask: Any = None
    targets: Any = None
    spans: Spans | None = None

    def require_use(self, positions: Positions | None) -> None:
        """Raise an error if the user passed a mask, targets or spans that would have no effect.

        Args:
            positions: how the scorer reads outputs, and at which positions it scores them; None if
                the model gives one output for each input.
        """
        if positions is None:
            if any(entry is not None for entry in self._by_name().values()):
                raise QualmsError(f"mask, targets and spans are {_MANY_POSITIONS}")
            return
        if self.spans is not None and positions.reduce is None:
            raise QualmsError(
                "spans need reduce=, which combines the scores of a span; pass mean, max, sum or a "
                "quantile."
            )
        if positions.chosen is None:  # all positions are scored
            return
        if self.spans is not None or self.targets is not None:
            raise QualmsError(
                "spans and targets are for scores at all positions; leave out positions=."
            )

    def require_no_more_than(self, inputs: int) -> None:
        """Raise an error if the mask, targets or spans have more entries than there are inputs.

        Args:
            inputs: the number of all inputs.
        """
        for name, entries in self._by_name().items():
            if entries is not None and len(entries) > inputs:
                raise QualmsError(
                    f"{name} has {len(entries)} entries, but there are {inputs} inputs; pass one "
                    "entry per input."
                )

    def select_inputs(self, start: int, end: int) -> "PositionTargets":
        """Return the entries of some consecutive inputs, with mask and targets as tensors.

        Args:
            start: the index of the first of these inputs.
            end: the index after the last of them.

        Raises:
            QualmsError: if there are fewer entries than `end`, or if targets are not integers.
        """
        for name, entries in self._by_name().items():
            if entries is not None and len(entries) < end:
                raise QualmsError(
                    f"{name} has {len(entries)} entries, but there are at least {end} inputs; pass "
                    "one entry per input."
                )
        mask = targets = spans = None  # what the user did not pass stays None
        if self.mask is not None:
            mask = torch.as_tensor(self.mask[start:end]).bool()
        if self.targets is not None:
            targets = torch.as_tensor(self.targets[start:end])
            if targets.is_floating_point():
                raise QualmsError(
                    f"targets are {targets.dtype}; pass the classes as whole numbers."
                )
        if self.spans is not None:
            spans = self.spans[start:end]
        return PositionTargets(mask, targets, spans)

    def _by_name(self) -> dict[str, Any]:
        """Return the mask, targets and spans by the names of the arguments that users pass."""
        return {"mask": self.mask, "targets": self.targets, "spans": self.spans}


def require_reduction(reduce: Any) -> None:
    """Raise an error unless `reduce` is None, `mean`, `max`, `sum` or a quantile."""
    is_quantile = isinstance(reduce, float) and 0 < reduce < 1
    if reduce is not None and reduce not in ("mean", "max", "sum") and not is_quantile:
        raise QualmsError(
            f"reduce={reduce!r} is invalid; choose mean, max, sum, or a quantile above 0 and "
            "below 1."
        )


def reduce_positions(
    values: Float[Tensor, "n ..."],
    reduce: str | float,
    spans: Spans | None = None,
) -> Float[Tensor, "n ..."]:
    """Reduce scores at positions to one number for each input, or for each span of an input.

    Masked positions have the score NaN and are left out; if all positions are masked, the number
    is NaN.

    Args:
        values: the scores at the positions of n inputs.
        reduce: `mean`, `max`, `sum`, or a quantile q between 0 and 1.
        spans: (start, end) of each span of each input, in tokens, the end excluded.

    Returns:
        Numbers of shape [n]; with spans [n, s], NaN after an input's last span.
    """
    require_reduction(reduce)
    if spans is None:
        return torch.stack([_reduce(input_scores.flatten(), reduce) for input_scores in values])
    _require_spans(spans, values)
    max_spans = max((len(input_spans) for input_spans in spans), default=0)
    # Inputs with fewer spans keep NaN after their last one.
    reduced = values.new_full((len(values), max_spans), math.nan)
    for i, input_spans in enumerate(spans):
        for j, (start, end) in enumerate(input_spans):
            reduced[i, j] = _reduce(values[i, start:end], reduce)
    return reduced


def _require_spans(spans: Spans, values: Float[Tensor, "n ..."]) -> None:
    """Raise an error unless there are spans for each input, all within its positions.

    Args:
        spans: (start, end) of each span of each input.
        values: the scores at the positions of the n inputs.
    """
    if values.ndim != 2 or len(spans) != len(values):
        raise QualmsError(
            f"there are spans for {len(spans)} inputs, but scores of shape {tuple(values.shape)}; "
            "pass one list of (start, end) pairs per text."
        )
    for input_spans in spans:
        for span in input_spans:
            if len(span) != 2:
                raise QualmsError(
                    "a span is not a pair of numbers; pass one list of (start, end) pairs per text."
                )
            start, end = span
            if not 0 <= start < end <= values.shape[1]:
                raise QualmsError(
                    f"the span from {start} to {end} is invalid for an input of {values.shape[1]} "
                    "positions; a span must start before it ends, within the input."
                )


def _reduce(values: Float[Tensor, " t"], reduce: str | float) -> Float[Tensor, ""]:
    """Reduce the scores that are not NaN to one number; NaN if there are none.

    Args:
        values: the scores at t positions, NaN where masked.
        reduce: `mean`, `max`, `sum`, or a quantile between 0 and 1.
    """
    unmasked = values[~values.isnan()]
    if len(unmasked) == 0:
        return values.new_tensor(math.nan)
    if isinstance(reduce, float):
        return unmasked.quantile(reduce)
    if reduce == "max":
        return unmasked.amax()
    return unmasked.sum() if reduce == "sum" else unmasked.mean()
