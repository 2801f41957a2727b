"""How many inputs go together: the one place that decides, for every command, task and service."""

from collections.abc import Iterator

BATCH = 32  # images that are read, scored and saved together: what a stop loses at most
FORWARD_BATCH = 256  # images in a plain forward pass, which keeps nothing for a backward pass
SERVICE_BATCH = 16  # images that the service scores between two looks at the deadline
EVALUATION_BATCH = 500  # images in a forward pass that judges a network in training
TOKEN_WINDOWS = 4  # windows of a text that are scored together
SAVED_WINDOWS = 8  # windows whose scores are saved together: what a stop loses at most
SPLIT_FILES = 256  # files of a folder that go to a process together
FIRST_SIZES = (1, 3, 12, 16)  # of the first batches; they add up to one batch of the usual size


def batch_sizes(count: int, largest: int = BATCH) -> Iterator[int]:
    """The sizes of consecutive batches of `count` images: 1, 3, 12, 16, then `largest`.

    The first batches are small, so that progress shows early. The sizes depend on nothing else, so
    a run that resumes forms the same batches as one that was never stopped.

    Args:
        count: the number of images, at least 0.
        largest: the most images in a batch.
    """
    left = count
    for first in FIRST_SIZES:
        size = min(first, largest, left)
        if size:
            yield size
        left -= size
    while left > 0:
        yield min(largest, left)
        left -= largest
