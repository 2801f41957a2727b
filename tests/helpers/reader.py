"""What a reader of files is to the loop over mutations."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.mutations import Mutation

ALL = 100_000
MIB = 2**20
BOUND = 256 * MIB  # that reading a file of a few kilobytes may take, whatever its headers say
IMAGE = (
    768 * MIB
)  # 16 million pixels, or 10,000 for each byte of the file, and copies of them in other modes
PAGES = (
    5 * 2**10 * MIB
)  # pyarrow reserves, and does not touch, what the header of a page says, up to 2 GiB a column


@dataclass(frozen=True)
class Reader:
    """How a kind of file is made and read.

    Args:
        make: writes valid files below a folder, and gives the paths of those that are made wrong,
            one at a time.
        read: reads the file, given the folder and the path; what is wrong is a `QualmsError`.
        mutate: makes the content wrong.
        few: mutations in CI.
        many: mutations with QUALMS_FUZZ=1.
        bound: bytes of address space that one reading may take.
        trusted: whether code in the file is allowed to run, as the documentation says.
    """

    make: Callable[[Path], list[Path]]
    read: Callable[[Path, Path], object]
    mutate: Mutation
    few: int = 100
    many: int = ALL
    bound: int = BOUND
    trusted: bool = False


def one(write: Callable[[Path], Path]) -> Callable[[Path], list[Path]]:
    """Of a writer of one file."""
    return lambda folder: [write(folder)]


def content(name: str, what: bytes) -> Callable[[Path], list[Path]]:
    """A file of this name and content."""

    def make(folder: Path) -> list[Path]:
        (folder / name).write_bytes(what)
        return [folder / name]

    return make
