"""The faults that `mutants.py` puts into the code, one at a time: what they are, and where they may
be.
"""

import importlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "src" / "qualms"


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


class Removal:
    """An operator beside those of cosmic-ray: a call whose result is not used, or a `raise`, is
    left out.
    """

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        """The statements that may go."""
        if node.type == "raise_stmt" or (
            node.type == "atom_expr" and node.parent.type == "simple_stmt"
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """What is put in its place."""
        tree = importlib.import_module("parso.python.tree")
        return tree.Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)


def operators() -> dict[str, Any]:
    """Every operator by name."""
    plugins = importlib.import_module("cosmic_ray.plugins")
    kinds = {
        name.removeprefix("core/"): plugins.get_operator(name) for name in plugins.operator_names()
    }
    return {name: kind() for name, kind in kinds.items() if not kind.arguments()} | {
        "Removal": Removal()
    }


def mutants_of(file: str, seed: int) -> list[Mutant]:
    """One for every place and kind of change in a file, such as `metrics/ties.py`."""
    ast = importlib.import_module("cosmic_ray.ast")
    tree = ast.get_ast((SOURCES / file).read_text())
    places: dict[tuple[Any, str], list[Mutant]] = defaultdict(list)
    for name, operator in operators().items():
        found = (
            (node, start)
            for node in ast.ast_nodes(tree)
            for start, _ in operator.mutation_positions(node)
        )
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
        if above.type == "funcdef" and node is above.annotation:
            return True
        if above.type == "tfpdef" and node is above.children[2]:  # of a parameter
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


def mutated(mutant: Mutant, code: str) -> str:
    """The file's code with the change."""
    mutating = importlib.import_module("cosmic_ray.mutating")
    return str(mutating.mutate_code(code, operators()[mutant.operator], mutant.occurrence))


def changed_line(mutant: Mutant, code: str) -> tuple[str, str]:
    """The line without and with the change."""
    before, after = (
        text.splitlines()[mutant.line - 1].strip() for text in (code, mutated(mutant, code))
    )
    return before, after
