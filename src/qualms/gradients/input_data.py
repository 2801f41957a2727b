"""Reads what a user passes as `x` or `train` as batches of tensors.

A `Batch` is a tensor, a tuple of tensors or a dict of tensors; the first axis counts the samples.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import signature
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from qualms.errors import QualmsError, reason
from qualms.gradients.batch import Batch, batch_tensors, num_samples, with_tensors

# Keys of a dict whose values are labels, not model inputs.
LABEL_KEYS = ("label", "labels")
DATASET_BATCH = 64  # samples of a dataset that are read at a time


def numbered_batches(x: Any, model: nn.Module) -> Iterator[tuple[int, Batch]]:
    """Yield the batches of `x`, each with the index of its first sample in the whole data.

    Args:
        x: one batch, an iterable of batches, or a dataset; labels are dropped.
        model: the model; NumPy floats are converted to the dtype of its weights.
    """
    first_index = 0
    for batch in batches(x, model):
        yield first_index, batch
        first_index += num_samples(batch)


def batches(x: Any, model: nn.Module) -> Iterator[Batch]:
    """Yield the batches of a user's inputs, without labels.

    Args:
        x: one batch, an iterable of batches, or a dataset.
        model: the model; NumPy floats (usually float64) are converted to the dtype of its weights.
    """
    for batch, _ in labeled_batches(x, model):
        yield batch


def labeled_batches(
    x: Any,
    model: nn.Module,
    argument: str = "x",
) -> Iterator[tuple[Batch, Tensor | None]]:
    """Yield the batches of a user's inputs, each with its labels [b].

    Labels are None unless there is one integer for each sample.

    Args:
        x: one batch, an iterable of batches, or a dataset.
        model: the model; NumPy floats (usually float64) are converted to the dtype of its weights.
        argument: the name of the user's argument, for errors.

    Raises:
        QualmsError: if `x` is none of these, is empty, or has values that are NaN or infinite.
    """
    reader = _BatchReader(argument, _float_dtype_of(model))
    # A dict, or an object like one (of a tokenizer, say), is a single batch.
    if hasattr(x, "keys"):
        yield reader.read(x)
        return
    if isinstance(x, (Tensor, tuple, np.ndarray)):
        batch = validate_batch(reader.to_tensors(x), argument)
        # The user may have meant `(inputs, labels)`.
        if argument == "train" and isinstance(batch, tuple):
            _require_arguments(model, len(batch))
        yield batch, None
        return
    if isinstance(x, Dataset):
        x = DataLoader(x, batch_size=DATASET_BATCH, collate_fn=reader.collate)
    if not isinstance(x, Iterable) or isinstance(x, (str, bytes)):
        raise QualmsError(
            f"{argument} is a {type(x).__name__}; pass a tensor or array, a tuple or dict of them, "
            "an iterable of batches, or a torch dataset."
        )
    is_empty = True
    for batch in _iterate_batches(x, argument):
        is_empty = False
        yield reader.read(batch)
    if is_empty:
        raise QualmsError(
            f"{argument} yields no batches; pass at least one sample (an iterator can be read only "
            "once, so pass a list or a DataLoader)."
        )


def _float_dtype_of(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's first float parameter; float32 if it has none."""
    for p in model.parameters():
        if p.is_floating_point():
            return p.dtype
    return torch.float32


def _require_arguments(model: nn.Module, number: int) -> None:
    """Raise an error unless the model takes the `number` parts of a tuple `train` as inputs."""
    try:
        # Only the number of arguments matters to `bind`, not their values.
        signature(model.forward).bind(*range(number))
    except TypeError as error:
        raise QualmsError(
            f"train=(...) is read as one batch of {number} model inputs, which the model does not "
            "accept; pass a list of batches: train=[(inputs, labels)]."
        ) from error


def _iterate_batches(x: Iterable[Any], argument: str) -> Iterator[Any]:
    """Yield the items of `x`, with a clear error if a DataLoader cannot collate them into batches.

    Args:
        x: an iterable of batches.
        argument: the name of the user's argument, for the error.

    Raises:
        QualmsError: if `x` is a DataLoader that cannot collate its items.
    """
    iterator = iter(x)
    # Not a `for` loop, so that only errors of `next` are caught.
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return
        except (RuntimeError, TypeError) as error:
            if not isinstance(x, DataLoader):
                raise
            raise QualmsError(
                f"the items of {argument} cannot be collated into one batch ({reason(error)}); "
                "pass a DataLoader with your own collate_fn."
            ) from error
        yield batch


