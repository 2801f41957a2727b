"""`Network`: a trained classifier, and how images become its inputs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.data import DATASETS, Images, ImageTransform, Normalization
from qualms.errors import QualmsError, explain_failure, reason
from qualms.gradients.isolation import preserve_state
from qualms.gradients.model_input import call_model, validate_logits
from qualms.methods.method import Method
from qualms.metrics import accuracy
from qualms.models.fingerprint import fingerprint
from qualms.models.imagenet import imagenet_classes, imagenet_ids
from qualms.stream.sizes import FORWARD_BATCH
from qualms.version import __version__


@dataclass(frozen=True)
class Network:
    """A classifier together with what turns images into its inputs.

    Args:
        name: what rows, tables and errors call it.
        model: the classifier; it returns logits.
        normalization: of its inputs.
        transform: how images of any size become its inputs. None keeps the size that they have.
        members: other trainings of the same network, for `ensemble`.
        class_names: of its outputs; empty if they are not known.
    """

    name: str
    model: nn.Module
    normalization: Normalization
    transform: ImageTransform | None = None
    members: tuple[nn.Module, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def about(self) -> dict[str, Any]:
        """What identifies the network in the first row of a run."""
        found: dict[str, Any] = {
            "qualms": __version__,
            "network": self.name,
            "weights": fingerprint(self.model),
            "mean": list(self.normalization.mean),
            "std": list(self.normalization.std),
        }
        if self.transform is not None:
            found["fit"] = str(self.transform)
        if self.members:
            found["members"] = [fingerprint(member) for member in self.members]
        return found

    def inputs(self, images: Images) -> Float[Tensor, "n c h w"]:
        """Return the model's input: pixels in its size and channels, normalized, on its device."""
        return self._normalize(self._transform(images))

    def numbered_inputs(self, images: Images) -> tuple[Float[Tensor, "n c h w"], list[int]]:
        """Return the model's input, and a number for each image that follows from its pixels.

        The numbers decide random draws (see `Scorer`), so an image has the same score in any
        position and in any batch.

        Args:
            images: n images of one size.

        Returns:
            The inputs, [n, c, h, w], and n numbers.
        """
        own = self._transform(images)
        return self._normalize(own), own.numbers()

    def _transform(self, images: Images) -> Images:
        own = images if self.transform is None else self.transform.apply(images)
        channels = len(self.normalization.mean)
        return own.convert(channels, own.size)  # files are read in color

    def _normalize(self, own: Images) -> Float[Tensor, "n c h w"]:
        device = next(self.model.parameters()).device
        return self.normalization.apply(own.pixels).to(device)

    def logits(self, images: Images) -> Float[Tensor, "n classes"]:
        """Return the model's outputs, in evaluation mode."""
        parts = []
        with preserve_state(self.model) as model, torch.no_grad():
            for x in InputBatches(self, images):
                parts.append(validate_logits(call_model(model, x), len(x)).cpu())
        return torch.cat(parts)

    def describe_preprocessing(self, images: Images) -> tuple[str, ...]:
        """Describe in sentences what is done to images, both while reading them and here."""
        if self.transform is None:
            return images.notes
        own = self.transform.describe([images.size] * len(images))
        return (*images.notes, own) if own else images.notes

    def require_input_size(self, images: Images) -> None:
        """Raise an error that names the size if the model cannot take the first image as it is."""
        if self.transform is not None:
            return
        height, width = images.size

        def explain(error: Exception) -> QualmsError:
            return QualmsError(
                f"{self.name} does not take images of {width} x {height} pixels "
                f"({reason(error)}); pass size=, the size it was trained on."
            )

        x = self.inputs(images.take(slice(0, 1)))
        with explain_failure(explain), preserve_state(self.model) as model, torch.no_grad():
            model(x)

    def names_of_classes(self, images: Images, count: int) -> tuple[str, ...] | None:
        """Return `count` class names: the network's, else the images'; None if neither has them.

        Args:
            images: whose class names serve if the network has none.
            count: the number of the model's outputs.
        """
        for names in (self.class_names, images.classes):
            if len(names) == count:
                return names
        return None

    def relabel(self, images: Images) -> Images:
        """Return images whose labels number the classes as the network does.

        Classes are matched by name where both have names, else by number. A folder may hold some
        of the network's classes, or all of them in alphabetical order. Folders of ImageNet's
        classes may be named by WordNet ids.

        Args:
            images: with or without labels; without, they are returned unchanged.
        """
        if images.labels is None or not images.classes:
            return images
        if images.classes == self.class_names:
            return images
        source = images.name if images.name in DATASETS else images.source or images.name
        if not self.class_names:
            self._require_class_count(images, source)
            return images
        names = self.class_names
        if names == imagenet_classes() and set(images.classes) <= set(imagenet_ids()):
            names = imagenet_ids()
        matched = _match_classes(images.classes, names, source, self.name)
        labels = torch.tensor(matched)[images.labels]
        return replace(images, labels=labels, classes=self.class_names)

    def _require_class_count(self, images: Images, source: str) -> None:
        classes = self.logits(images.take(slice(0, 1))).shape[1]
        if len(images.classes) != classes:
            raise QualmsError(
                f"{self.name} outputs {classes} classes, but {source} has "
                f"{len(images.classes)}; make a folder for each class, or name the network's "
                "classes."
            )

    def accuracy(self, images: Images) -> float:
        """Return the share of labeled images that the network classifies correctly."""
        logits, labels = self.logits(images), images.labels
        if labels is None:
            raise QualmsError(
                f"{images.name} has no labels, so it is not known which predictions are right."
            )
        known = DATASETS[images.name].classes if images.name in DATASETS else None
        highest = int(labels.max()) + 1
        classes = logits.shape[1]
        if highest > classes or known not in (None, classes):
            raise QualmsError(
                f"{self.name} outputs {classes} classes, but {images.name} has "
                f"{known or highest}; choose a network for these images."
            )
        return accuracy(logits, labels)

    def scale_noise(self, method: Method) -> Method:
        """Convert a method's noise, given for pixels in [0, 1], to the units of the model's input.

        Papers give the σ of smoothing and `perturb-x`, the a of `mc-aa` and the ε of `odin` for
        pixels in [0, 1].
        """
        return method.in_units(self.normalization.in_model_units)


@dataclass(frozen=True)
class InputBatches:
    """A network's inputs for some images, in batches that are made anew on each iteration.

    Args:
        network: which makes them.
        images: any number of one size.
    """

    network: Network
    images: Images

    def __iter__(self) -> Iterator[Float[Tensor, "n c h w"]]:
        for index in torch.arange(len(self.images)).split(FORWARD_BATCH):
            yield self.network.inputs(self.images.take(index))


def _match_classes(
    found: Sequence[str],
    names: Sequence[str],
    source: str,
    network: str,
) -> list[int]:
    """Return the network's number for each class of some images, matched by name.

    Several classes with one name are matched in order if the images have as many of that name.

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
                f"{source} has the class {name!r}, which {network} does not have: its classes are "
                f"{', '.join(names[:3])} …; rename the folders, or name the network's classes."
            )
        if len(places[name]) != counts[name]:
            which = " and ".join(map(str, places[name]))
            raise QualmsError(
                f"{source} has the class {name!r}, but classes {which} of {network} share that "
                "name; give them different names with --classes."
            )
        numbers.append(places[name][seen[name]])
        seen[name] += 1
    return numbers
