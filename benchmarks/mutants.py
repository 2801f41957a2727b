"""Do the tests notice when the code is wrong? One small fault at a time, and the tests that run its line.

    PYTHONPATH=.mutants python benchmarks/mutants.py metrics methods     (make mutants runs every folder)
    python benchmarks/mutants.py page                                    the score of each folder, and what survived

A mutant is the code with one change by an operator of cosmic-ray (a sign, a comparison, a number, a boolean, a loop,
a decorator, an exception) or without one call or `raise`. There is one for every place and kind of change, chosen by
the seed where an operator offers several; annotations are left alone, as the tests enforce them. Each is put into a
copy of the sources, and of the folder's tests those that run the line are run, the quickest first, until one fails.
Rows go to `results/mutants.jsonl` as they come, and a mutant that has one is passed over. With `--again`, what survived
is tried anew, after tests were added.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "mutants.jsonl"
COPIED = ("src", "tests", "examples", "benchmarks", "docs", "pyproject.toml", "README.md", "Makefile")
# What each folder is, how many mutants of it are drawn unless told, and its tests.
FOLDERS: dict[str, tuple[int, list[str]]] = {
    "metrics": (10**6, ["tests/metrics", "tests/test_threshold.py"]),
    "methods": (150, ["tests/methods"]),
    "gradients": (150, ["tests/gradients"]),
    "scale": (80, ["tests/scale"]),
}
FAST = "not slow and not data and not browser and not ray and not serve"
BESIDE = {"scale/cluster.py"}  # its tests need workers of Ray, which a mutant would leave behind
# Imported once, before the tests of each mutant are forked off; nothing of qualms is among them.
HEAVY = ("torch", "numpy", "scipy.stats", "sklearn.linear_model", "hypothesis", "beartype", "jaxtyping", "pytest")
# The only plugins that the tests need: to load all that are installed takes longer than most tests.
PLUGINS = ["-p", "pytest_cov", "-p", "pytest_timeout"]
SECONDS = 60  # of tests for one mutant
STAMPS = count(2 * 10**9)
Row = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """One change to one file: by which operator, which of its occurrences, and where."""

    file: str
    operator: str
    occurrence: int
    line: int
    column: int
    first: int  # line of the statement
    around: tuple[int, int]  # lines of the function

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells it from the others."""
        return self.file, self.operator, self.occurrence


# -- the mutants


class Removal:
    """An operator beside those of cosmic-ray: a call whose result is not used, or a `raise`, is left out."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """The statements that may go."""
        if node.type == "raise_stmt" or (node.type == "atom_expr" and node.parent.type == "simple_stmt"):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """What is put in its place."""
        tree = importlib.import_module("parso.python.tree")
        return tree.Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)


def operators() -> dict[str, Any]:
    """Every operator by name."""
    plugins = importlib.import_module("cosmic_ray.plugins")
    kinds = {name.removeprefix("core/"): plugins.get_operator(name) for name in plugins.operator_names()}
    return {name: kind() for name, kind in kinds.items() if not kind.arguments()} | {"Removal": Removal()}


def mutants_of(file: str, seed: int) -> list[Mutant]:
    """One for every place and kind of change in a file, such as `metrics/ties.py`."""
    ast = importlib.import_module("cosmic_ray.ast")
    tree = ast.get_ast((ROOT / "src/qualms" / file).read_text())
    places: dict[tuple[Any, str], list[Mutant]] = defaultdict(list)
    for name, operator in operators().items():
        found = ((node, start) for node in ast.ast_nodes(tree) for start, _ in operator.mutation_positions(node))
        for occurrence, (node, (line, column)) in enumerate(found):
            if not annotates(node):
                mutant = Mutant(file, name, occurrence, line, column, *lines_of(node))
                places[(line, column), name.partition("_")[0]].append(mutant)
    draw = random.Random(f"{seed} {file}")
    return [draw.choice(options) for _, options in sorted(places.items())]


def annotates(node: Any) -> bool:
    """Whether it is part of an annotation."""
    while node.parent is not None:
        above = node.parent
        if above.type in ("param", "funcdef") and node is above.annotation:
            return True
        if above.type == "annassign" and node is above.children[1]:
            return True
        node = above
    return False


def lines_of(node: Any) -> tuple[int, tuple[int, int]]:
    """The first line of the statement that it is in, and those of the function."""
    first, scope = node, node
    while first.parent is not None and first.parent.type not in ("suite", "file_input"):
        first = first.parent
    while scope.parent is not None and scope.type not in ("funcdef", "classdef"):
        scope = scope.parent
    return first.start_pos[0], (scope.start_pos[0], scope.end_pos[0])


# -- the tests


@dataclass
class Suite:
    """The tests of a folder: how long each takes, and which run a line."""

    seconds: dict[str, float] = field(default_factory=dict)
    by_line: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def fitting(self, mutant: Mutant) -> list[str]:
        """The tests that run the mutant's line, or else its function, or else its file; the quickest first."""
        lines = self.by_line.get(mutant.file, {})
        spans = [(mutant.first, mutant.line), mutant.around, (0, 10**6)]
        for low, high in spans:
            tests = {test for line in lines if low <= line <= high for test in lines[line]}
            if tests:
                break
        left, chosen = float(SECONDS), []
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            left -= self.seconds[test]
            if chosen and left < 0:
                break
            chosen.append(test)
        return chosen


