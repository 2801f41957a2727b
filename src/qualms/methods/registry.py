"""The one table of methods, and specs: `regrad+layers(0.4)+smooth(0.02, 8)` is a method with its modifiers."""

import re
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from qualms.errors import QualmsError
from qualms.gradients.smoothing import Smoothing
from qualms.methods.coherence import Coherence
from qualms.methods.confounding_label import ConfoundingLabel
from qualms.methods.energy import Energy
from qualms.methods.ensemble import Ensemble
from qualms.methods.entropy import Entropy
from qualms.methods.exgrad import ExGrad
from qualms.methods.exgrad_v import ExGradV
from qualms.methods.gen import GEN
from qualms.methods.gradnorm import GradNorm
from qualms.methods.gradnorm_huang import GradNormHuang
from qualms.methods.inserted_dropout import InsertedDropout
from qualms.methods.laplace import Laplace
from qualms.methods.layered import LAMBDA
from qualms.methods.max_logit import MaxLogit
from qualms.methods.mc_aa import MCAA
from qualms.methods.mc_batchnorm import MCBatchNorm
from qualms.methods.mc_dropout import MCDropout
from qualms.methods.method import Method
from qualms.methods.msp import MSP
from qualms.methods.negrad import NEGrad
from qualms.methods.perturb_theta import PerturbTheta
from qualms.methods.perturb_x import PerturbX
from qualms.methods.regrad import REGrad
from qualms.methods.ungrad import UNGrad

DEFAULT = "regrad+layers+smooth"

# The paper's tables first, in their order.
METHODS: tuple[type[Any], ...] = (
    *(REGrad, ExGrad, UNGrad, GradNorm, GradNormHuang, NEGrad),
    *(PerturbX, PerturbTheta, MCAA, InsertedDropout, Entropy, ExGradV, Laplace),
    *(MSP, MaxLogit, Energy, GEN, MCDropout, MCBatchNorm, ConfoundingLabel, Ensemble, Coherence),
)
BY_NAME: dict[str, type[Any]] = {kind.name: kind for kind in METHODS}
MODIFIERS = ("layers", "smooth")


def methods() -> list[Method]:
    """Every method with its default parameters: objects with .name, .paper, .needs and .cost."""
    return [kind() for kind in METHODS]


def parse(spec: str) -> Method:
    """The method that a spec names: `name` or `name(parameters)`, then `+layers(λ)` and `+smooth(σ, N)`."""
    name, *modifiers = re.split(r"\+(?![^(]*\))", spec.replace(" ", ""))
    base, arguments = _call(name, spec)
    if base not in BY_NAME:
        raise QualmsError(f"{base!r} in {spec!r} is not a method; {_close(base, BY_NAME)}")
    kind = BY_NAME[base]
    own = [f.name for f in fields(kind) if f.name not in MODIFIERS]
    if len(arguments) > len(own):
        takes = f"takes {', '.join(own)}" if own else "takes no parameters"
        raise QualmsError(f"{spec!r} gives {base} {len(arguments)} parameters; it {takes}.")
    defaults = {f.name: f.default for f in fields(kind)}
    given = {key: type(_one(defaults[key]))(value) for key, value in zip(own, arguments, strict=False)}
    method = kind(**given)
    for modifier in modifiers:
        method = _modified(method, *_call(modifier, spec), spec)
    return method


def _modified(method: Any, modifier: str, arguments: list[float], spec: str) -> Any:
    if modifier not in MODIFIERS:
        raise QualmsError(f"{modifier!r} in {spec!r} is not a modifier; {_close(modifier, MODIFIERS)}")
    if not hasattr(method, modifier):
        raise QualmsError(f"{spec!r}: {method.name} is not a gradient score, so {modifier!r} does not apply to it.")
    if getattr(method, modifier) is not None:
        raise QualmsError(f"{spec!r} has {modifier!r} twice; give it once.")
    most = 1 if modifier == "layers" else 2
    if len(arguments) > most:
        raise QualmsError(f"{spec!r} gives {modifier} {len(arguments)} parameters; it takes {most} at most.")
    if modifier == "layers":
        return replace(method, layers=arguments[0] if arguments else LAMBDA)
    if len(arguments) == 2 and arguments[1] != int(arguments[1]):
        raise QualmsError(f"{spec!r} asks for {arguments[1]} draws; N is a whole number.")
    default = Smoothing()
    sigma = arguments[0] if arguments else default.sigma
    return replace(method, smooth=Smoothing(sigma, int(arguments[1]) if len(arguments) == 2 else default.draws))


def spec_of(method: Method) -> str:
    """The spec of a method object, without its own parameters."""
    spec = method.name
    layers, smooth = getattr(method, "layers", None), getattr(method, "smooth", None)
    if layers is not None:
        spec += f"+layers({layers:g})"
    if smooth is not None:
        sigma = smooth.sigma[0] if isinstance(smooth.sigma, tuple) else smooth.sigma
        spec += f"+smooth({sigma:g},{smooth.draws})"
    return spec


def _call(text: str, spec: str) -> tuple[str, list[float]]:
    """`name(1, 2)` in its parts."""
    found = re.fullmatch(r"([a-zA-Z_-]*)(?:\((.*)\))?", text)
    try:
        if found is None:
            raise ValueError
        inside = (found[2] or "").split(",") if found[2] else []
        return found[1].lower().replace("_", "-"), [float(a) for a in inside]
    except ValueError:
        message = (
            f"{text!r} in {spec!r} is not a name with numbers in brackets, such as {DEFAULT!r} or 'exgrad+layers(0.4)'."
        )
        raise QualmsError(message) from None


def _one(default: Any) -> Any:
    return default[0] if isinstance(default, tuple) else default


def _close(word: str, known: Any) -> str:
    near = get_close_matches(word, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}."
