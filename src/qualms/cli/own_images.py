"""What `score`, `threshold` and `serve` share: a network and methods, ready to score images."""

from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from qualms.cli.image_options import echo_images
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
from qualms.cli.partial_file import IMAGES, REFERENCE, PartialFile, PartialFileSink
from qualms.cli.price import echo_price
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
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import InputBatches, Network
from qualms.stream.sink import report_to, score_stream
from qualms.stream.source import ImageBatch, batches_in_memory
from qualms.tasks.scoring import parameters
from qualms.threshold import Threshold

SOME_REJECTED = 4  # the exit code of a run that is done, but for inputs that could not be read


Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        help="The network's classes: comma-separated names, a file with one name per line, or "
        "their number.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at the first image that cannot be read.")
]


@dataclass(frozen=True)
class ScoreOptions:
    """The options of `score`, `threshold` and `serve` beside model, methods and images."""

    weights: Weights = None
    train: Annotated[
        str | None,
        typer.Option(
            "--train", help="Training images, for methods that learn from them, such as laplace."
        ),
    ] = None
    classes: Classes = None
    engine: Annotated[
        EngineName | None,
        typer.Option("--engine", help="How gradient scores are computed.", show_default="auto"),
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
class ScoringRun:
    """A network and methods, ready to score images.

    Args:
        network: how images become inputs.
        methods: by their specs, with noise in the units of the network's input.
        train: images that methods learn from; None if none does.
        engine: of the gradient scores.
        options: of the command.
    """

    network: Network
    methods: dict[str, Method]
    train: Images | None
    engine: EngineName | Sketch
    options: ScoreOptions

    def read(self, name: str) -> Images:
        """Read images for the network, and print what was found and done."""
        images = _read(name, self.network, self.options, "test")
        self.network.require_input_size(images)
        return images

    def make_scorer(self, methods: dict[str, Method], threshold: Threshold | None = None) -> Scorer:
        """A scorer by some of the methods."""
        train = None if self.train is None else InputBatches(self.network, self.train)
        return Scorer(
            self.network.model,
            methods,
            train=train,
            engine=self.engine,
            seed=self.options.seed,
            tolerance=self.options.tolerance,
            threshold=threshold,
        )

    def score_reference(
        self, images: Images, partial: PartialFile | None = None
    ) -> tuple[Scorer, Scored]:
        """Score images that the network knows, by the first method, which decides.

        Args:
            images: of the reference.
            partial: keeps what is done.

        Returns:
            The scorer, whose engine is chosen, and the scores.
        """
        name, method = next(iter(self.methods.items()))
        scorer = self.make_scorer({name: method})
        # A run that resumes may score no image, and a threshold must know its engine all the same.
        scorer.choose_engine(self.network.inputs(images.take(slice(1))))
        return scorer, self.score(scorer, images, partial, REFERENCE)

    def score(
        self,
        scorer: Scorer,
        images: Images,
        partial: PartialFile | None = None,
        group: str = IMAGES,
    ) -> Scored:
        """Score all images, with their names and those of the classes.

        Args:
            scorer: by some of the methods.
            images: in the order of the table.
            partial: keeps what is done, and holds what an earlier run has done.
            group: what that file calls the images.
        """
        if self.train is not None and self.train.fingerprint() == images.fingerprint():
            raise QualmsError(
                f"--train names the images of {images.source or images.name} themselves; name "
                "others."
            )
        partial = partial or PartialFile(None, {})
        sink = PartialFileSink(partial, group, scorer.threshold)
        done, total = partial.count(group), len(images)
        if done < total:
            echo_price(scorer, self.network.inputs(images.take(slice(1))), total - done)
        image_scorer = ImageScorer(self.network, scorer)

        def score_batch(batch: ImageBatch) -> Scored:
            scored = image_scorer.score(batch.images, batch.first)
            self.require_class_count(scored.probs.shape[1])
            return scored

        with show_progress(f"images of {images.name} scored", done, total) as progress:
            report = report_to(progress, images.name, total)
            score_stream(batches_in_memory(images), score_batch, sink, report)
        scored = Scored.concatenate(sink.parts)
        return replace(scored, class_names=self.network.names_of_classes(images, sink.classes))

    def about(self, scorer: Scorer) -> dict[str, Any]:
        """What decides the scores, beside the images."""
        settings, threshold = scorer.settings, scorer.threshold
        limit = None
        if threshold is not None:
            limit = f"{threshold.value:g}, {threshold.rule}, {threshold.fingerprint()}"
        methods = {}
        for name, method in scorer.methods.items():
            methods[name] = parameters(method, self.train)
        return {
            **self.network.about,
            "torch": torch.__version__,
            "pillow": version("pillow"),
            "device": next(self.network.model.parameters()).device.type,
            "methods": methods,
            "tolerance": settings.tolerance,
            "engine": repr(settings.sketch) if settings.sketch else settings.engine_name,
            "seed": settings.seed,
            "classes": list(self.network.class_names),
            "threshold": limit,
        }

    def require_class_count(self, count: int) -> None:
        """Raise an error if --classes gives another number than the network has."""
        wanted = parse_class_names(self.options.classes)[0]
        if wanted not in (None, count):
            raise QualmsError(
                f"--classes says {wanted} classes, and {self.network.name} tells {count} apart."
            )


def prepare_run(
    images: str, model: str, methods: dict[str, Method], options: ScoreOptions
) -> ScoringRun:
    """Load the network and the training images, once the options are known to be complete.

    Args:
        images: as the command line names them; a dataset's normalization may serve.
        model: as for `load_model`.
        methods: by their specs.
        options: of the command.
    """
    _require_data(methods, options)
    device, (classes, names) = resolve_device(options.device), parse_class_names(options.classes)
    status_line(f"loading {model} …")
    network = load_network(
        images,
        model,
        options.weights,
        options.root,
        options.mean,
        options.std,
        options.size,
        device,
        random=False,
        classes=classes,
    )
    network = replace(network, class_names=names or network.class_names)
    own = {name: network.scale_noise(method) for name, method in methods.items()}
    train = None
    if options.train is not None and any(TRAINING_DATA in m.needs for m in methods.values()):
        train = _read(options.train, network, options, "train")
    return ScoringRun(network, own, train, options.engine or "auto", options)


def _require_data(methods: dict[str, Method], options: ScoreOptions) -> None:
    for name, method in methods.items():
        if TRAINING_DATA in method.needs and options.train is None:
            raise QualmsError(
                f"{name} needs training data; pass --train, a folder of training images."
            )
        if MODELS in method.needs:
            raise QualmsError(
                f"{name} needs several models, and this command has one; leave it out of --methods."
            )


def _read(name: str, network: Network, options: ScoreOptions, split: str) -> Images:
    """Read images, and print what was found.

    Args:
        name: as the command line names them.
        network: whose transform is applied.
        options: of the command.
        split: `test` or `train`.
    """
    status_line(f"reading {name} …")
    images = load(name, options.root, split, transform=network.transform, strict=options.strict)
    echo_images(network, images)
    return images


def parse_class_names(text: str | None) -> tuple[int | None, tuple[str, ...]]:
    """How many classes --classes asks for, and their names if it has them.

    Args:
        text: a number, comma-separated names, or a file with a name on each line.
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
    found = tuple(name.strip() for name in names if name.strip())
    if len(found) < 2:
        raise QualmsError(
            f"--classes {text} is neither a number, nor two or more names separated by commas, nor "
            "a file with a name on each line."
        )
    return len(found), found


def exit_if_rejected(*found: Images | Texts) -> None:
    """Exit with a code of its own if some inputs could not be read."""
    status_line("")
    if any(some.rejected for some in found):
        raise typer.Exit(SOME_REJECTED)
