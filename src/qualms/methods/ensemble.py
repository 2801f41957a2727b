"""Deep ensemble: mutual information over the predictions of several models."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples, parts_of
from qualms.gradients.isolation import preserve_state
from qualms.gradients.memory import PassMemory
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.methods.context import ROWS_AT_ONCE, BatchContext
from qualms.methods.divergence import log_softmax, mutual_information
from qualms.methods.method import MODELS, Method


@dataclass(frozen=True)
class Ensemble(Method):
    """The members are the model itself and those given as `models=`.

    Example:
        ```python
        import torch
        import qualms
        from qualms.methods import Ensemble

        model, x = torch.nn.Linear(4, 3), torch.randn(5, 4)
        print(qualms.score(model, x, Ensemble(), models=[torch.nn.Linear(4, 3) for _ in range(4)]))
        ```
    """

    name = "ensemble"
    paper = (
        "Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles, "
        "NeurIPS 2017"
    )
    needs = (MODELS,)
    cost = "1 for each model"

    def score(self, context: BatchContext) -> Float[Tensor, " b"]:
        """One number for each input."""
        if not context.model_context.members:
            raise QualmsError(
                "ensemble needs several models; pass models=, the members beside the model itself."
            )
        log_q = [context.log_probs]
        for i, member in enumerate(context.model_context.members):
            with preserve_state(member) as inner, torch.no_grad():
                z = _logits(inner, context, f"a forward pass of member {i + 1}")
            if z.shape != context.logits.shape:
                raise QualmsError(
                    f"a member of the ensemble has {z.shape[1]} classes and the model {context.logits.shape[1]}; "
                    "all must have the same."
                )
            log_q.append(log_softmax(z.double()))
        return mutual_information(torch.stack(log_q, dim=1))


def _logits(member: nn.Module, context: BatchContext, what: str) -> Float[Tensor, "b c"]:
    """The logits of a member, in parts that fit the budget."""
    model_context, batch = context.model_context, context.batch
    work = PassMemory(what, lambda row: forward_logits(member, ModelInput(row)), ROWS_AT_ONCE)
    size = work.rows_at_once(batch, num_samples(batch), model_context.settings, model_context.cache)
    return torch.cat([forward_logits(member, ModelInput(part)) for part in parts_of(batch, size)])
