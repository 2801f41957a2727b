"""Load weights from disk into a network, in any common wrapping; all of them or none.

A pickle can run any code as it is read, so torch's files are read with `weights_only=True` and
anything else is refused. Reading a file (`read_state`) and putting its tensors into a network
(`fit_state`) are separate steps, since names in a file have a meaning only for a network.
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

ARCHIVE = b"PK\x03\x04"  # how files of torch's new format begin
# Bytes that one compressed byte of an archive can hold.
MAX_INFLATION = 1032
OLD_FORMAT_PICKLES = 5
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
PREFIXES = ("module.", "model.", "base_model.", "_orig_mod.")


def read_state(path: str | Path) -> dict[str, Tensor]:
    """Read the named tensors of a checkpoint, on the CPU.

    Dictionaries that training scripts put around the tensors (`{"state_dict": …, "epoch": …}`) are
    unwrapped; values that are no tensors are left out.

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
        content = _unwrap(_read_torch_file(path))
    if not isinstance(content, Mapping):
        raise _no_tensors(path, f"a {type(content).__name__}")
    state = {}
    for name, value in content.items():
        if isinstance(value, Tensor):
            state[name] = value
    if not state:
        raise _no_tensors(path, ", ".join(map(repr, content)) or "nothing")
    return state


def _no_tensors(path: Path, found: str) -> QualmsError:
    """Create the error that a file has no tensors by name."""
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
    """A file of which no read allocates more bytes than are left, whatever length is asked for."""

    def __init__(self, path: Path) -> None:
        """Open the file; its length bounds every later read."""
        super().__init__(io.FileIO(path))
        self.length = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Read `size` bytes, or all that are left if these are fewer."""
        remaining = max(0, self.length - self.tell())
        if size is None or size < 0:
            size = remaining
        return super().read(min(size, remaining))


def load_torch_file(path: Path) -> Any:
    """Load a file with `torch.load`, on the CPU, protected against malicious files.

    No code in the file runs, no warning is given, and no memory is allocated for lengths that the
    file only claims.

    Args:
        path: the path of a file that `torch.save` wrote.

    Raises:
        Exception: of any class, if the file is damaged or holds more than tensors.
    """
    with warnings.catch_warnings():
        # Warnings about kinds of pickles and archives that are refused right after.
        warnings.simplefilter("ignore")
        with open(path, "rb") as start:
            # As torch distinguishes its formats.
            is_archive = start.read(len(ARCHIVE)) == ARCHIVE
        if is_archive:
            _require_entries(path)
            return torch.load(path, weights_only=True, map_location="cpu")
        with _BoundedReader(path) as file:
            _require_numbers(file)
            file.seek(0)
            return torch.load(file, weights_only=True, map_location="cpu")


def _require_entries(path: Path) -> None:
    """Raise a ValueError if an entry of a zip archive claims more bytes than it can unpack to.

    torch would allocate memory for all bytes that the entry claims.
    """
    length = path.stat().st_size
    with zipfile.ZipFile(path) as file:
        for entry in file.infolist():
            held = min(entry.compress_size, length)
            is_stored = entry.compress_type == zipfile.ZIP_STORED
            if entry.file_size > held * (1 if is_stored else MAX_INFLATION):
                claim = f"{entry.filename} claims {entry.file_size} bytes"
                raise ValueError(f"{claim}, unpacked from {held}")


def _require_numbers(file: _BoundedReader) -> None:
    """Raise a ValueError if a file of torch's old format claims more numbers than it has bytes.

    torch would allocate memory for all of them before it reads any. The file is five pickles, then
    the numbers. In a pickle, the last integer before the opcode BINPERSID is a storage's length.

    Args:
        file: the open file, at its beginning; it is read up to the end of the pickles.
    """
    for _ in range(OLD_FORMAT_PICKLES):
        number = 0
        for code, argument, _ in pickletools.genops(file):
            # Positions in the pickle's memo are integers too, but no lengths.
            is_memo = "PUT" in code.name or "GET" in code.name
            if isinstance(argument, int) and not is_memo:
                number = argument
            if code.name == "BINPERSID" and not 0 <= number <= file.length:
                raise ValueError(f"it claims {number} numbers in {file.length} bytes")


def _read_torch_file(path: Path) -> Any:
    """Read a file of torch; any exception becomes an error that names the file."""

    def explain(error: Exception) -> QualmsError:
        """Create the error: refused if the file holds more than tensors, else damaged."""
        asked = re.search(r"GLOBAL ([\w.]+)", str(error))
        if asked or "TorchScript" in str(error):
            what = asked[1] if asked else "TorchScript"
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


def _unwrap(content: Any) -> Any:
    """Return the innermost dictionary under the keys that training scripts use as wrappers.

    Content without such keys, or that is no dictionary, is returned unchanged.
    """
    while isinstance(content, Mapping):
        inside = []
        for key in WRAPPERS:
            if isinstance(content.get(key), Mapping):
                inside.append(content[key])
        if not inside:
            return content
        content = inside[0]
    return content


def fit_state(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    rename: Rename | None = None,
    file: str | Path = "the checkpoint",
    network: str = "the network",
) -> None:
    """Copy a checkpoint's tensors into a model, in the model's own precision.

    Args:
        model: the network; it is left unchanged if the tensors do not fit.
        state: tensors by name; prefixes that wrappers such as DataParallel add to every name are
            removed if needed.
        rename: a mapping from prefixes in the checkpoint to prefixes in the network; or a function
            from the checkpoint's name to the network's.
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
        if isinstance(value, Tensor):
            expected[key] = value
    state = _strip_prefixes(state, expected)
    state = _rename_keys(state, expected, rename or {})
    problems, advice = _describe_mismatch(state, expected)
    if problems:
        raise QualmsError(f"{file} does not fit {network}: {', '.join(problems)}; {advice}.")
    # strict=False, since `_missing_keys` has decided above which keys may be missing.
    model.load_state_dict(dict(state), strict=False)


