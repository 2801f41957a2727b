"""Is it exact, batched and sketched? Every classifier of transformers, and a network of each family
of timm.

    python benchmarks/sweep.py transformers              (make sweep runs all three)
    PYTHONPATH=.timm python benchmarks/sweep.py timm
    python benchmarks/sweep.py page

Each model is built small with random weights (`tiny_models.py`, `tiny_timm.py`), in double
precision, and its gradient norms for each input, class and layer are compared with those of the
reference engine. Rows go to `results/sweep.jsonl` as they come; a model that has one is passed
over, unless it is named on the command line. `page` fills the table of docs/engine.md.
"""

import argparse
import json
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import fill, table
from tiny_models import lively, transformers_model, transformers_names
from tiny_timm import timm_model, timm_names

import qualms

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "sweep.jsonl"
PAGE = HERE.parent / "docs" / "engine.md"
SECONDS = 300  # for one model
NEGLIGIBLE = 1e-9  # relative to the largest norm of an input
EXACT = 1e-9
Row = dict[str, Any]


LIBRARIES: dict[str, tuple[Callable[[], list[str]], Callable[[str], Any]]] = {
    "transformers": (transformers_names, transformers_model),
    "timm": (timm_names, timm_model),
}


def tried(library: str, name: str) -> Row:
    """One row: how the model fared."""
    row: Row = {"library": library, "name": name}
    start = time.monotonic()
    try:
        model, x = LIBRARIES[library][1](name)
        model = lively(model)
        row["parameters"] = sum(p.numel() for p in model.parameters())
        want = qualms.class_gradient_norms(model, x, engine="reference")
    except Exception as error:
        return row | {"outcome": "not run", "reason": describe_error(error)}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", qualms.SlowWarning)
            have = qualms.class_gradient_norms(model, x)
        slow = [
            str(w.message).partition("because ")[2]
            for w in caught
            if issubclass(w.category, qualms.SlowWarning)
        ]
        row |= {"outcome": "one at a time", "reason": slow[0]} if slow else {"outcome": "batched"}
        row |= {"general": have.general} if not slow and have.general else {}
        row["error"] = relative_error(have, want)
    except Exception as error:
        row |= {"outcome": "failed", "reason": describe_error(error)}
    try:
        qualms.score(model, x, "exgrad", engine=qualms.Sketch(tangents=2))
        row["sketch"] = "runs"
    except Exception as error:
        row["sketch"] = describe_error(error)
    return row | {"seconds": round(time.monotonic() - start, 1)}


def relative_error(have: qualms.ClassGradientNorms, want: qualms.ClassGradientNorms) -> float:
    """The largest over inputs, classes and layers, but for norms that are zero beside the input's
    largest.
    """
    if have.layers != want.layers:
        return float("inf")
    counted = want.norms > NEGLIGIBLE * want.norms.amax(dim=(1, 2), keepdim=True)
    return float(((have.norms - want.norms).abs() / want.norms)[counted].max())


def describe_error(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"[:300]


class OutOfTimeError(BaseException):
    """A model takes too long. Not an Exception, which the engine would take for a reason to go more
    slowly.
    """


def out_of_time(*_: Any) -> None:
    """Ends a model that takes too long."""
    raise OutOfTimeError


def sweep(library: str, named: list[str]) -> None:
    """Try all models that have no row yet, or those named."""
    signal.signal(signal.SIGALRM, out_of_time)
    known = read()
    done = {row["name"] for row in known if row["library"] == library}
    names = named or [name for name in LIBRARIES[library][0]() if name not in done]
    for number, name in enumerate(names, 1):
        signal.alarm(SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                row = tried(library, name)
            except OutOfTimeError:
                row = {
                    "library": library,
                    "name": name,
                    "outcome": "not run",
                    "reason": f"not done in {SECONDS} s",
                }
        signal.alarm(0)
        known = [old for old in read() if (old["library"], old["name"]) != (library, name)] + [row]
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in known))
        print(f"{number}/{len(names)} {json.dumps(row)}", flush=True)


def read() -> list[Row]:
    """The rows so far."""
    return (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )


def page(rows: list[Row]) -> str:
    """How many models fared how, and those that did not fare well, with the reason."""
    header = [
        "library",
        "models",
        "compared",
        "largest relative error",
        "batched",
        "one at a time",
        "sketched",
    ]
    body = []
    for library in dict.fromkeys(row["library"] for row in rows):
        here = [row for row in rows if row["library"] == library]
        compared = [row for row in here if "error" in row]
        counts = Counter(row["outcome"] for row in here)
        sketched = sum(row["sketch"] == "runs" for row in compared)
        worst = max((row["error"] for row in compared), default=0.0)
        numbers = [
            len(here),
            len(compared),
            f"{worst:.0e}",
            counts["batched"],
            counts["one at a time"],
            sketched,
        ]
        body.append([library, *map(str, numbers)])
    inexact = [row for row in rows if row.get("error", 0) > EXACT]
    parts = [
        ("One at a time, because", grouped(rows, "one at a time", "reason")),
        ("Failed, because", grouped(rows, "failed", "reason")),
        (
            f"Exact to no more than {EXACT:.0e}",
            [f"{row['name']} ({row['error']:.0e})" for row in inexact],
        ),
        (
            "Refused by the sketch",
            [", ".join(row["name"] for row in rows if row.get("sketch", "runs") != "runs")],
        ),
        ("Not compared, because", grouped(rows, "not run", "reason")),
    ]
    found = [
        f"{title}:\n\n" + "\n".join(f"- {line}" for line in lines)
        for title, lines in parts
        if any(lines)
    ]
    return "\n\n".join([table(header, body), *found])


def grouped(rows: list[Row], outcome: str, field: str) -> list[str]:
    """One line for each reason, with the models that it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["outcome"] == outcome:
            reasons.setdefault(row[field].rstrip("."), []).append(row["name"])
    return [f"{reason}: {', '.join(names)}" for reason, names in reasons.items()]


def main() -> None:
    """Sweep one library, or fill the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=[*LIBRARIES, "page"])
    parser.add_argument("names", nargs="*", help="only these models, again")
    arguments = parser.parse_args()
    if arguments.part == "page":
        fill(PAGE, {"sweep": page(read())})
    else:
        sweep(arguments.part, arguments.names)


if __name__ == "__main__":
    main()
