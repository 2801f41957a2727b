"""Heat (ours): T · H(softmax(z / T)), the entropy at the temperature of the features' noise. And
`recommended`, which picks heat or `gen`.

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
of noise inputs do not grow fourfold when the noise grows 64-fold; `Scored.notes` reports
it. With more than 17 classes, traces are estimated from 16 fixed contrasts of classes. ρ₀ belongs
to a shape of inputs, so that the score of a text depends on how far its batch is padded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError, reason
from qualms.gradients.batch import num_samples, shapes_of, slices, split_batch
from qualms.gradients.directions import CONTRASTS, Directions
from qualms.methods.context import BatchContext
from qualms.methods.head import (
    Head,
    find_blocks,
    forward_with_head,
    require_head,
    without_head,
)
from qualms.methods.logits import GEN
from qualms.methods.method import GRADIENTS, Estimate, Method
from qualms.methods.noise import noise_inputs, scale_noise

BLOCKS = 3  # the number of blocks before the classifier whose gradients count
NOISE_INPUTS = 32
LOUDER = 64.0  # the factor by which noise inputs are scaled
# The features' norm is taken to be fixed if it grows by less than this when noise is scaled.
FREE = 4.0
COLDEST, HOTTEST = 1e-6, 1e6  # the bounds of the temperature
SMALLEST = 1e-300


def log_heat(
    logits: Float[Tensor, "b c"],
    temperature: Float[Tensor, " b"],
) -> Float[Tensor, " b"]:
    """Compute log(T · H(softmax(z / T))), accurate even if a class has probability 1 - 1e-300.

    H is the entropy. With u_c = (z_c - max z) / T ≤ 0 and s = Σ exp u_c over all classes but the
    likeliest, H = log(1 + s) + Σ exp(u_c) (-u_c) / (1 + s), both terms positive.

    Args:
        logits: the logits z.
        temperature: T of each input.
    """
    best = logits.argmax(-1, keepdim=True)
    u = (logits - logits.gather(-1, best)) / temperature[:, None]
    # exp(-∞) = 0 leaves the likeliest class out of the sum.
    u = u.scatter(-1, best, -torch.inf)
    log_s = u.logsumexp(-1)
    log_total = torch.nn.functional.softplus(log_s)  # log(1 + s)
    # log log(1 + s), which is log s where s is tiny.
    log_first_term = torch.where(log_s < -30, log_s, log_total.clamp_min(SMALLEST).log())
    # log(exp(u) (-u)); for the likeliest class it would be -∞ + ∞.
    log_products = (u + (-u).log()).scatter(-1, best, -torch.inf)
    log_second_term = log_products.logsumexp(-1) - log_total
    return temperature.log() + torch.logaddexp(log_first_term, log_second_term)


def head_trace(head: Head) -> Float[Tensor, " b"]:
    """Compute tr(P G P) of a linear classifier: (C - 1)(‖h‖² + 1), or (C - 1)‖h‖² without a bias.

    G = J Jᵀ, J the derivative of the C logits with respect to the classifier's weight and bias, and
    P = I - 11ᵀ/C. h are the features in `head`.
    """
    squared_norms = head.features.double().square().sum(-1)
    if head.bias is not None:
        squared_norms = squared_norms + 1
    num_classes = len(head.weight)
    return (num_classes - 1) * squared_norms


def block_traces(
    context: BatchContext,
    blocks: Sequence[Sequence[str]],
) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b c"]]:
    """Compute tr(P G_l P) of blocks l of parameters, or estimate it if there are over 17 classes.

    G_l = J Jᵀ, J the derivative of the C logits with respect to the parameters of block l, and
    P = I - 11ᵀ/C.

    Args:
        context: the batch of inputs.
        blocks: the names of the parameters of each block l.

    Returns:
        The traces, and the logits that the engine computed. They differ from `context.logits` if
        the inputs of a batch influence each other, as the engine then runs each input alone.
    """
    block_of_name = {name: i for i, block in enumerate(blocks) for name in block}
    params = frozenset(block_of_name)
    table = context.measure_exactly(params, Directions(("contrasts",)), granularity="tensor")
    # The trace is a sum of squared norms over the contrasts of classes: [b, parameter tensors].
    squares = table.values.double().square().sum(1)
    block_of_tensor = torch.tensor(
        [block_of_name[name] for name in table.layers],
        device=squares.device,
    )
    traces = squares.new_zeros(len(squares), len(blocks))
    # Add up the tensors of each block.
    traces.index_add_(1, block_of_tensor, squares)
    return traces, table.logits.double()


@dataclass(frozen=True)
class Unit:
    """ρ₀, the unit of a model's temperature T = ρ(x) / ρ₀, with ρ(x) the ratio of traces of input x.

    Attributes:
        blocks: the names of the parameters of each block whose gradients count.
        log_ratio: log ρ₀; None if T is 1 for every input.
        why: a clause that says why T is 1 for every input; empty if it is not.
    """

    blocks: tuple[tuple[str, ...], ...]
    log_ratio: float | None
    why: str = ""


@dataclass(frozen=True)
class Heat(Method):
    """log(T · H(softmax(z / T))), T = ρ(x) / ρ₀, with the sum of three blocks' ratios.

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
        """Compute `log_heat` at the temperature T = ρ(x) / ρ₀."""
        unit = self.get_unit(context)
        if unit.log_ratio is None:
            return log_heat(context.logits, torch.ones_like(context.logits[:, 0]))
        log_ratio, logits = self._compute_log_ratio(context, unit.blocks)
        # T = 1 for inputs whose gradients or features are all zero.
        log_temperature = torch.where(log_ratio.isfinite(), log_ratio - unit.log_ratio, 0.0)
        return log_heat(logits, log_temperature.exp().clamp(COLDEST, HOTTEST))

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute the scores; their errors are NaN (unknown) if traces are estimated from contrasts."""
        values = self.score(context)
        is_estimate = context.num_classes - 1 > CONTRASTS
        if is_estimate and self.get_unit(context).log_ratio is not None:
            return Estimate(values, torch.full_like(values, math.nan))
        return Estimate(values)

    def note(self, context: BatchContext) -> str | None:
        """Return a sentence that says why T is 1 for this model; None if T is measured."""
        why = self.get_unit(context).why
        return f"{why}, so {self.name} equals the entropy (T = 1)." if why else None

    def combine(self, log_ratios: Float[Tensor, "b l"]) -> Float[Tensor, " b"]:
        """Compute log ρ of each input from the logarithms of its l blocks' ratios: ρ is their sum."""
        return log_ratios.logsumexp(-1)

    def _compute_log_ratio(
        self,
        context: BatchContext,
        blocks: tuple[tuple[str, ...], ...],
    ) -> tuple[Float[Tensor, " b"], Float[Tensor, "b c"]]:
        """Compute log ρ of each input, from the ratio of each block's trace to the head's.

        log ρ is infinite or NaN for inputs whose gradients or features are all zero.

        Args:
            context: the batch of inputs.
            blocks: the names of the parameters of each block.

        Returns:
            log ρ, and the logits that the engine computed together with the gradients.
        """
        traces, logits = block_traces(context, blocks)
        head = _head_of_logits(context, logits)
        log_ratios = traces.log() - head_trace(head).log()[:, None]
        return self.combine(log_ratios), logits

    def get_unit(self, context: BatchContext) -> Unit:
        """Return ρ₀ for inputs of this shape; it is measured at the first batch of each shape.

        Whether T is 1 for every input is decided at the first shape, for all shapes: else batches
        of two shapes could have scores of two kinds, which cannot be compared.
        """
        units: dict[Any, Unit] = context.model_context.get_or_compute(self, dict)
        shapes = shapes_of(context.batch)
        if shapes not in units:
            first_unit = next(iter(units.values()), None)
            if first_unit is not None and first_unit.why:
                units[shapes] = first_unit
            else:
                units[shapes] = self._measure_unit(context, first_unit)
        return units[shapes]

    def _measure_unit(
        self,
        context: BatchContext,
        first_unit: Unit | None,
    ) -> Unit:
        """Measure ρ₀, the geometric mean of ρ over inputs of noise; or find that T is always 1.

        Args:
            context: real inputs, whose shape the noise inputs get.
            first_unit: the unit of the first shape of inputs; None if this is the first shape. It
                is returned if log ρ is not finite for most noise inputs of this shape.
        """
        blocks = self._find_last_blocks(context)
        if not blocks:
            return Unit(
                blocks,
                None,
                "no selected weights come before the classifier",
            )
        noise = BatchContext(
            context.model_context,
            noise_inputs(context, NOISE_INPUTS, self.name),
        )
        try:
            # Decided at the first shape, for all shapes.
            if first_unit is None and feature_growth(noise) < FREE:
                why = "the norm of the classifier's features hardly grows with the input"
                return Unit(blocks, None, why)
            log_ratio, _ = self._compute_log_ratio(noise, blocks)
        except QualmsError as error:
            raise QualmsError(
                f"{self.name} needs to run the model on {NOISE_INPUTS} noise inputs, but this "
                f"failed ({reason(error)}); use regrad+layers or entropy."
            ) from error
        finite = log_ratio[log_ratio.isfinite()]
        if 2 * len(finite) >= NOISE_INPUTS:
            return Unit(blocks, float(finite.mean()))
        if first_unit is not None:
            return first_unit
        return Unit(
            blocks,
            None,
            "the last blocks get no gradient for most noise inputs",
        )

    def _find_last_blocks(self, context: BatchContext) -> tuple[tuple[str, ...], ...]:
        """Find the names of the parameters of the last three blocks before the classifier."""
        # Run the model once, so that an input that it rejects is reported as such.
        _ = context.logits
        model, batch = context.model, context.batch
        blocks = find_blocks(model, batch, context.model_context.settings.params, self.name)
        last_blocks = without_head(blocks, context.head, model, batch)[-BLOCKS:]
        # Tuples, as the fields of the frozen `Unit` are immutable.
        return tuple(tuple(block) for block in last_blocks)


