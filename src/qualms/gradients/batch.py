"""What a model is called with, and the logits that come back.

A batch is a tensor, a tuple of tensors (positional arguments) or a dict of tensors (keyword
arguments, as Hugging Face tokenizers give them). The first axis of every tensor counts the inputs.
The first tensor is *the* input: the one that smoothing perturbs.
"""

from collections.abc import Hashable, Iterable, Iterator
from functools import partial
from inspect import signature
from numbers import Integral
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from qualms.errors import QualmsError, reason
from qualms.gradients.isolation import isolate_forward

Batch: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
LABEL_KEYS = ("label", "labels")


class NotBatchable(Exception):
    """The rows of the batch cannot be told apart inside the model; each input must be run on its
    own.
    """


def batch_tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, the input proper first."""
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def with_tensors(batch: Batch, new: Iterable[Tensor]) -> Batch:
    """The same structure as `batch`, filled with `new` in the order of `batch_tensors`."""
    new = list(new)
    if isinstance(batch, Tensor):
        return new[0]
    return dict(zip(batch, new, strict=True)) if isinstance(batch, dict) else tuple(new)


def take_samples(batch: Batch, index: slice | list[int]) -> Batch:
    """Some of a batch's inputs."""
    return with_tensors(batch, (t[index] for t in batch_tensors(batch)))


def parts_of(batch: Batch, size: int) -> Iterator[Batch]:
    """The inputs of a batch, so many at a time."""
    return (
        take_samples(batch, slice(start, start + size))
        for start in range(0, num_samples(batch), size)
    )


def shapes_of(batch: Batch) -> tuple[Hashable, ...]:
    """What inputs of the same kind have in common: the names, shapes and types of their tensors."""
    names = tuple(batch) if isinstance(batch, dict) else type(batch).__name__
    return (names, *((tuple(t.shape[1:]), t.dtype) for t in batch_tensors(batch)))


def num_samples(batch: Batch) -> int:
    """How many inputs a batch has."""
    return batch_tensors(batch)[0].shape[0]


def numbered_batches(x: Any, model: nn.Module) -> Iterator[tuple[int, Batch]]:
    """The batches of `x`, each with the number of its first input."""
    first = 0
    for batch in batches(x, model):
        yield first, batch
        first += num_samples(batch)


def batches(x: Any, model: nn.Module, called: str = "x") -> Iterator[Batch]:
    """The batches of whatever a user passes as `x`: one batch, an iterable of them (labels are
    dropped), or a dataset.

    NumPy's floats, 64 bits unless somebody said otherwise, become those of the model.
    """
    return (batch for batch, _ in labeled_batches(x, model, called))


def labeled_batches(
    x: Any, model: nn.Module, called: str = "x"
) -> Iterator[tuple[Batch, Tensor | None]]:
    """The same batches, each with its labels if it has any: one whole number for each input."""
    parameter = next((p for p in model.parameters() if p.is_floating_point()), None)
    floats = torch.float32 if parameter is None else parameter.dtype
    if isinstance(x, (Tensor, tuple, np.ndarray)) or hasattr(x, "keys"):
        alone = checked(
            _as_tensors(_inputs_of(x, called) if hasattr(x, "keys") else x, floats, called), called
        )
        if called == "train" and isinstance(alone, tuple) and not _takes(model, len(alone)):
            raise QualmsError(
                f"train is a tuple, so one batch of {len(alone)} inputs that the model is called with, which it does "
                "not take; pass a list of batches: train=[(inputs, labels)]."
            )
        yield alone, _labels_of(x, num_samples(alone), called) if hasattr(x, "keys") else None
        return
    if isinstance(x, Dataset):
        collate = partial(_collate, floats=floats, called=called)
        x = DataLoader(x, batch_size=DATASET_BATCH, collate_fn=collate)
    if not isinstance(x, Iterable) or isinstance(x, (str, bytes)):
        raise QualmsError(
            f"{called} is a {type(x).__name__}; pass a tensor or array, a tuple or dict of them, an iterable of "
            "batches, or a torch dataset."
        )
    empty = True
    for batch in _collated(x, called):
        empty = False
        inputs = checked(_as_tensors(_inputs_of(batch, called), floats, called), called)
        yield inputs, _labels_of(batch, num_samples(inputs), called)
    if empty:
        raise QualmsError(
            f"{called} yields no batch; pass at least one input, and a list or a loader if it is read again."
        )


def _takes(model: nn.Module, arguments: int) -> bool:
    """Whether a model can be called with so many positional arguments, as far as its signature
    tells.
    """
    try:
        signature(model.forward).bind(*range(arguments))
    except TypeError:
        return False
    return True


DATASET_BATCH = 64  # inputs that a dataset gives at a time


def _collate(items: list[Any], floats: torch.dtype, called: str) -> Any:
    return default_collate([_as_tensors(item, floats, called) for item in items])


def _collated(x: Iterable[Any], called: str) -> Iterator[Any]:
    """The batches of x; a DataLoader that cannot collate its items is an error that says what to
    do.
    """
    iterator = iter(x)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, TypeError) as error:
            if isinstance(x, DataLoader):
                raise QualmsError(
                    f"the items of {called} cannot be put into one batch ({reason(error)}); pass a DataLoader with a "
                    "collate_fn of your own."
                ) from error
            raise
        yield batch