@dataclass(frozen=True)
class _BatchReader:
    """Reads the batches of one argument of the user's call.

    Attributes:
        argument_name: the name of the argument, for errors.
        float_dtype: the dtype that NumPy floats are converted to.
    """

    argument_name: str
    float_dtype: torch.dtype

    def read(self, batch: Any) -> tuple[Batch, Tensor | None]:
        """Split an item of a data loader into validated inputs and labels [b].

        Args:
            batch: `inputs`, `(inputs, labels)`, or a dict that may have labels among its values.

        Returns:
            The inputs, and the labels; None for labels unless there is one integer for each input.
        """
        tensors = self.to_tensors(self._select_inputs(batch))
        inputs = validate_batch(tensors, self.argument_name)
        return inputs, self._select_labels(batch, num_samples(inputs))

    def collate(self, items: list[Any]) -> Any:
        """Stack the items of a dataset into one batch, as torch does, with NumPy arrays as tensors."""
        return default_collate([self.to_tensors(item) for item in items])

    def to_tensors(self, batch: Any) -> Any:
        """Convert NumPy arrays to tensors, also in nested tuples and dicts; keep anything else."""
        if isinstance(batch, np.ndarray):
            return self._to_tensor(batch)
        if isinstance(batch, dict):
            return {key: self.to_tensors(value) for key, value in batch.items()}
        if isinstance(batch, tuple):
            return tuple(self.to_tensors(item) for item in batch)
        return batch

    def _to_tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Copy an array of numbers to a tensor; floats get the dtype of the model's weights."""
        if array.dtype.kind not in "biuf" or isinstance(array, np.ma.MaskedArray):
            raise QualmsError(
                f"an array of {self.argument_name} is a {type(array).__name__} of {array.dtype}; pass "
                "an array of numbers."
            )
        is_float = array.dtype.kind == "f"
        # torch reads arrays in the byte order of the machine only, and few of NumPy's float types.
        dtype = np.dtype(np.float64) if is_float else array.dtype.newbyteorder("=")
        # A copy, as arrays may be read-only or have negative strides.
        t = torch.from_numpy(np.array(array, dtype=dtype))
        return t.to(self.float_dtype) if is_float else t

    def _select_inputs(self, batch: Any) -> Any:
        """Select the inputs of an item of a data loader.

        Args:
            batch: `inputs`, `(inputs, labels)`, or a dict that may have labels among its values.
        """
        if hasattr(batch, "keys"):
            return {k: v for k, v in dict(batch).items() if k not in LABEL_KEYS}
        if not isinstance(batch, (tuple, list)):
            return batch
        if not 1 <= len(batch) <= 2:
            raise QualmsError(
                f"a batch of {self.argument_name} has {len(batch)} parts, so it is not clear which are "
                "inputs; yield (inputs, labels), with a tuple of tensors as inputs if the model "
                "takes several."
            )
        inputs = batch[0]
        # Loaders make lists of tuples; a `Batch` of several tensors is a tuple.
        return tuple(inputs) if isinstance(inputs, list) else inputs

    def _select_labels(self, batch: Any, samples: int) -> Tensor | None:
        """Select the labels of an item of a data loader.

        Args:
            batch: `inputs`, `(inputs, labels)`, or a dict that may have labels among its values.
            samples: the number of inputs in the batch.

        Returns:
            Labels [samples]; None unless there is one integer for each input.

        Raises:
            QualmsError: if the batches are those of `train=` and there are more or fewer labels than
                inputs. Labels of other arguments are optional.
        """
        labels = _to_label_tensor(_find_labels(batch))
        if labels is None:
            return None
        if self.argument_name == "train" and labels.ndim == 1 and len(labels) != samples:
            raise QualmsError(
                f"a batch of train has {samples} inputs and {len(labels)} labels; pass one label "
                "per input."
            )
        if labels.shape not in ((samples,), (samples, 1)):
            return None
        return labels.detach().long().reshape(samples)


def _find_labels(batch: Any) -> Any:
    """Select the labels of an item of a data loader as they are; None if there are none."""
    if hasattr(batch, "keys"):
        return next((batch[key] for key in LABEL_KEYS if key in batch), None)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[1]
    return None


def _to_label_tensor(labels: Any) -> Tensor | None:
    """Convert labels to a tensor; None if they are anything but whole numbers."""
    if isinstance(labels, (list, tuple)):
        if all(isinstance(label, Integral) for label in labels):
            return torch.tensor([int(label) for label in labels])
        return None
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
        return torch.from_numpy(labels.astype(np.int64))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        return None
    return labels


def validate_batch(batch: Any, argument: str = "x") -> Batch:
    """Check that a batch consists of usable tensors, and detach them from the user's graph.

    Args:
        batch: a tensor, or a tuple or dict of tensors.
        argument: the name of the user's argument, for errors.

    Returns:
        The same structure with detached tensors that are usable outside inference mode.

    Raises:
        QualmsError: if anything but dense tensors is in the batch, the first axes differ in length,
            or a value is NaN or infinite.
    """
    tensors = batch_tensors(batch) if isinstance(batch, (Tensor, tuple, dict)) else []
    if not tensors or not all(isinstance(t, Tensor) for t in tensors):
        raise QualmsError(
            f"a batch of {argument} is a {type(batch).__name__} without tensors; pass tensors only."
        )
    if any(t.layout != torch.strided for t in tensors):
        raise QualmsError(f"a tensor of {argument} is sparse; pass dense tensors.")
    if any(t.ndim == 0 for t in tensors):
        raise QualmsError(
            f"a tensor of {argument} has no batch axis; the first axis must be the batch."
        )
    sizes = {t.shape[0] for t in tensors}
    if len(sizes) > 1:
        raise QualmsError(
            f"the tensors of {argument} differ in the number of inputs: {sorted(sizes)}."
        )
    if sizes == {0}:
        raise QualmsError(f"{argument} is an empty batch; pass at least one input.")
    for t in tensors:
        _require_finite(t, argument)
    return with_tensors(batch, map(_detach, tensors))


def _require_finite(t: Tensor, argument: str) -> None:
    """Raise an error that names the first input with a value that is NaN or infinite."""
    # Tensors on the meta device have no values.
    if not t.is_floating_point() or t.is_meta:
        return
    finite = torch.isfinite(t)
    if bool(finite.all()):
        return
    first_bad = int((~finite).reshape(len(t), -1).any(1).nonzero()[0])
    raise QualmsError(
        f"input {first_bad} of {argument} contains NaN or infinity; fix or remove it before scoring."
    )


def _detach(t: Tensor) -> Tensor:
    """Detach a tensor from the user's graph; copy it if autograd could not use it otherwise."""
    # Outside inference mode, clones of inference tensors are normal tensors.
    return t.detach().clone() if t.is_inference() else t.detach()
