"""The rule for embeddings: ∂W[v] = Σ_t [id_t = v] δ_t."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.outer_product import Outer, OuterSizes, in_out

if TYPE_CHECKING:
    from qualms.gradients.tracing.op_call import OpCall


def embedding(
    call: OpCall,
    weight: Tensor,
    input: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Run an embedding, y_t = W[id_t]: ∂W = Σ_t onehot(id_t) δ_tᵀ, zero in the padding row.

    This is a product with one-hot vectors a_t, so ⟨a_t, a_t'⟩ is 1 where two positions have the
    same id.

    Args:
        call: the operation.
        weight: W [v, o].
        input: the ids, integers of any shape.
        padding_idx: index of the row of W that gets no gradient.
        scale_grad_by_freq: the rule does not cover True: autograd then does not return the
            derivative.
        sparse: not used; it says how autograd stores the gradient.

    Returns:
        y; NotImplemented, so that the general path runs it, if the rule does not cover the
        arguments.
    """
    layout = call.input_layout(input)
    if layout is None or scale_grad_by_freq or not call.is_param(weight):
        return NotImplemented
    out = call.run()
    samples = call.samples
    vocabulary, features = weight.shape

    def ids() -> Tensor:
        """Arrange the ids by sample, as [b, t]."""
        # F.embedding takes int32 too, F.one_hot does not
        return layout.leading(input).reshape(samples, -1).long()

    def grad_outputs(d: Tensor) -> Tensor:
        """Arrange δ by sample, as [b, t, 1, o], with zeros at padding."""
        d = layout.leading(d).reshape(samples, -1, 1, features)
        return d * (ids() != padding_idx)[:, :, None, None]

    def activations() -> Tensor:
        """Write out the one-hot vectors, as [b, t, 1, v]."""
        return F.one_hot(ids(), vocabulary).to(weight.dtype).unsqueeze(2)

    def gram() -> Tensor:
        """Compare the ids of all pairs of positions: 1 where they are the same, [b, t, t]."""
        i = ids()
        same_id = i[:, :, None] == i[:, None, :]
        return same_id.to(at_least_float32(weight).dtype)

    sizes = OuterSizes(input.numel() // samples, features, vocabulary, 1)
    outer = Outer(grad_outputs, activations, in_out, samples, sizes, fast_gram=gram)
    call.add_factor(weight, [get_gradient_edge(out)], outer)
    return out
