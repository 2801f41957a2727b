"""Heat (ours): T · H(softmax(z / T)), the entropy at the temperature of the features' noise. Scores
are its logarithm.

T(x) = ρ(x) / ρ₀ and ρ(x) = Σ_l tr(P G_l P) / tr(P G_head P) over the last three blocks l before the
classifier, with G = J Jᵀ, J the derivative of the logits with respect to a block's weights and P =
I - 11ᵀ/C, so that a shift of all logits changes nothing. ρ₀ is the geometric mean of ρ over 32
inputs of N(0, 1) noise.

Why: noise of size ε on all weights gives the logits the covariance ε² G. The classifier's part of
it is (‖h‖² + 1) I, the energy of the features h that it reads; the blocks' part is the noise of the
features themselves, as the classifier sees it. So ρ is noise to signal, and dividing the logits by
it is shrinkage. ρ₀ sets the unit: an input that is known no better than noise keeps its softmax,
and one that is known better is sharpened. Mistakes stay near the boundaries between classes at any
T. An input without any gradient in the blocks has no ρ, and T = 1.

For classifiers that read features of free length. Where a normalization fixes ‖h‖ (vision
transformers, language models), ρ loses its signal. So T is 1, and heat the entropy, if the features
of noise inputs do not grow fourfold when the noise is made 64 times as large; `Scored.notes` says
so. With more than 17 classes, traces are estimated from 16 fixed contrasts of classes. ρ₀ belongs
to a shape of inputs, so that the score of a text depends on how far its batch is padded.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError, reason
from qualms.gradients.batch import num_samples, take_samples
from qualms.gradients.directions import CONTRASTS, Directions
from qualms.methods.blocks import blocks_of, without_head
from qualms.methods.context import BatchContext
from qualms.methods.head import Head, required, with_head
from qualms.methods.method import GRADIENTS, Method
from qualms.methods.noise import louder, noise_inputs

BLOCKS = 3
NOISE_INPUTS = 32
LOUDER = 64.0
FREE = 4.0  # a length that grows by less than this, when noise is made LOUDER, is fixed
COLDEST, HOTTEST = 1e-6, 1e6
SMALLEST = 1e-300
NOTHING = Directions(())


@dataclass(frozen=True)
class Unit:
    """What noise inputs say of a model: the blocks that count, and log ρ₀ or the reason why T is 1."""

    blocks: tuple[tuple[str, ...], ...]
    log_ratio: float | None
    why: str = ""


@dataclass(frozen=True)
class Heat(Method):
    """No parameters.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        print(qualms.score(model, torch.randn(5, 4), "heat"))
        ```
    """

    name = "heat"
    paper = "ours"
    needs = (GRADIENTS,)
    cost = "2, and C - 1 (at most 16) backward through the last three blocks"
    always_exact = True

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        unit = self.unit(context)
        if unit.log_ratio is None:
            return log_heat(context.logits, torch.ones_like(context.logits[:, 0]))
        log_ratio, logits = self._log_ratio(context, unit.blocks)
        log_t = torch.where(log_ratio.isfinite(), log_ratio - unit.log_ratio, 0.0)
        return log_heat(logits, log_t.exp().clamp(COLDEST, HOTTEST))

    def note(self, context: BatchContext) -> str | None:
        """That T is 1, and why."""
        why = self.unit(context).why
        return f"{why}, so {self.name} is the entropy here (T = 1)." if why else None

    def error(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Unknown where the traces are estimated from some contrasts of classes; 0 elsewhere."""
        b, c = context.logits.shape
        estimated = c - 1 > CONTRASTS and self.unit(context).log_ratio is not None
        return torch.full(
            (b,), math.nan if estimated else 0.0, dtype=torch.double, device=context.device
        )

    def combined(self, log_ratios: Float[Tensor, "b l"]) -> Float[Tensor, " b"]:
        """log ρ from the logarithms of the blocks' ratios: that of their sum."""
        return log_ratios.logsumexp(-1)

    def _log_ratio(
        self, context: BatchContext, blocks: tuple[tuple[str, ...], ...]
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, "b c"]]:
        """log ρ, infinite where there is no gradient or no feature, and the logits that belong to
        it.
        """
        traces, logits = context.traces(blocks)
        return self.combined(
            traces.log() - head_trace(_head(context, logits)).log()[:, None]
        ), logits

    def unit(self, context: BatchContext) -> Unit:
        """ρ₀, found once for each shape of inputs. Whether T is 1 is found once for all of them.

        Else batches of two shapes could have scores of two kinds, which do not compare.
        """
        units: dict[Any, Unit] = context.model_context.fitted.setdefault(self, {})
        shapes = context.request(NOTHING, None).shapes
        if shapes not in units:
            first = next(iter(units.values()), None)
            units[shapes] = (
                first if first is not None and first.why else self._measured_unit(context, first)
            )
        return units[shapes]

    def _measured_unit(self, context: BatchContext, first: Unit | None) -> Unit:
        blocks = tuple(map(tuple, without_head(blocks_of(context, self.name), context)[-BLOCKS:]))
        if not blocks:
            return Unit(blocks, None, "no counted weights come before the classifier")
        noise = BatchContext(context.model_context, noise_inputs(context, NOISE_INPUTS, self.name))
        try:
            if first is None and growth(noise) < FREE:
                return Unit(
                    blocks,
                    None,
                    "the length of the features that the classifier reads hardly grows with the input",
                )
            log_ratio = self._log_ratio(noise, blocks)[0]
        except QualmsError as error:
            raise QualmsError(
                f"{self.name} tries the model on {NOISE_INPUTS} inputs of noise, which fails ({reason(error)}); "
                "use regrad+layers or entropy."
            ) from error
        alive = log_ratio[log_ratio.isfinite()]
        if 2 * len(alive) < NOISE_INPUTS:
            if first is not None:
                return first
            return Unit(
                blocks, None, "most inputs of noise leave the last blocks without a gradient"
            )
        return Unit(blocks, float(alive.mean()))


@dataclass(frozen=True)
class HeatGeometric(Heat):
    """The geometric mean of the three blocks' ratios instead of their sum.

    A factor that is moved from one block's weights to another's, which leaves the function of a
    network of rectifiers without biases as it is, changes the sum and not the mean.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        print(qualms.score(model, torch.randn(5, 4), "heat-geometric"))
        ```
    """

    name = "heat-geometric"

    def combined(self, log_ratios: Float[Tensor, "b l"]) -> Float[Tensor, " b"]:
        """log ρ: the mean of the logarithms."""
        return log_ratios.mean(-1)


def log_heat(logits: Float[Tensor, "b c"], temperature: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
    """log(T · H(softmax(z / T))), right where the probability of a class is 1 - 1e-300.

    With u_c = (z_c - max z) / T ≤ 0 and s = Σ exp u_c over all classes but the likeliest,
    H = log(1 + s) + Σ exp(u_c) (-u_c) / (1 + s), each part of it positive.
    """
    best = logits.argmax(-1, keepdim=True)
    u = (logits - logits.gather(-1, best)) / temperature[:, None]
    u = u.scatter(-1, best, -torch.inf)
    log_s = u.logsumexp(-1)
    log_total = torch.nn.functional.softplus(log_s)  # log(1 + s)
    first = torch.where(log_s < -30, log_s, log_total.clamp_min(SMALLEST).log())
    second = (u + (-u).log()).scatter(-1, best, -torch.inf).logsumexp(-1) - log_total
    return temperature.log() + torch.logaddexp(first, second)


def head_trace(head: Head) -> Float[Tensor, " b"]:
    """tr(P G P) of a linear classifier: (C - 1)(‖h‖² + 1), without the 1 if it has no bias."""
    energy = head.features.double().square().sum(-1) + (0 if head.bias is None else 1)
    return (len(head.weight) - 1) * energy


def growth(noise: BatchContext) -> float:
    """By how much the features of noise inputs grow if the noise does by `LOUDER`: the median over
    the inputs.

    1 if most inputs have no features before or after; infinite if the louder noise is too much for
    the model's numbers.
    """
    loud, size = (
        louder(noise.batch, LOUDER, noise.seed),
        noise.model_context.rows_at_once(noise.batch),
    )
    parts = [
        loud.take(slice(start, start + size)) for start in range(0, num_samples(noise.batch), size)
    ]
    try:
        after = required(Head.joined([with_head(noise.model, part)[1] for part in parts]))
    except QualmsError:
        return math.inf
    before, behind = (head.features.double().norm(dim=-1).log() for head in (noise.head, after))
    grown = (behind - before)[before.isfinite() & behind.isfinite()]
    return float(grown.median().exp()) if 2 * len(grown) >= len(before) else 1.0


def _head(context: BatchContext, logits: Float[Tensor, "b c"]) -> Head:
    """The head on the features that these logits came from: those of each input alone, if company
    changes them.
    """
    if torch.allclose(logits, context.logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
        return context.head
    alone = [
        with_head(context.model, take_samples(context.batch, [i]))[1]
        for i in range(num_samples(context.batch))
    ]
    return required(Head.joined(alone))
