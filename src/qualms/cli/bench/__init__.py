"""`qualms bench`: a task on a network and images, or texts, of the user's choice."""

import typer

from qualms.cli.lazy import LazyGroup


class Tasks(LazyGroup):
    """The tasks that methods are judged by."""

    what = "task"
    table = {  # noqa: RUF012 (the base class says that it belongs to the class)
        "ood": ("qualms.cli.bench.image_tasks", "Can scores detect images of other datasets?"),
        "calibration": (
            "qualms.cli.bench.image_tasks",
            "Are the most certain predictions the correct ones?",
        ),
        "ablation": (
            "qualms.cli.bench.image_tasks",
            "What does each part of REGrad* add, and how much do λ and σ matter?",
        ),
        "runtime": ("qualms.cli.bench.image_tasks", "How long does each method take?"),
        "text": (
            "qualms.cli.bench.token_task",
            "Can token scores detect other texts, and wrong next tokens?",
        ),
        "active": ("qualms.cli.bench.active_learning", "Which images are worth labeling?"),
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
    """Evaluate methods on a network. Run an interrupted command again to resume it.

    `qualms bench TASK --help` lists the options of a task, with an example.
    """
