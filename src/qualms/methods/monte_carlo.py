"""What the scores over random draws share."""

from dataclasses import replace
from typing import Protocol

from qualms.methods.method import FEW, Method


class MonteCarlo(Method, Protocol):
    """A score over random draws of the input, the weights, or what lies between."""

    @property
    def draws(self) -> int:
        """N, how many."""
        ...

    @property
    def extra_passes(self) -> float:
        """A forward pass for each draw."""
        return float(self.draws)

    def quick(self) -> "MonteCarlo":
        """The same with two draws at most."""
        return replace(self, draws=min(self.draws, FEW))
