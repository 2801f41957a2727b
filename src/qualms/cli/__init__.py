"""The command line: a thin door onto the library."""

from qualms.cli.main import main

__all__ = ["main"]
