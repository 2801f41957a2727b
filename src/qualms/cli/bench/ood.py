"""`qualms bench ood`: do scores tell other datasets from the one that the network knows?"""

from collections.abc import Iterator
from functools import partial

from qualms.cli.bench.options import Trained
from qualms.cli.bench.scoring import Outside, Prepared, run_task, told_apart
from qualms.cli.options import Chosen, with_options
from qualms.cli.specs import parse_methods
from qualms.report.tables import ood_table
from qualms.tasks import ood as task
from qualms.tasks.rows import Row


@with_options(Trained)
def ood(given: Trained, outside: Outside = "", methods: Chosen = "paper") -> None:
    """Do scores tell other datasets apart? If it is stopped, the same command resumes where it left
    off.

    Noise levels in specs are in pixels from 0 to 1. Example:

        qualms bench ood --id cifar10 --ood svhn --model cifar10-resnet20 --methods
        regrad+layers+smooth,entropy
    """
    unknown = told_apart("ood", given.inside, outside)
    run_task("ood", given, partial(parse_methods, methods), measured, ood_table, unknown)


def measured(ready: Prepared) -> Iterator[Row]:
    """The network's accuracy, then a row for each method and dataset."""
    yield from ready.accuracy()
    yield from task.ood(
        ready.network, ready.images, ready.others, ready.methods, ready.journal, **ready.how
    )
