"""Where backward passes may stop: Σ_l a_l ‖g_l‖ without its first terms, within a stated tolerance.

The weights a_l = exp(λ(l - L)) fade toward the input, but norms may grow there, so what the first
layers add is measured, not assumed. One input, by plain autograd along a few directions, tells how
many of the first layers add less than a quarter of the tolerance; gradients of the others are all
that is computed from then on. Of every 16 further inputs the one that is most unlike those measured
so far, by the norms of its late layers, is measured in the same way, and so is every input that is
more unlike them than any before. If the early layers of one add more than the tolerance, fewer
layers are left out from then on, and its batch runs again. That is evidence, not proof: an input
whose early layers alone are out of the ordinary can slip through.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import take_samples
from qualms.gradients.directions import DIRECTIONS, of_class
from qualms.gradients.engines.base import ClassNorms, combine_parameters
from qualms.gradients.layers import group_by_layer, layer_weights
from qualms.gradients.model_input import ModelInput
from qualms.gradients.precision import at_least_float32, sum_of_squares
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import sample_gradients
from qualms.gradients.tracing.traced_forward import use_order

MARGIN = 4  # between what one input shows and what others may do
CHECK_EVERY = 16  # inputs, of which one is measured in full
UNLIKE = math.log(
    2
)  # a norm that differs from the first input's by less than this factor is nothing unusual


@dataclass
class LayerCut:
    """The layers of one model whose gradients are computed, and what is known of those left out.

    Args:
        lam: λ of the score that weights its layers down least.
        tolerance: the share of a score that may be left out.
        layers: the parameters of each layer, in order of use.
        early: how many of the first layers are left out.
        share: the largest share that they were seen to add.
    """

    lam: float
    tolerance: float
    layers: list[list[str]]
    early: int
    share: float
    typical: Float[Tensor, " l"] | None = None  # log ‖g_l‖ of the first input, late layers alone
    widest: float = UNLIKE  # how unlike the first input one was that was measured
    unchecked: int = 0  # inputs since the last one that was measured
    names: frozenset[str] = field(init=False)  # of the late parameters

    def __post_init__(self) -> None:
        self.names = frozenset(name for layer in self.layers[self.early :] for name in layer)

    @classmethod
    def of(cls, job: GradientRequest, lam: float) -> "LayerCut | None":
        """Measured on the first input; None if no layer can be left out, or the order of layers is
        not fixed.
        """
        order = use_order(job.model, ModelInput(take_samples(job.batch, slice(0, 1))), job.selected)
        norms = _row_norms(job, 0) if order.fixed else {}
        if not norms:
            return None
        layers = list(
            group_by_layer(
                job.model, order.relevant(norms, job.selected), job.settings.granularity
            ).values()
        )
        shares = _early_shares(norms, layers, lam, job.settings.norm)
        tolerance = job.settings.tolerance or 0.0
        early = _count_small(shares, tolerance / MARGIN)
        if early == 0:
            return None
        return cls(lam, tolerance, layers, early, float(shares[:, early - 1].max()))

    def job(self, job: GradientRequest) -> GradientRequest:
        """The same job for the late parameters alone: what comes before them runs without a graph."""
        return replace(job, settings=replace(job.settings, params=self.names.__contains__))

    def confirm(self, job: GradientRequest, found: ClassNorms) -> bool:
        """Whether the inputs of a job may do without the early layers, as far as the most unusual
        one tells.

        If not, fewer layers are left out from now on, and the job has to run again.
        """
        norms = _per_layer(found, self.layers[self.early :], job.settings.norm)
        profile = norms.amax(1).clamp_min(torch.finfo(torch.double).tiny).log()  # [b, l]
        if self.typical is None:
            self.typical = profile[0]
        unlike = (profile - self.typical).abs().amax(-1)
        worst = int(unlike.argmax())
        self.unchecked += job.inputs
        if self.unchecked < CHECK_EVERY and float(unlike[worst]) <= self.widest:
            return True
        self.widest = max(self.widest, float(unlike[worst]))
        return self._spot_check(job, worst)

    def confirm_blindly(self, job: GradientRequest) -> bool:
        """The same where no norms of layers are known, as of a sketch: one of every 16 inputs
        tells.
        """
        self.unchecked += job.inputs
        return self.unchecked < CHECK_EVERY or self._spot_check(job, job.inputs - 1)

    def _spot_check(self, job: GradientRequest, worst: int) -> bool:
        """Whether the early layers of one input add no more than the tolerance, by plain autograd."""
        self.unchecked = 0
        norms = _row_norms(job, worst)
        if not norms:  # the input uses no parameter that counts
            return True
        shares = _early_shares(norms, self.layers, self.lam, job.settings.norm)
        added = float(shares[:, self.early - 1].max())
        if added <= self.tolerance:
            self.share = max(self.share, added)
            return True
        self.early = _count_small(shares, self.tolerance / MARGIN)
        self.share = float(shares[:, self.early - 1].max()) if self.early else 0.0
        self.typical = None
        self.__post_init__()
        return False


def _row_norms(job: GradientRequest, i: int) -> dict[str, Float[Tensor, "1 m"]]:
    """Norms of the gradients of one input, by the parameters that it uses.

    Along the predicted class, all classes with random signs, and every direction of the job that is
    not a class.
    """

    def directions(logits: Float[Tensor, "1 c"]) -> Float[Tensor, "m 1 c"]:
        z = logits[:, None]
        p = z.double().softmax(-1)
        coin = torch.Generator().manual_seed(0)
        signs = (torch.randint(0, 2, p.shape[-1:], generator=coin) * 2 - 1).to(p)
        tried = [of_class(z, logits.argmax(-1)), (signs - p * signs.sum())[None]]  # Σ_c ±(e_c - p)
        tried += [
            DIRECTIONS[name](z)
            for name in job.directions.names
            if name in DIRECTIONS and name != "classes"
        ]
        return torch.cat(tried)[:, :, 0]

    row = ModelInput(take_samples(job.batch, slice(i, i + 1)))
    norm = job.settings.norm
    _, found = sample_gradients(
        job.model, row, job.selected, directions, lambda g: _norm(at_least_float32(g), norm)
    )
    return {name: norms[None] for name, norms in found.items()}


def _early_shares(
    norms: dict[str, Float[Tensor, "1 m"]], layers: list[list[str]], lam: float, norm: str
) -> Float[Tensor, "m l"]:
    """The share that the layers up to each one add to Σ_l a_l ‖g_l‖ of one input.

    Args:
        norms: of its gradients, by the parameters that it uses.
        layers: the parameters of each layer, in order of use.
        lam: λ.
        norm: of the gradients.
    """
    of_layers = _per_layer(ClassNorms(norms, torch.empty(0, 0), set()), layers, norm)[0]
    added = (of_layers * layer_weights(len(layers), lam).to(of_layers)).cumsum(-1)
    return added / added[:, -1:].clamp_min(torch.finfo(torch.double).tiny)


def _count_small(shares: Float[Tensor, "m l"], most: float) -> int:
    """How many of the first layers together add at most this share, along every direction."""
    return int((shares <= most).all(0).long().cumprod(0).sum())


def _per_layer(found: ClassNorms, layers: list[list[str]], norm: str) -> Float[Tensor, "b m l"]:
    none = torch.zeros_like(next(iter(found.values.values())))  # of a layer that no input here uses
    return torch.stack(
        [combine_parameters((found.values.get(n, none) for n in names), norm) for names in layers],
        dim=-1,
    )


def _norm(g: Float[Tensor, "..."], norm: str) -> Float[Tensor, ""]:
    if norm == "l1":
        return torch.linalg.vector_norm(g.flatten(), 1).double()
    return sum_of_squares(g.reshape(1, -1)).double().sqrt().squeeze()
