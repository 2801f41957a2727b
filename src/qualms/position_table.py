"""`PositionTable`: predictions and scores at the positions of inputs, before they are reduced."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.precision import at_least_float32
from qualms.methods.at_positions import NOWHERE, position_blocks
from qualms.methods.divergence import log_softmax

TOP_CLASSES = 5  # the number of classes that are kept at every position


@dataclass(frozen=True)
class PositionTable:
    """Predictions and scores at the positions [*t] of one input, or [b, *t] of a batch.

    Attributes:
        probs: the probabilities of the k most probable classes, [*t, k].
        classes: the k most probable classes, [*t, k].
        scores: the scores by the name of the method, each [*t].
        errors: the standard errors of the scores by the name of the method, each [*t].
        target_log_probs: log p of the targets, [*t]; None if there are no targets.
        sequence: ‖∇θ Σ_t log p(y_t)‖ of the targets y_t divided by their number, one number for
            each input; None if it was not computed.
    """

    probs: Float[Tensor, "*t k"]
    classes: Int[Tensor, "*t k"]
    scores: dict[str, Tensor]
    errors: dict[str, Tensor]
    target_log_probs: Tensor | None = None
    sequence: Tensor | None = None

    @classmethod
    def of_logits(cls, logits: Float[Tensor, "t c"]) -> "PositionTable":
        """Create a table of the most probable classes at each position, without scores yet.

        Args:
            logits: the logits at t positions.
        """
        probs: list[Tensor] = []
        classes: list[Tensor] = []
        # Block by block, since probabilities in double precision take much memory.
        for block in position_blocks(*logits.shape):
            p = logits[block].double().softmax(-1)
            top = p.topk(min(TOP_CLASSES, logits.shape[1]))
            probs.append(top.values)
            classes.append(top.indices)
        # One row is enough to learn the dtype.
        dtype = at_least_float32(logits[:1]).dtype
        return cls(torch.cat(probs).to(dtype), torch.cat(classes), scores={}, errors={})

    def map(self, change: Callable[[Tensor], Tensor]) -> "PositionTable":
        """Apply a function to every tensor that has an axis of positions, and return the new table.

        Args:
            change: the function, from a tensor [*t] or [*t, k] to the new one.
        """
        log_probs = self.target_log_probs
        return PositionTable(
            change(self.probs),
            change(self.classes),
            scores={name: change(values) for name, values in self.scores.items()},
            errors={name: change(values) for name, values in self.errors.items()},
            target_log_probs=None if log_probs is None else change(log_probs),
            sequence=self.sequence,  # one number for each input, so without positions
        )

    def hide_positions(self, is_counted: Bool[Tensor, "b ..."]) -> "PositionTable":
        """Return a table with NaN, or class -1, at the positions that do not count.

        Args:
            is_counted: whether each position of b inputs counts.
        """

        def fill_uncounted(values: Tensor) -> Tensor:
            """Replace the values of uncounted positions, in a tensor with or without classes."""
            keep = is_counted if values.ndim == is_counted.ndim else is_counted.unsqueeze(-1)
            return values.masked_fill(~keep, missing_value(values))

        return self.map(fill_uncounted)

    @classmethod
    def join(
        cls,
        tables: "Sequence[PositionTable]",
        combine: Callable[[list[Tensor]], Tensor],
    ) -> "PositionTable":
        """Join the tables of several inputs, or of several positions of one input, into one table.

        Args:
            tables: tables with the scores of the same methods.
            combine: `torch.stack` for the tables of several inputs, or `torch.cat` for those of
                several positions of one input.
        """

        def combine_optional(parts: Iterable[Tensor | None]) -> Tensor | None:
            """Join an optional field of all tables; None if no table has it."""
            present = [part for part in parts if part is not None]
            return combine(present) if present else None

        scores: dict[str, Tensor] = {}
        errors: dict[str, Tensor] = {}
        for name in tables[0].scores:
            scores[name] = combine([t.scores[name] for t in tables])
            errors[name] = combine([t.errors[name] for t in tables])
        return cls(
            combine([t.probs for t in tables]),
            combine([t.classes for t in tables]),
            scores,
            errors,
            combine_optional(t.target_log_probs for t in tables),
            combine_optional(t.sequence for t in tables),
        )


def missing_value(values: Tensor) -> float:
    """Return the number that marks masked positions: NaN for floats, -1 for class indices."""
    return torch.nan if values.is_floating_point() else -1.0


def flatten_targets(targets: Int[Tensor, "..."], shape: torch.Size) -> Int[Tensor, " t"]:
    """Flatten the targets of one input, row by row, after checking that each position has one.

    Args:
        targets: the true class at each position, in the shape of the positions.
        shape: the shape of the positions in the model's output.

    Raises:
        QualmsError: if there is not one target for each position.
    """
    if targets.shape != shape:
        raise QualmsError(
            f"the targets of an input have shape {tuple(targets.shape)}, but the model predicts at "
            f"positions of shape {tuple(shape)}; pass one target per position."
        )
    return targets.flatten()


def log_probs_of_targets(
    logits: Float[Tensor, "t c"],
    targets: Int[Tensor, " t"],
) -> Float[Tensor, " t"]:
    """Compute log p of the target at each position; NaN where there is no target.

    Args:
        logits: the logits at t positions.
        targets: the class at each position, -100 (`NOWHERE`) for none.

    Returns:
        log p, computed in double precision, in the dtype of the logits but at least float32.
    """
    is_class = (targets >= 0) & (targets < logits.shape[1])
    invalid = targets[(targets != NOWHERE) & ~is_class]
    if len(invalid):
        raise QualmsError(
            f"a target is {int(invalid[0])}, but there are {logits.shape[1]} classes, numbered "
            "from 0."
        )
    parts: list[Tensor] = []
    for block in position_blocks(*logits.shape):
        # Positions without a target read class 0; `torch.where` below replaces that by NaN.
        class_indices = targets[block].clamp_min(0)[:, None]
        log_p = log_softmax(logits[block].double())
        parts.append(log_p.gather(-1, class_indices)[:, 0])
    log_probs = torch.where(targets >= 0, torch.cat(parts), torch.nan)
    # One row is enough to learn the dtype.
    return log_probs.to(at_least_float32(logits[:1]).dtype)
