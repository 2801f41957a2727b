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
        name: the display name, in rows, tables and errors.
        model: the classifier; it returns logits.
        normalization: the mean and standard deviation that the model's inputs are normalized by.
        transform: resizes and crops images of any size for the model. None keeps their size.
        members: other trainings of the same network, for the method `ensemble`.
        class_names: the names of the model's outputs; empty if they are not known.
    """

    name: str
    model: nn.Module
    normalization: Normalization
    transform: ImageTransform | None = None
    members: tuple[nn.Module, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def about(self) -> dict[str, Any]:
        """The settings that identify the network; a run saves them, and only resumes with equal
        ones.
        """
        identity: dict[str, Any] = {
            "qualms": __version__,
            "network": self.name,
            "weights": fingerprint(self.model),
            "mean": list(self.normalization.mean),
            "std": list(self.normalization.std),
        }
        if self.transform is not None:
            identity["transform"] = self.transform.identity
        if self.members:
            identity["members"] = [fingerprint(member) for member in self.members]
        return identity

    def inputs(self, images: Images) -> Float[Tensor, "n c h w"]:
        """Convert images to the model's inputs: resized, normalized, and on the model's device."""
        return self._normalize(self._transform(images))

    def numbered_inputs(self, images: Images) -> tuple[Float[Tensor, "n c h w"], list[int]]:
        """Return the model's inputs, and for each image a number that is a hash of its pixels.

        The numbers seed random draws (see `Scorer`), so an image has the same score in any
        position and in any batch.

        Args:
            images: n images of one size.

        Returns:
            The inputs, [n, c, h, w], and n numbers.
        """
        transformed = self._transform(images)
        return self._normalize(transformed), transformed.numbers()

    def _transform(self, images: Images) -> Images:
        """Resize and crop images for the model, and convert them to gray or color as it needs."""
        transformed = images if self.transform is None else self.transform.apply(images)
        # The model has a mean for each of its channels. Files are read in color, even for a model
        # of gray images.
        num_channels = len(self.normalization.mean)
        return transformed.convert(num_channels, transformed.size)

    def _normalize(self, transformed: Images) -> Float[Tensor, "n c h w"]:
        """Convert images to normalized floats on the model's device."""
        device = next(self.model.parameters()).device
        return self.normalization.apply(transformed.pixels).to(device)

    def logits(self, images: Images) -> Float[Tensor, "n classes"]:
        """Compute the logits of all images batch by batch, in evaluation mode, on the CPU."""
        parts = []
        with preserve_state(self.model) as model, torch.no_grad():
            for x in InputBatches(self, images):
                parts.append(validate_logits(call_model(model, x), len(x)).cpu())
        return torch.cat(parts)

    def describe_preprocessing(self, images: Images) -> tuple[str, ...]:
        """Return sentences on how images were changed while reading, and how the transform changes
        them.
        """
        if self.transform is None:
            return images.notes
        sizes = [images.size] * len(images)
        description = self.transform.describe(sizes)
        return (*images.notes, description) if description else images.notes

    def require_input_size(self, images: Images) -> None:
        """Raise an error if the model cannot take images of this size.

        Args:
            images: images of one size; the first is passed through the model.
        """
        # A transform resizes images of any size to the model's.
        if self.transform is not None:
            return
        height, width = images.size

        def explain(error: Exception) -> QualmsError:
            """Create the error that names the network, the images' size and the model's error."""
            return QualmsError(
                f"{self.name} does not accept images of {width} x {height} pixels "
                f"({reason(error)}); pass size=, the size it was trained on."
            )

        x = self.inputs(images.take(slice(0, 1)))  # the first image as a batch
        with explain_failure(explain), preserve_state(self.model) as model, torch.no_grad():
            model(x)

    def names_of_classes(self, images: Images, count: int) -> tuple[str, ...] | None:
        """Return the names of the model's outputs, if they are known.

        Args:
            images: images whose class names are used if the network has none.
            count: the number of the model's outputs.

        Returns:
            The network's class names if there are `count` of them; else the images' likewise; else
            None.
        """
        for names in (self.class_names, images.classes):
            if len(names) == count:
                return names
        return None

    def relabel(self, images: Images) -> Images:
        """Return the images, with labels renumbered to the network's class indices.

        Classes are matched by name where both have names, else by number. A folder may hold some
        of the network's classes, or all of them in alphabetical order. Folders of ImageNet's
        classes may be named by WordNet ids.

        Args:
            images: images with or without labels; without labels, they are returned unchanged.
        """
        if images.labels is None or not images.classes:
            return images
        if images.classes == self.class_names:
            return images
        # What errors call the images: the name of a dataset, or else where they came from.
        source = images.name if images.name in DATASETS else images.source or images.name
        if not self.class_names:
            self._require_class_count(images, source)
            return images
        names = self.class_names
        if names == imagenet_classes() and set(images.classes) <= set(imagenet_ids()):
            names = imagenet_ids()
        # The network's class index for each of the images' classes.
        index_of_class = torch.tensor(_match_classes(images.classes, names, source, self.name))
        labels = index_of_class[images.labels]
        return replace(images, labels=labels, classes=self.class_names)

    def _require_class_count(self, images: Images, source: str) -> None:
        """Raise an error unless the network has as many outputs as the images have classes.

        Args:
            images: labeled images, the first of which is passed through the network.
            source: what the error calls the images.
        """
        num_classes = self.logits(images.take(slice(0, 1))).shape[1]
        if len(images.classes) != num_classes:
            raise QualmsError(
                f"{self.name} outputs {num_classes} classes, but {source} has "
                f"{len(images.classes)}; make a folder for each class, or name the network's "
                "classes."
            )

    def accuracy(self, images: Images) -> float:
        """Compute the share of images that the network classifies correctly.

        Args:
            images: images whose labels are the network's class indices (see `relabel`).

        Raises:
            QualmsError: if there are no labels, or if the network has another number of classes.
        """
        logits, labels = self.logits(images), images.labels
        if labels is None:
            raise QualmsError(
                f"{images.name} has no labels, so it is not known which predictions are right."
            )
        dataset_classes = DATASETS[images.name].classes if images.name in DATASETS else None
        # The images have at least as many classes as this.
        label_classes = int(labels.max()) + 1
        num_classes = logits.shape[1]
        if label_classes > num_classes or dataset_classes not in (None, num_classes):
            raise QualmsError(
                f"{self.name} outputs {num_classes} classes, but {images.name} has "
                f"{dataset_classes or label_classes}; choose a network for these images."
            )
        return accuracy(logits, labels)

    def scale_noise(self, method: Method) -> Method:
        """Return the method with its noise level in the units of the model's normalized input.

        Args:
            method: a method whose noise is meant for pixels in [0, 1], as papers give it: the σ of
                smoothing and `perturb-x`, the a of `mc-aa`, or the ε of `odin`. Methods without
                noise are returned unchanged.
        """
        return method.in_units(self.normalization.in_model_units)


