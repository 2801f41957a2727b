"""What the last linear layer reads for every training input: found once for a model, and kept for
all methods.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples, take_samples
from qualms.gradients.precision import at_least_float32
from qualms.methods.context import BatchContext
from qualms.methods.head import required, with_head


@dataclass(frozen=True)
class TrainingFeatures:
    """Of n training inputs, 32 bits for each number at least: 4 n f bytes of memory in all for a
    float32 model.
    """

    features: Float[Tensor, "n f"]
    max_logits: Float[Tensor, " n"]
    labels: Int[Tensor, " n"]  # those that came with the inputs, else the model's predictions


def training_features(context: BatchContext, method: str) -> TrainingFeatures:
    """Those of the data in `train=`, from one pass over it that serves all methods."""
    fitted = context.model_context.fitted
    if TrainingFeatures not in fitted:
        fitted[TrainingFeatures] = _found(context, method)
    return fitted[TrainingFeatures]


def _found(context: BatchContext, method: str) -> TrainingFeatures:
    features, largest, labels = [], [], []
    for batch, given in context.model_context.labeled_training_batches(method):
        size = context.model_context.rows_at_once(batch)
        for start in range(0, num_samples(batch), size):
            rows = slice(start, start + size)
            z, head = with_head(context.model, take_samples(batch, rows))
            features.append(at_least_float32(required(head).features))
            largest.append(at_least_float32(z).amax(-1))
            labels.append(
                z.argmax(-1) if given is None else _within(given[rows].to(z.device), z.shape[1])
            )
    return TrainingFeatures(torch.cat(features), torch.cat(largest), torch.cat(labels))


def _within(labels: Int[Tensor, " b"], classes: int) -> Int[Tensor, " b"]:
    """The labels themselves; an error if one is not the number of a logit."""
    low, high = (int(end) for end in labels.aminmax())
    if low < 0 or high >= classes:
        raise QualmsError(
            f"the labels in train= go from {low} to {high}, but the model has {classes} classes, numbered from 0; "
            "correct the labels, or pass the inputs alone."
        )
    return labels
