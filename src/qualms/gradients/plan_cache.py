"""What the engines learn about a model from its first batch, kept for later batches."""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from torch import Tensor

from qualms.errors import ProbabilitiesWarning, SlowWarning
from qualms.gradients.fallback import Fallback
from qualms.gradients.precision import look_like_probabilities

T = TypeVar("T")
# The kind of a finding, which decides its type, and what it was found on.
Key = tuple[Hashable, ...]
# Samples may come in any number of shapes, and each plan holds traces of a few of them.
MAX_PER_KIND = 8
PROBABILITIES = (
    "the model's outputs look like probabilities (none is negative, and each row sums to 1), but "
    "are treated as logits; remove the final softmax, or return log-probabilities."
)


@dataclass
class PlanCache:
    """Findings about one model with its weights as they are.

    Whoever holds it makes a new one when the weights change.

    Attributes:
        found: the findings, the one asked for last at the end.
        warned: what the user has been warned of.
    """

    found: dict[Key, object] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def get(self, key: Key, kind: type[T]) -> T | None:
        """The finding of a key; None if there is none of this type."""
        if key in self.found:
            self.found[key] = self.found.pop(key)
        found = self.found.get(key)
        return found if isinstance(found, kind) else None

    def keep(self, key: Key, finding: object) -> None:
        """Keep a finding, and drop the least recently used one of its kind."""
        self.found.pop(key, None)
        of_kind = [other for other in self.found if other[0] == key[0]]
        for oldest in of_kind[: max(0, len(of_kind) + 1 - MAX_PER_KIND)]:
            del self.found[oldest]
        self.found[key] = finding

    def forget(self, key: Key) -> None:
        """Drop a finding that no longer holds."""
        self.found.pop(key, None)

    def once(self, key: Key, find: Callable[[], T]) -> T:
        """Return the cached value of a key; `find` computes it first if there is none."""
        if key not in self.found:
            self.keep(key, find())
        self.found[key] = self.found.pop(key)
        return cast(T, self.found[key])

    def warn_slow(self, fallback: Fallback) -> None:
        """Warn that samples run one at a time, once for each reason.

        The reason may be a defect, or a lack of memory.
        """
        self._warn_once(
            fallback.reason,
            f"falling back to one sample at a time (exact, slow): {fallback.reason}.",
            SlowWarning,
        )

    def warn_of_probabilities(self, logits: Tensor) -> None:
        """Warn once if what is treated as logits looks like probabilities."""
        if PROBABILITIES not in self.warned and look_like_probabilities(logits):
            self._warn_once(PROBABILITIES, PROBABILITIES, ProbabilitiesWarning)

    def _warn_once(self, what: str, message: str, category: type[Warning]) -> None:
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(message, category, stacklevel=3)
