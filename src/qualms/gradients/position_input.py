"""A model that predicts at many positions, as a classifier of some of them, one sample at a time.

What a sample gives alone does not depend on the others in its batch. Padding changes more than it
should: some models count positions from where the padding starts. So texts are cut to the tokens
that their attention masks keep, and the results are put back where those tokens were.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, take_samples
from qualms.gradients.isolation import isolate_forward
from qualms.gradients.layers import Params, selected_parameters
from qualms.gradients.model_input import logits_in

INNER = "model."  # what the names of a model's parameters begin with inside `AtPositions`
MASK = "attention_mask"
ENCODER = "encoder_"  # how the outputs of an encoder that ran before are named
DECODER = "decoder_"  # how the arguments of a decoder beside an encoder are named
TOKEN_ARGUMENTS = (  # that have an entry for each token
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "labels",
)


@dataclass(frozen=True)
class SampleAlone:
    """One sample of a batch as the model runs on it.

    Attributes:
        batch: the sample as a batch of one, without padding.
        kept: the positions that are left, where padding was cut off; else None.
        length: how many positions there were with the padding, where it was cut off.
    """

    batch: Batch
    kept: Int[Tensor, " t"] | None = None
    length: int = 0

    @classmethod
    def of(cls, batch: Batch, number: int) -> "SampleAlone":
        """Sample `number` of a batch.

        Raises:
            QualmsError: if its attention mask leaves nothing of it.
        """
        one = take_samples(batch, slice(number, number + 1))
        if not isinstance(one, dict):
            return cls(one)
        kept = None
        length = 0
        for side in ("", DECODER):
            mask = one.get(side + MASK)
            if mask is None or mask.ndim != 2:
                continue
            live = mask[0].bool().nonzero().flatten()
            if len(live) == 0:
                raise QualmsError(
                    f"the {side + MASK} of input {number} of the batch masks all of it; leave this "
                    "input out."
                )
            first, last = int(live[0]), int(live[-1])
            # Where a mask has holes, the model itself must know what to do with it.
            has_holes = len(live) != last - first + 1
            if has_holes or len(live) == mask.shape[1]:
                continue
            one = _cut(one, side, slice(first, last + 1), mask.shape[1])
            if side == _answering_side(one):
                kept, length = live, mask.shape[1]
        return cls(one, kept, length)

    def require_fit(self, positions: int) -> None:
        """Raise an error if padding was cut off but predictions and tokens differ in number."""
        if self.kept is not None and positions != len(self.kept):
            raise _mismatch(str(positions), len(self.kept))

    def put_back(self, values: Tensor, missing: float) -> Tensor:
        """Put values [t, …] at the sample's own positions where these are with the padding.

        Args:
            values: at the sample's own positions.
            missing: what stands at padding.
        """
        if self.kept is None:
            return values
        self.require_fit(len(values))
        padded = values.new_full((self.length, *values.shape[1:]), missing)
        padded[self.kept.to(padded.device)] = values
        return padded

    def own(self, values: Tensor) -> Tensor:
        """The values at the sample's own positions, of values [t, …] with the padding."""
        if self.kept is None:
            return values
        return values[self.kept.to(values.device)]

    def own_position(self, position: int) -> int | None:
        """Where a position with the padding is without it; None if it is padding."""
        if self.kept is None:
            return position
        found = (self.kept == position).nonzero()
        return int(found[0]) if len(found) else None


def _mismatch(positions: str, tokens: int) -> QualmsError:
    return QualmsError(
        f"the model predicts at {positions} positions for {tokens} tokens, so it is not clear "
        "which of them the attention mask excludes; pass one text at a time, without padding."
    )


