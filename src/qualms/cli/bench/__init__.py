"""`qualms bench`: a task on a network and images, or texts, of the user's choice."""

import typer

from qualms.cli.lazy import LazyGroup


class Tasks(LazyGroup):
    """What methods can be judged by."""

    what = "task"
    table = {  # noqa: RUF012 (the base class says that it belongs to the class)
        "ood": ("qualms.cli.bench.ood", "Do scores tell other datasets apart?"),
        "calibration": ("qualms.cli.bench.calibration", "Are certain predictions right?"),
        "ablation": (
            "qualms.cli.bench.ablation",
            "What do the parts of REGrad* add, and do λ and σ matter?",
        ),
        "runtime": ("qualms.cli.bench.runtime", "What does each method cost?"),
        "text": (
            "qualms.cli.bench.text",
            "Do scores of tokens tell other texts apart, and wrong next tokens?",
        ),
        "active": ("qualms.cli.bench.active", "Which images are worth a label?"),
    }


bench = typer.Typer(
    cls=Tasks,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    subcommand_metavar="TASK [ARGS]...",
)


@bench.callback()
def describe() -> None:
    """Judge methods on a network. If it is stopped, the same command resumes where it left off.

    Each task has its own options and an example in `qualms bench TASK --help`.
    """
