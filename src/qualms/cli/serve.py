"""`qualms serve`: a network behind HTTP, which says of each image what it sees and whether to trust
that.
"""

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
from qualms.cli.options import with_options
from qualms.cli.own_images import ScoreOptions, prepare_run
from qualms.cli.price import describe_price
from qualms.cli.signals import at_sigterm, interrupt, leave
from qualms.cli.specs import parse_methods
from qualms.cli.status import echo
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT
from qualms.service.settings import LOOPBACK, Settings
from qualms.threshold import Threshold

if TYPE_CHECKING:
    from qualms.service.scoring import Served

TOKEN = "QUALMS_TOKEN"
MEGABYTE = 2**20
USUAL = Settings()
FILES = (".pt2", ".pt", ".pth")


@with_options(ScoreOptions)
def serve(
    given: ScoreOptions,
    model: Annotated[
        str, typer.Option(help="As for load_model: a name, timm:…, hf:…, FILE.pt2, module:factory.")
    ],
    methods: Annotated[
        str, typer.Option(help="Comma-separated specs; the first one decides.")
    ] = DEFAULT,
    threshold: Annotated[
        Path | None,
        typer.Option(help="A file from `qualms threshold`; without it, nothing is decided."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="The network's name in answers and addresses.", show_default="made from --model"
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="127.0.0.1; or 0.0.0.0 or ::, which need a token.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(help="The port, 1024 or above.")] = USUAL.port,
    batch: Annotated[
        int, typer.Option(help="The most requests that are scored together.")
    ] = USUAL.batch,
    waiting: Annotated[
        int, typer.Option(help="The most requests at a time; more are answered 429.")
    ] = USUAL.waiting,
    deadline: Annotated[
        float, typer.Option(help="Seconds that a request may take.")
    ] = USUAL.deadline,
    max_body: Annotated[float, typer.Option(help="The most megabytes in a request.")] = USUAL.body
    / MEGABYTE,
    max_images: Annotated[int, typer.Option(help="The most images in a request.")] = USUAL.images,
    max_pixels: Annotated[
        int, typer.Option(help="The most pixels in a request, over all its images.")
    ] = USUAL.pixels,
) -> None:
    """Serve a network over HTTP: images in, predictions, scores and decisions out; a page to try it
    at `/`.

    The service listens to this machine alone, unless --host says otherwise. If QUALMS_TOKEN is set
    in the environment, requests must carry it as `Authorization: Bearer …`; other addresses than
    127.0.0.1 need one. It listens at once, and answers 503 until the network has scored a first
    image: `/readyz`, the page and stderr say how far it is. Ctrl-C or SIGTERM stops it once all
    requests it has taken are answered, and at once while it starts. Examples:

        qualms serve --model timm:resnet18 --methods regrad+layers+smooth,energy --threshold t.json

        qualms serve --model cifar10-resnet20 --methods entropy --host 0.0.0.0 --port 8080
    """
    # Also while the network is loaded: the first process of a container is not ended by a signal
    # that it does not heed.
    signal.signal(signal.SIGTERM, interrupt)
    if not math.isfinite(max_body):
        raise QualmsError(f"--max-body is {max_body}; it must be a number above 0.")
    settings = Settings(
        host=LOOPBACK if host == "localhost" else host,
        port=port,
        token=os.environ.get(TOKEN),
        batch=batch,
        waiting=waiting,
        deadline=deadline,
        body=int(max_body * MEGABYTE),
        images=max_images,
        pixels=max_pixels,
    )
    wanted = parse_methods(methods, "")
    limit = None if threshold is None else Threshold.load(threshold)
    called = _address(name or model)
    try:
        with at_sigterm(leave):
            from qualms.service.scoring import about_unloaded
            from qualms.service.serve import serve as run
    except ModuleNotFoundError as missing:
        raise QualmsError(
            f"`qualms serve` needs {missing.name}; pip install '.[app,serve]' in a clone of qualms."
        ) from None
    make = _Make(called, name or _file_name(model), model, wanted, given, limit)
    run(make, about_unloaded(called, wanted, limit), settings, echo)


@dataclass(frozen=True)
class _Make:
    """Builds what is served, in the process that serves it.

    Args:
        called: the network's name in answers and addresses.
        public: how the steps of the start call it: probes are told, so it holds no folders.
        model: what to load.
        methods: by their specs.
        given: the other options.
        threshold: what decides, if anything does.
    """

    called: str
    public: str
    model: str
    methods: dict[str, Method]
    given: ScoreOptions
    threshold: Threshold | None

    def __call__(self, begin: Callable[[str], None]) -> "Served":
        """Load the network, and score a first image with it."""
        from qualms.service.scoring import Served

        with short_warnings():
            begin(f"loading {self.public}")
            prepared = prepare_run("", self.model, self.methods, self.given)
            served = Served(
                self.called,
                prepared.network,
                prepared.make_scorer(prepared.methods, self.threshold),
            )
            price = served.price()
            begin(
                "scoring a first image"
                + (f", about {describe_price(price)}" if price is not None else "")
            )
            first = served.warm_up()
            if first is not None:
                prepared.require_class_count(first.probs.shape[1])
            return served


def _address(name: str) -> str:
    """A name that can stand in an address: of a file without its folder and ending."""
    bare = Path(name).stem if name.endswith(FILES) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", bare).strip("-.") or "model"


def _file_name(model: str) -> str:
    """What --model names, of a file without its folder."""
    return Path(model).name if model.endswith(FILES) else model
