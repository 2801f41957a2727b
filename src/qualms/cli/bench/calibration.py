"""`qualms bench calibration`: are the predictions that a score calls certain the right ones?"""

from collections.abc import Iterator
from functools import partial

from qualms.cli.bench.options import Trained
from qualms.cli.bench.scoring import Prepared, run_task
from qualms.cli.options import Chosen, with_options
from qualms.cli.specs import parse_methods
from qualms.report.tables import calibration_table
from qualms.tasks import calibration as task
from qualms.tasks.rows import Row


@with_options(Trained)
def calibration(given: Trained, methods: Chosen = "paper") -> None:
    """Are certain predictions right? If it is stopped, the same command resumes where it left off.

    Noise levels in specs are in pixels from 0 to 1. Example:

        qualms bench calibration --id cifar10 --methods regrad+layers+smooth,entropy --count 0
    """
    run_task("calibration", given, partial(parse_methods, methods), measured, calibration_table)


def measured(ready: Prepared) -> Iterator[Row]:
    """The network's accuracy, then a row for each method."""
    yield from ready.accuracy()
    yield from task.calibration(
        ready.network, ready.images, ready.methods, ready.journal, **ready.how
    )
