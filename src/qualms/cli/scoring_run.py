"""What `score`, `threshold` and `serve` share: a network and methods, ready to score images.

The path of an image: `Network` transforms it, `ImageScorer` scores it, `score_stream` is the loop
over batches, and `PartialFileSink` saves the scores.
"""

from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Annotated, Any

import torch
import typer

from qualms.cli.input_images import echo_images
from qualms.cli.load_network import load_network
from qualms.cli.options import (
    Classes,
    NetworkOptions,
    Seed,
    Strict,
    Tolerance,
    engine_option,
    parse_class_names,
    resolve_device,
)
from qualms.cli.partial_file import IMAGES, REFERENCE, PartialFile, PartialFileSink
from qualms.cli.price_estimate import echo_price
from qualms.cli.progress_bar import show_progress
from qualms.cli.status import status_line
from qualms.data import Images, load
from qualms.errors import QualmsError
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.method import MODELS, TRAINING_DATA, Method
from qualms.result import Scored
from qualms.scorer import Scorer
from qualms.stream.image_scorer import ImageScorer
from qualms.stream.network import InputBatches, Network
from qualms.stream.sink import report_to, score_stream
from qualms.stream.source import ImageBatch, batches_in_memory
from qualms.tasks.image_scores import describe_parameters
from qualms.threshold import Threshold


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(NetworkOptions):
    """The options that `score`, `threshold` and `serve` share, besides model and methods."""

    train: Annotated[
        str | None,
        typer.Option(
            "--train", help="Training images, for methods that learn from them, such as laplace."
        ),
    ] = None
    classes: Classes = None
    engine: Annotated[Engine | None, engine_option("auto")] = None
    tolerance: Tolerance = None
    seed: Seed = 0
    strict: Strict = False


@dataclass(frozen=True)
class ScoringRun:
    """A network and methods, ready to score images.

    Args:
        network: The network, which turns images into inputs.
        methods: The methods by their specs, with noise in the units of the network's input.
        train: Images that methods learn from; None if no method does.
        options: The options of the command.
    """

    network: Network
    methods: dict[str, Method]
    train: Images | None
    options: ScoreOptions

    def read(self, name: str) -> Images:
        """Read images to score, and print how many there are and how they are preprocessed.

        Args:
            name: A file, a folder, or a dataset, of which the test images are read.

        Raises:
            QualmsError: If the network cannot take images of their size.
        """
        images = _read_images(name, self.network, self.options, "test")
        self.network.require_input_size(images)
        return images

    def make_scorer(
        self, threshold: Threshold | None = None, methods: dict[str, Method] | None = None
    ) -> Scorer:
        """Build a scorer of the network's model.

        Args:
            threshold: The threshold of the first method's scores; None to accept or reject nothing.
            methods: The methods by their specs; by default all methods of the run.

        Raises:
            QualmsError: If the threshold was calibrated on scores of another kind.
        """
        train = None if self.train is None else InputBatches(self.network, self.train)
        engine: Engine | Sketch = self.options.engine or "auto"
        return Scorer(
            self.network.model,
            methods or self.methods,
            train=train,
            engine=engine,
            seed=self.options.seed,
            tolerance=self.options.tolerance,
            threshold=threshold,
        )

    def score_reference(
        self, images: Images, partial: PartialFile | None = None
    ) -> tuple[Scorer, Scored]:
        """Score images that the network knows by the first method, whose scores set a threshold.

        Args:
            images: The images of the reference.
            partial: The partial file that saves the scores of each batch.

        Returns:
            The scorer, which has chosen its engine, and the scores.
        """
        first_name = next(iter(self.methods))
        scorer = self.make_scorer(methods={first_name: self.methods[first_name]})
        # A scorer chooses its engine when it first scores. A run that resumes may have nothing left
        # to score, but the threshold must record the engine.
        scorer.choose_engine(self.network.inputs(images.take(slice(1))))
        return scorer, self.score(scorer, images, partial, REFERENCE)

    def score(
        self,
        scorer: Scorer,
        images: Images,
        partial: PartialFile | None = None,
        group: str = IMAGES,
    ) -> Scored:
        """Score all images, batch by batch; batches that an earlier run has scored are restored.

        Args:
            scorer: The scorer, from `make_scorer`.
            images: The images, in the order of the table.
            partial: The partial file that saves the scores of each batch, and may hold the scores
                of an earlier run.
            group: The group of the images in the partial file, `IMAGES` or `REFERENCE`.

        Returns:
            The scores, with the names of the images and of the classes if they are known.
        """
        if self.train is not None and self.train.fingerprint() == images.fingerprint():
            raise same_training_images_error(images.source or images.name)
        if partial is None:
            # Keeps the scores in memory only.
            partial = PartialFile(None, {})
        sink = PartialFileSink(partial, group, scorer.threshold)
        done = partial.count_scored(group)
        total = len(images)
        if done < total:
            # The price of one image, times the number of images to score.
            echo_price(scorer, self.network.inputs(images.take(slice(1))), total - done)
        image_scorer = ImageScorer(self.network, scorer)

        def score_batch(batch: ImageBatch) -> Scored:
            """Score a batch; raise an error if --classes gives another number of classes."""
            scored = image_scorer.score(batch.images, batch.first)
            self.require_class_count(scored.probs.shape[1])
            return scored

        with show_progress(f"images of {images.name} scored", done, total) as progress:
            report = report_to(progress, images.name, total)
            score_stream(batches_in_memory(images), score_batch, sink, report)
        scored = Scored.concatenate(sink.parts)
        return replace(scored, class_names=self.network.names_of_classes(images, sink.num_classes))

    def describe(self, scorer: Scorer) -> dict[str, Any]:
        """Return all settings that decide the scores, but not the images, as values for JSON.

        A run resumes, and shards share a folder, only if these settings are equal.

        Args:
            scorer: The scorer, from `make_scorer`.
        """
        settings, threshold = scorer.settings, scorer.threshold
        threshold_text = None
        if threshold is not None:
            threshold_text = f"{threshold.value:g}, {threshold.rule}, {threshold.fingerprint()}"
        methods = {}
        for name, method in scorer.methods.items():
            methods[name] = describe_parameters(method, self.train)
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
            "threshold": threshold_text,
        }

    def require_class_count(self, count: int) -> None:
        """Raise an error if --classes gives another number of classes than the network has.

        Args:
            count: The number of classes that the network outputs.
        """
        listed_count, _ = parse_class_names(self.options.classes)
        if listed_count not in (None, count):
            raise QualmsError(
                f"--classes lists {listed_count} classes, but {self.network.name} outputs {count}; "
                f"pass {count}."
            )


