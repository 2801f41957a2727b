"""Format rows of tasks as Markdown tables, with the paper's numbers next to ours."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from qualms.errors import QualmsError
from qualms.methods.registry import parse
from qualms.report.content import Content
from qualms.report.numbers import summarize_methods
from qualms.tasks import paper_numbers
from qualms.tasks.rows import CalibrationRow, CycleRow, OodRow, Row

Line = Sequence[str]
AnyRow = TypeVar("AnyRow")
Key = TypeVar("Key", bound=Hashable)


def markdown_table(headings: Line, lines: Iterable[Line]) -> str:
    """Format an aligned Markdown table.

    Args:
        headings: The headings of the columns.
        lines: The cells of each line.

    Returns:
        The lines of the table, without a line break at the end.
    """
    cells = [list(headings), *map(list, lines)]
    widths = []
    for column in zip(*cells, strict=True):
        # Markdown needs at least three dashes below a heading.
        widths.append(max(3, *map(len, column)))
    dashes = ["-" * (width + 2) for width in widths]
    markdown_lines = [_markdown_line(line, widths) for line in cells]
    # The line of dashes below the headings.
    markdown_lines.insert(1, f"|{'|'.join(dashes)}|")
    return "\n".join(markdown_lines)


def _markdown_line(line: Line, widths: Sequence[int]) -> str:
    """Format a line of a Markdown table, with each cell padded to the width of its column."""
    padded = []
    for cell, width in zip(line, widths, strict=True):
        padded.append(cell.ljust(width))
    return f"| {' | '.join(padded)} |"


def group_rows(rows: Iterable[AnyRow], key: Callable[[AnyRow], Key]) -> dict[Key, list[AnyRow]]:
    """Group rows by a key, in the order in which the keys first occur.

    Args:
        rows: The rows.
        key: Returns the key of a row.
    """
    groups: dict[Key, list[AnyRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def ood_table(rows: Iterable[Row], paper: str = "table1") -> str:
    """Format the rows of `qualms.tasks.ood`, in percent: a table for each pair of datasets.

    The columns are AUROC with its interval (or the standard deviation over seeds), AUPR with either
    dataset as the positive class, FPR95, and the paper's numbers.

    Args:
        rows: Rows of tasks; rows of other kinds are ignored.
        paper: The table of the paper to compare to, `table1` or `vit`.
    """
    ood_rows = [row for row in rows if row["row"] == "ood"]
    tables = []
    for (known, other), pair_rows in group_rows(
        ood_rows, lambda row: (row["in"], row["out"])
    ).items():
        paper_cells = _paper_numbers_of_pair(f"{known}→{other}", paper)
        lines = []
        for name, method_rows in group_rows(pair_rows, lambda row: row["method"]).items():
            lines.append(
                [
                    name,
                    _format_auroc(method_rows),
                    _format_column_percent(method_rows, "aupr_out"),
                    _format_column_percent(method_rows, "aupr_in"),
                    _format_column_percent(method_rows, "fpr95"),
                    _find_paper_number(name, known, paper_cells),
                ]
            )
        first_row = pair_rows[0]
        title = f"{known} → {other}: {first_row['n_in']} and {first_row['n_out']} images, %"
        headings = [
            "method",
            "AUROC",
            "AUPR",
            "AUPR, in as positive",
            "FPR95",
            "paper's AUROC/AUPR",
        ]
        tables.append(f"{title}\n\n{markdown_table(headings, lines)}")
    return "\n\n".join(tables)


def calibration_table(rows: Iterable[Row]) -> str:
    """Format the rows of `qualms.tasks.calibration`: a table for each dataset.

    The columns are rAULC with its interval (or the standard deviation over seeds), the error rates
    of the most certain predictions, and the paper's rAULC.

    Args:
        rows: Rows of tasks; rows of other kinds are ignored.
    """
    calibration_rows = [row for row in rows if row["row"] == "calibration"]
    tables = []
    for dataset, dataset_rows in group_rows(calibration_rows, lambda row: row["in"]).items():
        paper_cells = {}
        for name, number in paper_numbers.RAULC.get(dataset, {}).items():
            paper_cells[name] = f"{number:.3f}"
        lines = []
        for name, method_rows in group_rows(dataset_rows, lambda row: row["method"]).items():
            lines.append(
                [
                    name,
                    _format_raulc(method_rows),
                    _format_column_percent(method_rows, "risk_at_95"),
                    _format_column_percent(method_rows, "risk_at_90"),
                    _format_column_percent(method_rows, "risk_at_80"),
                    _find_paper_number(name, dataset, paper_cells),
                ]
            )
        accuracy = _format_column_percent(dataset_rows, "accuracy")
        title = f"{dataset}: {dataset_rows[0]['n']} images, {accuracy} % right"
        headings = ["method", "rAULC", "error at coverage 95 %, %", "90 %", "80 %", "paper's rAULC"]
        tables.append(f"{title}\n\n{markdown_table(headings, lines)}")
    return "\n\n".join(tables)


def active_table(rows: Iterable[Row]) -> str:
    """Format the rows of `qualms.tasks.active`: a table for each dataset.

    Accuracy and negative log-likelihood (NLL) are means over a method's cycles. Before the first
    cycle all methods share one network; its rows have the method `start`, and so a line of their
    own. With several seeds, the standard deviation of the seeds' means follows.

    Args:
        rows: Rows of tasks; rows of other kinds are ignored.
    """
    cycle_rows = [row for row in rows if row["row"] == "cycle"]
    tables = []
    for dataset, dataset_rows in group_rows(cycle_rows, lambda row: row["data"]).items():
        paper_cells = {}
        for name, (accuracy, nll) in paper_numbers.ACTIVE.get(dataset, {}).items():
            paper_cells[name] = f"{accuracy:.2f}/{nll:.3f}"
        lines = []
        for name, method_rows in group_rows(dataset_rows, lambda row: row["method"]).items():
            labeled = [row["labeled"] for row in method_rows]
            # The paper's NLLs suggest that its loss applies a second softmax (`nll_softmax_twice`),
            # so both NLLs are shown.
            lines.append(
                [
                    name,
                    f"{min(labeled)} to {max(labeled)}",
                    _format_mean_over_seeds(method_rows, lambda row: 100 * row["accuracy"], 2),
                    _format_mean_over_seeds(method_rows, lambda row: row["nll"], 3),
                    _format_mean_over_seeds(method_rows, lambda row: row["nll_softmax_twice"], 3),
                    _find_paper_number(name, dataset, paper_cells),
                ]
            )
        headings = [
            "method",
            "labels",
            "accuracy, %",
            "NLL",
            "NLL, softmax twice",
            "paper's ACC/NLL",
        ]
        tables.append(f"{dataset}\n\n{markdown_table(headings, lines)}")
    return "\n\n".join(tables)


def runtime_table(rows: Iterable[Row]) -> str:
    """Format the rows of `qualms.tasks.runtime`, in units of Entropy's time.

    Args:
        rows: Rows of tasks; rows of other kinds are ignored.
    """
    runtime_rows = [row for row in rows if row["row"] == "runtime"]
    if not runtime_rows:
        return ""
    paper_cells = {}
    for name, seconds in paper_numbers.RUNTIME.items():
        paper_cells[name] = f"{seconds / paper_numbers.RUNTIME['Entropy']:.1f}"
    lines = []
    for row in runtime_rows:
        # The paper measured times on CIFAR-10, with the settings for it.
        paper = _find_paper_number(row["method"], "cifar10", paper_cells)
        lines.append([row["method"], f"{row['ratio']:.1f}", f"{row['seconds']:.2f}", paper])
    headings = [
        "method",
        "time, Entropy = 1",
        "seconds",
        "paper's, Entropy = 1 (ResNet-18, CIFAR-10)",
    ]
    return f"{runtime_rows[0]['n']} images\n\n{markdown_table(headings, lines)}"


def paper_table(name: str, rows: Sequence[Row]) -> str:
    """Format the rows of a table of `qualms reproduce`.

    Args:
        name: The name of the table in that command.
        rows: The rows of the table.
    """
    if name == "table2":
        return calibration_table(rows)
    if name == "table3":
        return active_table(rows)
    if name == "runtime":
        return runtime_table(rows)
    if name == "vit":
        return ood_table(rows, paper="vit")
    # All other tables are of OOD detection, with the paper's numbers of its table 1 beside ours.
    return ood_table(rows, paper="table1")


def glance_table(content: Content, resamples: int = 1000) -> str:
    """Format the methods of a report as a Markdown table, a line for each.

    The columns are AUROC/AUPR of each unknown group in percent, rAULC, and the cost in forward
    passes.

    Args:
        content: The content of the report.
        resamples: The number of bootstrap resamples of each interval. The table shows no intervals,
            but if the number is that of `write_page`, both use the same cached summaries.
    """
    headings = ["method"]
    for group in content.unknown:
        headings.append(f"{group.name}, AUROC/AUPR")
    headings += ["rAULC", "forward passes"]
    lines = []
    for summary in summarize_methods(content, resamples):
        line = [summary.method]
        for auroc, aupr in zip(summary.auroc, summary.aupr, strict=True):
            line.append(f"{100 * auroc.value:.1f}/{100 * aupr:.1f}")
        raulc_text = ""
        if summary.raulc is not None:
            raulc_text = f"{summary.raulc.value:.3f}"
        lines.append([*line, raulc_text, _format_cost(summary.cost)])
    return markdown_table(headings, lines)


def _format_cost(cost: int | float | str | None) -> str:
    """Format a cost in forward passes; a string is returned unchanged, and None as empty text."""
    if isinstance(cost, (int, float)):
        return f"{cost:.1f}"
    return cost or ""


def list_networks(rows: Iterable[Row]) -> str:
    """List the networks of `accuracy` rows with their accuracies, under a title.

    Args:
        rows: Rows of tasks; rows of other kinds are ignored.
    """
    lines = []
    for row in rows:
        if row["row"] == "accuracy":
            accuracy = f"{100 * row['accuracy']:.2f} % of {row['n']} {row['data']} test images"
            lines.append(f"- {row['network']}: {accuracy} right")
    return _format_list("Networks", lines)


def list_left_out(rows: Iterable[Row]) -> str:
    """List what could not be computed, and why, under a title; empty if nothing was left out.

    Args:
        rows: Rows of tasks; rows of other kinds are ignored.
    """
    lines = []
    for row in rows:
        if row["row"] == "left out":
            # What was left out is a method or, with all of its methods, a dataset (`out`).
            lines.append(f"- {row.get('method') or row.get('out')}: {row['why']}")
    return _format_list("Left out", lines)


def _format_list(title: str, lines: Sequence[str]) -> str:
    """Format the distinct lines under a title; return an empty string if there are no lines."""
    if not lines:
        return ""
    # `dict.fromkeys` drops repeated lines and keeps the order.
    return f"{title}:\n\n" + "\n".join(dict.fromkeys(lines))


def _find_paper_number(name: str, dataset: str, paper_cells: Mapping[str, str]) -> str:
    """Return the paper's number for a method, or an empty string if the paper has none.

    If our method has other settings than the paper's, `, other settings` follows the number.

    Args:
        name: The name of the method in our rows, which may be a spec.
        dataset: The dataset that decides the settings of the paper's methods.
        paper_cells: A dict from the names of methods in the paper's tables to its numbers as text.
    """
    if name in paper_cells:
        return paper_cells[name]
    try:
        method = parse(name)
    # The name is not a spec.
    except QualmsError:
        return ""
    paper_name = paper_numbers.paper_row(method)
    if paper_name not in paper_cells:
        return ""
    if paper_numbers.paper_methods(dataset)[paper_name] != method:
        return f"{paper_cells[paper_name]}, other settings"
    return paper_cells[paper_name]


def _paper_numbers_of_pair(pair: str, table: str) -> dict[str, str]:
    """Return the paper's AUROC/AUPR for a pair of datasets, as text by name of the method.

    Args:
        pair: The known and the other dataset, such as `mnist→omniglot`.
        table: The table of the paper, `table1` or `vit`.
    """
    numbers: dict[str, Any] = paper_numbers.VIT.get(pair, {})
    if table != "vit":
        # Those of its table of OOD detection, and of its tables of λ and σ.
        numbers = {
            **paper_numbers.OOD.get(pair, {}),
            **paper_numbers.SWEEPS.get(pair, {}),
        }
    paper_cells = {}
    for name, (auroc, aupr) in numbers.items():
        paper_cells[name] = f"{auroc:.2f}/{aupr:.2f}"
    return paper_cells


def _format_mean_percent(shares: Iterable[float]) -> str:
    """Format the mean of some shares (numbers from 0 to 1) in percent, with two decimals."""
    return f"{100 * statistics.fmean(shares):.2f}"


def _format_column_percent(rows: Iterable[Mapping[str, Any]], column: str) -> str:
    """Format the mean of the shares that rows have in a column, in percent with two decimals."""
    return _format_mean_percent(row[column] for row in rows)


def _format_auroc(rows: Sequence[OodRow]) -> str:
    """Format AUROC in percent: of one seed with its interval, of several as mean ± deviation.

    Args:
        rows: The rows of a method, one per seed.
    """
    aurocs = [row["auroc"] for row in rows]
    if len(aurocs) > 1:
        return f"{_format_mean_percent(aurocs)} ± {100 * statistics.stdev(aurocs):.2f}"
    row = rows[0]
    interval = f"[{100 * row['auroc_low']:.1f}, {100 * row['auroc_high']:.1f}]"
    return f"{_format_mean_percent(aurocs)} {interval}"


def _format_mean_over_seeds(
    rows: Sequence[CycleRow], get_number: Callable[[CycleRow], float], digits: int
) -> str:
    """Average a number over the cycles of each seed, and format mean ± deviation over the seeds.

    Args:
        rows: The cycles of a method, of all seeds.
        get_number: Returns the number to average, given the row of a cycle.
        digits: The number of decimals.
    """
    seed_means = []
    for seed_rows in group_rows(rows, lambda row: row["seed"]).values():
        seed_means.append(statistics.fmean(get_number(row) for row in seed_rows))
    text = f"{statistics.fmean(seed_means):.{digits}f}"
    if len(seed_means) > 1:
        text += f" ± {statistics.stdev(seed_means):.{digits}f}"
    return text


def _format_raulc(rows: Sequence[CalibrationRow]) -> str:
    """Format rAULC: of one seed with its interval, of several as mean ± standard deviation.

    Args:
        rows: The rows of a method, one per seed. Rows whose rAULC is undefined (None) are left out;
            if no row is left, the text is `none`.
    """
    defined_rows = []
    values = []
    for row in rows:
        if row["raulc"] is not None:
            defined_rows.append(row)
            values.append(row["raulc"])
    if not values:
        return "none"
    if len(values) == 1:
        row = defined_rows[0]
        return f"{values[0]:.3f} [{row['raulc_low']:.3f}, {row['raulc_high']:.3f}]"
    return f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}"
