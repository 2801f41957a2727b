"""The loop over mutations of one reader, in a process of its own that may die of them: its parent
tells what of.

A mutation follows from the reader's name and a seed. Each is read with as much address space as the
process has, plus the reader's bound, and with `SECONDS` of the processor.
"""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from random import Random
from typing import Any

from qualms.errors import QualmsError
from tests.helpers.reader import Reader
from tests.helpers.readers_of_data import READERS_OF_DATA
from tests.helpers.readers_of_runs import READERS_OF_RUNS

READERS = READERS_OF_DATA | READERS_OF_RUNS

SECONDS = 10  # of the processor, for one mutation
SILENCE = 300  # seconds without a mutation read, after which a process counts as hanging
TOLD = 20  # failures of a reader that are told
# What Python is told of before it happens, and no file may bring about.
FORBIDDEN = {
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
    "pickle.find_class",
}  # fmt: skip
NO_ROOM = (
    "bad_alloc",
    "can't allocate memory",
    "malloc of size",
    "realloc of size",
    "Cannot allocate memory",
)
SHARED = Path("/dev/shm")


@dataclass
class Figures:
    """What came of the mutations of a reader."""

    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)  # by seed


def run(name: str, seeds: range, workers: int = 1) -> Figures:
    """All mutations of these seeds, in so many processes; one that dies is told, and another goes
    on after it.
    """
    context = _forkserver()
    began, total = time.monotonic(), Figures()
    shares = [seeds[i::workers] for i in range(workers)]
    running = [_Child(context, name, share) for share in shares if len(share)]
    while running:
        for child in list(running):
            rest = child.poll(total)
            if rest is not None:
                running.remove(child)
                if len(rest) and len(total.failures) < TOLD:
                    running.append(_Child(context, name, rest))
        time.sleep(0.01)
    total.seconds = time.monotonic() - began
    return total


@cache
def _forkserver() -> Any:
    """A process that imports all once, by the paths of this one, and of which others are copies."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return context


class _Child:
    """A process that goes through some seeds."""

    def __init__(self, context: Any, name: str, seeds: range) -> None:
        self.seeds = seeds
        self.at = context.RawValue("q", 0)  # how many it has begun
        self.ours, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_loop, args=(name, seeds, self.at, theirs))
        self.process.start()
        theirs.close()
        self.seen, self.since = 0, time.monotonic()

    def poll(self, total: Figures) -> range | None:
        """The seeds that are left once it has ended, None before; adds what it found."""
        if self.process.is_alive() and not self.ours.poll():
            if self.at.value != self.seen:
                self.seen, self.since = self.at.value, time.monotonic()
            if time.monotonic() - self.since < SILENCE:
                return None
            self.process.kill()
        try:
            found: Figures | str | None = self.ours.recv()
        except EOFError:
            found = None
        self.process.join()
        self.ours.close()
        begun = self.at.value
        if not isinstance(found, Figures):  # it died, and its figures with it
            code = self.process.exitcode or 0
            reason = found or (signal.Signals(-code).name if code < 0 else f"exit code {code}")
            seed = self.seeds[max(0, begun - 1)]
            total.failures[seed] = f"the process ended with {reason}" + (
                "" if begun else " before the first mutation"
            )
            return self.seeds[begun:] if begun else self.seeds[:0]
        total.accepted += found.accepted
        total.refused += found.refused
        total.failures |= found.failures
        return self.seeds[:0]


def mutation(
    name: str, reader: Reader, contents: dict[Path, bytes], seed: int
) -> tuple[Path, bytes]:
    """The file that is made wrong, and what it holds then."""
    random = Random(f"{name} {seed}")
    path = random.choice(list(contents))
    return path, reader.mutate(contents[path], random)


def _loop(name: str, seeds: Iterable[int], at: Any, pipe: Any) -> None:
    try:
        pipe.send(_found(name, seeds, at))
    except BaseException as error:  # of the loop itself
        pipe.send(_told(error))


def _found(name: str, seeds: Iterable[int], at: Any) -> Figures:
    reader, found = READERS[name], Figures()
    ran: list[str] = []
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, wherever it hangs
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others keep address space for later
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 2)  # libraries in C write there
    with (
        tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as place,
        warnings.catch_warnings(record=True) as caught,
    ):
        folder = Path(place)
        warnings.simplefilter("always")
        contents = {path: path.read_bytes() for path in reader.make(folder)}
        for path in contents:
            reader.read(folder, path)
        caught.clear()
        sys.addaudithook(
            lambda event, _: (
                ran.append(event) if event in FORBIDDEN and not reader.trusted else None
            )
        )
        for number, seed in enumerate(seeds, 1):
            at.value = number
            path, content = mutation(name, reader, contents, seed)
            path.write_bytes(content)
            failure = _failure(reader, folder, path, found)
            if failure is None and (ran or caught):
                failure = f"ran {ran[0]}" if ran else f"let a warning out: {caught[0].message}"
            if failure is not None:
                found.failures[seed] = failure
            ran.clear()
            caught.clear()
            path.write_bytes(contents[path])
            if len(found.failures) >= TOLD:
                break
    return found


def _failure(reader: Reader, folder: Path, path: Path, found: Figures) -> str | None:
    try:
        with _limited(reader.bound):
            reader.read(folder, path)
    except QualmsError as error:
        inner: BaseException | None = error
        while inner is not None:
            if isinstance(inner, MemoryError) or any(words in str(inner) for words in NO_ROOM):
                return f"took more than {reader.bound // 2**20} MiB: {_told(inner)}"
            inner = inner.__cause__ or inner.__context__
        found.refused += 1
    except BaseException as error:
        return _told(error)
    else:
        found.accepted += 1
    return None


@contextmanager
def _limited(bound: int) -> Iterator[None]:
    """As much memory more as the bound says, and some seconds."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + bound, most))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _told(error: BaseException) -> str:
    where = "".join(traceback.format_tb(error.__traceback__)[-2:]).replace("\n", " ")
    return f"{type(error).__name__}: {str(error)[:300]!r} at {where[-600:]}"
