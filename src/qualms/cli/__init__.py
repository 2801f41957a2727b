"""The command line: a thin door onto the library."""

import signal
import sys

from qualms.cli.signals import leave


def main() -> None:
    """The command `qualms`, whose own needs are an extra."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:
        signal.signal(signal.SIGTERM, leave)
    try:
        try:
            from qualms.cli.app import run
        except ModuleNotFoundError as missing:
            print(
                f"qualms: the command line needs {missing.name}; pip install '.[app]' in a clone of qualms.",
                file=sys.stderr,
            )
            sys.exit(1)
        run()
    finally:  # what is done is done, but Python takes its time to end: the exit code is the command's own
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
