"""Weights on disk into a network: whatever wrapping they were saved with, all of them or none.

A pickle can run any code as it is read, so torch's files are read with `weights_only=True` and what
asks for more is refused. Reading is one step and fitting another: the names in a file mean
something only beside a network.
"""

import io
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError, reason

ARCHIVE = b"PK\x03\x04"  # how files of torch's new format begin
MOST_UNPACKED = 1032  # bytes that one compressed byte of an archive can stand for
WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
PREFIXES = ("module.", "model.", "base_model.", "_orig_mod.")


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The named tensors of a `.safetensors` file or of a file that `torch.save` wrote, on the CPU.

    What scripts put around them (`{"state_dict": …, "epoch": …}`) is taken off; what is no tensor
    is left out.

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
    content = _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)
    inner = _unwrapped(content)
    state = (
        {k: v for k, v in inner.items() if isinstance(v, Tensor)}
        if isinstance(inner, Mapping)
        else {}
    )
    if not state:
        found = (
            ", ".join(map(repr, inner)) or "nothing"
            if isinstance(inner, Mapping)
            else f"a {type(inner).__name__}"
        )
        raise QualmsError(
            f"{path} holds no tensors by name, only {found}; save the network's state_dict()."
        )
    return state


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise QualmsError(
            f"{path} needs the package safetensors; pip install '.[app]' in a clone of qualms."
        ) from error
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise QualmsError(
            f"{path} is damaged or no safetensors file ({reason(error)}); get it anew."
        ) from error


class _Bounded(io.BufferedReader):
    """A file that makes room for no more bytes than it has left, whatever a length in it says."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.length = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """As many bytes as there are, at most."""
        rest = max(0, self.length - self.tell())
        return super().read(rest if size is None or size < 0 else min(size, rest))


def tensors_of(path: Path) -> Any:
    """What `torch.load` makes of a file, without running code, warning, or making room for what is
    not there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # about pickles and archives of kinds that are refused right after
        with open(path, "rb") as start:
            archive = start.read(len(ARCHIVE)) == ARCHIVE  # by which torch tells its formats apart
        if archive:
            _require_entries(path)
            return torch.load(path, weights_only=True, map_location="cpu")
        with _Bounded(path) as file:
            _require_room(file)
            file.seek(0)
            return torch.load(file, weights_only=True, map_location="cpu")


def _require_entries(path: Path) -> None:
    """An error if an entry of a zip archive claims more bytes than what is there can be unpacked
    to.
    """
    length = path.stat().st_size
    with zipfile.ZipFile(path) as file:
        for entry in file.infolist():
            held = min(entry.compress_size, length)
            if entry.file_size > held * (
                1 if entry.compress_type == zipfile.ZIP_STORED else MOST_UNPACKED
            ):
                raise ValueError(f"{entry.filename} claims {entry.file_size} bytes of {held}")


def _require_room(file: _Bounded) -> None:
    """An error if a file of torch's old format, five pickles and then numbers, claims more numbers
    than it has bytes.

    torch makes room for a storage of the length that the pickle says: the number right before its
    id is complete.
    """
    for _ in range(5):
        number = 0
        for code, argument, _ in pickletools.genops(file):
            if isinstance(argument, int) and "PUT" not in code.name and "GET" not in code.name:
                number = argument
            if code.name == "BINPERSID" and not 0 <= number <= file.length:
                raise ValueError(f"it claims {number} numbers in {file.length} bytes")


def _torch_file(path: Path) -> Any:
    try:
        return tensors_of(path)
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to mean
        needs = re.search(r"GLOBAL ([\w.]+)", str(error))
        if needs or "TorchScript" in str(error):
            what = needs[1] if needs else "TorchScript"
            raise QualmsError(
                f"{path} holds more than tensors ({what}) and could run code as it is read, so it is refused; "
                "where you trust it, load it yourself and save its state_dict() alone."
            ) from error
        raise QualmsError(
            f"{path} is damaged or no checkpoint of torch's ({reason(error)}); get it anew, "
            "or save the network's state_dict() with torch.save."
        ) from error


def _unwrapped(content: Any) -> Any:
    while isinstance(content, Mapping):
        inside = next((content[w] for w in WRAPPERS if isinstance(content.get(w), Mapping)), None)
        if inside is None:
            return content
        content = inside
    return content


def fit_state(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    file: str | Path = "the checkpoint",
    network: str = "the network",
) -> None:
    """Put a checkpoint's tensors into the model, in the model's own precision, or raise and leave
    it as it is.

    Args:
        model: the network.
        state: tensors by name; the prefixes that wrappers of networks add to every name are taken
            off if need be.
        rename: starts of names in the checkpoint, and what the network calls them; or a function
            from the checkpoint's name to the network's.
        file: what an error calls the checkpoint.
        network: what an error calls the model.

    Example:
        ```python
        import torch
        from qualms.models import fit_state

        trained, model = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        # as DataParallel saves it:
        state = {f"module.{name}": tensor for name, tensor in trained.state_dict().items()}
        fit_state(model, state)
        assert torch.equal(model.weight, trained.weight)
        ```
    """
    own = {k: v for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    state = _renamed(_without_prefixes(state, own), own, rename or {})
    missing = _missing(state, own)
    unexpected = [k for k in state if k not in own]
    other = [k for k in state if k in own and state[k].shape != own[k].shape]
    reasons = []
    if missing:
        reasons.append(f"{_keys(missing)} missing (first '{missing[0]}')")
    if unexpected:
        reasons.append(f"{_keys(unexpected)} unexpected (first '{unexpected[0]}')")
    if other:
        theirs, ours = (tuple(s[other[0]].shape) for s in (state, own))
        reasons.append(
            f"{_keys(other)} of another shape (first '{other[0]}': {theirs} in the file, {ours} here)"
        )
    if reasons:
        advice = (
            "name the network it was saved from"
            if missing or unexpected
            else "pass classes= as it was trained"
        )
        raise QualmsError(f"{file} does not fit {network}: {', '.join(reasons)}; {advice}.")
    # Not strict: what may be missing was decided above.
    model.load_state_dict(dict(state), strict=False)


def _without_prefixes(
    state: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Prefixes go one by one until names are the network's; if they never are, nothing was a
    prefix.
    """
    bare = state
    while not any(k in own for k in bare):
        prefix = next((p for p in PREFIXES if all(k.startswith(p) for k in bare)), None)
        if prefix is None:
            return state
        bare = {k.removeprefix(prefix): v for k, v in bare.items()}
    return bare


def _renamed(
    state: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    rename: Mapping[str, str] | Callable[[str], str],
) -> dict[str, Tensor]:
    def ours(key: str) -> str:
        if callable(rename):
            return key if key in own else rename(key)
        start = next((old for old in rename if key not in own and key.startswith(old)), None)
        return key if start is None else rename[start] + key.removeprefix(start)

    return {ours(k): v for k, v in state.items()}


def _missing(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """What the checkpoint lacks and the network needs.

    Not a counter that evaluation never reads, nor a second name for a tensor that is there:
    safetensors drops those.
    """
    there = {(v.data_ptr(), v.shape) for k, v in own.items() if k in state}
    lacking = (k for k in own if k not in state and not k.endswith("num_batches_tracked"))
    return [
        k for k in lacking if own[k].numel() == 0 or (own[k].data_ptr(), own[k].shape) not in there
    ]


def _keys(names: list[str]) -> str:
    return f"{len(names)} key{'' if len(names) == 1 else 's'}"
