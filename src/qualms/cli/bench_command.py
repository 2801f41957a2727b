"""`qualms bench`: tasks that evaluate methods on a network and images, or texts, of your choice.

The commands are in `bench_images` (ood, calibration, ablation, runtime), `bench_text` and
`bench_active`; what they measure is in `qualms.tasks`.
"""

import typer

from qualms.cli.lazy_group import LazyGroup


class Tasks(LazyGroup):
    """The tasks of `qualms bench`: for each, the module of its command, and its line in --help."""

    what = "task"
    table = {  # noqa: RUF012 (the base class says that it belongs to the class)
        "ood": ("qualms.cli.bench_images", "Can scores detect images from other datasets?"),
        "calibration": (
            "qualms.cli.bench_images",
            "Are the most certain predictions the correct ones?",
        ),
        "ablation": (
            "qualms.cli.bench_images",
            "What does each part of REGrad* add, and how much do λ and σ matter?",
        ),
        "runtime": ("qualms.cli.bench_images", "How long does each method take?"),
        "text": (
            "qualms.cli.bench_text",
            "Can token scores detect other texts, and wrong next tokens?",
        ),
        "active": ("qualms.cli.bench_active", "Which images are worth labeling?"),
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