@dataclass(frozen=True)
class HeatGeometric(Heat):
    """Heat with the geometric mean of the three blocks' ratios instead of their sum.

    In a network of ReLUs without biases, one block's weights can be multiplied by a factor and
    another's divided by it without a change to the function. This changes the sum of the ratios,
    but not their geometric mean.

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

    def combine(self, log_ratios: Float[Tensor, "b l"]) -> Float[Tensor, " b"]:
        """Compute log ρ of each input from the logarithms of its l blocks' ratios.

        ρ is their geometric mean.
        """
        return log_ratios.mean(-1)


def feature_growth(noise: BatchContext) -> float:
    """Measure by what factor ‖h‖ of noise inputs grows if the noise is multiplied by `LOUDER`.

    Args:
        noise: the context of the noise inputs.

    Returns:
        The median over the inputs. 1 if the features of most inputs are zero with either noise;
        infinite if the louder noise overflows the model's numbers.
    """
    loud_noise = scale_noise(noise.batch, LOUDER, noise.seed)
    max_rows = noise.model_context.rows_at_once(noise.batch)
    loud_heads: list[Head | QualmsError] = []
    for part in slices(num_samples(noise.batch), max_rows):
        try:
            _, head = forward_with_head(noise.model, loud_noise.take(part))
        except QualmsError:
            return math.inf
        loud_heads.append(head)
    loud_head = Head.concatenate(loud_heads)
    if isinstance(loud_head, QualmsError):
        return math.inf
    log_norms = noise.head.features.double().norm(dim=-1).log()
    loud_log_norms = loud_head.features.double().norm(dim=-1).log()
    # The logarithm of a zero norm is infinite.
    is_finite = log_norms.isfinite() & loud_log_norms.isfinite()
    log_growth = (loud_log_norms - log_norms)[is_finite]
    if 2 * len(log_growth) < len(log_norms):
        return 1.0
    return float(log_growth.median().exp())


def _head_of_logits(
    context: BatchContext,
    logits: Float[Tensor, "b c"],
) -> Head:
    """Return the head with the features from which an engine computed given logits.

    If the logits differ from those of the plain forward pass by more than rounding, inputs of a
    batch influence each other. Then the engine ran each input alone, and so does this function.

    Args:
        context: the batch.
        logits: the logits that the engine computed.
    """
    largest = float(logits.abs().max())
    if torch.allclose(logits, context.logits, rtol=1e-3, atol=1e-3 * largest):
        return context.head
    heads: list[Head | QualmsError] = []
    for single_input in split_batch(context.batch, 1):
        _, head = forward_with_head(context.model, single_input)
        heads.append(head)
    return require_head(Head.concatenate(heads))


@dataclass(frozen=True)
class Recommended(Method):
    """Recommended (ours): `heat` for classifiers that read features of free length, `gen` for all
    others.

    Noise inputs show of which kind a network is (see `heat`), so no data is needed; `Scored.notes`
    has what was picked and why. The page on heat has the study behind it, and what was tried behind
    a normalization and rejected: REGrad with more noise.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
        scored = qualms.Scorer(model, "recommended")(torch.randn(5, 4))
        print(scored.scores["recommended"], scored.notes["recommended"])
        ```
    """

    name = "recommended"
    paper = "ours"
    needs = (GRADIENTS,)
    cost = "as `heat`, or 1"
    always_exact = True

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """Compute the scores of the method that is picked."""
        return self.estimate(context).values

    def estimate(self, context: BatchContext) -> Estimate:
        """Compute the scores of the method that is picked, with its errors."""
        return self.pick(context)[0].estimate(context)

    def note(self, context: BatchContext) -> str | None:
        """Return a sentence that says what was picked, and why."""
        method, why = self.pick(context)
        return f"recommended picked {method.spec}, because {why}."

    def pick(self, context: BatchContext) -> tuple[Method, str]:
        """Return `heat` or `gen`, picked at the model's first batch.

        The choice is kept for later batches, because scores of two methods cannot be compared.

        Returns:
            The method, and a clause that says why it was picked.
        """
        return context.model_context.get_or_compute(self, lambda: _pick_method(context))


def _pick_method(context: BatchContext) -> tuple[Method, str]:
    """Pick `gen` if the temperature of `heat` would always be 1 or cannot be measured, else `heat`.

    Returns:
        The method, and a clause that says why it was picked.
    """
    # Raises an error if the model rejects the input: that is no reason to pick `gen`.
    _ = context.logits
    try:
        why = Heat().get_unit(context).why
    except QualmsError as error:
        # The part of the message that says what is wrong, without the advice after the semicolon.
        problem, _, _ = str(error).partition(";")
        why = problem.replace("this method", "heat").rstrip(".")
    if why:
        return GEN(), why
    return (
        Heat(),
        "the norm of the classifier's features grows with the input",
    )
