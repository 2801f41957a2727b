"""The command line: a thin door onto the library."""

import atexit
import signal
import sys

from qualms.cli.signals import at_sigterm, leave


def main() -> None:
    """The command `qualms`, whose own needs are an extra."""
    with at_sigterm(leave):
        try:
            from qualms.cli.main import run
        except ModuleNotFoundError as missing:
            print(
                f"qualms: the command line needs {missing.name}; pip install '.[app]' in a clone of qualms.",
                file=sys.stderr,
            )
            sys.exit(1)
        try:
            run()
        # what is done is done, but Python takes its time to end: the exit code is the command's own
        finally:
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
