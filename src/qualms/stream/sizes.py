"""Batch sizes: the one place that sets them, for every command, task and service."""

from collections.abc import Iterator

# Images that are read, scored and saved together: what a stop loses at most.
BATCH = 32
# The sizes of the first batches, which add up to BATCH.
FIRST_SIZES = (1, 3, 12, 16)
# Images in a plain forward pass, which keeps nothing for a backward pass.
FORWARD_BATCH = 256
# Images in a forward pass that evaluates a network during training.
EVALUATION_BATCH = 500
# Images that the service scores between two looks at the deadline.
SERVICE_BATCH = 16
# Windows of a text that are scored together.
TOKEN_WINDOWS = 4
# Windows whose scores are saved together: what a stop loses at most.
SAVED_WINDOWS = 8
# Files of a folder that are sent to a process together.
SPLIT_FILES = 256


def batch_sizes(count: int, largest: int = BATCH) -> Iterator[int]:
    """Yield the sizes of consecutive batches of `count` images: 1, 3, 12, 16, then `largest`.

    The first batches are small, so that progress shows early. The sizes depend on the arguments
    alone, so a run that resumes forms the same batches as one that was never stopped.

    Args:
        count: the number of images, at least 0.
        largest: the most images in a batch.
    """
    num_left = count
    for first_size in FIRST_SIZES:
        size = min(first_size, largest, num_left)
        if size:
            yield size
        num_left -= size
    while num_left > 0:
        yield min(largest, num_left)
        num_left -= largest
