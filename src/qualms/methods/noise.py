"""Inputs of pure noise in the shape of real ones: they show properties of the model alone."""

from typing import Any

import torch
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import (
    Batch,
    batch_tensors,
    num_samples,
    take_samples,
    with_tensors,
)
from qualms.gradients.function_modes import CallMode, name_of
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import BatchContext
from qualms.random import generator

# Makes these random numbers differ from others under the same seed.
PURPOSE = 71
INSTEAD = "use regrad+layers or entropy"  # the advice of errors


def noise_inputs(context: BatchContext, number: int, method: str) -> Batch:
    """Create inputs of N(0, 1) noise in the shape of real ones, or random ids for token ids.

    The noise has variance 1 in the units of the tensor that the model receives. Further arguments
    of the model get neutral values: masks that mask nothing, and token types of zero.

    Args:
        context: the real inputs.
        number: the number of noise inputs.
        method: the name of the method, for errors.
    """
    first, *others = batch_tensors(context.batch)
    # Only the tensors of a dict have names, the keys.
    names = list(context.batch)[1:] if isinstance(context.batch, dict) else [""] * len(others)
    shape = (number, *first.shape[1:])
    random = generator(context.seed, PURPOSE)
    if first.is_floating_point():
        noise = torch.randn(shape, generator=random)
    else:
        noise = torch.randint(0, _find_vocabulary_size(context, method), shape, generator=random)
    tensors = [noise.to(first)]
    for name, t in zip(names, others, strict=True):
        tensors.append(_fill_argument(name, t, number, context.seed, method))
    return with_tensors(context.batch, tensors)


def scale_noise(batch: Batch, times: float, seed: int) -> ModelInput:
    """Multiply inputs of noise by a factor.

    Args:
        batch: inputs of noise.
        times: the factor. Token ids cannot be scaled: noise with this standard deviation is added
            to their embeddings instead.
        seed: the seed of the noise added to embeddings.
    """
    first, *others = batch_tensors(batch)
    if first.is_floating_point():
        return ModelInput(with_tensors(batch, [first * times, *others]))

    def draw_noise(shape: tuple[int, ...]) -> Tensor:
        """Draw noise for the embeddings of all inputs; `shape` is that of one embedded input."""
        random = generator(seed, PURPOSE)
        return times * torch.randn((num_samples(batch), *shape), generator=random)

    return ModelInput(batch, embedding_noise=draw_noise)


def _fill_argument(
    name: str,
    t: Tensor,
    number: int,
    seed: int,
    method: str,
) -> Tensor:
    """Create a neutral value for an argument of the model other than the first.

    Args:
        name: the name of the argument, "" if it has none.
        t: the value of the argument for the real inputs, which gives shape, dtype and device.
        number: the number of noise inputs.
        seed: the seed of random values.
        method: the name of the method, for the error.
    """
    shape = (number, *t.shape[1:])
    if "mask" in name:
        # Attention masks are 1 at tokens to read, padding masks are True at tokens to ignore; all
        # tokens of noise are to be read.
        is_padding_mask = "padding" in name
        return t.new_full(shape, not is_padding_mask)
    # Token types: all tokens belong to the first segment.
    if "type" in name:
        return t.new_zeros(shape)
    if t.is_floating_point():
        # The length of the name, so that most arguments get different numbers.
        return torch.randn(shape, generator=generator(seed, PURPOSE, len(name))).to(t)
    what = repr(name) if name else "a tuple's tensor of whole numbers"
    hint = "" if name else "pass a dict with names such as attention_mask, or "
    raise QualmsError(
        f"{method} runs the model on noise, but {what} has no known neutral value; {hint}{INSTEAD}."
    )


def _find_vocabulary_size(context: BatchContext, method: str) -> int:
    """Find how many token ids there are: as many as the embedding that reads them has rows.

    Args:
        context: a batch of token ids.
        method: the name of the method, for the error if no embedding reads the ids.
    """
    first_sample = take_samples(context.batch, slice(0, 1))
    finder = _EmbeddingFinder(batch_tensors(first_sample)[0])
    with torch.no_grad():
        forward_logits(context.model, ModelInput(first_sample), finder)
    if finder.rows is None:
        raise QualmsError(
            f"{method} runs the model on random token ids, but no embedding of the model reads x, "
            f"so the vocabulary is unknown; {INSTEAD}, put the token ids first if x is a dict, or "
            "convert x to a float dtype if it does not contain tokens."
        )
    return finder.rows


class _EmbeddingFinder(CallMode):
    """Finds the first embedding that looks up given token ids.

    Attributes:
        ids: the token ids, flattened.
        rows: the number of rows of the embedding's table; None until it is found.
    """

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids.flatten()
        # None until an embedding reads the ids.
        self.rows: int | None = None

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and record the size of its table if it looks up the token ids."""
        if self.rows is None and name_of(func).startswith("embedding"):
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            # Else the operations of the comparison would come to this mode as well.
            with torch._C.DisableTorchFunction():
                if any(self._are_ids(t) for t in tensors):
                    tables = [t for t in tensors if t.is_floating_point()]
                    self.rows = tables[0].shape[0] if tables else None
        return func(*args, **kwargs)

    def _are_ids(self, t: Tensor) -> bool:
        """Whether a tensor holds the token ids, in any shape and dtype."""
        return t.numel() == self.ids.numel() and torch.equal(t.flatten().to(self.ids), self.ids)
