"""One input by itself, without its padding: what it gives then does not depend on its company.

Padding changes more than it should: some models count positions from where the padding starts. So texts are cut to
the tokens that their attention masks keep, and what is found is put back where the tokens were.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.inputs import Batch, take

MASK = "attention_mask"
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
        one, kept, length = take(batch, slice(number, number + 1)), None, 0
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

    def put_back(self, values: Tensor, missing: float) -> Tensor:
        """Values [t, …] at the input's own positions, put where these are with the padding."""
        if self.kept is None:
            return values
        if len(values) != len(self.kept):
            raise QualmsError(
                f"the model answers at {len(values)} positions for {len(self.kept)} tokens, so it is not clear where "
                "its answers belong in a padded batch; pass one text at a time, without padding."
            )
        whole = values.new_full((self.length, *values.shape[1:]), missing)
        whole[self.kept.to(whole.device)] = values
        return whole

    def own(self, values: Tensor) -> Tensor:
        """The other way round: of values at all positions with the padding, those of the input's own."""
        return values if self.kept is None else values[self.kept.to(values.device)]


def live_positions(batch: Batch, shape: tuple[int, ...] | None) -> Bool[Tensor, "b ..."] | None:
    """The positions that a batch's attention mask keeps, if it has one for the positions of the answers."""
    mask = batch.get(_answers(batch) + MASK) if isinstance(batch, dict) else None
    return mask.bool() if mask is not None and shape in (None, tuple(mask.shape[1:])) else None


def _answers(batch: dict[str, Tensor]) -> str:
    """The side whose positions the model answers at."""
    return DECODER if any(name.startswith(DECODER) for name in batch) else ""


def _cut(batch: dict[str, Tensor], side: str, part: slice, length: int) -> dict[str, Tensor]:
    """The arguments of one side, the encoder's or the decoder's, cut to a part of the tokens."""

    def belongs(name: str, t: Tensor) -> bool:
        return name.startswith(DECODER) == (side == DECODER) and t.ndim >= 2 and t.shape[1] == length

    return {name: t[:, part] if belongs(name, t) else t for name, t in batch.items()}
