"""A model that answers at many positions, read as a classifier of some of them, one sample at a time.

What a sample gives alone does not depend on the others in its batch. Padding changes more than it should:
some models count positions from where the padding starts. So texts are cut to the tokens that their
attention masks keep, and the results are put back where those tokens were.
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

INSIDE = "model."  # what the names of a model's parameters begin with where it is read at positions
MASK = "attention_mask"
ENCODER = "encoder_"  # what comes from an encoder that ran before
DECODER = "decoder_"  # what the arguments of a decoder begin with, beside those of its encoder


@dataclass(frozen=True)
class Alone:
    """One input of a batch as the model runs on it.

    `kept`, where padding was cut off: the positions that are left, of `length` with the padding.
    """

    batch: Batch
    kept: Int[Tensor, " t"] | None = None
    length: int = 0

    @classmethod
    def of(cls, batch: Batch, number: int) -> "Alone":
        """Input `number` of a batch."""
        one, kept, length = take_samples(batch, slice(number, number + 1)), None, 0
        if not isinstance(one, dict):
            return cls(one)
        for side in ("", DECODER):
            mask = one.get(side + MASK)
            if mask is None or mask.ndim != 2:
                continue
            live = mask[0].bool().nonzero().flatten()
            if len(live) == 0:
                raise QualmsError(
                    f"the {side + MASK} of input {number} of the batch leaves nothing of it; leave it out."
                )
            # Where a mask has holes, the model itself must know what to do with it.
            if len(live) < mask.shape[1] and len(live) == int(live[-1] - live[0]) + 1:
                one = _cut(one, side, slice(int(live[0]), int(live[-1]) + 1), mask.shape[1])
                if side == _answers(one):
                    kept, length = live, mask.shape[1]
        return cls(one, kept, length)

    def require_fit(self, positions: int) -> None:
        """An error if padding was cut off, and the answers are not those at the tokens that are
        left.
        """
        if self.kept is not None and positions != len(self.kept):
            raise QualmsError(NOT_ALIKE.format(positions, len(self.kept)))

    def put_back(self, values: Tensor, missing: float) -> Tensor:
        """Values [t, …] at the input's own positions, put where these are with the padding."""
        if self.kept is None:
            return values
        self.require_fit(len(values))
        whole = values.new_full((self.length, *values.shape[1:]), missing)
        whole[self.kept.to(whole.device)] = values
        return whole

    def own(self, values: Tensor) -> Tensor:
        """The other way round: of values at all positions with the padding, those of the input's
        own.
        """
        return values if self.kept is None else values[self.kept.to(values.device)]


NOT_ALIKE = (
    "the model answers at {} positions for {} tokens, so it is not clear which of its answers an attention mask leaves "
    "out; pass one text at a time, without padding."
)


def live_positions(batch: Batch, shape: tuple[int, ...]) -> Bool[Tensor, "b t"] | None:
    """The positions that a batch's attention mask keeps, if it has one, and there is something that
    it leaves out.
    """
    mask = batch.get(_answers(batch) + MASK) if isinstance(batch, dict) else None
    if mask is None or mask.ndim != 2 or bool(mask.bool().all()):
        return None
    if tuple(mask.shape[1:]) != shape:
        raise QualmsError(NOT_ALIKE.format(" x ".join(map(str, shape)), mask.shape[1]))
    return mask.bool()


def _answers(batch: dict[str, Tensor]) -> str:
    """The side whose positions the model answers at."""
    return DECODER if any(name.startswith(DECODER) for name in batch) else ""


BY_TOKEN = (
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "labels",
)


def _cut(batch: dict[str, Tensor], side: str, part: slice, length: int) -> dict[str, Tensor]:
    """The arguments of one side, the encoder's or the decoder's, cut to a part of the tokens."""
    cut = dict(batch)
    for name, t in batch.items():
        if name.removeprefix(side) in BY_TOKEN and name.startswith(side):
            cut[name] = t[:, part] if t.ndim >= 2 and t.shape[1] == length else t
        elif (
            not name.startswith((DECODER, ENCODER))
            and t.ndim >= 2
            and t.shape[1] == length
            and side == ""
        ):
            raise QualmsError(
                f"{name} of x is as long as its padded texts, so it is not clear whether it has an entry for each "
                "token; pass one text at a time, without padding."
            )
    return cut


def named(model: nn.Module, batch: Batch) -> Batch:
    """The batch by the names of the model's arguments, if it is a tuple with an attention mask
    among them.
    """
    if not isinstance(batch, tuple):
        return batch
    try:
        found = dict(signature(model.forward).bind(*batch).arguments)
    except (TypeError, ValueError):
        return batch
    return found if MASK in found and all(isinstance(t, Tensor) for t in found.values()) else batch


class AtPositions(nn.Module):
    """The logits of some positions side by side, [b, P·c]; of all of them, in their order, if none
    are named.

    The engines take it for a classifier: for one position it is one, for several its logits are
    those of P classifiers.
    """

    def __init__(
        self, model: nn.Module, class_dim: int, positions: list[int] | None = None
    ) -> None:
        super().__init__()
        self.model, self.class_dim, self.positions = model, class_dim, positions
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "b pc"]:
        """One pass of the model."""
        with isolate_forward(self.model):
            logits = classes_last(self.model(*args, **kwargs), self.class_dim).flatten(1, -2)
        return (logits if self.positions is None else logits[:, self.positions]).flatten(1)


def classes_last(output: Any, class_dim: int) -> Float[Tensor, "b *positions c"]:
    """The logits in a model's output, their axes those of inputs, positions and classes."""
    logits = logits_in(output)
    if logits.ndim < 3:
        raise QualmsError(
            f"the model returns logits of shape {tuple(logits.shape)}, one answer for each input; leave out class_dim."
        )
    axis = class_dim % logits.ndim if -logits.ndim <= class_dim < logits.ndim else 0
    if axis == 0 or logits.shape[axis] < 2:
        raise QualmsError(
            f"class_dim={class_dim} is not an axis of classes in logits of shape {tuple(logits.shape)}; use -1 for "
            "language models, 1 for segmentation."
        )
    return logits.movedim(axis, -1)


def inside(model: nn.Module, params: Params) -> Params:
    """Which parameters count, where the model is read at positions: those that count in the model
    itself.
    """
    if params is None:
        return None
    chosen = selected_parameters(model, params)
    return lambda name: name.removeprefix(INSIDE) in chosen
