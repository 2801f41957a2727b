"""The rule for embeddings: ∂W[v] = Σ_t [id_t = v] δ_t."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from qualms.gradients.precision import at_least_float32
from qualms.gradients.tracing.outer_product import Outer, OuterSizes, arrange_in_out

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

    t are positions and δ_t the cotangent of y_t. This is a product of W with one-hot vectors a_t,
    so ⟨a_t, a_t'⟩ is 1 if two positions t and t' have the same id, else 0.

    Args:
        call: the operation.
        weight: W [vocabulary, features].
        input: the ids, integers of any shape.
        padding_idx: index of the row of W that gets no gradient.
        scale_grad_by_freq: the rule does not cover True: autograd then does not return the
            derivative.
        sparse: not used; it says how autograd stores the gradient.

    Returns:
        y; NotImplemented, so that `OpCall.run_on_copies` runs it, if the rule does not
        cover the arguments.
    """
    layout = call.find_input_layout(input)
    if layout is None or scale_grad_by_freq or not call.is_param(weight):
        return NotImplemented
    out = call.run()
    num_samples = call.num_samples
    vocabulary, features = weight.shape

    def arrange_ids() -> Tensor:
        """Reshape the ids to [samples, positions]."""
        # F.embedding takes int32 too, F.one_hot does not.
        return layout.rows_first(input).reshape(num_samples, -1).long()

    def arrange_cotangent(cotangent: Tensor) -> Tensor:
        """Reshape δ to [samples, positions, 1, features], with zeros at padding."""
        delta = layout.rows_first(cotangent).reshape(num_samples, -1, 1, features)
        is_token = arrange_ids() != padding_idx
        return delta * is_token[:, :, None, None]

    def one_hot() -> Tensor:
        """Write out the one-hot vectors, as [samples, positions, 1, vocabulary]."""
        return F.one_hot(arrange_ids(), vocabulary).to(weight.dtype).unsqueeze(2)

    def compare_ids() -> Tensor:
        """Compute the Gram matrix of the one-hot vectors, [samples, positions, positions].

        It is 1 where two positions have the same id, else 0.
        """
        ids = arrange_ids()
        is_same = ids[:, :, None] == ids[:, None, :]
        return is_same.to(at_least_float32(weight).dtype)

    sizes = OuterSizes(
        positions=input.numel() // num_samples,
        out_features=features,
        in_features=vocabulary,
        groups=1,
    )
    outer = Outer(
        grad_outputs=arrange_cotangent,
        activations=one_hot,
        arrange=arrange_in_out,
        num_samples=num_samples,
        sizes=sizes,
        fast_gram=compare_ids,
    )
    call.add_factor(weight, [get_gradient_edge(out)], outer)
    return out