@dataclass(frozen=True)
class InputBatches:
    """A network's inputs for some images, as an iterable of batches.

    Batches are computed while they are iterated over, and again by each iteration.

    Args:
        network: the network that turns images into inputs.
        images: any number of images of one size.
    """

    network: Network
    images: Images

    def __iter__(self) -> Iterator[Float[Tensor, "n c h w"]]:
        """Yield the inputs of `FORWARD_BATCH` images at a time; the last batch may be smaller."""
        for indices in torch.arange(len(self.images)).split(FORWARD_BATCH):
            yield self.network.inputs(self.images.take(indices))


def _match_classes(
    image_classes: Sequence[str],
    names: Sequence[str],
    source: str,
    network: str,
) -> list[int]:
    """Find the network's class index for each class of some images, by name.

    Several classes with one name are matched in order if the images have as many of that name.

    Args:
        image_classes: the names of the images' classes.
        names: the names of the network's classes, in the order of its outputs.
        source: the name of the images in errors.
        network: the name of the network in errors.

    Returns:
        For each of `image_classes`, its index in `names`.
    """
    # The class indices of the network by name; several classes may share a name.
    indices_by_name: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        indices_by_name.setdefault(name, []).append(index)
    image_counts = Counter(image_classes)
    # How many of the images' classes of each name are matched so far.
    num_matched: Counter[str] = Counter()
    matches = []
    for name in image_classes:
        if name not in indices_by_name:
            raise QualmsError(
                f"{source} has the class {name!r}, which {network} does not have: its classes are "
                f"{', '.join(names[:3])} …; rename the folders, or name the network's classes."
            )
        # If the counts differ, it is open which of the network's classes of this name is meant.
        if len(indices_by_name[name]) != image_counts[name]:
            which = " and ".join(map(str, indices_by_name[name]))
            raise QualmsError(
                f"{source} has the class {name!r}, but classes {which} of {network} share that "
                "name; give them different names with --classes."
            )
        matches.append(indices_by_name[name][num_matched[name]])
        num_matched[name] += 1
    return matches
