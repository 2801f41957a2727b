"""Files that are written completely or not at all, and files locked by one run.

Locks are those of `fcntl`, held on the files themselves. Libraries such as filelock lock a second
file, which stays beside each file of the user.
"""

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
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

# Attempts to lock a new file, which other runs may remove. If all fail, the file system has no
# locks, and no other run removes the file either.
MAX_TRIES = 10


@contextmanager
def explain_write_failure(what: str | Path) -> Iterator[None]:
    """Convert write errors inside the block, such as a full disk, to a `QualmsError`.

    Args:
        what: The file that is written inside the block, as the error calls it.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch raises a RuntimeError while it handles the OSError, which is then the context.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        why = os.strerror(cause.errno) if cause.errno else str(cause)
        raise QualmsError(
            f"{what} cannot be written ({why}); resolve this, or choose another path."
        ) from None


def require_writable(path: str | Path, called: str | None = None) -> None:
    """Create the folder of a file, and raise an error if `atomic_write` could not write the file.

    Commands call this before they compute anything that could be lost.

    Args:
        path: The path of the file, which need not exist.
        called: What errors call the file; by default its path.
    """
    path = Path(path)
    with explain_write_failure(called or path):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = _replaceable_file(path)
        if target is not None:
            # Creating a file beside it shows that the folder is writable.
            with temp_sibling(target, called or str(path)):
                pass


@contextmanager
def atomic_write(path: Path, called: str | None = None) -> Iterator[Path]:
    """Yield an empty file that replaces `path` if the block succeeds, and is removed if not.

    The data is on the disk before it replaces the file, so that a power failure leaves the old file
    or the new one. A symbolic link is kept, and the file that it points to is replaced; the new
    file has the permissions of the old one. If `path` is not a regular file, such as /dev/stdout,
    `path` itself is yielded.

    Args:
        path: The path of the file, in a folder that exists.
        called: What errors call the file; by default its path.
    """
    called = called or str(path)
    with explain_write_failure(called):
        target = _replaceable_file(path)
    if target is None:  # not a regular file
        yield path
        return
    with temp_sibling(target, called) as part:
        with explain_write_failure(called):
            # Permissions are set before the data is written, so that a private file stays private.
            if target.exists() and _mode(part) != _mode(target):
                part.chmod(_mode(target))
        yield part
        with explain_write_failure(called):
            # Waits until the data is on the disk.
            with open(part, "ab") as file:
                os.fsync(file.fileno())
            os.replace(part, target)


@contextmanager
def temp_sibling(path: Path, called: str | None = None) -> Iterator[Path]:
    """Yield the path of an empty temporary file in the folder of `path`; remove it afterwards.

    Temporary files that killed runs have left there for the same `path` are removed first.

    Args:
        path: The path of the file that the temporary one is for.
        called: What errors call that file; by default its path.
    """
    _remove_leftovers(path)
    with explain_write_failure(called or path):
        part, lock = _create_sibling(path)
    try:
        yield part
    finally:
        # The folder may have become read-only, for example.
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if lock is not None:
            lock.close()


def append_lines(file: IO[bytes], path: Path, lines: bytes) -> None:
    """Append to an open file, completely or not at all; the data is on disk when this returns.

    Args:
        file: The file, opened and locked by `lock_file`.
        path: The path that the file was opened at.
        lines: The lines to append, with their line ends.

    Raises:
        QualmsError: If the disk is full, or if the file was removed or replaced after it was
            opened, so that the lines would be lost.
    """
    with explain_write_failure(path):
        end = os.fstat(file.fileno()).st_size
        if not _is_at(file, path):
            raise QualmsError(
                f"{path} was removed while a run was writing to it; run the same command again."
            )
        is_complete = False
        try:
            while lines:
                # Without a buffer, a write may take only the first part of the lines.
                num_written = file.write(lines)
                lines = lines[num_written:]
            os.fsync(file.fileno())
            is_complete = True
        finally:
            # After an error, or Ctrl-C, the part that was written is cut off.
            if not is_complete:
                with suppress(OSError):
                    file.truncate(end)


def lock_file(path: Path) -> IO[bytes]:
    """Open a file for reading and appending, and lock it until it is closed.

    Raises:
        QualmsError: If another run has locked it.
    """
    with explain_write_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer, which would keep data that a full disk refuses, and fail again on close.
        file = open(path, "a+b", buffering=0)  # noqa: SIM115 (it is locked as long as it is open)
    if not _lock(file):
        file.close()
        raise QualmsError(f"{path} is in use by another run; wait for it, or choose another file.")
    return file


def _replaceable_file(path: Path) -> Path | None:
    """Return the path of the file to replace, with symbolic links resolved.

    Args:
        path: The path to write to, which need not exist.

    Returns:
        The path of a regular or new file; None for others, such as /dev/stdout.

    Raises:
        OSError: If the path is a folder, or a file without permission to write.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    # Checked here, since `os.replace` would replace a write-protected file in a writable folder.
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    target = Path(os.path.realpath(path))
    return None if path.exists() and not target.is_file() else target


def _mode(path: Path) -> int:
    """Return the permission bits of a file, such as 0o644."""
    return path.stat().st_mode & 0o777


def _create_sibling(path: Path) -> tuple[Path, IO[bytes] | None]:
    """Create an empty temporary file beside `path`, and lock it if the file system can.

    Returns:
        The path of the temporary file, and the open file that holds the lock; None without a lock.
    """
    tries = 0
    while True:
        part = path.with_name(f".{path.name}.{token_hex(4)}.part")
        file = open(part, "xb")  # noqa: SIM115 (it is locked as long as it is open)
        if fcntl is not None and _lock(file) and _is_at(file, part):
            return part, file
        file.close()
        tries += 1
        if fcntl is None or tries == MAX_TRIES:
            # Returned closed and unlocked, since Windows neither moves nor removes open files.
            return part, None
        # Another run removed or locked the file before it was locked here, as it removes unlocked
        # files of killed runs (`_remove_leftovers`). Try again under another name.
        part.unlink(missing_ok=True)


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether `path` still leads to this open file, which was neither removed nor replaced."""
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())


def _lock(file: IO[bytes]) -> bool:
    """Lock a file until it is closed or its process ends; do not wait for the lock.

    Returns:
        False if another run has locked it, or if the file system has no locks. True on Windows,
        where nothing is locked.
    """
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files for `path` that killed runs left: those that no run has locked."""
    if fcntl is None:
        # Without locks, files of killed runs cannot be told from those in use.
        return
    for part in path.parent.glob(f".{escape(path.name)}.*.part"):
        with suppress(OSError), open(part, "rb") as file:
            if _lock(file):
                part.unlink()
