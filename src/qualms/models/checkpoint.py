"""Load weights from disk into a network: all of them or none.

A pickle can run any code when it is read, so torch's files are read with `weights_only=True`, which
refuses everything but tensors and plain values. Reading a file (`read_state`) and copying its
tensors into a network (`fit_state`) are separate steps, since names in a file have a meaning only
for a network.
"""

import io
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError, explain_failure, reason

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str]

# The first bytes of a zip archive, torch's new format.
ARCHIVE_PREFIX = b"PK\x03\x04"
# The largest number of bytes to which one compressed byte of an archive can be unpacked.
MAX_INFLATION = 1032
# The number of pickles at the start of a file in torch's old format.
OLD_FORMAT_PICKLES = 5
# Keys under which training scripts store the tensors.
WRAPPER_KEYS = ("state_dict", "model_state_dict", "model", "net")
# Prefixes that wrappers of networks add to the names of all tensors.
WRAPPER_PREFIXES = ("module.", "model.", "base_model.", "_orig_mod.")


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read the named tensors of a checkpoint, on the CPU.

    Dictionaries that training scripts put around the tensors (`{"state_dict": …, "epoch": …}`) are
    removed; values that are no tensors are left out.

    Args:
        path: the path of a `.safetensors` file, or of a file that `torch.save` wrote.

    Returns:
        Tensors by name.

    Example:
        ```python
        import torch
        from qualms.models import read_state

        model = torch.nn.Linear(4, 3)
        torch.save({"epoch": 7, "state_dict": model.state_dict()}, "checkpoint.pt")
        state = read_state("checkpoint.pt")
        assert list(state) == ["weight", "bias"]
        ```
    """
    path = Path(path)
    if not path.is_file():
        raise QualmsError(f"there is no checkpoint file {path}; check the path.")
    if path.suffix == ".safetensors":
        content: Any = _read_safetensors(path)
    else:
        content = _remove_wrappers(_read_torch_file(path))
    if not isinstance(content, Mapping):
        raise _no_tensors_error(path, f"a {type(content).__name__}")
    state = {}
    for name, value in content.items():
        if isinstance(value, Tensor):
            state[name] = value
    if not state:
        raise _no_tensors_error(path, ", ".join(map(repr, content)) or "nothing")
    return state


def _no_tensors_error(path: Path, found: str) -> QualmsError:
    """Create the error that a file contains no named tensors, but only what `found` describes."""
    return QualmsError(
        f"{path} contains no named tensors, only {found}; save the network's state_dict()."
    )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors` file by name."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise QualmsError(
            f"{path} needs the package safetensors; run pip install '.[app]' in a clone of qualms."
        ) from error
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise QualmsError(
            f"{path} is damaged or not a safetensors file ({reason(error)}); download it again."
        ) from error


class _BoundedReader(io.BufferedReader):
    """A file whose reads never allocate more bytes than the rest of the file has.

    Python would allocate as many bytes as are requested, even if the file is shorter.
    """

    def __init__(self, path: Path) -> None:
        """Open the file for reading, and note its length."""
        super().__init__(io.FileIO(path))
        self.length = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Read `size` bytes, but request no more than the rest of the file has."""
        remaining = max(0, self.length - self.tell())
        if size is None or size < 0:
            size = remaining
        return super().read(min(size, remaining))


def load_torch_file(path: Path) -> Any:
    """Load a file with `torch.load`, on the CPU, protected against malicious files.

    No code in the file runs, torch's warnings are hidden, and no memory is allocated for lengths
    that the file only claims.

    Args:
        path: the path of a file that `torch.save` wrote.

    Raises:
        Exception: of any class, if the file is damaged, or contains more than tensors.
    """
    with warnings.catch_warnings():
        # torch warns about kinds of pickles and archives just before it refuses them.
        warnings.simplefilter("ignore")
        # torch's new format is a zip archive; torch too recognizes it by these bytes.
        with open(path, "rb") as stream:
            is_archive = stream.read(len(ARCHIVE_PREFIX)) == ARCHIVE_PREFIX
        if is_archive:
            _require_plausible_entries(path)
            return torch.load(path, weights_only=True, map_location="cpu")
        with _BoundedReader(path) as file:
            _require_plausible_storages(file)
            # The check has read part of the file.
            file.seek(0)
            return torch.load(file, weights_only=True, map_location="cpu")


