"""A trained classifier with what tasks must know of it: how images become its inputs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.data import DATASETS, Images, ImageTransform, Normalization
from qualms.errors import QualmsError, reason
from qualms.gradients.isolation import preserve_state
from qualms.gradients.model_input import call_model, validate_logits
from qualms.methods.method import Method
from qualms.metrics import accuracy
from qualms.models.fingerprint import fingerprint
from qualms.models.imagenet import imagenet_classes, imagenet_ids
from qualms.version import __version__

AT_ONCE = 500  # images in a plain forward pass


@dataclass(frozen=True)
class Network:
    """A model with what tasks must know of it.

    Args:
        name: what rows and tables call it.
        model: the classifier.
        normalization: of its inputs.
        transform: how images of any size become its inputs, batch by batch. None takes them in the size
            that they have.
        members: other trainings of it, for `ensemble`.
        class_names: of its outputs; empty where nobody says.
    """

    name: str
    model: nn.Module
    normalization: Normalization
    transform: ImageTransform | None = None
    members: tuple[nn.Module, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def about(self) -> dict[str, Any]:
        """What identifies it in a run's first row."""
        n = self.normalization
        own = {
            "network": self.name,
            "weights": fingerprint(self.model),
            "mean": list(n.mean),
            "std": list(n.std),
        }
        more = {
            "fit": "" if self.transform is None else str(self.transform),
            "members": [fingerprint(member) for member in self.members],
        }
        return {"qualms": __version__, **own, **{k: v for k, v in more.items() if v}}

    def inputs(self, images: Images) -> Float[Tensor, "n c h w"]:
        """What the model receives: pixels in its size and channels, normalized, on its device."""
        return self._normalized(self._fitted(images))

    def numbered_inputs(self, images: Images) -> tuple[Float[Tensor, "n c h w"], list[int]]:
        """What the model receives, and a number for each image that follows from its pixels there.

        Numbers decide draws, so that an image has the same score wherever it stands, and in
        whatever company.
        """
        own = self._fitted(images)
        return self._normalized(own), own.numbers()

    def _fitted(self, images: Images) -> Images:
        own = images if self.transform is None else self.transform.apply(images)
        return own.convert(len(self.normalization.mean), own.size)  # files are read in color

    def _normalized(self, own: Images) -> Float[Tensor, "n c h w"]:
        return self.normalization.apply(own.pixels).to(next(self.model.parameters()).device)

    def logits(self, images: Images) -> Float[Tensor, "n classes"]:
        """The model's outputs, in evaluation mode."""
        parts = torch.arange(len(images)).split(AT_ONCE)
        with preserve_state(self.model) as model, torch.no_grad():
            return torch.cat(
                [
                    validate_logits(call_model(model, self.inputs(images.take(i))), len(i)).cpu()
                    for i in parts
                ]
            )

    def describe_preprocessing(self, images: Images) -> tuple[str, ...]:
        """What was done to images as they were read, and what is done to them here, in sentences."""
        more = (
            "" if self.transform is None else self.transform.describe([images.size] * len(images))
        )
        return (*images.notes, *([more] if more else []))

    def require_input_size(self, images: Images) -> None:
        """An error that speaks of sizes if the model does not take the first image, and nobody says
        what it takes.
        """
        if self.transform is not None:
            return
        first = images.take(slice(0, 1))
        x = self.inputs(first)
        try:
            with preserve_state(self.model) as model, torch.no_grad():
                model(x)
        except Exception as error:  # whatever the user's network raises
            height, width = images.size
            raise QualmsError(
                f"{self.name} does not take images of {width} x {height} pixels ({reason(error)}); "
                "pass size=, the one that it was trained on."
            ) from error

    def relabel(self, images: Images) -> Images:
        """Images whose labels count the classes as the network does: by name where both have names,
        else by number.

        A folder may hold some of the network's classes, or all of them in the order of the
        alphabet. Folders of ImageNet's classes may be called by WordNet ids.
        """
        if images.labels is None or not images.classes or images.classes == self.class_names:
            return images
        source = images.name if images.name in DATASETS else images.source or images.name
        if not self.class_names:
            classes = self.logits(images.take(slice(0, 1))).shape[1]
            if len(images.classes) != classes:
                raise QualmsError(
                    f"{self.name} tells {classes} classes apart, and {source} has {len(images.classes)}; give a folder "
                    "for each class, or name the network's classes."
                )
            return images
        names = self.class_names
        if names == imagenet_classes() and set(images.classes) <= set(imagenet_ids()):
            names = imagenet_ids()
        numbers = torch.tensor(_match_classes(images.classes, names, source, self.name))
        return replace(images, labels=numbers[images.labels], classes=self.class_names)

    def accuracy(self, images: Images) -> float:
        """The share of images that it gets right."""
        logits, labels = self.logits(images), images.labels
        known = DATASETS[images.name].classes if images.name in DATASETS else None
        if labels is None:
            raise QualmsError(
                f"{images.name} has no labels, so it is not known which predictions are right."
            )
        if int(labels.max()) >= logits.shape[1] or known not in (None, logits.shape[1]):
            raise QualmsError(
                f"{self.name} tells {logits.shape[1]} classes apart, and {images.name} has "
                f"{known or int(labels.max()) + 1}; choose a network for these images."
            )
        return accuracy(logits, labels)

    def scale_noise(self, method: Method) -> Method:
        """A method whose noise is given in pixels scaled to [0, 1], with the noise in the units of
        the model's input.

        That is how papers mean the σ of smoothing and of `perturb-x`, the a of `mc-aa` and the ε of
        `odin`.
        """
        return method.in_units(self.normalization.in_model_units)


def _match_classes(
    found: Sequence[str], names: Sequence[str], source: str, network: str
) -> list[int]:
    """The number that the network gives each class of some images, by name.

    Several classes of one name are matched in order if the images have as many of that name.

    Args:
        found: the images' classes.
        names: of the network's classes.
        source: what an error calls the images.
        network: what an error calls the network.
    """
    places: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        places.setdefault(name, []).append(number)
    seen: Counter[str] = Counter()
    counts = Counter(found)
    numbers = []
    for name in found:
        if name not in places:
            raise QualmsError(
                f"{source} has the class {name!r}, which {network} does not know: its classes are called "
                f"{', '.join(names[:3])} …; give the folders their names, or name the network's classes."
            )
        if len(places[name]) != counts[name]:
            which = " and ".join(map(str, places[name]))
            raise QualmsError(
                f"{source} has the class {name!r}, which is the name of the classes {which} of {network}; give those "
                "different names with --classes."
            )
        numbers.append(places[name][seen[name]])
        seen[name] += 1
    return numbers
