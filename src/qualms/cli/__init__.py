"""The `qualms` command, a thin layer over the library."""

import atexit
import signal
import sys

from qualms.cli.signals import at_sigterm, leave


def main() -> None:
    """Run the `qualms` command, or explain how to install what it needs."""
    with at_sigterm(leave):
        try:
            from qualms.cli.commands import run
        except ModuleNotFoundError as missing:
            print(
                f"qualms: the command line needs {missing.name}; "
                "run pip install '.[app]' in a clone of qualms.",
                file=sys.stderr,
            )
            sys.exit(1)
        try:
            run()
        # Python takes a while to exit. A signal in that time must not change the exit code.
        finally:
            atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
