"""Files that are written whole or not at all, and places that one run has to itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO

from qualms.errors import QualmsError

try:
    import fcntl
except ImportError:  # a system without locks
    fcntl = None  # type: ignore[assignment]


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """Tells in one sentence what the disk refuses, such as a byte more; `what` is the file, as its user calls it."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = error if isinstance(error, OSError) else error.__context__  # torch puts an error of its own over it
        if not isinstance(refused, OSError):
            raise
        why = os.strerror(refused.errno) if refused.errno else str(refused)
        raise QualmsError(f"{what} cannot be written ({why}); put that right, or choose another place.") from None


@contextmanager
def written_whole(path: Path, called: str | None = None) -> Iterator[Path]:
    """An empty file beside `path`, to be filled: it takes the place of `path` if all goes well, and is gone if not.

    What is written is on the disk before it takes that place, so that a machine that stops leaves no half of a file.

    Args:
        path: the file. Its folder is there already.
        called: what errors call it, if not by its path.
    """
    with beside(path, called) as part:
        yield part
        with writing(called or path):
            with open(part, "rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, path)


@contextmanager
def beside(path: Path, called: str | None = None) -> Iterator[Path]:
    """An empty file beside `path`, which is gone in the end. What runs that were killed left there is taken away."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    _take_away(path)
    held: IO[bytes] | None = None
    try:
        with writing(called or path):
            held = open(part, "wb")  # noqa: SIM115 (it is locked as long as it is open)
            _lock(held)
        yield part
    finally:
        with suppress(OSError):  # its folder may have become read-only: what went wrong is told already
            part.unlink(missing_ok=True)
        if held is not None:
            held.close()


def appended(file: IO[bytes], path: Path, line: bytes) -> None:
    """Add a line to the end of an open file, on the disk when this returns; a line that does not fit is not begun.

    Args:
        file: of `locked`.
        path: where it was when it was opened. It is an error if it is there no longer: the line would be lost with it.
        line: what to add.
    """
    with writing(path):
        end = os.fstat(file.fileno()).st_size
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise QualmsError(f"{path} was removed while a run was writing to it; run the same command again.")
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except BaseException:  # also Ctrl-C
            with suppress(OSError):
                file.truncate(end)
            raise


def locked(path: Path) -> IO[bytes]:
    """A file, open for reading and for writing at its end, and for nobody else who asks for it this way."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: what a full disk refuses would stay in it, and be refused again when the file is closed.
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 (it is locked as long as it is open)
    if not _lock(file):
        file.close()
        raise QualmsError(f"{path} is in use by another run; wait for it, or choose another file.")
    return file


def _lock(file: IO[bytes]) -> bool:
    """Whether nobody else has locked it; it is ours as long as it is open, or its process lives."""
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _take_away(path: Path) -> None:
    """The halves of runs that were killed: those that nobody holds."""
    for half in path.parent.glob(f".{escape(path.name)}.*.part") if fcntl is not None else ():
        with suppress(OSError), open(half, "rb") as file:
            if _lock(file):
                half.unlink()
