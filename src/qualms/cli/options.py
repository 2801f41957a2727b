"""The options that several commands share, each defined once, and what their values mean.

An option is an annotated type (`Seed`), used as the type of a command's parameter or of a
dataclass's field. Commands share a dataclass of options through `with_options`. Values are parsed
by `parse_methods`, `parse_class_names`, `split_list` and `resolve_device`.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import torch
import typer

from qualms.errors import QualmsError, reason
from qualms.gradients import settings
from qualms.methods.method import Method
from qualms.methods.registry import METHODS, parse
from qualms.tasks.paper_numbers import paper_methods

Options = TypeVar("Options")
CommandParameters = ParamSpec("CommandParameters")

# Methods that are not in the paper, which users might choose instead; `--methods paper` adds them.
ALTERNATIVES = ("energy", "gen", "heat", "coherence")

COUNT = 500  # test images of each dataset, unless --count is given
MODEL = "A network: a name, timm:NAME, hf:NAME, FILE.pt2, or module:factory."
SPECS = "Comma-separated methods, or `paper`, or `all`."
DECIDING_SPECS = "Comma-separated methods; the first one decides what is accepted."


def _require_tolerance(tolerance: float | None) -> float | None:
    """Return the value of --tolerance; raise an error if it is out of range. A typer callback."""
    if tolerance is not None and not 0 <= tolerance < 1:
        raise QualmsError(
            f"--tolerance is {tolerance:g}; pass a number of at least 0 (exact) and below 1."
        )
    return tolerance


def model_option(default: str) -> Any:
    """Return the typer option --model, for commands where it is optional.

    Args:
        default: What --help shows as the default.
    """
    return typer.Option("--model", help=MODEL, show_default=default)


def methods_option(help: str, default: str) -> Any:
    """Return the typer option --methods, for commands whose default depends on other options.

    Args:
        help: `SPECS`, or `DECIDING_SPECS` where the first method decides.
        default: What --help shows as the default.
    """
    return typer.Option("--methods", help=help, show_default=default)


def engine_option(default: str | bool = True) -> Any:
    """Return the typer option --engine.

    Args:
        default: What --help shows as the default; True shows the option's own default.
    """
    return typer.Option("--engine", help="How gradient scores are computed.", show_default=default)


# The network, and how images become its inputs.
Model = Annotated[str, typer.Option("--model", help=MODEL)]
Published = Annotated[str | None, model_option("a published network for the dataset")]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", help="The network's checkpoint.", show_default="from ROOT/weights"),
]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        help="The network's classes: comma-separated names, a file with one name per line, or "
        "their number.",
    ),
]
Size = Annotated[
    int | None, typer.Option("--size", help="Resize images to this height and width, in pixels.")
]
Mean = Annotated[
    str | None,
    typer.Option(
        "--mean",
        help="Mean of the normalization, for pixels from 0 to 1: comma-separated, one number "
        "per channel.",
    ),
]
Std = Annotated[
    str | None,
    typer.Option("--std", help="Standard deviation of the normalization, in the format of --mean."),
]
Device = Annotated[
    str, typer.Option("--device", help="Run on cpu, cuda or mps; auto picks the fastest available.")
]

# The images.
Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        help="The folder with the datasets.",
        envvar="QUALMS_DATA",
        show_default="data",
    ),
]
Inside = Annotated[
    str, typer.Option("--id", help="The dataset that the network knows, by name or path.")
]
Outside = Annotated[str, typer.Option("--ood", help="Other datasets or texts, comma-separated.")]
Count = Annotated[
    int, typer.Option("--count", help="Number of test images per dataset; 0 for all.")
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first input that cannot be read.")
]

# The methods.
Specs = Annotated[str, typer.Option("--methods", help=SPECS)]
Engine = Annotated[settings.Engine, engine_option()]
Tolerance = Annotated[
    float | None,
    typer.Option(
        "--tolerance",
        callback=_require_tolerance,
        help="Largest relative standard error of gradient scores; 0 for exact scores.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed for all random draws.")]

# The output.
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output if it already exists.")
]
Page = Annotated[Path, typer.Option("--out", help="Write the page to this file.")]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]


@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    """The options that decide how a network is loaded, and how images become its inputs."""

    weights: Weights = None
    size: Size = None
    mean: Mean = None
    std: Std = None
    root: Root = None
    device: Device = "auto"


def resolve_device(name: str) -> str:
    """Return the device that --device names.

    Args:
        name: A device of torch, or `auto` for the fastest available device.

    Raises:
        QualmsError: If the named device is not available.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    # An empty tensor cannot be created on a device that is not available.
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError):
        raise QualmsError(f"device {name!r} is not available; use --device auto.") from None
    return name