def _require_plausible_entries(path: Path) -> None:
    """Raise a ValueError if an entry of a zip archive claims more bytes than it can unpack to.

    torch would allocate memory for all bytes that the entry claims.
    """
    length = path.stat().st_size
    with zipfile.ZipFile(path) as file:
        for entry in file.infolist():
            # The size in the archive can be false too, so it is capped by the file's length.
            packed_bytes = min(entry.compress_size, length)
            is_stored = entry.compress_type == zipfile.ZIP_STORED  # not compressed
            most_bytes = packed_bytes if is_stored else packed_bytes * MAX_INFLATION
            if entry.file_size > most_bytes:
                claim = f"{entry.filename} claims {entry.file_size} bytes"
                raise ValueError(f"{claim}, unpacked from {packed_bytes}")


def _require_plausible_storages(file: _BoundedReader) -> None:
    """Raise a ValueError if a file of torch's old format claims more numbers than it has bytes.

    torch would allocate memory for all claimed numbers before it reads any. Such a file consists of
    five pickles, and of the numbers in the tensors' storages. In the pickles, the last integer
    before an opcode BINPERSID is the length of a storage.

    Args:
        file: the open file, at its beginning; it is read up to the end of the pickles.
    """
    for _ in range(OLD_FORMAT_PICKLES):
        last_integer = 0
        for opcode, argument, _ in pickletools.genops(file):
            # PUT and GET take positions in the pickle's memo, which are integers but no lengths.
            is_memo = "PUT" in opcode.name or "GET" in opcode.name
            if isinstance(argument, int) and not is_memo:
                last_integer = argument
            if opcode.name == "BINPERSID" and not 0 <= last_integer <= file.length:
                raise ValueError(f"it claims {last_integer} numbers in {file.length} bytes")


def _read_torch_file(path: Path) -> Any:
    """Read a file that `torch.save` wrote; any exception becomes an error that names the file."""

    def explain(error: Exception) -> QualmsError:
        """Create the error that the file is refused, or else that it is damaged."""
        # torch names the function or class that it refuses to import.
        refused_name = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused_name or "TorchScript" in str(error):
            what = refused_name[1] if refused_name else "TorchScript"
            return QualmsError(
                f"{path} contains more than tensors ({what}) and could run code when loaded, so "
                "it is refused; if you trust it, load it yourself and save only its state_dict()."
            )
        return QualmsError(
            f"{path} is damaged or not a torch checkpoint ({reason(error)}); download it again, or "
            "save the network's state_dict() with torch.save."
        )

    with explain_failure(explain):
        return load_torch_file(path)


def _remove_wrappers(content: Any) -> Any:
    """Return the innermost dictionary of a checkpoint with nested dictionaries.

    A nested dictionary is one under a key of `WRAPPER_KEYS`. Content without such a key, or that is
    no dictionary, is returned unchanged.
    """
    while isinstance(content, Mapping):
        nested = [content[key] for key in WRAPPER_KEYS if isinstance(content.get(key), Mapping)]
        if not nested:
            return content
        content = nested[0]
    return content


def fit_state(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    rename: Rename | None = None,
    file: str | Path = "the checkpoint",
    network: str = "the network",
) -> None:
    """Copy a checkpoint's tensors into a model, converted to the model's dtypes.

    Args:
        model: the network; it is left unchanged if the tensors do not fit.
        state: tensors by name; prefixes that wrappers such as DataParallel add to every name are
            removed if needed.
        rename: how to convert names of tensors: a mapping from prefixes in the checkpoint to
            prefixes in the network; or a function from a name in the checkpoint to the name in the
            network. None if the names are the same.
        file: what an error calls the checkpoint.
        network: what an error calls the model.

    Raises:
        QualmsError: if a tensor is missing, unexpected or of another shape.

    Example:
        ```python
        import torch
        from qualms.models import fit_state

        trained, model = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        state = {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}
        fit_state(model, state)  # "module." is how DataParallel saves it
        assert torch.equal(model.weight, trained.weight)
        ```
    """
    expected = {}
    for key, value in model.state_dict().items():
        # The extra state of a module may be no tensor.
        if isinstance(value, Tensor):
            expected[key] = value
    state = _strip_prefixes(state, expected)
    state = _rename_keys(state, expected, rename or {})
    problems, advice = _describe_mismatch(state, expected)
    if problems:
        raise QualmsError(f"{file} does not fit {network}: {', '.join(problems)}; {advice}.")
    # strict=False, since `_find_missing_keys` has decided above which keys may be missing.
    model.load_state_dict(dict(state), strict=False)


