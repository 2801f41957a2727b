"""Every Python block of the README and the docs runs, in order, in one namespace for each page."""

import json
import re
import shlex
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


# What a newcomer meets first is tried on every run; the other pages take a minute together.
RUNS = [
    pytest.param(
        page,
        marks=[] if page.name in ("README.md", "index.md") else [pytest.mark.slow],
        id=page.name,
    )
    for page in PAGES
    if blocks(page)
]


@pytest.mark.usefixtures("as_users_meet_it")
@pytest.mark.parametrize("page", RUNS)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), space)


def commands(page: Path) -> list[list[str]]:
    """The lines of the blocks that are for a shell, without comments."""
    found, fence = [], None
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence == "```" and line.startswith(("qualms ", "make ", ".venv/bin/qualms ")):
            found.append(shlex.split(line.removeprefix(".venv/bin/").split(" #")[0]))
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=lambda p: p.name)
def test_every_command_is_one_that_there_is(page: Path) -> None:
    import typer

    from qualms.cli.commands import app

    group: Any = typer.main.get_command(app)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    for program, *words in commands(page):
        if program == "make":
            assert set(words) <= set(targets), words
        elif words != ["--help"]:
            command: Any = group
            while words and hasattr(command, "commands"):
                name, words = words[0], words[1:]
                command = command.commands[name].load()
            command.make_context(name, words, resilient_parsing=False).close()


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
            if page.is_relative_to(ROOT / "docs"):  # the site has nothing else
                assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), (
                    page.name,
                    target,
                )


def test_the_licenses_page_lists_every_package_that_is_asked_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs" / "licenses.md").read_text()
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        name = re.split(r"[\[><=]", line)[0]
        assert f"| {name} |" in text, f"{name}: run `make licenses`"


def test_the_methods_page_lists_every_method() -> None:
    from qualms.methods.registry import METHODS

    text = (ROOT / "docs" / "methods.md").read_text()
    for kind in METHODS:
        assert f"| `{kind.name}` |" in text, kind.name
        assert f"| {kind.cost}" in text, (kind.name, kind.cost)
    rows = set(re.findall(r"^\| `([\w-]+)` \|", text, flags=re.MULTILINE))
    assert rows <= {kind.name for kind in METHODS}


def test_the_path_of_a_tensor_names_what_there_is() -> None:
    """Each `name` (`file`) of the walk, in the file that it names; the names without one are
    explained before.
    """
    walk = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .split("## The path of a tensor")[1]
        .split("## To add")[0]
    )
    steps = re.findall(r"`([\w.]+)`,?\s+\(`([\w/]+\.py)`\)", walk)
    assert len(steps) > 25
    for name, file in steps:
        source = (ROOT / "src" / "qualms" / file).read_text()
        for part in name.split("."):
            assert re.search(rf"(def|class) {part}\b", source), f"{name} is not in {file}"


def rows_of(file: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (ROOT / "benchmarks" / "results" / file).read_text().splitlines()
    ]


def readme_table() -> tuple[list[str], dict[str, list[str]]]:
    """The header of the README's table of scores, and its cells by spec."""
    text = (ROOT / "README.md").read_text().split("## Which score, and why")[1]
    head, _, *body = [
        line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")
    ]
    return head, {cells[0].split("`")[1]: cells for cells in body}


PAPER_NAMES = {
    "regrad+layers+smooth": "REGrad*",
    "regrad": "REGrad",
    "entropy": "Entropy",
    "perturb-x": "Perturb x",
    "laplace": "LA",
}


def test_the_aurocs_in_the_readme_are_those_that_were_measured() -> None:
    """By the dataset that the network knows: the mean over other datasets of the mean over seeds."""
    head, table = readme_table()
    columns = {
        name: name.lower().replace("cifar-", "cifar")
        for name in head[1 : head.index("mean of pairs")]
    }
    means: dict[str, list[float]] = {spec: [] for spec in table}
    for column, (name, data) in enumerate(columns.items(), 1):
        rows = [row for row in rows_of(f"tables/table1-{data}.jsonl") if row["row"] == "ood"]
        for spec, cells in table.items():
            own = [row for row in rows if row["method"] == PAPER_NAMES.get(spec, spec)]
            pairs = [
                [row["auroc"] for row in own if row["out"] == out]
                for out in {row["out"] for row in own}
            ]
            areas = [100 * sum(found) / len(found) for found in pairs]
            assert float(cells[column].strip("*")) == pytest.approx(
                sum(areas) / len(areas), abs=0.051
            ), (name, spec)
            means[spec] += areas
        said = {spec: cells[column].strip("*") for spec, cells in table.items()}
        bold = {spec for spec, cells in table.items() if cells[column].startswith("**")}
        assert bold == {
            spec for spec, value in said.items() if value == max(said.values(), key=float)
        }, name
    for spec, cells in table.items():
        said_mean = float(cells[head.index("mean of pairs")].strip("*"))
        assert said_mean == pytest.approx(sum(means[spec]) / len(means[spec]), abs=0.051), spec


def test_the_costs_in_the_readme_are_those_that_were_measured() -> None:
    head, table = readme_table()
    measured = {row["method"]: row["ratio"] for row in rows_of("tables/runtime-cifar10.jsonl")}
    at_thousand = {
        r["method"]: r
        for r in rows_of("costs.jsonl")
        if r["network"] == "imagenet-efficientnet-lite0"
    }
    for spec, cells in table.items():
        assert float(cells[head.index("cost, 10 classes")]) == round(
            measured[PAPER_NAMES.get(spec, spec)]
        ), spec
        many, row = cells[head.index("cost, 1000 classes")], at_thousand[spec]
        measured_there = row.get("passes", row.get("counted"))
        assert many.strip() == ("" if measured_there is None else str(round(measured_there))), spec


def test_the_table_of_segmentation_is_what_was_measured() -> None:
    text = (
        (ROOT / "docs" / "results.md")
        .read_text()
        .partition("<!-- segmentation -->")[2]
        .partition("<!-- end -->")[0]
    )
    cells = [
        line.strip("| ").replace("*", "").split(" | ")
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    rows = rows_of("segmentation.jsonl")
    kinds = ("digits", "letters", "photos", "wrong")
    methods = {row["method"] for row in rows}
    assert len(rows) == 3 * len(kinds) * len(methods)
    assert {name.replace("`", "") for name, *_ in cells} == methods
    for name, *found in cells[: len(methods)]:
        for kind, cell in zip(kinds, found, strict=True):
            own = [
                row for row in rows if (row["kind"], row["method"]) == (kind, name.replace("`", ""))
            ]
            means = [sum(row[key] for row in own) / 3 for key in ("auroc", "aupr", "fpr95")]
            assert cell == "/".join(f"{100 * mean:.1f}" for mean in means), (name, kind)