def split_list(text: str) -> list[str]:
    """Split text at its commas, except for those inside parentheses.

    `regrad+smooth(0.02,8),entropy` thus has two parts. Empty parts are dropped.
    """
    # A comma is inside parentheses if a `)` follows it before any `(`.
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", text)]
    return [part for part in parts if part]


def parse_methods(text: str, dataset: str = "") -> dict[str, Method]:
    """Parse comma-separated specs, among which `paper` and `all` stand for several methods.

    Args:
        text: The value of --methods. `paper` stands for the paper's methods and `ALTERNATIVES`;
            `all` adds every other method of qualms with its default settings.
        dataset: The dataset that decides the settings of the paper's methods.

    Returns:
        The methods by spec; those of the paper by their names in its tables.
    """
    methods: dict[str, Method] = {}
    for spec in split_list(text):
        if spec not in ("paper", "all"):
            methods[spec] = parse(spec)
            continue
        methods |= paper_methods(dataset)
        methods |= {name: parse(name) for name in ALTERNATIVES}
        if spec == "all":
            # Methods that are included already, perhaps with other settings, are not added again.
            included_types = {type(method) for method in methods.values()}
            for method_type in METHODS:
                if method_type not in included_types:
                    methods[method_type.name] = method_type()
    if not methods:
        raise QualmsError("--methods names no method; pass comma-separated specs, or `paper`.")
    return methods


def parse_class_names(text: str | None) -> tuple[int | None, tuple[str, ...]]:
    """Parse --classes.

    Args:
        text: A number, comma-separated names, or a file with one name per line.

    Returns:
        The number of classes, None if it is not given; and the names of the classes, empty if they
        are not given.
    """
    if text is None:
        return None, ()
    if text.isdecimal():
        return int(text), ()
    if Path(text).is_file():
        try:
            names = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise QualmsError(f"--classes {text} cannot be read: {reason(error)}.") from None
    else:
        names = split_list(text)
    stripped = [name.strip() for name in names]
    class_names = tuple(name for name in stripped if name)
    if len(class_names) < 2:
        raise QualmsError(
            f"--classes {text} is neither a number, nor two or more comma-separated names, nor a "
            "file with one name per line."
        )
    return len(class_names), class_names


def with_options(
    options: type[Options],
) -> Callable[[Callable[Concatenate[Options, CommandParameters], None]], Callable[..., None]]:
    """Build a decorator that adds the fields of a dataclass to the options of a command.

    Commands that share a list of options thus state it once. Typer reads a command's signature, so
    the decorated function has the command's own parameters and one for each field.

    Args:
        options: The dataclass. Each field is annotated as a typer option. The command receives an
            instance as its first argument.

    Example:
        ```python
        @dataclass(frozen=True, kw_only=True)
        class RunOptions:
            seed: Seed = 0


        @with_options(RunOptions)
        def run(options: RunOptions, out: Annotated[str, typer.Option()]) -> None:
            print(options.seed, out)  # `qualms run --out a.csv --seed 3` prints 3 a.csv
        ```
    """

    def decorate(
        command: Callable[Concatenate[Options, CommandParameters], None],
    ) -> Callable[..., None]:
        """Return a function whose parameters are a command's own and the fields of the dataclass.

        It calls the command with an instance of the dataclass as the first argument. Typer reads
        the signature and the annotations that are set here.
        """
        shared = inspect.signature(options).parameters
        # Without the first parameter, which receives the dataclass.
        own = list(inspect.signature(command).parameters.values())[1:]
        parameters = []
        for parameter in (*own, *shared.values()):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        # Sorting by False and True puts required options before optional ones in --help.
        parameters.sort(key=_is_optional)

        @wraps(command)
        def run_command(**values: Any) -> None:
            """Run the command, with the shared options collected into one object.

            Args:
                values: The values of all options by name, as typer passes them.
            """
            fields = {name: values.pop(name) for name in shared}
            command(options(**fields), **values)  # type: ignore[call-arg]

        run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run_command.__annotations__ = {p.name: p.annotation for p in parameters}
        return run_command

    return decorate


def _is_optional(parameter: inspect.Parameter) -> bool:
    """Whether a parameter of a command has a default, so that its option may be left out."""
    return parameter.default is not inspect.Parameter.empty