def _describe_mismatch(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[list[str], str]:
    """Describe why a checkpoint's tensors do not fit the model's, and give advice.

    Args:
        state: the tensors of the checkpoint by name.
        expected: the tensors of the model by name.

    Returns:
        The problems, an empty list if the tensors fit; and advice, with which the error ends.
    """
    missing = _find_missing_keys(state, expected)
    unexpected = [key for key in state if key not in expected]
    misshapen = []
    for key in state:
        if key in expected and state[key].shape != expected[key].shape:
            misshapen.append(key)
    problems = []
    if missing:
        problems.append(f"{_format_count(missing)} missing (first '{missing[0]}')")
    if unexpected:
        problems.append(f"{_format_count(unexpected)} unexpected (first '{unexpected[0]}')")
    if misshapen:
        first = misshapen[0]
        file_shape = tuple(state[first].shape)
        model_shape = tuple(expected[first].shape)
        problems.append(
            f"{_format_count(misshapen)} with a different shape (first '{first}': {file_shape} in "
            f"the file, {model_shape} here)"
        )
    if missing or unexpected:
        return problems, "name the network it was saved from"
    return problems, "pass classes=, the number that it was trained with"


def _strip_prefixes(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Remove prefixes of `WRAPPER_PREFIXES` that all names in a checkpoint have in common.

    Prefixes are removed one by one until some name is one of the network's. If that never happens,
    the checkpoint is returned unchanged.

    Args:
        state: the tensors of the checkpoint by name.
        expected: the tensors of the model by name.
    """
    stripped = state
    while not any(key in expected for key in stripped):
        common = [p for p in WRAPPER_PREFIXES if all(key.startswith(p) for key in stripped)]
        if not common:
            return state
        stripped = {key.removeprefix(common[0]): value for key, value in stripped.items()}
    return stripped


def _rename_keys(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], rename: Rename
) -> dict[str, Tensor]:
    """Convert the names in a checkpoint to the network's, except names that the network has.

    Args:
        state: the tensors of the checkpoint by name.
        expected: the tensors of the network by name.
        rename: a mapping from prefixes to prefixes, or a function from name to name.
    """
    renamed = {}
    for key, value in state.items():
        new_key = key if key in expected else _rename_key(key, rename)
        renamed[new_key] = value
    return renamed


def _rename_key(key: str, rename: Rename) -> str:
    """Convert a tensor's name with a function, or by replacing the first prefix that it has."""
    if callable(rename):
        return rename(key)
    for old, new in rename.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _find_missing_keys(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Find the names of tensors that the network needs and the checkpoint lacks.

    Two kinds of names may be absent: the batch counters of batch normalization, which evaluation
    never reads, and second names of a shared tensor, which safetensors leaves out.

    Args:
        state: the tensors of the checkpoint by name.
        expected: the tensors of the network by name.
    """
    # All names of a shared tensor have the same memory, so one of them in the checkpoint is enough.
    present = {(expected[key].data_ptr(), expected[key].shape) for key in expected if key in state}
    missing = []
    for key, value in expected.items():
        if key in state or key.endswith("num_batches_tracked"):
            continue
        # Empty tensors have no memory by which a second name could be recognized.
        if value.numel() == 0 or (value.data_ptr(), value.shape) not in present:
            missing.append(key)
    return missing


def _format_count(names: list[str]) -> str:
    """Format the number of names as `1 key`, `3 keys` and so on."""
    return "1 key" if len(names) == 1 else f"{len(names)} keys"
