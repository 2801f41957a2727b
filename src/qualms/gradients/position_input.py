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
from qualms.gradients.layers import Params, select_parameters
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
    """One sample of a batch, without its padding.

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
        """Take one sample of a batch and cut off its padding.

        Padding is what the attention mask hides before the first and after the last token. Masks of
        an encoder and a decoder are handled separately.

        Args:
            batch: the samples.
            number: the index of the sample in the batch.

        Raises:
            QualmsError: if the attention mask of the sample keeps no token.
        """
        sample = take_samples(batch, slice(number, number + 1))
        if not isinstance(sample, dict):
            return cls(sample)
        kept = None
        length = 0
        for side in ("", DECODER):
            mask = sample.get(side + MASK)
            if mask is None or mask.ndim != 2:
                continue
            tokens = mask[0].bool().nonzero().flatten()
            if len(tokens) == 0:
                raise QualmsError(
                    f"the {side + MASK} of input {number} of the batch masks every token; leave "
                    "this input out."
                )
            first, last = int(tokens[0]), int(tokens[-1])
            # A mask with holes is left to the model.
            has_holes = len(tokens) != last - first + 1
            has_padding = len(tokens) < mask.shape[1]
            if has_holes or not has_padding:
                continue
            sample = _cut_tokens(sample, side, slice(first, last + 1), mask.shape[1])
            # The positions of the logits are those of this side's tokens.
            if side == _answering_side(sample):
                kept, length = tokens, mask.shape[1]
        return cls(sample, kept, length)

    def require_fit(self, positions: int) -> None:
        """Raise an error unless the model returned logits for each token, if padding was cut off.

        Args:
            positions: the number of positions at which the model returned logits.
        """
        if self.kept is not None and positions != len(self.kept):
            raise _mismatch_error(str(positions), len(self.kept))

    def restore_padding(self, values: Tensor, missing: float) -> Tensor:
        """Write the values of t tokens to their positions in the padded sample.

        Args:
            values: values [t, …] of the tokens.
            missing: the value for padding, such as NaN.

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
        """Select the values [t, …] at the t tokens from values at all positions of the padded sample.

        Returns `values` itself if no padding was cut off.

        Args:
            values: values [length, …], those at padding included.
        """
        if self.kept is None:
            return values
        return values[self.kept.to(values.device)]

    def position_without_padding(self, position: int) -> int | None:
        """Return which token is at a position of the padded sample; None for padding."""
        if self.kept is None:
            return position
        matches = (self.kept == position).nonzero()
        return int(matches[0]) if len(matches) else None


def _mismatch_error(positions: str, tokens: int) -> QualmsError:
    """Make the error for a model whose positions do not match the tokens of the attention mask.

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
    """Return a mask of the t positions of the logits that are not padding; None if none is padding.

    Args:
        batch: the samples.
        shape: the shape of the positions that the model has logits at, without samples and classes.

    Raises:
        QualmsError: if the mask has another shape.
    """
    if not isinstance(batch, dict):
        return None
    # With a decoder, the positions of the logits are the decoder's.
    mask = batch.get(_answering_side(batch) + MASK)
    if mask is None or mask.ndim != 2 or bool(mask.bool().all()):
        return None
    if tuple(mask.shape[1:]) != shape:
        raise _mismatch_error(" x ".join(map(str, shape)), mask.shape[1])
    return mask.bool()


def _answering_side(batch: dict[str, Tensor]) -> str:
    """Return the name prefix of the arguments whose tokens the model's logits belong to.

    It is `decoder_` if the batch has arguments of a decoder, else the empty string.
    """
    has_decoder = any(name.startswith(DECODER) for name in batch)
    return DECODER if has_decoder else ""


def _cut_tokens(
    batch: dict[str, Tensor],
    side: str,
    part: slice,
    length: int,
) -> dict[str, Tensor]:
    """Keep only some of the tokens in the arguments of the encoder or the decoder.

    Args:
        batch: one sample: the model's arguments by name.
        side: the name prefix of the arguments to cut: `DECODER`, or an empty string for the encoder
            (or a model without decoder).
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
        # Any other argument of this length might have an entry for each token as well.
        elif is_long and side == "" and not name.startswith((DECODER, ENCODER)):
            raise QualmsError(
                f"{name} of x is as long as the padded texts, so it is not clear whether {name} "
                "has one entry per token; pass one text at a time, without padding."
            )
    return cut


def name_arguments(model: nn.Module, batch: Batch) -> Batch:
    """Turn a tuple into a dict by the model's argument names, if one of them is an attention mask.

    Padding is found by the name of the mask. Any other batch is returned unchanged.

    Args:
        model: the model, whose `forward` names the arguments.
        batch: the positional arguments, or any other batch.
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
    """Wraps a model with logits at many positions so that it returns those of P positions, [b, P·c].

    To the engines the wrapped model is a classifier with P·c logits, c for each position; with a
    single position it is an ordinary classifier.

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
        # Set directly, as `eval()` would change the mode of the inner model as well.
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Float[Tensor, "b pc"]:
        """Run the model and select the logits at the positions, side by side."""
        # The engines isolate the wrapper alone; `preserve_state` has been given the inner model.
        with isolate_forward(self.model):
            output = self.model(*args, **kwargs)
            # [b, positions, c], the positions in row-major order.
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
    # Axis 0 counts the samples, so it is invalid too.
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
        A function from a name in the wrapper, which begins with `model.`, to whether the parameter
        is selected; None for all parameters.
    """
    if params is None:
        return None
    chosen = select_parameters(model, params)
    return lambda name: name.removeprefix(INNER) in chosen
