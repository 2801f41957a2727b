"""What an engine hands on: one value for each input, direction and parameter."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass
class ClassNorms:
    """What an engine says of a batch, parameter by parameter, in order of first use.

    `values[name]` is [b, m]: ‖g‖ for l2, Σ|g| for l1, for each input and direction; for gram it is
    [b, m, m], the inner products between directions. In double precision: ‖g‖ of a confident
    prediction is zero in 32 bits.
    """

    values: dict[str, Tensor]
    logits: Float[Tensor, "b c"]
    general: set[str]  # parameters that no rule covered

    @classmethod
    def joined(cls, parts: "list[ClassNorms]") -> "ClassNorms":
        """All parts in one; a parameter that the logits of a part do not depend on has gradient
        zero there.
        """
        shapes = {name: value.shape[1:] for part in parts for name, value in part.values.items()}
        values = {
            name: torch.cat(
                [
                    p.values.get(
                        name, p.logits.new_zeros(len(p.logits), *shape, dtype=torch.double)
                    )
                    for p in parts
                ]
            )
            for name, shape in shapes.items()
        }
        return cls(
            values, torch.cat([p.logits for p in parts]), set().union(*(p.general for p in parts))
        )


def combine_parameters(values: Iterable[Tensor], kind: str) -> Tensor:
    """What several parameters have together: (Σ‖g‖²)^½ for l2, also where a square is zero in 64
    bits; else the sum.
    """
    return reduce(torch.hypot if kind == "l2" else torch.add, values)
