"""Inputs of pure noise, of the shape of real ones: what a model makes of them says something about the model alone."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.inputs import Batch, count, take, tensors, with_tensors
from qualms.gradients.rows import Rows, logits_of
from qualms.methods.passes import Passes
from qualms.random import generator

PURPOSE = 71  # of these random numbers


def noise_inputs(passes: Passes, number: int, method: str) -> Batch:
    """N(0, 1) in place of every number that an input is made of, and random ids in place of token ids.

    In the units of the tensor that the model receives. Beside ids, masks are one and all other whole numbers are zero.
    """
    first, *others = tensors(passes.batch)
    names = list(passes.batch) if isinstance(passes.batch, dict) else [""] * (1 + len(others))
    drawn: list[Tensor] = []
    for place, (name, t) in enumerate(zip(names, (first, *others), strict=True)):
        shape, source = (number, *t.shape[1:]), generator(passes.seed, PURPOSE, place)
        if t.is_floating_point():
            drawn.append(torch.randn(shape, generator=source).to(t))
        elif t is first:
            drawn.append(torch.randint(0, _vocabulary(passes, method), shape, generator=source).to(t))
        else:
            drawn.append((torch.ones if "mask" in name else torch.zeros)(shape, dtype=t.dtype, device=t.device))
    return with_tensors(passes.batch, drawn)


def louder(batch: Batch, times: float, seed: int) -> Rows:
    """Inputs of noise, `times` as large; for token ids that much noise is added to their embeddings."""
    first, *others = tensors(batch)
    if first.is_floating_point():
        return Rows(with_tensors(batch, [first * times, *others]))

    def noise(shape: tuple[int, ...]) -> Tensor:
        return times * torch.randn((count(batch), *shape), generator=generator(seed, PURPOSE))

    return Rows(batch, embedding_noise=noise)


def _vocabulary(passes: Passes, method: str) -> int:
    """How many ids there are: the rows of the embedding that reads them."""
    watch = _Embeddings()
    with torch.no_grad():
        logits_of(passes.model, Rows(take(passes.batch, slice(0, 1))), watch)
    if not watch.rows:
        raise QualmsError(
            f"{method} tries the model on random token ids, but no embedding of the model reads ids, so there is no "
            "vocabulary to draw them from; use regrad+layers or entropy."
        )
    return watch.rows[0]


class _Embeddings(TorchFunctionMode):
    """Notes how many rows the embeddings have that a model looks something up in."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "").startswith("embedding"):
            tables = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor) and t.is_floating_point()]
            self.rows += [t.shape[0] for t in tables[:1]]
        return func(*args, **(kwargs or {}))