def suite_of(folder: str, tree: Path) -> Suite:
    """Runs the folder's tests once, and notes which test ran which line."""
    note = tree / "seconds.json"
    arguments = ["-m", FAST, f"--cov=src/qualms/{folder}", "--cov-context=test", "--cov-report=", *FOLDERS[folder][1]]
    ended = forked(tree, lambda: tests_end(arguments, note), limit=3600)
    if ended != 0:
        raise SystemExit(f"the tests of {folder} fail without a mutant ({ended}): see {tree / 'said.txt'}")
    suite = Suite(json.loads(note.read_text()))
    data = importlib.import_module("coverage").CoverageData(str(tree / ".coverage"))
    data.read()
    for file in data.measured_files():
        lines = {
            line: {test for test, _, _ in (context.rpartition("|") for context in contexts) if test in suite.seconds}
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


def tests_end(arguments: list[str], note: Path | None = None) -> int:
    """The exit code of pytest, in this process."""
    watch = Stopwatch()
    code = int(importlib.import_module("pytest").main([*PLUGINS, "-q", "-x", *arguments], plugins=[watch]))
    if note:
        note.write_text(json.dumps(watch.seconds))
    return code


def forked(tree: Path, work: Callable[[], int], limit: float) -> int | None:
    """What `work` returns in a process of its own, in the tree; None if it took longer than the limit."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        with open("said.txt", "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                code = work()
                sys.stdout.flush()
            except BaseException:
                traceback.print_exc()
                code = 99
            sys.stderr.flush()
        os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


# -- a row for each mutant


@contextmanager
def applied(mutant: Mutant, tree: Path) -> Iterator[tuple[str, str]]:
    """Puts the mutant into the tree, and takes it out again; gives the line without and with it."""
    mutating = importlib.import_module("cosmic_ray.mutating")
    path = tree / "src/qualms" / mutant.file
    was, times = path.read_text(), path.stat()
    changed = mutating.mutate_code(was, operators()[mutant.operator], mutant.occurrence)
    path.write_text(changed)
    # Compiled files are told apart by whole seconds, so every mutant is of a second of its own.
    stamp = next(STAMPS)
    os.utime(path, (stamp, stamp))
    before, after = (text.splitlines()[mutant.line - 1].strip() for text in (was, changed))
    try:
        yield before, after
    finally:
        path.write_text(was)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def tried(mutant: Mutant, suite: Suite, tree: Path) -> Row:
    """One row: whether a test failed."""
    tests = suite.fitting(mutant)
    start = time.monotonic()
    with applied(mutant, tree) as (before, after):
        limit = 60 + 6 * sum(suite.seconds[test] for test in tests)
        code = forked(tree, lambda: tests_end(tests), limit) if tests else 0
    if code == 5:
        raise SystemExit(f"none of the tests of {mutant} were found: {tests}")
    outcome = "noticed" if code else "too slow" if code is None else "survived" if tests else "not run"
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
    return {(row["file"], row["operator"], row["occurrence"]): row for row in map(json.loads, lines)}


def run(folder: str, how_many: int | None, seed: int, again: bool) -> None:
    """The mutants of one folder."""
    files = sorted(str(p.relative_to(ROOT / "src/qualms")) for p in (ROOT / "src/qualms" / folder).rglob("*.py"))
    every = [mutant for file in files if file not in BESIDE for mutant in mutants_of(file, seed)]
    random.Random(seed).shuffle(every)
    chosen = every[: FOLDERS[folder][0] if how_many is None else how_many]
    known = rows()
    lived = {key for key, row in known.items() if row["outcome"] in ("survived", "not run")}
    left = [m for m in chosen if m.key not in known or (again and m.key in lived)]
    print(f"{folder}: {len(chosen)} of {len(every)} mutants, seed {seed}, {len(left)} to do", flush=True)
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
        if row["outcome"] not in ("noticed", "too slow"):
            print(f"{row['outcome']}: {row['file']}:{row['line']}: {row['before']}  ->  {row['after']}", flush=True)


def page() -> None:
    """The score of each folder."""
    by_folder: dict[str, list[Row]] = defaultdict(list)
    for row in rows().values():
        by_folder[row["folder"]].append(row)
    for folder, of in by_folder.items():
        noticed = sum(row["outcome"] in ("noticed", "too slow") for row in of)
        print(f"{folder}: {noticed} of {len(of)} mutants noticed, {noticed / len(of):.1%}")


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", choices=[*FOLDERS, "page"])
    parser.add_argument("--count", type=int, help="how many mutants of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="try anew what survived")
    arguments = parser.parse_args()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = False  # or every mutant would compile all of qualms
    for folder in arguments.folders:
        if folder != "page":
            for module in HEAVY:
                importlib.import_module(module)
            run(folder, arguments.count, arguments.seed, arguments.again)
    page()


if __name__ == "__main__":
    main()
