"""A network that hangs: nothing can stop it but the end of its process."""

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ERRORS = 2  # the file that they go to
# seconds after which it ends without a sentence, if Python cannot say one: a library holds its lock
GRACE = 5.0
LONGEST = 1e6  # seconds, some eleven days: timers take no more on some systems


@contextmanager
def ended_if_hung(deadline: float, images: int) -> Iterator[None]:
    """End this process if that many images take longer than any that could be answered: the
    deadline for each.

    As long again is left, so that nothing is ended that is only slow.
    """
    limit = min((images + 1) * deadline, LONGEST)
    timer = threading.Timer(limit, _end, (limit, images))
    timer.daemon = True
    try:
        timer.start()
        faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=ERRORS)
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def _end(limit: float, images: int) -> None:
    words = f"the network did not come back within {limit:g} s from a batch of {images}, so its process ends"
    print(f"qualms: {words}; this is where it was:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=ERRORS)
    os._exit(1)
