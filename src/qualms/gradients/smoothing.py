"""Smoothing: class gradients averaged over small perturbations of the input, before any norm is taken.

g_c becomes (1/(N+1)) Σ_{i=0..N} ∇θ log p_c(x_i), with x_0 the input and x_i = x_0 + N(0, σ²I)
(Wang & Ji, CVPR 2024, section 4.3). With antithetic draws the perturbations come in pairs ±Δ, whose odd terms cancel:
eight of them rank inputs like a hundred independent ones.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode

from qualms.errors import QualmsError
from qualms.gradients.inputs import Batch, checked_logits, count, run, take, tensors, with_tensors
from qualms.random import generator


@dataclass(frozen=True)
class Smoothing:
    """How to perturb.

    Args:
        sigma: standard deviation in the units of the tensor that the model receives; a number, or one per channel.
        draws: N, the number of perturbed inputs beside the input itself.
        antithetic: draw in pairs ±Δ (an odd last draw stands alone).

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model, x = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)), torch.rand(2, 4)
        smoothed = qualms.class_gradient_norms(model, x, smoothing=qualms.Smoothing(sigma=0.1, draws=4))
        print(smoothed.norms)
        ```
    """

    sigma: float | tuple[float, ...] = 0.02
    draws: int = 8
    antithetic: bool = True

    def __post_init__(self) -> None:
        values = self.sigma if isinstance(self.sigma, tuple) else (self.sigma,)
        if not values or not all(0 < s < math.inf for s in values):
            raise QualmsError(f"smoothing has sigma {self.sigma}; it must be a positive number, or one per channel.")
        if self.draws < 1 or self.draws != int(self.draws):
            raise QualmsError(f"smoothing has {self.draws} draws; at least one is needed, and a whole number.")

    @classmethod
    def of(cls, value: Any) -> "Smoothing | None":
        """A Smoothing from itself, from σ, or from the pair (σ, N)."""
        if value is None or isinstance(value, Smoothing):
            return value
        given = value if isinstance(value, tuple) else (value,)
        numbers = given[0] if isinstance(given[0], tuple) else given[:1]
        if len(given) > 2 or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in numbers):
            raise QualmsError(
                f"smoothing={value!r} is not known; pass qualms.Smoothing, a number σ, or the pair (σ, N)."
            )
        return cls(*given)

    def noise(self, shape: tuple[int, ...], index: int, seed: int) -> Float[Tensor, "rows *shape"]:
        """Perturbations of input number `index`: zero for x_0, then N draws. Its seed and index alone decide them."""
        half = -(-self.draws // 2) if self.antithetic else self.draws
        drawn = torch.randn((half, *shape), generator=generator(seed, index))
        if self.antithetic:
            drawn = torch.stack([drawn, -drawn], dim=1).flatten(0, 1)[: self.draws]
        return torch.cat([torch.zeros(1, *shape), drawn]) * self._scale(shape)

    def _scale(self, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(self.sigma, tuple):
            return torch.tensor(self.sigma)
        if not shape or len(self.sigma) not in (1, shape[0]):
            raise QualmsError(
                f"smoothing has {len(self.sigma)} values of sigma, but an input of shape {shape} "
                f"has {shape[0] if shape else 0} channels; give one number, or one per channel."
            )
        return torch.tensor(self.sigma).reshape(-1, *[1] * (len(shape) - 1))


@dataclass(frozen=True)
class Rows:
    """What the model runs on: for each input a group of rows, the first of them the input itself."""

    batch: Batch
    per_input: int = 1
    embedding_noise: Callable[[tuple[int, ...]], Tensor] | None = None

    def take(self, index: slice | list[int]) -> "Rows":
        """Some of the rows, each on its own."""
        noise = self.embedding_noise
        return Rows(take(self.batch, index), 1, None if noise is None else lambda shape: noise(shape)[index])


def rows(batch: Batch, smoothing: Smoothing | None, numbers: Sequence[int], seed: int) -> Rows:
    """The rows of a batch whose inputs have these numbers, which decide their draws.

    Discrete inputs (token ids) cannot be perturbed; their rows repeat, and the noise goes to the embeddings' output.
    """
    if smoothing is None:
        return Rows(batch)
    x = tensors(batch)[0]
    per_input = smoothing.draws + 1

    def noise(shape: tuple[int, ...]) -> Tensor:
        return torch.cat([smoothing.noise(shape, number, seed) for number in numbers])

    repeated = with_tensors(batch, (t.repeat_interleave(per_input, dim=0) for t in tensors(batch)))
    if not x.is_floating_point():
        return Rows(repeated, per_input, noise)
    first, *others = tensors(repeated)
    return Rows(with_tensors(batch, [first + noise(tuple(x.shape[1:])).to(first), *others]), per_input)


def logits_of(model: nn.Module, on: Rows, *modes: TorchFunctionMode) -> Float[Tensor, "rows classes"]:
    """One forward pass over the rows, under further function modes (the last one given sees each call first)."""
    with ExitStack() as stack:
        noisy = None
        if on.embedding_noise is not None:
            noisy = stack.enter_context(NoisyEmbedding(tensors(on.batch)[0], on.embedding_noise))
        for mode in modes:
            stack.enter_context(mode)
        output = run(model, on.batch)
    if noisy is not None and not noisy.done:
        raise QualmsError(
            "x is discrete and no embedding of the model reads it, so there is nothing to perturb; "
            "use regrad+layers, entropy or perturb-theta, or pass the embedded input."
        )
    return checked_logits(output, count(on.batch))


class NoisyEmbedding(TorchFunctionMode):
    """Adds noise to the output of the first embedding that reads the input itself."""

    def __init__(self, ids: Tensor, noise: Callable[[tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.ids, self.noise, self.done = ids, noise, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.done or not getattr(func, "__name__", "").startswith("embedding"):
            return out
        for index in (*args, *(kwargs or {}).values()):
            axis = self._rows_axis(index)
            if axis is not None:
                self.done = True
                shape = tuple(n for i, n in enumerate(out.shape) if i != axis)
                return out + self.noise(shape).to(out).movedim(0, axis)
        return out

    def _rows_axis(self, index: Any) -> int | None:
        """The axis of `index` that counts the rows, if `index` is the input itself, whole or a view of it."""
        if not isinstance(index, Tensor) or index.is_floating_point():
            return None
        while is_functorch_wrapped_tensor(index):  # under forward-mode differentiation
            index = get_unwrapped(index)
        if index.untyped_storage().data_ptr() != self.ids.untyped_storage().data_ptr():
            return None
        axes = zip(index.shape, index.stride(), strict=True)
        return next((i for i, axis in enumerate(axes) if axis == (self.ids.shape[0], self.ids.stride(0))), None)
