"""Files that are written whole or not at all, and places that one run has to itself."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from qualms.errors import QualmsError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """An empty file beside `path`, to be filled: it takes the place of `path` if all goes well, and is gone if not.

    What is written is on the disk before it takes that place, so that a machine that stops leaves no half of a file.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.touch()
    try:
        yield part
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def locked(path: Path) -> IO[bytes]:
    """A file, open for reading and for writing at its end, and for nobody else who asks for it this way."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b")  # noqa: SIM115 (it is locked as long as it is open)
    except OSError as error:
        raise QualmsError(f"{path} cannot be written ({error.strerror}); choose another file.") from None
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # a system without locks
    except OSError:
        file.close()
        raise QualmsError(f"{path} is in use by another run; wait for it, or choose another file.") from None
    return file
