"""What the engines have found out about a model, kept from its first batch for all that follow."""

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from qualms.errors import ProbabilitiesWarning, SlowWarning, reason
from qualms.gradients.fallback import Fallback
from qualms.gradients.precision import look_like_probabilities

T = TypeVar("T")
Key = tuple[Hashable, ...]  # what kind of finding, and what it is about
# findings of one kind: inputs may come in any number of shapes, and each look holds a few rows
MOST = 8


@dataclass
class PlanCache:
    """Findings about one model with its weights as they are; whoever holds it starts anew when the
    weights change.
    """

    found: dict[Key, Any] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)  # what the user has been warned of

    def get(self, key: Key) -> Any:
        """What is known of this, or None."""
        if key in self.found:
            self.found[key] = self.found.pop(key)  # the latest to be asked for
        return self.found.get(key)

    def keep(self, key: Key, found: Any) -> None:
        """Keep a finding; of those of one kind, the first part of the key, the one not asked for
        longest gives way.
        """
        self.found.pop(key, None)
        like = [other for other in self.found if other[0] == key[0]]
        for oldest in like[: max(0, len(like) + 1 - MOST)]:
            del self.found[oldest]
        self.found[key] = found

    def forget(self, key: Key) -> None:
        """Drop a finding that does not hold any more."""
        self.found.pop(key, None)

    def once(self, key: Key, find: Callable[[], T]) -> T:
        """What `find` says, asked the first time only."""
        if key not in self.found:
            self.keep(key, find())
        found: T = self.get(key)
        return found

    def warn_slow(self, error: Exception | Fallback) -> None:
        """Say why inputs run one at a time, once for each reason: it may be a defect, or a lack of
        memory.
        """
        why = error.reason if isinstance(error, Fallback) else reason(error)
        if why not in self.warned:
            self.warned.add(why)
            warnings.warn(
                f"the inputs are run one at a time, which is exact but slow, because {why}.",
                SlowWarning,
                stacklevel=2,
            )

    def warn_of_probabilities(self, logits: Tensor) -> None:
        """Warn once if what is taken for logits looks like probabilities."""
        if PROBABILITIES not in self.warned and look_like_probabilities(logits):
            self.warned.add(PROBABILITIES)
            warnings.warn(PROBABILITIES, ProbabilitiesWarning, stacklevel=2)


PROBABILITIES = (
    "the model's outputs look like probabilities (none is negative, and those of an input add up to 1), but are taken "
    "for logits; leave out its last softmax, or return the logarithm of the probabilities."
)
