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
from qualms.cli.signals import at_sigterm, exit_at_once, terminate_service
from qualms.cli.status import echo
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT
from qualms.service.config import LOOPBACK, ServiceConfig
from qualms.threshold import Threshold

if TYPE_CHECKING:
    from qualms.service.scoring import ScoringService

TOKEN_VARIABLE = "QUALMS_TOKEN"
MEGABYTE = 2**20
DEFAULT_CONFIG = ServiceConfig()
FILE_ENDINGS = (".pt2", ".pt", ".pth")


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
    ] = DEFAULT_CONFIG.port,
    batch: Annotated[
        int, typer.Option(help="Maximum number of requests scored together.")
    ] = DEFAULT_CONFIG.batch,
    waiting: Annotated[
        int,
        typer.Option(help="Maximum number of requests in progress; further ones get status 429."),
    ] = DEFAULT_CONFIG.waiting,
    deadline: Annotated[
        float, typer.Option(help="Maximum duration of a request, in seconds.")
    ] = DEFAULT_CONFIG.deadline,
    max_body: Annotated[
        float, typer.Option(help="Maximum size of a request, in megabytes.")
    ] = DEFAULT_CONFIG.max_body / MEGABYTE,
    max_images: Annotated[
        int, typer.Option(help="Maximum number of images in a request.")
    ] = DEFAULT_CONFIG.max_images,
    max_pixels: Annotated[
        int, typer.Option(help="Maximum number of pixels in a request, over all its images.")
    ] = DEFAULT_CONFIG.max_pixels,
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
    # As the first process of a container, this one would ignore a signal without a handler.
    signal.signal(signal.SIGTERM, terminate_service)
    if not math.isfinite(max_body):
        raise QualmsError(f"--max-body is {max_body}; pass a number above 0.")
    config = ServiceConfig(
        host=LOOPBACK if host == "localhost" else host,
        port=port,
        token=os.environ.get(TOKEN_VARIABLE),
        batch=batch,
        waiting=waiting,
        deadline=deadline,
        max_body=int(max_body * MEGABYTE),
        max_images=max_images,
        max_pixels=max_pixels,
    )
    requested_methods = parse_methods(methods)
    loaded_threshold = None if threshold is None else Threshold.load(threshold)
    url_name = _url_name(name or model)
    try:
        with at_sigterm(exit_at_once):
            from qualms.service.scoring import describe_unloaded
            from qualms.service.server import serve as serve_network
    except ModuleNotFoundError as missing:
        raise QualmsError(
            f"`qualms serve` needs {missing.name}; run pip install '.[app,serve]' in a clone of "
            "qualms."
        ) from None
    loader = _Loader(
        url_name=url_name,
        log_name=name or _log_name(model),
        model=model,
        methods=requested_methods,
        options=options,
        threshold=loaded_threshold,
    )
    description = describe_unloaded(url_name, requested_methods, loaded_threshold)
    serve_network(loader, description, config, echo)


@dataclass(frozen=True)
class _Loader:
    """Loads the network to serve. It is called in another process, so it must be picklable.

    Args:
        url_name: The network's name in responses and URLs.
        log_name: The network's name in the log and at `/readyz` during startup. Anybody can read
            it, so it must not contain folders.
        model: The name of the network, as for `load_model`.
        methods: The methods by their specs, with noise for pixels in [0, 1].
        options: The other options.
        threshold: The threshold up to which predictions are accepted; None to decide nothing.
    """

    url_name: str
    log_name: str
    model: str
    methods: dict[str, Method]
    options: ScoreOptions
    threshold: Threshold | None

    def __call__(self, report_step: Callable[[str], None]) -> "ScoringService":
        """Load the network, and score a first image with it.

        Args:
            report_step: Called with the name of each step as the step begins.

        Returns:
            The service. If the network's input size is known, it has scored a gray image.
        """
        # Not imported by other commands, since it needs the packages of the service.
        from qualms.service.scoring import ScoringService

        with short_warnings():
            report_step(f"loading {self.log_name}")
            # No images are named, since they come with requests.
            run = prepare_run("", self.model, self.methods, self.options)
            service = ScoringService(self.url_name, run.network, run.make_scorer(self.threshold))
            price = service.price()
            step = "scoring a warm-up image"
            if price is not None:
                step += f", about {describe_price(price)}"
            report_step(step)
            first_scored = service.warm_up()
            if first_scored is not None:
                run.require_class_count(first_scored.probs.shape[1])
            return service


def _url_name(name: str) -> str:
    """Return a name that is valid in a URL; for a file, without its folder and ending.

    Args:
        name: The value of --name, else of --model.
    """
    without_folder = Path(name).stem if name.endswith(FILE_ENDINGS) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", without_folder).strip("-.") or "model"


def _log_name(model: str) -> str:
    """Return the value of --model; for a file, without its folder.

    Args:
        model: The value of --model.
    """
    return Path(model).name if model.endswith(FILE_ENDINGS) else model
