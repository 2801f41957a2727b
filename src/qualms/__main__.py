"""`python -m qualms` is the command `qualms`."""

from qualms.cli import main

main()
