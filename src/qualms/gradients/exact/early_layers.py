"""No passes through early layers that cannot matter: Σ_l a_l ‖g_l‖ without its first terms, within a stated tolerance.

The weights a_l = exp(λ(l - L)) fade towards the input, but norms may grow there, so what the first layers add is
measured, not assumed. The first chunk of inputs runs in full and tells how many layers add less than a quarter of the
tolerance, for every input and direction. In each further chunk a few full passes (the predicted class, a random
combination of all classes) must agree that they stay below the tolerance; else that chunk runs in full as well. That is
evidence, not proof: one class of many whose gradient alone is large in early layers can slip through.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.directions import DIRECTIONS, Cotangents, Directions, of_class
from qualms.gradients.exact.measure import Kind, measure
from qualms.gradients.layers import layer_weights
from qualms.gradients.measured import added_up
from qualms.gradients.watch.pieces import Piece
from qualms.gradients.watch.weights import Weights, roots

MARGIN = 4  # between what the first inputs show and what the others may do


@dataclass(frozen=True)
class Cutoff:
    """How much of Σ_l a_l ‖g_l‖ may be left out, and how parameters, in the model's order, make up layers."""

    tolerance: float
    lam: float
    group: Callable[[list[str]], list[list[str]]]
    kind: Kind

    def early(self, values: dict[str, Float[Tensor, "b m"]], order: list[str]) -> frozenset[str]:
        """The parameters of the first layers that together add little for every input and direction."""
        layers = self.group(order)
        shares = self._shares(values, layers)
        small = (shares <= self.tolerance / MARGIN).flatten(0, 1).all(0)
        number = int(small.long().cumprod(0).sum())
        return frozenset(name for names in layers[:number] for name in names)

    def holds(self, values: dict[str, Float[Tensor, "b m"]], order: list[str], early: frozenset[str]) -> bool:
        """Whether these layers add less than the tolerance here too."""
        layers = self.group(order)
        number = sum(1 for names in layers if set(names) <= early)
        return number == 0 or bool((self._shares(values, layers)[..., number - 1] <= self.tolerance).all())

    def _shares(self, values: dict[str, Tensor], layers: list[list[str]]) -> Float[Tensor, "b m l"]:
        """What the layers up to each one add, as a share of all."""
        none = torch.zeros_like(next(iter(values.values())))  # of a layer that no input here uses
        norms = torch.stack([added_up((values.get(n, none) for n in names), self.kind) for names in layers], dim=-1)
        added = (norms * layer_weights(len(layers), self.lam).to(norms)).cumsum(-1)
        return added / added[..., -1:].clamp_min(torch.finfo(torch.double).tiny)


@dataclass(frozen=True)
class EarlyLayers:
    """What the first chunk of inputs found of the early layers, to be confirmed by every other one."""

    cutoff: Cutoff
    early: frozenset[str]
    order: list[str]

    def pieces(
        self,
        logits: Float[Tensor, "rows c"],
        directions: Directions,
        pieces: list[Piece],
        weights: Weights,
        inputs: int,
    ) -> list[Piece]:
        """The pieces of late layers; all of them if a direction that is tried finds more in early ones.

        Tried are the predicted class, all classes with random signs, and every direction that is not a class.
        """
        z = logits.detach().unflatten(0, (inputs, -1))
        p = z.double().softmax(-1)
        coin = torch.Generator().manual_seed(0)
        signs = (torch.randint(0, 2, p.shape[-1:], generator=coin) * 2 - 1).to(p)
        tried = [of_class(z, z[:, 0].argmax(-1)), (signs - p * signs.sum())[None]]  # Σ_c ±(e_c - p)
        tried += [DIRECTIONS[name](z) for name in directions.names if name in DIRECTIONS and name != "classes"]
        cotangents = Cotangents.of(torch.cat(tried).flatten(1, 2), inputs)
        values = measure(logits, cotangents, pieces, weights, inputs, self.cutoff.kind)
        if not self.cutoff.holds(values, self.order, self.early):
            return pieces
        return [piece for piece in pieces if not roots(piece.target, weights) <= self.early]
