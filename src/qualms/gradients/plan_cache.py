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
# The kind of the cached value, such as "memory of a row", then what it depends on (shapes, names).
Key = tuple[Hashable, ...]
# The most values of one kind: plans hold traces, and samples may come in any number of shapes.
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
        entries: the cached values by key, the most recently used at the end.
        warned: the warnings that the user has already seen.
    """

    entries: dict[Key, object] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

    def get(self, key: Key, kind: type[T]) -> T | None:
        """Return the cached value of a key; None if there is no value of type `kind`."""
        if key not in self.entries:
            return None
        self._mark_as_used(key)
        value = self.entries[key]
        return value if isinstance(value, kind) else None

    def keep(self, key: Key, value: object) -> None:
        """Cache a value; if there are too many of its kind, drop the least recently used of them."""
        self.entries.pop(key, None)
        keys_of_kind = [cached for cached in self.entries if cached[0] == key[0]]
        num_excess = max(0, len(keys_of_kind) + 1 - MAX_PER_KIND)
        # Makes room for the new value; the least recently used come first.
        for excess_key in keys_of_kind[:num_excess]:
            del self.entries[excess_key]
        self.entries[key] = value

    def forget(self, key: Key) -> None:
        """Drop a cached value that does not hold for later batches."""
        self.entries.pop(key, None)

    def get_or_compute(self, key: Key, compute: Callable[[], T]) -> T:
        """Return the cached value of a key; call `compute` for it if there is none."""
        if key not in self.entries:
            self.keep(key, compute())
        self._mark_as_used(key)
        return cast(T, self.entries[key])

    def _mark_as_used(self, key: Key) -> None:
        """Move the value of a key to the end: the most recently used."""
        self.entries[key] = self.entries.pop(key)

    def warn_slow(self, fallback: Fallback) -> None:
        """Warn that samples run one at a time, once for each reason of a fallback."""
        self._warn_once(
            fallback.reason,
            f"falling back to one sample at a time (exact, slow): {fallback.reason}.",
            SlowWarning,
        )

    def warn_of_probabilities(self, logits: Tensor) -> None:
        """Warn once if the model's outputs look like probabilities instead of logits."""
        if PROBABILITIES not in self.warned and look_like_probabilities(logits):
            self._warn_once(PROBABILITIES, PROBABILITIES, ProbabilitiesWarning)

    def _warn_once(self, cause: str, message: str, category: type[Warning]) -> None:
        """Issue a warning unless the user has already been warned of the same cause."""
        if cause not in self.warned:
            self.warned.add(cause)
            # The warning names the caller of the method that called this one.
            warnings.warn(message, category, stacklevel=3)
