"""A network with methods and images of the user's own, made ready and scored: what `score` and
`threshold` share.
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from qualms.cli.image_options import tell_images
from qualms.cli.load_network import load_network
from qualms.cli.options import (
    Device,
    Mean,
    Root,
    Seed,
    Size,
    Std,
    Tolerance,
    Weights,
    resolve_device,
    split_list,
)
from qualms.cli.partial_file import IMAGES, REFERENCE, PartialFile, part_row
from qualms.cli.price import say_price
from qualms.cli.progress_bar import show_progress
from qualms.cli.status import status_line
from qualms.data import Images, load
from qualms.data.texts import Texts
from qualms.errors import QualmsError, reason
from qualms.gradients.settings import Engine as EngineName
from qualms.gradients.settings import Sketch
from qualms.methods.method import MODELS, TRAINING_DATA, Method
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.stream.network import Network
from qualms.tasks.scoring import (
    Inputs,
    batch_slices,
    names_of_classes,
    parameters,
    scored_images,
)
from qualms.threshold import Threshold

SOME_REJECTED = 4  # the exit code of a run that is done, but for inputs that could not be read


Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        help="The network's classes: their names, comma-separated, a file with a name a line, or how many.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")
]


@dataclass(frozen=True)
class ScoreOptions:
    """What both commands are told beside model, methods and images."""

    weights: Weights = None
    train: Annotated[
        str | None,
        typer.Option(
            "--train", help="Training images, for methods such as laplace that learn from them."
        ),
    ] = None
    classes: Classes = None
    engine: Annotated[
        EngineName | None,
        typer.Option("--engine", help="Of the gradient scores.", show_default="auto"),
    ] = None
    tolerance: Tolerance = None
    size: Size = None
    mean: Mean = None
    std: Std = None
    root: Root = None
    seed: Seed = 0
    device: Device = "auto"
    strict: Strict = False


@dataclass(frozen=True)
class Ready:
    """A network and methods, which score images."""

    network: Network
    methods: dict[str, Method]  # noise in the units of the network's input
    train: Images | None
    engine: EngineName | Sketch
    given: ScoreOptions

    def read(self, name: str) -> Images:
        """Images as the network takes them; says what was found and done."""
        found = _read(name, self.network, self.given, "test")
        self.network.require_input_size(found)
        return found

    def scorer(self, methods: dict[str, Method], threshold: Threshold | None = None) -> Scorer:
        """Of some of the methods."""
        train = None if self.train is None else Inputs(self.network, self.train)
        return Scorer(
            self.network.model,
            methods,
            train=train,
            engine=self.engine,
            seed=self.given.seed,
            tolerance=self.given.tolerance,
            threshold=threshold,
        )

    def deciding(self) -> dict[str, Method]:
        """The first method, which decides."""
        name, method = next(iter(self.methods.items()))
        return {name: method}

    def score_reference(
        self, images: Images, partial: PartialFile | None = None
    ) -> tuple[Scorer, Scored]:
        """The scores of images that the network knows, by the first method."""
        scorer = self.scorer(self.deciding())
        scorer.choose_engine(
            self.network.inputs(images.take(slice(1)))
        )  # all scores may be kept from before
        return scorer, self.scored(scorer, images, partial, REFERENCE)

    def scored(
        self, scorer: Scorer, images: Images, partial: PartialFile | None = None, of: str = IMAGES
    ) -> Scored:
        """All images, with their names and, where they are known, those of the classes.

        Args:
            scorer: of some of the methods.
            images: in the order of the table.
            partial: where what is done is kept, and what was done before is found.
            of: what the images are, in that file.
        """
        if self.train is not None and self.train.fingerprint() == images.fingerprint():
            raise QualmsError(
                f"--train names the images of {images.source or images.name} themselves; name others."
            )
        partial = partial or PartialFile(None, {})
        places = list(batch_slices(len(images)))
        kept = [partial.part(of, place) for place in places]
        done = sum(len(row["ids"]) for row in kept if row is not None)
        parts: list[Scored] = []
        what = f"images of {images.name} scored"
        if done < len(images):
            say_price(scorer, self.network.inputs(images.take(slice(1))), len(images) - done)
        with show_progress(what, done, len(images)) as progress:
            for place, row in zip(places, kept, strict=True):
                if row is None:
                    part = scored_images(self.network, scorer, images.take(place), place.start)
                    self.check_classes(part.probs.shape[1])
                    row = part_row(of, place.start, part)
                    partial.add(row)
                    done += len(part)
                    progress(what, done, len(images))
                names = names_of_classes(self.network, images, row["classes"])
                parts.append(partial.restore(row, names, scorer.threshold))
        return Scored.concatenate(parts)

    def about(self, scorer: Scorer) -> dict[str, Any]:
        """What decides the scores, beside the images."""
        how, limit = scorer.settings, scorer.threshold
        return {
            **self.network.about,
            "torch": torch.__version__,
            "pillow": version("pillow"),
            "device": next(self.network.model.parameters()).device.type,
            "methods": {
                name: parameters(method, self.train) for name, method in scorer.methods.items()
            },
            "tolerance": how.tolerance,
            "engine": repr(how.sketch) if how.sketch else how.engine_name,
            "seed": how.seed,
            "classes": list(self.network.class_names),
            "threshold": None
            if limit is None
            else f"{limit.value:g}, {limit.rule}, {limit.fingerprint()}",
        }

    def check_classes(self, found: int) -> None:
        """An error if --classes says another number than the network."""
        wanted = class_names(self.given.classes)[0]
        if wanted not in (None, found):
            raise QualmsError(
                f"--classes says {wanted} classes, and {self.network.name} tells {found} apart."
            )


def ready(images: str, model: str, methods: dict[str, Method], given: ScoreOptions) -> Ready:
    """The network and the methods, once nothing is known to be missing."""
    for name, method in methods.items():
        if TRAINING_DATA in method.needs and given.train is None:
            raise QualmsError(
                f"{name} needs training data; pass --train, a folder of training images."
            )
        if MODELS in method.needs:
            raise QualmsError(
                f"{name} needs several models, and this command has one; leave it out of --methods."
            )
    device, (classes, names) = resolve_device(given.device), class_names(given.classes)
    status_line(f"loading {model} …")
    network = load_network(
        images,
        model,
        given.weights,
        given.root,
        given.mean,
        given.std,
        given.size,
        device,
        random=False,
        classes=classes,
    )
    network = replace(network, class_names=names or network.class_names)
    own = {name: network.scale_noise(method) for name, method in methods.items()}
    learns = any(TRAINING_DATA in method.needs for method in methods.values())
    train = (
        _read(given.train, network, given, "train") if learns and given.train is not None else None
    )
    return Ready(network, own, train, given.engine or "auto", given)


def _read(name: str, network: Network, given: ScoreOptions, split: str) -> Images:
    status_line(f"reading {name} …")
    found = load(name, given.root, split, transform=network.transform, strict=given.strict)
    tell_images(network, found)
    return found


def class_names(text: str | None) -> tuple[int | None, tuple[str, ...]]:
    """How many classes --classes asks for, and their names if it has them."""
    if text is None or text.isdecimal():
        return (None if text is None else int(text)), ()
    if Path(text).is_file():
        try:
            names = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise QualmsError(f"--classes {text} cannot be read: {reason(error)}.") from None
    else:
        names = split_list(text)
    found = tuple(name.strip() for name in names if name.strip())
    if len(found) < 2:
        raise QualmsError(
            f"--classes {text} is neither a number, nor two or more names separated by commas, nor a file "
            "with a name on each line."
        )
    return len(found), found


def end(*found: Images | Texts) -> None:
    """Exit with a code of its own if some inputs could not be read."""
    status_line("")
    if any(some.rejected for some in found):
        raise typer.Exit(SOME_REJECTED)
