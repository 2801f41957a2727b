"""`qualms bench runtime`: what each method costs."""

from collections.abc import Iterator
from functools import partial

from qualms.cli.bench.options import Trained
from qualms.cli.bench.scoring import Prepared, run_task
from qualms.cli.options import Chosen, with_options
from qualms.cli.specs import parse_methods
from qualms.report.tables import runtime_table
from qualms.tasks import runtime as task
from qualms.tasks.rows import Row


@with_options(Trained)
def runtime(given: Trained, methods: Chosen = "paper") -> None:
    """What does each method cost? If it is stopped, the same command resumes where it left off.

    Times are in units of Entropy's. A network without weights will do. Example:

        qualms bench runtime --id cifar10 --model resnet18 --count 64
    """
    run_task(
        "runtime", given, partial(parse_methods, methods), measured, runtime_table, random=True
    )


def measured(ready: Prepared) -> Iterator[Row]:
    """A row for each method."""
    yield from task.runtime(ready.network, ready.images, ready.methods, ready.journal, **ready.how)
