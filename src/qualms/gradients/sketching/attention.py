"""Attention with a derivative of its own in forward mode.

torch's kernel that has one takes it apart into a dozen steps, each a pass over [tokens, tokens].
With P the softmax of S = s q kᵀ + mask and o = P v, and A = P ∘ dS, where dS = s (dq kᵀ + q dkᵀ) is
one product of [dq q] and [k dk]:

    do = P dv + A v - r ∘ o,  r the sums of the rows of A.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


class Attention(torch.autograd.Function):
    """softmax(s q kᵀ + mask) v."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The result, and P for the derivative."""
        scores = (q * scale) @ k.mT
        probs = (scores if mask is None else scores + mask).softmax(-1)
        if mask is not None:  # a token that sees none gets nothing, as torch has it
            probs = probs.masked_fill((mask == -torch.inf).all(-1, keepdim=True), 0.0)
        return probs @ v, probs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """What the derivative needs."""
        q, k, v, _, ctx.scale = inputs
        out, probs = output
        ctx.mark_non_differentiable(probs)
        ctx.save_for_forward(q, k, v, out, probs)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> tuple[Tensor, None]:
        """The derivative of the result."""
        q, k, v, out, probs = ctx.saved_tensors
        a = probs * (torch.cat([dq * ctx.scale, q * ctx.scale], -1) @ torch.cat([k, dk], -1).mT)
        return probs @ dv + a @ v - a.sum(-1, keepdim=True) * out, None


class DifferentiableAttention(TorchFunctionMode):
    """Attention by `Attention`, where nothing is asked of it that it does not do."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "scaled_dot_product_attention":
            return func(*args, **kwargs)
        given = dict(zip(NAMES, args, strict=False)) | kwargs
        q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        if given.get("dropout_p") or q.ndim < 2 or (mask is not None and mask.is_floating_point()):
            return func(*args, **kwargs)  # a mask of numbers may have a derivative
        if given.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        if given.get("is_causal"):
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(
                ~mask, -torch.inf
            )
        scale = given.get("scale")
        own: Any = Attention
        return own.apply(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)[0]
