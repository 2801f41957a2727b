"""How far a long computation is, told to whoever wants to know."""

from collections.abc import Callable

Tell = Callable[[str, int, int], None]
"""A callback: what is done, how much of it so far, and how much there is in all."""
