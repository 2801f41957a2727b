"""A cache of what engines learn about a model from one batch, to reuse it for later batches."""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar, cast

from torch import Tensor

from qualms.errors import ProbabilitiesWarning, SlowWarning
from qualms.gradients.fallback import Fallback
from qualms.gradients.precision import look_like_probabilities

T = TypeVar("T")
# First the kind of the cached value, which decides its type; then what it depends on (shapes, names).
Key = tuple[Hashable, ...]
# The most values of a kind: plans hold traces, and samples may come in any number of shapes.
MAX_PER_KIND = 8
PROBABILITIES = (
    "the model's outputs look like probabilities (none is negative, and each row sums to 1), but "
    "are treated as logits; remove the final softmax, or return log-probabilities."
)


@dataclass
class PlanCache:
    """Cached plans and measurements of one model with its current weights.

    The owner of a cache replaces it when the weights change.

    Attributes:
        found: the cached values by key, the most recently used at the end.
        warned: the warnings that the user has already seen.
    """

    found: dict[Key, object] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def get(self, key: Key, kind: type[T]) -> T | None:
        """The cached value of a key; None if there is none of type `kind`."""
        if key in self.found:
            self.found[key] = self.found.pop(key)
        found = self.found.get(key)
        return found if isinstance(found, kind) else None

    def keep(self, key: Key, finding: object) -> None:
        """Cache a value; if its kind has too many, drop the least recently used."""
        self.found.pop(key, None)
        of_kind = [other for other in self.found if other[0] == key[0]]
        for oldest in of_kind[: max(0, len(of_kind) + 1 - MAX_PER_KIND)]:
            del self.found[oldest]
        self.found[key] = finding

    def forget(self, key: Key) -> None:
        """Drop a cached value that does not hold for later batches."""
        self.found.pop(key, None)

    def once(self, key: Key, find: Callable[[], T]) -> T:
        """The cached value of a key; computed by `find` the first time."""
        if key not in self.found:
            self.keep(key, find())
        self.found[key] = self.found.pop(key)
        return cast(T, self.found[key])

    def warn_slow(self, fallback: Fallback) -> None:
        """Warn that samples run one at a time; once for each reason."""
        self._warn_once(
            fallback.reason,
            f"falling back to one sample at a time (exact, slow): {fallback.reason}.",
            SlowWarning,
        )

    def warn_of_probabilities(self, logits: Tensor) -> None:
        """Warn once if the model's outputs look like probabilities instead of logits."""
        if PROBABILITIES not in self.warned and look_like_probabilities(logits):
            self._warn_once(PROBABILITIES, PROBABILITIES, ProbabilitiesWarning)

    def _warn_once(self, what: str, message: str, category: type[Warning]) -> None:
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(message, category, stacklevel=3)
