"""What a report tells of: images, their scores by several methods, and what else is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from qualms.data import Images
from qualms.errors import QualmsError
from qualms.methods.method import Method
from qualms.metrics.checks import scores as checked
from qualms.tasks.rows import LeftOutRow, Row


@dataclass(frozen=True, eq=False)
class Group:
    """Images of one kind, with their scores by method, the class that the network gives each, and
    the true one.

    `labels` count the classes of `images`, and `confidence` is the probability of the class that
    the network gives; None where they are not known.
    """

    name: str
    images: Images
    scores: dict[str, np.ndarray]
    predicted: np.ndarray
    labels: np.ndarray | None = None
    confidence: np.ndarray | None = None

    def __post_init__(self) -> None:
        columns = {f"the scores of {method}": values for method, values in self.scores.items()}
        columns |= {"the predictions": self.predicted}
        columns |= {} if self.labels is None else {"the labels": self.labels}
        columns |= {} if self.confidence is None else {"the confidences": self.confidence}
        for what, values in columns.items():
            found = checked(values, f"{what} for {self.name}")
            if len(found) != len(self.images):
                raise QualmsError(
                    f"{self.name} has {len(self.images)} images, and {what} are {len(found)}; give one for each image."
                )

    @property
    def correct(self) -> np.ndarray | None:
        """Whether each prediction is right, where that is known."""
        return (
            None if self.labels is None else np.asarray(self.predicted) == np.asarray(self.labels)
        )


@dataclass(frozen=True, eq=False)
class LayerContributions:
    """What each layer adds to the uncertainty of some inputs: row i tells of an image of group
    `groups[i]`.

    Contributions are 0 or more, in any unit; the report shows each as a share of its row's sum.
    """

    names: Sequence[str]
    contributions: Float[np.ndarray, "n l"]
    groups: Sequence[str]

    def __post_init__(self) -> None:
        n, layers = self.contributions.shape
        if n != len(self.groups) or layers != len(self.names) or not n * layers:
            raise QualmsError(
                f"the contributions of layers have shape {(n, layers)}, with {len(self.names)} names and "
                f"{len(self.groups)} groups; give a row for each input, and a column for each layer."
            )
        if not (np.isfinite(self.contributions).all() and (self.contributions >= 0).all()):
            raise QualmsError(
                "some contributions of layers are negative, NaN or infinite; pass norms, 0 or more."
            )


@dataclass(frozen=True, eq=False)
class Content:
    """All that a report shows; where something is not given, the page says what it would take.

    Args:
        title: of the page.
        known: images like those that the network has learnt.
        unknown: groups of others, from which scores should tell them.
        about: short facts by name, such as the network's name and the seed.
        costs: of each method in forward passes: a number, or words such as `method.cost`.
        layers: by method, which layers its scores come from.
        cycles: rows of active learning, as `qualms.tasks.active` gives them.
        kinds: the methods themselves, by the names that the scores have; a name that is a spec
            needs none.
        left_out: the methods that could not be used, and why.
        classes: the names of the network's classes; those of the known images if not given.
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
        if not self.known.scores:
            raise QualmsError(
                f"{self.known.name} has no scores; give those of at least one method."
            )
        for group in self.unknown:
            if set(group.scores) != set(self.known.scores):
                odd = sorted(set(group.scores) ^ set(self.known.scores))[0]
                raise QualmsError(
                    f"only one of {self.known.name} and {group.name} has scores of {odd}; give every group the same "
                    "methods."
                )
        names = [group.name for group in self.groups]
        if len(set(names)) < len(names):
            raise QualmsError(
                f"two groups of images have one name, among {', '.join(names)}; name them apart."
            )
        for method, layers in self.layers.items():
            odd_group = next((name for name in layers.groups if name not in names), None)
            if odd_group is not None or method not in self.known.scores:
                raise QualmsError(
                    f"the layers of {method} tell of {odd_group or 'a method'}, which is not there; name groups and "
                    "methods of the report."
                )

    @property
    def groups(self) -> list[Group]:
        """The known images first, then the unknown."""
        return [self.known, *self.unknown]

    @property
    def methods(self) -> list[str]:
        """In the order of the known images' scores."""
        return list(self.known.scores)