def live_positions(
    batch: Batch,
    shape: tuple[int, ...],
) -> Bool[Tensor, "b t"] | None:
    """The positions that a batch's attention mask keeps; None if it leaves nothing out.

    Args:
        batch: the samples.
        shape: of the positions that the model answers at.
    """
    if not isinstance(batch, dict):
        return None
    mask = batch.get(_answering_side(batch) + MASK)
    if mask is None or mask.ndim != 2 or bool(mask.bool().all()):
        return None
    if tuple(mask.shape[1:]) != shape:
        raise _mismatch(" x ".join(map(str, shape)), mask.shape[1])
    return mask.bool()


def _answering_side(batch: dict[str, Tensor]) -> str:
    """The prefix of the arguments at whose positions the model predicts."""
    has_decoder = any(name.startswith(DECODER) for name in batch)
    return DECODER if has_decoder else ""


def _cut(
    batch: dict[str, Tensor],
    side: str,
    part: slice,
    length: int,
) -> dict[str, Tensor]:
    """Cut the arguments of the encoder or the decoder to a part of the tokens.

    Args:
        batch: one sample.
        side: how these arguments begin.
        part: the tokens that are left.
        length: how many tokens there are.
    """
    cut = dict(batch)
    for name, t in batch.items():
        is_long = t.ndim >= 2 and t.shape[1] == length
        if name.startswith(side) and name.removeprefix(side) in TOKEN_ARGUMENTS:
            cut[name] = t[:, part] if is_long else t
        elif is_long and side == "" and not name.startswith((DECODER, ENCODER)):
            raise QualmsError(
                f"{name} of x is as long as its padded texts, so it is not clear whether it has an "
                "entry for each token; pass one text at a time, without padding."
            )
    return cut


def name_arguments(model: nn.Module, batch: Batch) -> Batch:
    """A tuple by the names of the model's arguments, if an attention mask is among them."""
    if not isinstance(batch, tuple):
        return batch
    try:
        arguments = dict(signature(model.forward).bind(*batch).arguments)
    except (TypeError, ValueError):
        return batch
    if MASK not in arguments:
        return batch
    all_tensors = all(isinstance(t, Tensor) for t in arguments.values())
    return arguments if all_tensors else batch


class AtPositions(nn.Module):
    """The logits of some positions side by side, [b, P·c].

    The engines take it for a classifier: for one position it is one, for several its logits are
    those of P classifiers.

    Args:
        model: answers at many positions.
        class_dim: the axis of the classes in its logits.
        positions: which are read, counted row by row; all of them by default.
    """

    def __init__(
        self,
        model: nn.Module,
        class_dim: int,
        positions: list[int] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.class_dim = class_dim
        self.positions = positions
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "b pc"]:
        """One pass of the model."""
        with isolate_forward(self.model):
            output = self.model(*args, **kwargs)
            logits = classes_last(output, self.class_dim).flatten(1, -2)
        if self.positions is not None:
            logits = logits[:, self.positions]
        return logits.flatten(1)


def classes_last(output: Any, class_dim: int) -> Float[Tensor, "b *positions c"]:
    """The logits in a model's output, their axes in the order of samples, positions and classes.

    Raises:
        QualmsError: if there are no positions, or `class_dim` is not an axis of classes.
    """
    logits = logits_in(output)
    shape = tuple(logits.shape)
    if logits.ndim < 3:
        raise QualmsError(
            f"the model returns logits of shape {shape}, one prediction per input; leave out "
            "class_dim."
        )
    is_axis = -logits.ndim <= class_dim < logits.ndim
    axis = class_dim % logits.ndim if is_axis else 0
    if axis == 0 or shape[axis] < 2:
        raise QualmsError(
            f"class_dim={class_dim} is not a class axis of logits of shape {shape}; use -1 "
            "for language models, 1 for segmentation."
        )
    return logits.movedim(axis, -1)


def inner_params(model: nn.Module, params: Params) -> Params:
    """Which parameters count where the model is read at positions: those of the model itself."""
    if params is None:
        return None
    chosen = selected_parameters(model, params)
    return lambda name: name.removeprefix(INNER) in chosen
