"""Inputs of pure noise, of the shape of real ones: what a model makes of them says something about
the model alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch, batch_tensors, num_samples, take_samples, with_tensors
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import BatchContext
from qualms.random import generator

PURPOSE = 71  # of these random numbers
INSTEAD = "use regrad+layers or entropy"


def noise_inputs(context: BatchContext, number: int, method: str) -> Batch:
    """N(0, 1) in place of every number that an input is made of, and random ids in place of token
    ids.

    In the units of the tensor that the model receives. Masks that come beside it are such that
    nothing is masked, and types of tokens are zero.
    """
    first, *others = batch_tensors(context.batch)
    names = list(context.batch)[1:] if isinstance(context.batch, dict) else ["" for _ in others]
    shape, source = (number, *first.shape[1:]), generator(context.seed, PURPOSE)
    if first.is_floating_point():
        drawn = torch.randn(shape, generator=source)
    else:
        drawn = torch.randint(0, _vocabulary(context, method), shape, generator=source)
    beside = [
        _beside(name, t, number, context, method) for name, t in zip(names, others, strict=True)
    ]
    return with_tensors(context.batch, [drawn.to(first), *beside])


def louder(batch: Batch, times: float, seed: int) -> ModelInput:
    """Inputs of noise, `times` as large; for token ids that much noise is added to their
    embeddings.
    """
    first, *others = batch_tensors(batch)
    if first.is_floating_point():
        return ModelInput(with_tensors(batch, [first * times, *others]))

    def noise(shape: tuple[int, ...]) -> Tensor:
        return times * torch.randn((num_samples(batch), *shape), generator=generator(seed, PURPOSE))

    return ModelInput(batch, embedding_noise=noise)


def _beside(name: str, t: Tensor, number: int, context: BatchContext, method: str) -> Tensor:
    """What stands beside the input proper, by its name."""
    shape = (number, *t.shape[1:])
    if "mask" in name:
        masked_is_true = "padding" in name
        return t.new_full(shape, not masked_is_true)
    if "type" in name:
        return t.new_zeros(shape)
    if t.is_floating_point():
        return torch.randn(shape, generator=generator(context.seed, PURPOSE, len(name))).to(t)
    what = repr(name) if name else "a tensor of whole numbers in a tuple"
    hint = "" if name else "pass a dict with names such as attention_mask, or "
    raise QualmsError(
        f"{method} tries the model on noise, but does not know what to put in place of {what}; {hint}{INSTEAD}."
    )


def _vocabulary(context: BatchContext, method: str) -> int:
    """How many ids there are: the rows of the embedding that reads them."""
    one = take_samples(context.batch, slice(0, 1))
    watch = _Embeddings(batch_tensors(one)[0])
    with torch.no_grad():
        forward_logits(context.model, ModelInput(one), watch)
    if watch.rows is None:
        raise QualmsError(
            f"{method} tries the model on random token ids, but no embedding of the model reads x, so there is no "
            f"vocabulary to draw them from; {INSTEAD}, put the token ids first if x is a dict, or pass x as "
            "floating-point numbers if it is not tokens."
        )
    return watch.rows


class _Embeddings(TorchFunctionMode):
    """Notes how many rows the first embedding has in which a model looks these ids up."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.ids = ids.flatten()
        self.rows: int | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)]
        if self.rows is None and getattr(func, "__name__", "").startswith("embedding"):
            with torch._C.DisableTorchFunction():
                if any(
                    t.numel() == self.ids.numel()
                    and torch.equal(t.flatten().to(self.ids), self.ids)
                    for t in given
                ):
                    self.rows = next((t.shape[0] for t in given if t.is_floating_point()), None)
        return func(*args, **(kwargs or {}))
