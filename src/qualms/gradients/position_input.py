"""Models with logits at many positions (tokens, pixels), run one sample at a time.

Run alone, a sample does not depend on the others in its batch. Padding may change its logits: some
models count positions from where the padding starts. So texts are cut to the tokens that their
attention masks keep, and the results are written back to the positions of those tokens.
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

# Prefix of the model's parameter names inside `AtPositions`.
INNER = "model."
MASK = "attention_mask"
# Name prefix of encoder outputs that are passed to the model.
ENCODER = "encoder_"
# Name prefix of the decoder's arguments in an encoder-decoder model.
DECODER = "decoder_"
TOKEN_ARGUMENTS = (  # arguments with an entry for each token
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "token_type_ids",
    "position_ids",
    "labels",
)


@dataclass(frozen=True)
class SampleAlone:
    """One sample of a batch, its padding cut off.

    Attributes:
        batch: the sample as a batch of one, without padding.
        kept: the positions of its t tokens in the padded sample; None if no padding was cut off.
        length: the number of positions of the padded sample; 0 if no padding was cut off.
    """

    batch: Batch
    kept: Int[Tensor, " t"] | None = None
    length: int = 0

    @classmethod
    def of(cls, batch: Batch, number: int) -> "SampleAlone":
        """Take sample `number` of a batch and cut off its padding.

        Padding is what the attention mask hides before the first and after the last token. Masks of
        an encoder and a decoder are handled separately.

        Raises:
            QualmsError: if the attention mask of the sample keeps no token.
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
                    f"the {side + MASK} of input {number} of the batch masks every token; leave "
                    "this input out."
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
        """Raise an error if padding was cut off and the model does not answer once for each token.

        Args:
            positions: the number of positions at which the model returned logits.
        """
        if self.kept is not None and positions != len(self.kept):
            raise _mismatch(str(positions), len(self.kept))

    def put_back(self, values: Tensor, missing: float) -> Tensor:
        """Write values [t, …] of the sample without padding to their positions with padding.

        Args:
            values: one value for each position without padding.
            missing: the value that padding gets, such as NaN.

        Returns:
            Values [length, …]; `values` itself if no padding was cut off.
        """
        if self.kept is None:
            return values
        self.require_fit(len(values))
        padded = values.new_full((self.length, *values.shape[1:]), missing)
        padded[self.kept.to(padded.device)] = values
        return padded

    def remove_padding(self, values: Tensor) -> Tensor:
        """Select the values at tokens from values [length, …] at all positions, padding included."""
        if self.kept is None:
            return values
        return values[self.kept.to(values.device)]

    def position_without_padding(self, position: int) -> int | None:
        """Map a position of the padded sample to the unpadded one; None for padding."""
        if self.kept is None:
            return position
        matches = (self.kept == position).nonzero()
        return int(matches[0]) if len(matches) else None


def _mismatch(positions: str, tokens: int) -> QualmsError:
    """Build the error for a model whose positions do not match the tokens of the attention mask.

    Args:
        positions: the number or shape of the positions, as text for the message.
        tokens: the number of tokens.
    """
    return QualmsError(
        f"the model predicts at {positions} positions for {tokens} tokens, so it is not clear "
        "which positions the attention mask excludes; pass one text at a time, without padding."
    )


def live_positions(
    batch: Batch,
    shape: tuple[int, ...],
) -> Bool[Tensor, "b t"] | None:
    """Return which positions a batch's attention mask keeps; None if there is no padding.

    Args:
        batch: the samples.
        shape: the shape of the positions that the model has logits at, without samples and classes.

    Raises:
        QualmsError: if the mask has another shape.
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
    """The name prefix of the arguments whose positions the logits belong to.

    `decoder_` if the batch has arguments of a decoder, else the empty string.
    """
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
        batch: one sample, its arguments by name.
        side: the name prefix of the arguments to cut: `DECODER`, or none for the encoder.
        part: the tokens to keep.
        length: the number of tokens with padding.

    Raises:
        QualmsError: if another argument is as long as the text, and may have to be cut as well.
    """
    cut = dict(batch)
    for name, t in batch.items():
        is_long = t.ndim >= 2 and t.shape[1] == length
        if name.startswith(side) and name.removeprefix(side) in TOKEN_ARGUMENTS:
            cut[name] = t[:, part] if is_long else t
        elif is_long and side == "" and not name.startswith((DECODER, ENCODER)):
            raise QualmsError(
                f"{name} of x is as long as the padded texts, so it is not clear whether {name} "
                "has one entry per token; pass one text at a time, without padding."
            )
    return cut


def name_arguments(model: nn.Module, batch: Batch) -> Batch:
    """Turn a tuple into a dict by the model's argument names, if one of them is an attention mask.

    Padding is found by the name of the mask. Any other batch is returned as it is.
    """
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
    """Wraps a model so that it returns the logits of P positions side by side, [b, P·c].

    To the engines the wrapped model is a classifier: with one position an ordinary one, with P
    positions one with P·c logits, c for each position.

    Args:
        model: a model with logits at many positions.
        class_dim: the axis of the classes in its logits.
        positions: indices of the positions to read, positions flattened row by row; None for all.
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
        # Not `eval()`, which would change the modes of the model inside.
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "b pc"]:
        """Run the model and select the logits at the positions, side by side."""
        with isolate_forward(self.model):
            output = self.model(*args, **kwargs)
            logits = classes_last(output, self.class_dim).flatten(1, -2)
        if self.positions is not None:
            logits = logits[:, self.positions]
        return logits.flatten(1)


def classes_last(output: Any, class_dim: int) -> Float[Tensor, "b *positions c"]:
    """Find the logits in a model's output and move the class axis to the end.

    Args:
        output: what the model returned.
        class_dim: the axis of the classes in its logits, as the user gave it.

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
    """Translate a selection of the model's parameters to their names inside `AtPositions`.

    Args:
        model: the model that is wrapped.
        params: the user's selection, by the names of the model.

    Returns:
        A selection for the wrapper, in which names begin with `model.`; None for all parameters.
    """
    if params is None:
        return None
    chosen = selected_parameters(model, params)
    return lambda name: name.removeprefix(INNER) in chosen
