"""Do the tests notice when the code is wrong? One small fault at a time, and the tests that run its
line.

    PYTHONPATH=.mutants python benchmarks/mutants.py metrics methods     (make mutants runs every
    folder) PYTHONPATH=.mutants python benchmarks/mutants.py page                the score of each
    folder, and what survived

A mutant is the code with one change by an operator of cosmic-ray (a sign, a comparison, a number, a
boolean, a loop, a decorator, an exception) or without one call or `raise`. There is one for every
place and kind of change, chosen by the seed where an operator offers several; annotations are left
alone, as the tests enforce them. Each is put into a copy of the sources, and of the folder's tests
those that run the line are run, the quickest first, until one fails. Rows go to
`results/mutants.jsonl` as they come, and a mutant that has one is passed over; a row whose line is
another now, or has moved among those of its operator, counts no more. With `--again`, what survived
is tried again, after tests were added.
"""

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from mutations import SOURCES, Mutant, changed_line, mutants_of, mutated

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "mutants.jsonl"
COPIED = (
    "src",
    "tests",
    "examples",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
    "Makefile",
)
# How many mutants of each folder get a row by default, and its tests.
FOLDERS: dict[str, tuple[int, list[str]]] = {
    "metrics": (10**6, ["tests/metrics"]),
    "methods": (150, ["tests/methods", "tests/test_positions.py", "tests/test_scorer.py"]),
    "gradients": (150, ["tests/gradients", "tests/test_positions.py", "tests/test_scorer.py"]),
    "scale": (80, ["tests/scale", "tests/cli/test_shards.py", "tests/data/test_claims.py"]),
}
FAST = "not slow and not data and not browser and not ray and not serve"
BESIDE = {"scale/cluster.py"}  # its tests need workers of Ray, which a mutant would leave behind
# Imported once, before the tests of each mutant are forked off; nothing of qualms is among them.
HEAVY = (
    "torch",
    "numpy",
    "scipy.stats",
    "sklearn.linear_model",
    "hypothesis",
    "beartype",
    "jaxtyping",
    "pytest",
)
# The only plugins that the tests need: to load all that are installed takes longer than most tests.
PLUGINS = ["-p", "pytest_cov", "-p", "pytest_timeout", "-p", "xdist.plugin"]
SECONDS = 120  # of tests for one mutant
SEEN = ("noticed", "too slow")  # outcomes of a mutant that would not get through
STAMPS = count(2 * 10**9)
Row = dict[str, Any]


@dataclass
class Suite:
    """The tests of a folder: how long each takes, and which run a line."""

    seconds: dict[str, float] = field(default_factory=dict)
    by_line: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def fitting(self, mutant: Mutant) -> list[str]:
        """The tests that run the mutant's line, or else its function, or else its file; the
        quickest first.
        """
        lines = self.by_line.get(mutant.file, {})
        spans = [(mutant.first, mutant.line), mutant.around, (0, 10**6)]
        for low, high in spans:
            tests = {test for line in lines if low <= line <= high for test in lines[line]}
            if tests:
                break
        left, chosen = float(SECONDS), list[str]()
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            left -= self.seconds[test]
            if chosen and left < 0:
                break
            chosen.append(test)
        return chosen


def suite_of(folder: str, tree: Path) -> Suite:
    """Runs the folder's tests once, and notes which test ran which line."""
    note = tree / "seconds.json"
    arguments = [
        "-m",
        FAST,
        f"--cov=src/qualms/{folder}",
        "--cov-context=test",
        "--cov-report=",
        *FOLDERS[folder][1],
    ]
    ended = forked(tree, lambda: pytest_ends(arguments, note), limit=3600)
    if ended != 0:
        raise SystemExit(
            f"the tests of {folder} fail without a mutant ({ended}): see {tree / 'output.txt'}"
        )
    suite = Suite(json.loads(note.read_text()))
    data = importlib.import_module("coverage").CoverageData(str(tree / ".coverage"))
    data.read()
    for file in data.measured_files():
        lines = {
            line: {
                test
                for test, _, _ in (context.rpartition("|") for context in contexts)
                if test in suite.seconds
            }
            for line, contexts in data.contexts_by_lineno(file).items()
        }
        suite.by_line[str(Path(file).relative_to(tree / "src/qualms"))] = lines
    return suite


class Stopwatch:
    """A plugin of pytest that notes how long each test takes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One part of a test is done."""
        self.seconds[report.nodeid] += report.duration


def pytest_ends(arguments: list[str], note: Path | None = None) -> int:
    """The exit code of pytest, in this process."""
    watch = Stopwatch()
    code = int(
        importlib.import_module("pytest").main([*PLUGINS, "-q", "-x", *arguments], plugins=[watch])
    )
    if note:
        note.write_text(json.dumps(watch.seconds))
    return code


