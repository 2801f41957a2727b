"""`qualms serve`: a network behind HTTP, with predictions, scores and decisions for images."""

import math
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qualms.cli.commands import short_warnings
from qualms.cli.options import DECIDING_SPECS, Model, parse_methods, with_options
from qualms.cli.price_estimate import describe_price
from qualms.cli.scoring_run import ScoreOptions, prepare_run
from qualms.cli.signals import at_sigterm, interrupt, leave
from qualms.cli.status import echo
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT
from qualms.service.config import LOOPBACK, ServiceConfig
from qualms.threshold import Threshold

if TYPE_CHECKING:
    from qualms.service.scoring import ScoringService

TOKEN = "QUALMS_TOKEN"
MEGABYTE = 2**20
USUAL = ServiceConfig()
FILES = (".pt2", ".pt", ".pth")


@with_options(ScoreOptions)
def serve(
    options: ScoreOptions,
    model: Model,
    methods: Annotated[str, typer.Option(help=DECIDING_SPECS)] = DEFAULT,
    threshold: Annotated[
        Path | None,
        typer.Option(
            help="Threshold file from `qualms threshold`; without one, no decisions are made."
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of the network in responses and URLs.", show_default="from --model"
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(help="Listen on this address; 0.0.0.0 and :: require a token."),
    ] = LOOPBACK,
    port: Annotated[
        int, typer.Option(help="Listen on this port, from 1024 to 65535.")
    ] = USUAL.port,
    batch: Annotated[
        int, typer.Option(help="Maximum number of requests scored together.")
    ] = USUAL.batch,
    waiting: Annotated[
        int,
        typer.Option(help="Maximum number of requests in progress; further ones get status 429."),
    ] = USUAL.waiting,
    deadline: Annotated[
        float, typer.Option(help="Maximum duration of a request, in seconds.")
    ] = USUAL.deadline,
    max_body: Annotated[
        float, typer.Option(help="Maximum size of a request, in megabytes.")
    ] = USUAL.max_body / MEGABYTE,
    max_images: Annotated[
        int, typer.Option(help="Maximum number of images in a request.")
    ] = USUAL.max_images,
    max_pixels: Annotated[
        int, typer.Option(help="Maximum number of pixels in a request, over all its images.")
    ] = USUAL.max_pixels,
) -> None:
    """Serve a network over HTTP: images in; predictions, scores and decisions out; a page at `/`.

    The service listens only on this machine, unless you pass --host. If QUALMS_TOKEN is set in the
    environment, requests must carry it as `Authorization: Bearer …`; addresses other than 127.0.0.1
    require it. Until the network has scored its first image, requests get status 503; `/readyz`,
    the page and stderr show the progress. Ctrl-C or SIGTERM stops the service once all requests are
    answered, or at once during startup. Examples:

        qualms serve --model timm:resnet18 --methods regrad+layers+smooth,energy --threshold t.json

        qualms serve --model cifar10-resnet20 --methods entropy --host 0.0.0.0 --port 8080

    \f

    Args:
        options: The options that `serve` shares with `score`.
        model: The network.
        methods: The methods.
        threshold: A file with a threshold.
        name: What answers and addresses call the network.
        host: The address.
        port: The port.
        batch: The most requests that are scored together.
        waiting: The most requests at a time.
        deadline: The most seconds of a request.
        max_body: The most megabytes of a request.
        max_images: The most images in a request.
        max_pixels: The most pixels in a request.
    """
    # The first process of a container ignores a signal without a handler, also while it loads.
    signal.signal(signal.SIGTERM, interrupt)
    if not math.isfinite(max_body):
        raise QualmsError(f"--max-body is {max_body}; pass a number above 0.")
    settings = ServiceConfig(
        host=LOOPBACK if host == "localhost" else host,
        port=port,
        token=os.environ.get(TOKEN),
        batch=batch,
        waiting=waiting,
        deadline=deadline,
        max_body=int(max_body * MEGABYTE),
        max_images=max_images,
        max_pixels=max_pixels,
    )
    wanted = parse_methods(methods)
    limit = None if threshold is None else Threshold.load(threshold)
    address = _address(name or model)
    try:
        with at_sigterm(leave):
            from qualms.service.scoring import describe_unloaded
            from qualms.service.server import serve as run
    except ModuleNotFoundError as missing:
        raise QualmsError(
            f"`qualms serve` needs {missing.name}; run pip install '.[app,serve]' in a clone of "
            "qualms."
        ) from None
    loader = _Loader(address, name or _file_name(model), model, wanted, options, limit)
    run(loader, describe_unloaded(address, wanted, limit), settings, echo)


@dataclass(frozen=True)
class _Loader:
    """Loads the network that is served: called in the process that serves it, so it is picklable.

    Args:
        address: The network's name in answers and addresses.
        public: The network's name in the log and at `/readyz` during the start. Anybody can read
            it, so it holds no folders.
        model: The name of the network, as for `load_model`.
        methods: The methods by their specs, with noise for pixels in [0, 1].
        options: The other options.
        threshold: The threshold that decides; None decides nothing.
    """

    address: str
    public: str
    model: str
    methods: dict[str, Method]
    options: ScoreOptions
    threshold: Threshold | None

    def __call__(self, begin: Callable[[str], None]) -> "ScoringService":
        """Load the network, and score a first image with it.

        Args:
            begin: Called with the name of each step, as it begins.

        Returns:
            The service, whose network has scored a gray image if its input size is known.
        """
        from qualms.service.scoring import ScoringService

        with short_warnings():
            begin(f"loading {self.public}")
            run = prepare_run("", self.model, self.methods, self.options)
            served = ScoringService(self.address, run.network, run.make_scorer(self.threshold))
            price = served.price()
            step = "scoring a warm-up image"
            if price is not None:
                step += f", about {describe_price(price)}"
            begin(step)
            first = served.warm_up()
            if first is not None:
                run.require_class_count(first.probs.shape[1])
            return served


def _address(name: str) -> str:
    """Return a name that can stand in an address; for a file, without its folder and ending.

    Args:
        name: The value of --name, else of --model.
    """
    bare = Path(name).stem if name.endswith(FILES) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", bare).strip("-.") or "model"


def _file_name(model: str) -> str:
    """Return what --model names; for a file, without its folder.

    Args:
        model: The value of --model.
    """
    return Path(model).name if model.endswith(FILES) else model