def _describe_mismatch(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> tuple[list[str], str]:
    """Explain why a checkpoint's tensors do not fit the model's, and what to do about it.

    Args:
        state: the tensors of the checkpoint by name.
        expected: the tensors of the model by name.

    Returns:
        The problems, an empty list if the tensors fit; and the advice that ends the error.
    """
    missing = _missing_keys(state, expected)
    unexpected = [key for key in state if key not in expected]
    misshapen = []
    for key in state:
        if key in expected and state[key].shape != expected[key].shape:
            misshapen.append(key)
    problems = []
    if missing:
        problems.append(f"{_keys(missing)} missing (first '{missing[0]}')")
    if unexpected:
        problems.append(f"{_keys(unexpected)} unexpected (first '{unexpected[0]}')")
    if misshapen:
        theirs = tuple(state[misshapen[0]].shape)
        ours = tuple(expected[misshapen[0]].shape)
        problems.append(
            f"{_keys(misshapen)} with a different shape (first '{misshapen[0]}': {theirs} in the file, "
            f"{ours} here)"
        )
    if missing or unexpected:
        return problems, "name the network it was saved from"
    return problems, "pass classes=, the number that it was trained with"


def _strip_prefixes(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Remove prefixes that all names in a checkpoint have in common.

    They are removed one by one until a name is the network's; if that never happens, the checkpoint
    is returned unchanged.

    Args:
        state: the tensors of the checkpoint by name.
        expected: the tensors of the model by name.
    """
    bare = state
    while not any(key in expected for key in bare):
        common = [p for p in PREFIXES if all(key.startswith(p) for key in bare)]
        if not common:
            return state
        bare = {key.removeprefix(common[0]): value for key, value in bare.items()}
    return bare


def _rename_keys(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], rename: Rename
) -> dict[str, Tensor]:
    """Rename a checkpoint's keys to the network's names; keys that the network has stay.

    Args:
        state: the tensors of the checkpoint by name.
        expected: the tensors of the network by name.
        rename: a mapping from prefixes to prefixes, or a function from name to name.
    """
    renamed = {}
    for key, value in state.items():
        renamed[key if key in expected else _new_name(key, rename)] = value
    return renamed


def _new_name(key: str, rename: Rename) -> str:
    """Rename a key by a function, or by the first prefix that it has."""
    if callable(rename):
        return rename(key)
    for old, new in rename.items():
        if key.startswith(old):
            return new + key.removeprefix(old)
    return key


def _missing_keys(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Find the keys that the network needs and the checkpoint lacks.

    Two kinds may be missing: the batch counters of batch normalization, which evaluation never
    reads, and second names of a shared tensor, which safetensors drops.
    """
    # Names of a shared tensor have the same memory, so one of them in the checkpoint is enough.
    present = {(expected[key].data_ptr(), expected[key].shape) for key in expected if key in state}
    missing = []
    for key, value in expected.items():
        if key in state or key.endswith("num_batches_tracked"):
            continue
        if value.numel() == 0 or (value.data_ptr(), value.shape) not in present:
            missing.append(key)
    return missing


def _keys(names: list[str]) -> str:
    """Format a number of keys, such as `1 key` or `3 keys`."""
    return "1 key" if len(names) == 1 else f"{len(names)} keys"