def forked(tree: Path, work: Callable[[], int], limit: float) -> int | None:
    """What `work` returns in a process of its own, in the tree; None if it took longer than the
    limit.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        with open("output.txt", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                code = work()
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
                code = 99
            sys.stderr.flush()
        os._exit(code)
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:  # what the tests started goes with them, also on Ctrl-C
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[tuple[str, str]]:
    """Puts the mutant into the tree, and takes it out again; gives the line without and with it."""
    path = tree / "src/qualms" / mutant.file
    was, times = path.read_text(), path.stat()
    path.write_text(mutated(mutant, was))
    # Compiled files are distinguished by whole seconds, so every mutant is of a second of its own.
    stamp = next(STAMPS)
    os.utime(path, (stamp, stamp))
    try:
        yield changed_line(mutant, was)
    finally:
        path.write_text(was)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def tried(mutant: Mutant, suite: Suite, tree: Path) -> Row:
    """One row: whether a test failed."""
    tests = suite.fitting(mutant)
    start = time.monotonic()
    with applied(mutant, tree) as (before, after):
        limit = 60 + 6 * sum(suite.seconds[test] for test in tests)
        code = forked(tree, lambda: pytest_ends(tests), limit) if tests else 0
    if code == 5:
        raise SystemExit(f"none of the tests of {mutant} were found: {tests}")
    outcome = (
        "noticed" if code else "too slow" if code is None else "survived" if tests else "not run"
    )
    return {
        "file": mutant.file,
        "operator": mutant.operator,
        "occurrence": mutant.occurrence,
        "line": mutant.line,
        "outcome": outcome,
        "before": before,
        "after": after,
        "tests": len(tests),
        "seconds": round(time.monotonic() - start, 1),
    }


def rows() -> dict[tuple[str, str, int], Row]:
    """The newest row of each mutant."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {
        (row["file"], row["operator"], row["occurrence"]): row for row in map(json.loads, lines)
    }


def every_mutant(folder: str, seed: int) -> list[Mutant]:
    """Those of one folder, in the order in which they are drawn."""
    files = sorted(str(p.relative_to(SOURCES)) for p in (SOURCES / folder).rglob("*.py"))
    every = [mutant for file in files if file not in BESIDE for mutant in mutants_of(file, seed)]
    random.Random(seed).shuffle(every)
    return every


def tried_before(mutants: list[Mutant]) -> dict[Mutant, Row]:
    """Their rows, where the code is still what it was then."""
    known = rows()
    found = {mutant: known[mutant.key] for mutant in mutants if mutant.key in known}
    code = {mutant.file: (SOURCES / mutant.file).read_text() for mutant in found}
    return {
        m: row
        for m, row in found.items()
        if (row["before"], row["after"]) == changed_line(m, code[m.file])
    }


def run(folder: str, how_many: int | None, seed: int, again: bool) -> None:
    """The mutants of one folder."""
    every = every_mutant(folder, seed)
    known = tried_before(every)
    more = max(0, (FOLDERS[folder][0] if how_many is None else how_many) - len(known))
    left = [m for m in every if m not in known][:more]
    if again:
        left = [m for m, row in known.items() if row["outcome"] not in SEEN]
    print(
        f"{folder}: of {len(every)} mutants, seed {seed}, {len(known)} have a row, {len(left)} to do",
        flush=True,
    )
    tree = ROOT / ".mutants" / "trees" / folder
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    for name in COPIED:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy2)(ROOT / name, tree / name)
    suite = suite_of(folder, tree)
    for mutant in left:
        row = tried(mutant, suite, tree) | {"folder": folder, "seed": seed}
        with RESULTS.open("a") as out:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
        if row["outcome"] not in SEEN:
            print(describe(row), flush=True)


def describe(row: Row) -> str:
    """A mutant that no test noticed."""
    return f"{row['outcome']}: {row['file']}:{row['line']}: {row['before']}  ->  {row['after']}"


def page(seed: int) -> None:
    """The score of each folder, and what survived."""
    for folder in FOLDERS:
        every = every_mutant(folder, seed)
        of = tried_before(every)
        lived = [row for row in of.values() if row["outcome"] not in SEEN]
        print(
            f"{folder}: of {len(every)} mutants {len(of)} were tried, and {len(of) - len(lived)} noticed"
        )
        for row in lived:
            print(describe(row))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", choices=[*FOLDERS, "page"])
    parser.add_argument("--count", type=int, help="how many mutants of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="try again what survived")
    arguments = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = False  # or every mutant would compile all of qualms
    for folder in arguments.folders:
        if folder != "page":
            for module in HEAVY:
                importlib.import_module(module)
            run(folder, arguments.count, arguments.seed, arguments.again)
    page(arguments.seed)


if __name__ == "__main__":
    main()
