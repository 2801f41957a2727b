"""What a model is called with, and the logits that come back.

A batch is a tensor, a tuple of tensors (positional arguments) or a dict of tensors (keyword arguments, as Hugging
Face tokenisers give them). The first axis of every tensor counts the inputs. The first tensor is *the* input: the one
that smoothing perturbs.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.watch.layout import Unclear

Batch: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
LABEL_KEYS = ("label", "labels")


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, the input proper first."""
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def with_tensors(batch: Batch, new: Iterable[Tensor]) -> Batch:
    """The same structure as `batch`, filled with `new` in the order of `tensors`."""
    new = list(new)
    if isinstance(batch, Tensor):
        return new[0]
    return dict(zip(batch, new, strict=True)) if isinstance(batch, dict) else tuple(new)


def take(batch: Batch, index: slice | list[int]) -> Batch:
    """Some of a batch's inputs."""
    return with_tensors(batch, (t[index] for t in tensors(batch)))


def count(batch: Batch) -> int:
    """How many inputs a batch has."""
    return tensors(batch)[0].shape[0]


def batches(x: Any) -> Iterator[Batch]:
    """The batches of whatever a user passes as `x`: one batch, or an iterable of them (labels are dropped)."""
    if isinstance(x, (Tensor, tuple)) or hasattr(x, "keys"):
        yield checked(_inputs_of(x) if hasattr(x, "keys") else x)
        return
    if not isinstance(x, Iterable) or isinstance(x, (str, bytes)):
        raise QualmsError(
            f"x is a {type(x).__name__}; pass a tensor, a tuple or dict of tensors, or an iterable of batches."
        )
    empty = True
    for batch in x:
        empty = False
        yield checked(_inputs_of(batch))
    if empty:
        raise QualmsError("x yields no batch; pass at least one input.")


def _inputs_of(batch: Any) -> Any:
    """What a loader yields, without labels: `inputs`, `(inputs, labels)`, or a dict."""
    if hasattr(batch, "keys"):
        return {k: v for k, v in dict(batch).items() if k not in LABEL_KEYS}
    if not isinstance(batch, (tuple, list)):
        return batch
    if not 1 <= len(batch) <= 2:
        raise QualmsError(
            f"a batch of x has {len(batch)} parts, so it is not clear which are inputs; yield (inputs, labels), with "
            "a tuple of tensors as inputs if the model takes several."
        )
    return tuple(batch[0]) if isinstance(batch[0], list) else batch[0]


def checked(batch: Any) -> Batch:
    """The batch itself, or an error that says what is wrong with it."""
    parts = tensors(batch) if isinstance(batch, (Tensor, tuple, dict)) else []
    if not parts or not all(isinstance(t, Tensor) for t in parts):
        raise QualmsError(f"a batch of x is a {type(batch).__name__} without tensors; pass tensors only.")
    if any(t.layout != torch.strided for t in parts):
        raise QualmsError("a tensor of x is sparse; pass dense tensors.")
    if any(t.ndim == 0 for t in parts):
        raise QualmsError("a tensor of x has no batch axis; its first axis must count the inputs.")
    sizes = {t.shape[0] for t in parts}
    if len(sizes) > 1:
        raise QualmsError(f"the tensors of x disagree on the number of inputs: {sorted(sizes)}.")
    if sizes == {0}:
        raise QualmsError("x is an empty batch; pass at least one input.")
    for t in parts:
        if t.is_floating_point() and not t.is_meta and not bool(torch.isfinite(t).all()):
            bad = int((~torch.isfinite(t)).flatten(1).any(1).nonzero()[0]) if t.ndim > 1 else 0
            raise QualmsError(f"input {bad} of x has a value that is NaN or infinite; clean it before scoring.")
    # A plain tensor of our own: no graph of the user's behind it, and usable outside inference mode.
    return with_tensors(batch, (t.detach().clone() if t.is_inference() else t.detach() for t in parts))


def run(model: nn.Module, batch: Batch) -> Any:
    """The model's output; whatever the model itself rejects becomes one clear error."""
    parameter = next(model.parameters(), None)
    here = tensors(batch)[0].device
    if parameter is not None and parameter.device != here:
        raise QualmsError(
            f"the model's parameters are on {parameter.device} and x is on {here}; move one to the other."
        )
    try:
        if isinstance(batch, Tensor):
            return model(batch)
        return model(**batch) if isinstance(batch, dict) else model(*batch)
    except (QualmsError, Unclear):
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors(batch)).replace("torch.", "")
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise QualmsError(f"the model does not accept x of {shapes}: {reason}") from error


def checked_logits(output: Any, rows: int) -> Float[Tensor, "rows classes"]:
    """The logits in a model's output: the tensor itself, `.logits`, or the first element of a tuple."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, dict):
        logits = logits.get("logits")
    if isinstance(logits, (tuple, list)) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise QualmsError(
            f"the model returns a {type(output).__name__} without logits; "
            "it must return a float tensor, an object with `.logits`, or a tuple that starts with them."
        )
    if logits.ndim != 2 or logits.shape[0] != rows or logits.shape[1] < 2:
        raise QualmsError(
            f"the model returns logits of shape {tuple(logits.shape)} for a batch of {rows}; "
            f"({rows}, classes) with two classes or more is needed (inputs are also run one at a time)."
        )
    finite = torch.isfinite(logits.detach()).all(dim=1)
    if not bool(finite.all()):
        raise QualmsError(
            f"the logits of input {int((~finite).nonzero()[0])} of the batch are NaN or infinite; "
            "check the model's weights and the input's scaling."
        )
    return logits
