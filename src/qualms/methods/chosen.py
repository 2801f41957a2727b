"""The methods that a user names, by specs, objects, or names of the user's own, with their noise in
one unit.
"""

from collections.abc import Mapping, Sequence

from qualms.errors import QualmsError
from qualms.methods.method import Method, Noise
from qualms.methods.registry import parse

Methods = str | Method | Sequence[str | Method] | Mapping[str, str | Method]
PixelStd = float | Sequence[float] | None


def by_name(methods: Methods) -> dict[str, Method]:
    """The methods parsed, by name: the dict's key, else the spec as it was written."""
    if isinstance(methods, (str, Method)):
        methods = [methods]
    if not methods:
        raise QualmsError("methods is empty; name one, such as 'regrad' or 'entropy'.")
    named: dict[str, Method] = {}
    for name, one in (
        methods.items() if isinstance(methods, Mapping) else [(None, one) for one in methods]
    ):
        method = parse(one) if isinstance(one, str) else one
        if not isinstance(method, Method):
            raise QualmsError(
                f"a method is a {type(one).__name__}; pass a spec, or a qualms.methods.Method."
            )
        called = name or (one if isinstance(one, str) else method.spec)
        if named.setdefault(called, method) != method:
            raise QualmsError(
                f"two methods are called {called!r}; give each a name of your own, in a dict."
            )
    return named


def in_pixels(method: Method, pixel_std: PixelStd) -> Method:
    """A method whose noise is in pixels from 0 to 1, with the noise in the units of inputs divided
    by `pixel_std`.
    """
    if pixel_std is None:
        return method
    each = tuple(pixel_std) if isinstance(pixel_std, Sequence) else (pixel_std,)
    if not each or not all(
        isinstance(s, (int, float)) and not isinstance(s, bool) and s > 0 for s in each
    ):
        raise QualmsError(
            f"pixel_std is {pixel_std!r}; pass a number above 0, or one for each channel."
        )

    def scaled(level: float) -> Noise:
        levels = tuple(level / s for s in each)
        return levels if len(levels) > 1 else levels[0]

    return method.in_units(scaled)


def noisy_specs(methods: Methods) -> tuple[str, ...]:
    """The specs whose noise would be scaled; who makes a method object has set its noise."""
    values = (
        methods.values()
        if isinstance(methods, Mapping)
        else [methods]
        if isinstance(methods, str)
        else methods
    )
    specs = (
        [one for one in values if isinstance(one, str)] if not isinstance(values, Method) else []
    )
    return tuple(spec for spec in specs if in_pixels(parse(spec), 0.5) != parse(spec))
