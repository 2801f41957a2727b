"""Attention with a forward-mode derivative of its own.

torch's kernel that has one takes attention apart into a dozen steps, each a pass over
[tokens, tokens]. With P the softmax of S = s q kᵀ + mask and o = P v, and A = P ∘ dS, where
dS = s (dq kᵀ + q dkᵀ) is one product of [dq q] and [k dk]:

    do = P dv + A v - r ∘ o,  r the sums of the rows of A.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qualms.gradients.function_modes import CallMode, bind_arguments, name_of, run_function

PARAMETERS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


@contextmanager
def attention_with_forward_rule() -> Iterator[None]:
    """Run attention by kernels that have a forward-mode rule, by `Attention` where that serves."""
    mha: Any = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), DifferentiableAttention():
            yield
    finally:
        mha.set_fastpath_enabled(before)


class Attention(torch.autograd.Function):
    """softmax(s q kᵀ + mask) v."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """The result, and P for the derivative.

        Args:
            q: queries [..., t, d].
            k: keys [..., u, d].
            v: values [..., u, e].
            mask: added to the scores; 0 or -inf.
            scale: s.
        """
        scores = (q * scale) @ k.mT
        if mask is None:
            probs = scores.softmax(-1)
        else:
            # A token that sees none gets nothing, as in torch.
            sees_none = (mask == -torch.inf).all(-1, keepdim=True)
            probs = (scores + mask).softmax(-1).masked_fill(sees_none, 0.0)
        return probs @ v, probs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the derivative needs."""
        q, k, v, _, ctx.scale = inputs
        out, probs = output
        ctx.mark_non_differentiable(probs)
        ctx.save_for_forward(q, k, v, out, probs)

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> tuple[Tensor, None]:
        """The derivative of the result.

        Args:
            ctx: what `setup_context` has saved.
            dq: tangent of the queries.
            dk: tangent of the keys.
            dv: tangent of the values.
        """
        q, k, v, out, probs = ctx.saved_tensors
        left = torch.cat([dq * ctx.scale, q * ctx.scale], -1)
        right = torch.cat([k, dk], -1)
        a = probs * (left @ right.mT)
        return probs @ dv + a @ v - a.sum(-1, keepdim=True) * out, None


class DifferentiableAttention(CallMode):
    """Replaces attention by `Attention`, unless a call asks for something that it does not do."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `func`, or `Attention` in its place."""
        if name_of(func) != "scaled_dot_product_attention":
            return run_function(func, args, kwargs)
        arguments = bind_arguments(PARAMETERS, args, kwargs)
        q, k, v = arguments["query"], arguments["key"], arguments["value"]
        mask = arguments.get("attn_mask")
        # A mask of numbers may have a derivative.
        is_additive = mask is not None and mask.is_floating_point()
        if arguments.get("dropout_p") or q.ndim < 2 or is_additive:
            return run_function(func, args, kwargs)
        if arguments.get("enable_gqa"):
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        if arguments.get("is_causal"):
            square = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device)
            mask = square.tril()
        if mask is not None:
            zeros = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
            mask = zeros.masked_fill(~mask, -torch.inf)
        scale = arguments.get("scale")
        if scale is None:
            scale = q.shape[-1] ** -0.5
        attention: Any = Attention
        return attention.apply(q, k, v, mask, scale)[0]