def _as_tensors(batch: Any, floats: torch.dtype, called: str) -> Any:
    """NumPy arrays as tensors, wherever they stand in a batch."""
    if isinstance(batch, np.ndarray):
        if batch.dtype.kind not in "biuf" or isinstance(batch, np.ma.MaskedArray):
            raise QualmsError(
                f"an array of {called} is a {type(batch).__name__} of {batch.dtype}; pass plain numbers."
            )
        kind = np.dtype(np.float64) if batch.dtype.kind == "f" else batch.dtype.newbyteorder("=")
        t = torch.from_numpy(
            np.array(batch, dtype=kind)
        )  # a copy: arrays may be read-only or run backwards
        return t.to(floats) if t.is_floating_point() else t
    if isinstance(batch, dict):
        return {key: _as_tensors(value, floats, called) for key, value in batch.items()}
    return (
        tuple(_as_tensors(part, floats, called) for part in batch)
        if isinstance(batch, tuple)
        else batch
    )


def _inputs_of(batch: Any, called: str) -> Any:
    """What a loader yields, without labels: `inputs`, `(inputs, labels)`, or a dict."""
    if hasattr(batch, "keys"):
        return {k: v for k, v in dict(batch).items() if k not in LABEL_KEYS}
    if not isinstance(batch, (tuple, list)):
        return batch
    if not 1 <= len(batch) <= 2:
        raise QualmsError(
            f"a batch of {called} has {len(batch)} parts, so it is not clear which are inputs; yield (inputs, labels), "
            "with a tuple of tensors as inputs if the model takes several."
        )
    return tuple(batch[0]) if isinstance(batch[0], list) else batch[0]


def _labels_of(batch: Any, inputs: int, called: str) -> Tensor | None:
    """What `_inputs_of` leaves out, if it is one whole number for each input."""
    if hasattr(batch, "keys"):
        labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    else:
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None
    if isinstance(labels, (list, tuple)) and all(isinstance(label, Integral) for label in labels):
        labels = torch.tensor([int(label) for label in labels])
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
        labels = torch.from_numpy(labels.astype(np.int64))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    if called == "train" and labels.ndim == 1 and len(labels) != inputs:
        raise QualmsError(
            f"a batch of train has {inputs} inputs and {len(labels)} labels; give one label for each input."
        )
    return (
        labels.detach().long().reshape(inputs) if labels.shape in ((inputs,), (inputs, 1)) else None
    )


def checked(batch: Any, called: str = "x") -> Batch:
    """The batch itself, or an error that says what is wrong with it."""
    parts = batch_tensors(batch) if isinstance(batch, (Tensor, tuple, dict)) else []
    if not parts or not all(isinstance(t, Tensor) for t in parts):
        raise QualmsError(
            f"a batch of {called} is a {type(batch).__name__} without tensors; pass tensors only."
        )
    if any(t.layout != torch.strided for t in parts):
        raise QualmsError(f"a tensor of {called} is sparse; pass dense tensors.")
    if any(t.ndim == 0 for t in parts):
        raise QualmsError(
            f"a tensor of {called} has no batch axis; its first axis must count the inputs."
        )
    sizes = {t.shape[0] for t in parts}
    if len(sizes) > 1:
        raise QualmsError(
            f"the tensors of {called} disagree on the number of inputs: {sorted(sizes)}."
        )
    if sizes == {0}:
        raise QualmsError(f"{called} is an empty batch; pass at least one input.")
    for t in parts:
        if t.is_floating_point() and not t.is_meta and not bool(torch.isfinite(t).all()):
            bad = int((~torch.isfinite(t)).flatten(1).any(1).nonzero()[0]) if t.ndim > 1 else 0
            raise QualmsError(
                f"input {bad} of {called} has a value that is NaN or infinite; clean it before scoring."
            )
    # A plain tensor of our own: no graph of the user's behind it, and usable outside inference
    # mode.
    return with_tensors(
        batch, (t.detach().clone() if t.is_inference() else t.detach() for t in parts)
    )


def call_model(model: nn.Module, batch: Batch) -> Any:
    """The model's raw output for a batch; a wrong device, or any error in the model, becomes a
    QualmsError.
    """
    parameter = next(model.parameters(), None)
    here = batch_tensors(batch)[0].device
    if parameter is not None and parameter.device != here:
        raise QualmsError(
            f"the model's parameters are on {parameter.device} and x is on {here}; move one to the other."
        )
    try:
        with isolate_forward(model):
            if isinstance(batch, Tensor):
                return model(batch)
            return model(**batch) if isinstance(batch, dict) else model(*batch)
    except (QualmsError, NotBatchable):
        raise
    except Exception as error:
        shapes = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in batch_tensors(batch)).replace(
            "torch.", ""
        )
        raise QualmsError(f"the model does not accept x of {shapes}: {reason(error)}.") from error


def logits_in(output: Any) -> Tensor:
    """The logits in a model's output: the tensor itself, `.logits`, or the first element of a
    tuple.
    """
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
    return logits


def checked_logits(output: Any, rows: int) -> Float[Tensor, "rows classes"]:
    """The logits in a model's output, one row for each input."""
    logits = logits_in(output)
    if logits.ndim > 2 and logits.shape[0] == rows:
        raise QualmsError(
            f"the model returns logits of shape {tuple(logits.shape)}, so it answers at many positions; pass "
            "class_dim= to qualms.Scorer, the axis of the classes: -1 for language models, 1 for segmentation."
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


def look_like_probabilities(logits: Float[Tensor, "rows c"]) -> bool:
    """Whether all rows add up to 1 and have no negative entry.

    Logits hardly ever do so by chance, up to rounding; in 16 bits rounding is coarse, so several
    rows must agree.
    """
    rounding = torch.finfo(logits.dtype).eps
    if bool((logits < 0).any()) or (rounding > 1e-6 and len(logits) < SEVERAL):
        return False
    return bool(((logits.double().sum(1) - 1).abs() <= logits.shape[1] * rounding).all())


SEVERAL = 4  # rows
