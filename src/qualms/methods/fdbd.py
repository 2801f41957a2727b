"""fDBD: minus the mean distance of the features to the decision boundaries, over their distance to
the training mean.

With ĉ the predicted class, h what the last linear layer reads and w_c its rows, the boundary to
class c is |z_ĉ - z_c| / ‖w_ĉ - w_c‖ away; the score is minus the mean of that over c ≠ ĉ, divided
by ‖h - μ‖.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.methods.context import BatchContext
from qualms.methods.method import TRAINING_DATA, Method
from qualms.methods.training_features import training_features

NEAREST = 1e-6  # to the mean, of the features' length: what is nearer is rounding in 32 bits


@dataclass(frozen=True)
class FDBD(Method):
    """No parameters. Two classes with the same weights have no boundary between them, and no
    distance to it.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import FDBD

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, FDBD(), train=[torch.randn(50, 4)]))
        ```
    """

    name = "fdbd"
    paper = "Liu & Qin, Fast Decision Boundary based Out-of-Distribution Detector, ICML 2024"
    needs = (TRAINING_DATA,)
    cost = "1, and 1 for each training input"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        fitted, head = context.model_context.fitted, context.head
        if self not in fitted:
            known = training_features(context, self.name).features
            length = float(known.norm(dtype=torch.double)) / len(known) ** 0.5
            fitted[self] = known.mean(0, dtype=torch.double), NEAREST * (length or 1.0)
        mean, nearest = fitted[self]
        from_mean = (head.features.double() - mean).norm(dim=-1).clamp_min(nearest)
        return -boundary_distance(context.logits, head.weight) / from_mean


def boundary_distance(
    logits: Float[Tensor, "b c"], weight: Float[Tensor, "c f"]
) -> Float[Tensor, " b"]:
    """The mean distance to the boundaries between the predicted class and all others, ‖w_ĉ - w_c‖
    between weights.
    """
    largest, predicted = logits.max(-1)
    # Those of the classes that are predicted alone: of all pairs there may be billions.
    some, place = predicted.unique(return_inverse=True)
    every = weight.double()
    between = torch.cdist(every[some], every, compute_mode="donot_use_mm_for_euclid_dist")[place]
    each = torch.where(between > 0, (largest[:, None] - logits) / between, 0)
    return each.sum(-1) / (logits.shape[1] - 1)