def prepare_run(
    images: str, model: str, methods: dict[str, Method], options: ScoreOptions
) -> ScoringRun:
    """Check the options, load the network, and read the training images if a method needs them.

    Args:
        images: The images, as the command line names them. If they are a dataset, its
            normalization is used for a network without one.
        model: The name of the network, as for `load_model`.
        methods: The methods by their specs, with noise for pixels in [0, 1].
        options: The options of the command.

    Returns:
        The network and the methods, with noise in the units of the network's input.
    """
    _require_training_data(methods, options)
    # Called for its error, before the network is loaded.
    resolve_device(options.device)
    network = load_classifier(images, model, options, options.classes)
    scaled_methods = {name: network.scale_noise(method) for name, method in methods.items()}
    train = None
    has_learning_method = any(TRAINING_DATA in method.needs for method in methods.values())
    if options.train is not None and has_learning_method:
        train = _read_images(options.train, network, options, "train")
    return ScoringRun(
        network=network,
        methods=scaled_methods,
        train=train,
        options=options,
    )


def load_classifier(
    images: str, model: str, options: NetworkOptions, classes: str | None
) -> Network:
    """Load a network whose classes may be given by --classes.

    Args:
        images: The images, as the command line names them. If they are a dataset, its
            normalization is used for a network without one.
        model: The name of the network, as for `load_model`.
        options: The options of the network.
        classes: The value of --classes.
    """
    count, names = parse_class_names(classes)
    status_line(f"loading {model} …")
    network = load_network(images, model, options, count)
    return replace(network, class_names=names or network.class_names)


def same_training_images_error(source: str) -> QualmsError:
    """Return the error for --train that names the very images to score.

    Args:
        source: Where the images come from.
    """
    return QualmsError(
        f"--train names the same images that are to be scored ({source}); choose other training "
        "images."
    )


def _require_training_data(methods: dict[str, Method], options: ScoreOptions) -> None:
    """Raise an error if a method needs several models, or training images without --train.

    Args:
        methods: The methods by their specs.
        options: The options of the command.
    """
    for name, method in methods.items():
        if TRAINING_DATA in method.needs and options.train is None:
            raise QualmsError(
                f"{name} needs training data; pass --train, a folder of training images."
            )
        if MODELS in method.needs:
            raise QualmsError(
                f"{name} needs several models, but this command loads one; leave it out of "
                "--methods."
            )


def _read_images(name: str, network: Network, options: ScoreOptions, split: str) -> Images:
    """Read images, and print how many there are and what is done to them.

    Args:
        name: The images, as the command line names them.
        network: The network, whose transform is applied.
        options: The options of the command.
        split: `test` or `train`.
    """
    status_line(f"reading {name} …")
    images = load(name, options.root, split, transform=network.transform, strict=options.strict)
    echo_images(network, images)
    return images
