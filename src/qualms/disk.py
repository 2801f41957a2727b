"""Files that are written whole or not at all, and places that one run has to itself."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from secrets import token_hex
from typing import IO

from qualms.errors import QualmsError

try:
    import fcntl
except ImportError:  # a system without locks
    fcntl = None  # type: ignore[assignment]

# to lock a new file. Then it is the file system that has no locks, so that no other run takes it
# away either
TRIES = 10


@contextmanager
def explain_write_failure(what: str | Path) -> Iterator[None]:
    """Tells in one sentence what the disk refuses, such as a byte more; `what` is the file, as its
    user calls it.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = (
            error if isinstance(error, OSError) else error.__context__
        )  # torch puts an error of its own over it
        if not isinstance(refused, OSError):
            raise
        why = os.strerror(refused.errno) if refused.errno else str(refused)
        raise QualmsError(
            f"{what} cannot be written ({why}); put that right, or choose another place."
        ) from None


def require_writable(path: str | Path, called: str | None = None) -> None:
    """An error, before there is any work to lose, if `atomic_write` could not write there. Its
    folder is made.

    Args:
        path: the file.
        called: what errors call it, if not by its path.
    """
    path = Path(path)
    with explain_write_failure(called or path):
        path.parent.mkdir(parents=True, exist_ok=True)
        place = _place(path)
        if place is not None:
            with temp_sibling(place, called or str(path)):
                pass


@contextmanager
def atomic_write(path: Path, called: str | None = None) -> Iterator[Path]:
    """An empty file beside `path`, to be filled: it takes the place of `path` if all goes well, and
    is gone if not.

    What is written is on the disk before it takes that place, so that a machine that stops leaves
    no half of a file. A link stays, and what it leads to is replaced; a file that was there leaves
    its mode to the new one. What is there and no file, such as /dev/stdout, is not replaced: it is
    itself what is to be filled.

    Args:
        path: the file. Its folder is there already.
        called: what errors call it, if not by its path.
    """
    called = called or str(path)
    with explain_write_failure(called):
        place = _place(path)
    if place is None:
        yield path
        return
    with temp_sibling(place, called) as part:
        with explain_write_failure(called):
            if place.exists() and _mode(part) != _mode(
                place
            ):  # what is private is so while it is written, too
                part.chmod(_mode(place))
        yield part
        with explain_write_failure(called):
            with open(part, "ab") as file:
                os.fsync(file.fileno())
            os.replace(part, place)


@contextmanager
def temp_sibling(path: Path, called: str | None = None) -> Iterator[Path]:
    """An empty file beside `path`, which is gone in the end. What runs that were killed left there
    is taken away.
    """
    _take_away(path)
    with explain_write_failure(called or path):
        part, held = _created(path)
    try:
        yield part
    finally:
        with suppress(
            OSError
        ):  # its folder may have become read-only: what went wrong is told already
            part.unlink(missing_ok=True)
        if held is not None:
            held.close()


def append_lines(file: IO[bytes], path: Path, line: bytes) -> None:
    """Add a line to the end of an open file, on the disk when this returns; a line that does not
    fit is not begun.

    Args:
        file: of `lock_file`.
        path: where it was when it was opened. It is an error if it is there no longer: the line
            would be lost with it.
        line: what to add.
    """
    with explain_write_failure(path):
        end = os.fstat(file.fileno()).st_size
        if not _is_at(file, path):
            raise QualmsError(
                f"{path} was removed while a run was writing to it; run the same command again."
            )
        try:
            while line:
                line = line[file.write(line) :]
            os.fsync(file.fileno())
        except BaseException:  # also Ctrl-C
            with suppress(OSError):
                file.truncate(end)
            raise


def lock_file(path: Path) -> IO[bytes]:
    """A file, open for reading and for writing at its end, and for nobody else who asks for it this
    way.
    """
    with explain_write_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: what a full disk refuses would stay in it, and be refused again when the
        # file is closed.
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 (it is locked as long as it is open)
    if not _lock(file):
        file.close()
        raise QualmsError(f"{path} is in use by another run; wait for it, or choose another file.")
    return file


def _place(path: Path) -> Path | None:
    """The file to be replaced, behind all links; None if what is there is no file, and is to be
    written to as it is.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if path.exists() and not os.access(
        path, os.W_OK
    ):  # a file may be replaced all the same, but is protected
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    place = Path(os.path.realpath(path))
    return None if path.exists() and not place.is_file() else place


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _created(path: Path) -> tuple[Path, IO[bytes] | None]:
    """A new file beside `path`, of a name that no other has, and what holds it."""
    tries = 0
    while True:
        part = path.with_name(f".{path.name}.{token_hex(4)}.part")
        file = open(part, "xb")  # noqa: SIM115 (it is locked as long as it is open)
        if fcntl is not None and _lock(file) and _is_at(file, part):
            return part, file
        file.close()
        tries += 1
        if fcntl is None or tries == TRIES:
            return part, None  # and not open: Windows would neither move nor remove it
        part.unlink(missing_ok=True)  # another run took it for one that nobody holds


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still there."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


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
