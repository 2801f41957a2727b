"""The table of methods, and the parser of specs, such as `regrad+layers(0.4)+smooth(0.02, 8)`: a
method with its modifiers.
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from qualms.errors import QualmsError
from qualms.gradients.settings import Smoothing
from qualms.methods import (
    coherence,
    dropout,
    feature_maps,
    features,
    gradients,
    heat,
    logits,
    perturb_inputs,
    perturb_model,
    training_distances,
    training_laplace_quam,
    training_react_vim,
)
from qualms.methods.gradient_score import LAMBDA, GradientScore
from qualms.methods.method import Method, Noise

DEFAULT = "regrad+layers+smooth"

# One row a score. The paper's tables first, in their order.
METHODS: tuple[type[Method], ...] = (
    gradients.REGrad,
    gradients.ExGrad,
    gradients.UNGrad,
    gradients.GradNorm,
    features.GradNormHuang,
    gradients.NEGrad,
    perturb_inputs.PerturbX,
    perturb_model.PerturbTheta,
    perturb_inputs.MCAA,
    dropout.InsertedDropout,
    logits.Entropy,
    logits.ExGradV,
    training_laplace_quam.Laplace,
    # What is usually compared with.
    logits.MSP,
    logits.MaxLogit,
    logits.Energy,
    logits.GEN,
    dropout.MCDropout,
    perturb_model.MCBatchNorm,
    gradients.ConfoundingLabel,
    perturb_model.Ensemble,
    coherence.Coherence,
    gradients.Fisher,
    gradients.Isotropic,
    heat.Heat,
    heat.HeatGeometric,
    heat.Recommended,
    # Rivals that need no data.
    features.SCALE,
    features.ASHS,
    features.LTS,
    perturb_inputs.ODIN,
    feature_maps.RankFeat,
    feature_maps.GAIA,
    features.ClaFR,
    # Rivals that need training data.
    training_distances.KNN,
    training_react_vim.ViM,
    training_distances.Mahalanobis,
    training_react_vim.ReAct,
    training_distances.FDBD,
    training_laplace_quam.QUAM,
)
RENAMED = {"auto": "recommended"}  # old names of methods; `auto` is an engine
BY_NAME = {kind.name: kind for kind in METHODS}
# From the name of a modifier to the largest number of its parameters.
MODIFIERS = {"layers": 1, "smooth": 2}

Methods = str | Method | Sequence[str | Method] | Mapping[str, str | Method]
PixelStd = float | Sequence[float] | None


def list_methods() -> list[Method]:
    """List every method with its default parameters: objects with .name, .paper, .needs and .cost.

    Example:
        ```python
        import qualms

        for method in qualms.list_methods():
            print(method.name, method.needs, method.cost, method.paper)
        ```
    """
    return [kind() for kind in METHODS]


def parse(spec: str) -> Method:
    """Create the method that a spec describes.

    A spec is `name` or `name(parameters)`, then the modifiers `+layers(λ)` and `+smooth(σ, N)`, if
    any.

    Example:
        ```python
        from qualms.methods import parse

        print(parse("exgrad+layers(0.4)+smooth(0.02, 8)"))
        ```
    """
    # Split at the plus signs outside of parentheses: 1e+3 is a number.
    call, *modifiers = re.split(r"\+(?![^(]*\))", spec.replace(" ", ""))
    name, arguments = _parse_call(call, spec)
    if name in RENAMED:
        warnings.warn(
            f"the method {name!r} is deprecated; use {RENAMED[name]!r}.",
            FutureWarning,
            stacklevel=2,
        )
        name = RENAMED[name]
    if name not in BY_NAME:
        raise QualmsError(f"{name!r} in {spec!r} is not a method; {_suggest(name, BY_NAME)}")
    kind: type[Any] = BY_NAME[name]
    parameters = [f.name for f in fields(kind) if f.name not in MODIFIERS]
    if len(arguments) > len(parameters):
        takes = f"takes {', '.join(parameters)}" if parameters else "takes no parameters"
        raise QualmsError(f"{spec!r} passes {len(arguments)} parameters to {name}, which {takes}.")
    method: Method = kind(**_name_arguments(kind, arguments))
    for modifier in modifiers:
        method = _modify(method, *_parse_call(modifier, spec), spec)
    return method


def _modify(
    method: Method,
    modifier: str,
    arguments: list[float],
    spec: str,
) -> Method:
    """Return a copy of a gradient score with the modifier `+layers` or `+smooth`.

    Args:
        method: the method to modify.
        modifier: the name of the modifier.
        arguments: the parameters of the modifier.
        spec: the whole spec, for errors.

    Raises:
        QualmsError: if the modifier is unknown, used twice or has too many parameters, or if the
            method is not a gradient score.
    """
    if modifier not in MODIFIERS:
        raise QualmsError(
            f"{modifier!r} in {spec!r} is not a modifier; {_suggest(modifier, MODIFIERS)}"
        )
    if not isinstance(method, GradientScore):
        raise QualmsError(
            f"{spec!r} is invalid: {modifier!r} applies only to gradient scores, and "
            f"{method.name} is not one."
        )
    current_value = method.layers if modifier == "layers" else method.smooth
    if current_value is not None:
        raise QualmsError(f"{spec!r} has {modifier!r} twice; pass it once.")
    max_arguments = MODIFIERS[modifier]
    if len(arguments) > max_arguments:
        raise QualmsError(
            f"{spec!r} passes {len(arguments)} parameters to {modifier}, which takes at most "
            f"{max_arguments}."
        )
    if modifier == "layers":
        return replace(method, layers=arguments[0] if arguments else LAMBDA)
    return replace(method, smooth=_create_smoothing(arguments, spec))


def _create_smoothing(arguments: list[float], spec: str) -> Smoothing:
    """Create the smoothing of `+smooth(σ, N)` from its parameters.

    Args:
        arguments: σ and N; the defaults stand in for missing ones.
        spec: the whole spec, which errors quote.
    """
    # Any, as type checkers do not know which fields the arguments belong to.
    kind: type[Any] = Smoothing
    try:
        return kind(**_name_arguments(kind, arguments))
    except QualmsError as error:
        raise QualmsError(f"{spec!r}: {error}") from None


def _parse_call(text: str, spec: str) -> tuple[str, list[float]]:
    """Split a text such as `name(1,2)` into the name, in lower case with hyphens, and the numbers.

    Args:
        text: the method or modifier, without spaces.
        spec: the whole spec, for errors.
    """
    match = re.fullmatch(r"([a-zA-Z_-]*)(?:\((.*)\))?", text)
    try:
        if match is None:
            raise ValueError  # as `float` does below for what is not a number
        name, inside = match[1], match[2]
        arguments = inside.split(",") if inside else []
        return name.lower().replace("_", "-"), [float(argument) for argument in arguments]
    except ValueError:
        message = (
            f"{text!r} in {spec!r} is invalid; pass a name with numbers in parentheses, such as "
            f"{DEFAULT!r} or 'exgrad+layers(0.4)'."
        )
        raise QualmsError(message) from None


def _name_arguments(
    kind: type[Any],
    arguments: list[float],
) -> dict[str, int | float]:
    """Assign numbers to the fields of a method or a smoothing, in order.

    An integral number becomes an int if the default of its field is an int. Other numbers stay
    floats, which the rules of the parameters accept or reject.

    Args:
        kind: the dataclass, a method or `Smoothing`.
        arguments: the numbers; fewer than there are fields leave the last fields out.

    Returns:
        A dict from the name of each field to its number.
    """
    named: dict[str, int | float] = {}
    for field, number in zip(fields(kind), arguments, strict=False):
        is_count = isinstance(field.default, int) and number.is_integer()
        named[field.name] = int(number) if is_count else number
    return named


def _suggest(word: str, known: Iterable[str]) -> str:
    """Phrase the advice of an error about an unknown word: similar known words, or all of them."""
    similar = get_close_matches(word, known, n=3, cutoff=0.5)
    if similar:
        return f"did you mean {' or '.join(similar)}?"
    return f"choose one of {', '.join(known)}."


# What a user passes as methods: specs or objects, or a dict of them with names of the user's own.


def name_methods(methods: Methods) -> dict[str, Method]:
    """Parse the specs among some methods, and name each method.

    Args:
        methods: what a user passes: specs, such as `"regrad+layers"`, or objects; one, a list of
            them, or a dict of them with names.

    Returns:
        A dict from names to methods. The name is the key in a dict of methods, else the spec as it
        was written, or the spec of the object.
    """
    if isinstance(methods, (str, Method)):
        methods = [methods]
    if not methods:
        raise QualmsError("methods is empty; name one, such as 'regrad' or 'entropy'.")
    pairs: Iterable[tuple[str | None, str | Method]] = [(None, one) for one in methods]
    if isinstance(methods, Mapping):
        pairs = methods.items()
    named: dict[str, Method] = {}
    for key, one in pairs:
        method = parse(one) if isinstance(one, str) else one
        if not isinstance(method, Method):
            raise QualmsError(
                f"a method is a {type(one).__name__}; pass a spec, or a qualms.methods.Method."
            )
        name = key or (one if isinstance(one, str) else method.spec)
        if named.setdefault(name, method) != method:
            raise QualmsError(
                f"two methods are called {name!r}; pass a dict with a different name for each."
            )
    return named


def in_pixels(method: Method, pixel_std: PixelStd) -> Method:
    """Return a method with its noise converted from pixels to the units of the model's inputs.

    Pixels range from 0 to 1; the model's inputs are pixels divided by `pixel_std`.

    Args:
        method: the method; a noise level that is a tuple is already in the units of the inputs.
        pixel_std: one number, or one for each channel; None leaves the method unchanged.
    """
    if pixel_std is None:
        return method
    stds = tuple(pixel_std) if isinstance(pixel_std, Sequence) else (pixel_std,)
    if not stds or not all(map(_is_positive_number, stds)):
        raise QualmsError(
            f"pixel_std={pixel_std!r} is invalid; pass a number above 0, or one per channel."
        )

    def divide_by_stds(level: float) -> Noise:
        """Divide a noise level in pixels by the standard deviation, or by that of each channel."""
        levels = tuple(level / std for std in stds)
        return levels if len(levels) > 1 else levels[0]

    return method.in_units(divide_by_stds)


def _is_positive_number(value: Any) -> bool:
    """Whether a value is an int or a float above 0; a bool is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def noisy_specs(methods: Methods) -> tuple[str, ...]:
    """Return those specs among some methods whose noise level is in pixels.

    Method objects are left out: their noise is already in the units of the model's input.

    Args:
        methods: specs or objects; one, a list of them, or a dict of them with names.
    """
    if isinstance(methods, (str, Method)):
        methods = [methods]
    specs_or_objects = methods.values() if isinstance(methods, Mapping) else methods
    specs: list[str] = []
    for one in specs_or_objects:
        # Any standard deviation other than 1 changes a method that has noise.
        if isinstance(one, str) and in_pixels(parse(one), 0.5) != parse(one):
            specs.append(one)
    return tuple(specs)
