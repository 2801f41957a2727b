"""`qualms bench ablation`: what each part of REGrad* adds, and how much its two parameters matter."""

from qualms.cli.bench.ood import measured
from qualms.cli.bench.options import Trained
from qualms.cli.bench.scoring import Outside, run_task, told_apart
from qualms.cli.options import with_options
from qualms.report.tables import ood_table
from qualms.tasks.ablation import components, lambda_sweep, sigma_sweep
from qualms.tasks.scoring import Methods


@with_options(Trained)
def ablation(given: Trained, outside: Outside = "") -> None:
    """What do the parts of REGrad* add, and do λ and σ matter?

    It is judged by how well other datasets are told apart. If it is stopped, the same command
    resumes where it left off. Example:

        qualms bench ablation --id svhn --ood cifar10
    """
    run_task(
        "ablation", given, parts, measured, ood_table, told_apart("ablation", given.inside, outside)
    )


def parts(dataset: str) -> Methods:
    """REGrad* and what is left of it without each part, over λ and over σ."""
    return {**components(dataset), **lambda_sweep(), **sigma_sweep(dataset)}
