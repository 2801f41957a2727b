"""The content of a report: images, their scores by several methods, and other known facts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.metrics.checks import scores as check_scores
from qualms.tasks.rows import LeftOutRow, Row


@dataclass(frozen=True, eq=False)
class Group:
    """A group of images with their scores and predictions.

    Args:
        name: The name of the group on the page.
        images: The images.
        scores: A dict from the name of each method to the scores of the n images, of shape [n].
        predicted: The predicted class of each image, of shape [n].
        labels: The true class of each image, of shape [n], as an index into `images.classes`; None
            if it is not known.
        confidence: The probability of each predicted class, of shape [n]; None if it is not known.
    """

    name: str
    images: Images
    scores: dict[str, np.ndarray]
    predicted: np.ndarray
    labels: np.ndarray | None = None
    confidence: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Raise an error unless there is one finite number per image everywhere."""
        for method, values in self.scores.items():
            self._require_length(f"the scores of {method}", values)
        self._require_length("the predictions", self.predicted)
        self._require_length("the labels", self.labels)
        self._require_length("the confidences", self.confidence)

    def _require_length(self, what: str, values: np.ndarray | None) -> None:
        """Raise an error unless there is one finite value per image.

        Args:
            what: What error messages call the values.
            values: The values, of shape [n]; None if they are not known.
        """
        if values is None:
            return
        checked = check_scores(values, f"{what} for {self.name}")
        if len(checked) != len(self.images):
            raise QualmsError(
                f"{self.name} has {len(self.images)} images and {len(checked)} values in {what}; "
                "pass one per image."
            )

    @property
    def correct(self) -> np.ndarray | None:
        """Whether each prediction is right, of shape [n]; None without labels."""
        if self.labels is None:
            return None
        return np.asarray(self.predicted) == np.asarray(self.labels)


@dataclass(frozen=True, eq=False)
class LayerContributions:
    """What each layer adds to the uncertainty of some inputs.

    Args:
        names: The names of the layers.
        contributions: The contribution of each layer to each input's score, of shape [n, layers], 0
            or more, in any unit; the report shows each layer's share of a row's sum.
        groups: The name of each input's group.
    """

    names: Sequence[str]
    contributions: Float[np.ndarray, "n l"]
    groups: Sequence[str]

    def __post_init__(self) -> None:
        """Raise an error unless each input has a finite contribution of 0 or more per layer."""
        shape = self.contributions.shape
        if shape != (len(self.groups), len(self.names)) or not self.contributions.size:
            raise QualmsError(
                f"the layer contributions have shape {shape}, with {len(self.names)} names and "
                f"{len(self.groups)} groups; pass a row per input and a column per layer."
            )
        if not (np.isfinite(self.contributions).all() and (self.contributions >= 0).all()):
            raise QualmsError(
                "some layer contributions are negative, NaN or infinite; pass norms, which are "
                "0 or more."
            )


@dataclass(frozen=True, eq=False)
class Content:
    """Everything that a report shows; where something is missing, the page says what is needed.

    Args:
        title: The title of the page.
        known: Images like those that the network was trained on.
        unknown: Groups of other images, which scores should distinguish from the known ones.
        about: Short facts by name, such as the network's name and the seed.
        costs: The cost of each method in forward passes: a number, or words such as `method.cost`.
        layers: A dict from the names of methods to the contributions of layers to their scores.
        cycles: Rows of active learning, as `qualms.tasks.active` yields them.
        kinds: A dict from the names of methods, as in `scores`, to the methods. Names that are
            specs, such as `regrad+layers`, may be left out.
        left_out: Rows of the methods that could not be used, with reasons.
        classes: The names of the network's classes; by default those of the known images.
    """

    title: str
    known: Group
    unknown: Sequence[Group] = ()
    about: Mapping[str, str] = field(default_factory=dict)
    costs: Mapping[str, int | float | str] = field(default_factory=dict)
    layers: Mapping[str, LayerContributions] = field(default_factory=dict)
    cycles: Sequence[Row] = ()
    kinds: Mapping[str, Method] = field(default_factory=dict)
    left_out: Sequence[LeftOutRow] = ()
    classes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raise an error if scores are missing, or if names of groups or methods do not match."""
        if not self.known.scores:
            raise QualmsError(
                f"{self.known.name} has no scores; pass those of at least one method."
            )
        self._require_same_methods()
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise QualmsError(
                f"two groups of images have the same name, among {', '.join(names)}; rename one."
            )
        self._require_known_layers(names)

    def _require_same_methods(self) -> None:
        """Raise an error unless all groups have scores by the same methods."""
        for group in self.unknown:
            # The methods with scores of only one of the two groups.
            difference = set(group.scores) ^ set(self.known.scores)
            if difference:
                raise QualmsError(
                    f"only one of {self.known.name} and {group.name} has scores of "
                    f"{min(difference)}; score every group with the same methods."
                )

    def _require_known_layers(self, names: list[str]) -> None:
        """Raise an error if `layers` has a method without scores, or names no group of the report.

        Args:
            names: The names of the report's groups.
        """
        for method, layers in self.layers.items():
            if method not in self.known.scores:
                raise QualmsError(
                    f"the report has layers of {method}, but no scores; pass both or neither."
                )
            for name in layers.groups:
                if name not in names:
                    raise QualmsError(
                        f"the layers of {method} are for images of {name}, which is not a group of "
                        f"the report; choose from {', '.join(names)}."
                    )

    @property
    def groups(self) -> list[Group]:
        """All groups of images: the known images first, then the unknown groups."""
        return [self.known, *self.unknown]

    @property
    def methods(self) -> list[str]:
        """The names of the methods, in the order of the known images' scores."""
        return list(self.known.scores)
