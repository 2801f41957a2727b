"""The one table of methods, and specs: `regrad+layers(0.4)+smooth(0.02, 8)` is a method with its
modifiers.
"""

import re
import warnings
from collections.abc import Iterable
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from qualms.errors import QualmsError
from qualms.gradients.settings import Smoothing
from qualms.methods.ash_s import ASHS
from qualms.methods.clafr import ClaFR
from qualms.methods.coherence import Coherence
from qualms.methods.confounding_label import ConfoundingLabel
from qualms.methods.energy import Energy
from qualms.methods.ensemble import Ensemble
from qualms.methods.entropy import Entropy
from qualms.methods.exgrad import ExGrad
from qualms.methods.exgrad_v import ExGradV
from qualms.methods.fdbd import FDBD
from qualms.methods.fisher import Fisher
from qualms.methods.gaia import GAIA
from qualms.methods.gen import GEN
from qualms.methods.gradient_score import LAMBDA, GradientScore
from qualms.methods.gradnorm import GradNorm
from qualms.methods.gradnorm_huang import GradNormHuang
from qualms.methods.heat import Heat, HeatGeometric
from qualms.methods.inserted_dropout import InsertedDropout
from qualms.methods.isotropic import Isotropic
from qualms.methods.knn import KNN
from qualms.methods.laplace import Laplace
from qualms.methods.lts import LTS
from qualms.methods.mahalanobis import Mahalanobis
from qualms.methods.max_logit import MaxLogit
from qualms.methods.mc_aa import MCAA
from qualms.methods.mc_batchnorm import MCBatchNorm
from qualms.methods.mc_dropout import MCDropout
from qualms.methods.method import Method
from qualms.methods.msp import MSP
from qualms.methods.negrad import NEGrad
from qualms.methods.odin import ODIN
from qualms.methods.perturb_theta import PerturbTheta
from qualms.methods.perturb_x import PerturbX
from qualms.methods.quam import QUAM
from qualms.methods.rankfeat import RankFeat
from qualms.methods.react import ReAct
from qualms.methods.recommended import Recommended
from qualms.methods.regrad import REGrad
from qualms.methods.scale import SCALE
from qualms.methods.ungrad import UNGrad
from qualms.methods.vim import ViM

DEFAULT = "regrad+layers+smooth"

# The paper's tables first, in their order.
METHODS: tuple[type[Method], ...] = (
    *(REGrad, ExGrad, UNGrad, GradNorm, GradNormHuang, NEGrad),
    *(PerturbX, PerturbTheta, MCAA, InsertedDropout, Entropy, ExGradV, Laplace),
    *(MSP, MaxLogit, Energy, GEN, MCDropout, MCBatchNorm, ConfoundingLabel, Ensemble, Coherence),
    *(Fisher, Isotropic),
    *(Heat, HeatGeometric, Recommended),
    *(SCALE, ASHS, LTS, ODIN, RankFeat, GAIA, ClaFR),
    *(KNN, ViM, Mahalanobis, ReAct, FDBD, QUAM),
)
RENAMED = {"auto": "recommended"}  # `auto` is an engine
BY_NAME = {kind.name: kind for kind in METHODS}
MODIFIERS = {"layers": 1, "smooth": 2}  # and how many parameters they take at most


def list_methods() -> list[Method]:
    """Every method with its default parameters: objects with .name, .paper, .needs and .cost.

    Example:
        ```python
        import qualms

        for method in qualms.list_methods():
            print(method.name, method.needs, method.cost, method.paper)
        ```
    """
    return [kind() for kind in METHODS]


def parse(spec: str) -> Method:
    """The method that a spec names: `name` or `name(parameters)`, then `+layers(λ)` and `+smooth(σ,
    N)`.

    Example:
        ```python
        from qualms.methods import parse

        print(parse("exgrad+layers(0.4)+smooth(0.02, 8)"))
        ```
    """
    name, *modifiers = re.split(r"\+(?![^(]*\))", spec.replace(" ", ""))
    base, arguments = _call(name, spec)
    if base in RENAMED:
        warnings.warn(
            f"the method {base!r} is deprecated; use {RENAMED[base]!r}.",
            FutureWarning,
            stacklevel=2,
        )
        base = RENAMED[base]
    if base not in BY_NAME:
        raise QualmsError(f"{base!r} in {spec!r} is not a method; {_close(base, BY_NAME)}")
    kind: type[Any] = BY_NAME[base]
    own = [f.name for f in fields(kind) if f.name not in MODIFIERS]
    if len(arguments) > len(own):
        takes = f"takes {', '.join(own)}" if own else "takes no parameters"
        raise QualmsError(f"{spec!r} gives {base} {len(arguments)} parameters; it {takes}.")
    method: Method = kind(**_parameters(kind, arguments))
    for modifier in modifiers:
        method = _modified(method, *_call(modifier, spec), spec)
    return method


def _modified(method: Method, modifier: str, arguments: list[float], spec: str) -> Method:
    if modifier not in MODIFIERS:
        raise QualmsError(
            f"{modifier!r} in {spec!r} is not a modifier; {_close(modifier, MODIFIERS)}"
        )
    if not isinstance(method, GradientScore):
        raise QualmsError(
            f"{spec!r}: {method.name} is not a gradient score, so {modifier!r} does not apply to it."
        )
    if (method.layers if modifier == "layers" else method.smooth) is not None:
        raise QualmsError(f"{spec!r} has {modifier!r} twice; give it once.")
    most = MODIFIERS[modifier]
    if len(arguments) > most:
        raise QualmsError(
            f"{spec!r} gives {modifier} {len(arguments)} parameters; it takes {most} at most."
        )
    if modifier == "layers":
        return replace(method, layers=arguments[0] if arguments else LAMBDA)
    return replace(method, smooth=_smoothing(arguments, spec))


def _smoothing(arguments: list[float], spec: str) -> Smoothing:
    kind: type[Any] = Smoothing
    try:
        return kind(**_parameters(kind, arguments))
    except QualmsError as error:
        raise QualmsError(f"{spec!r}: {error}") from None


def _call(text: str, spec: str) -> tuple[str, list[float]]:
    """`name(1, 2)` in its parts."""
    found = re.fullmatch(r"([a-zA-Z_-]*)(?:\((.*)\))?", text)
    try:
        if found is None:
            raise ValueError
        inside = (found[2] or "").split(",") if found[2] else []
        return found[1].lower().replace("_", "-"), [float(a) for a in inside]
    except ValueError:
        message = f"{text!r} in {spec!r} is not a name with numbers in brackets, such as {DEFAULT!r} or 'exgrad+layers(0.4)'."
        raise QualmsError(message) from None


def _parameters(kind: type[Any], arguments: list[float]) -> dict[str, int | float]:
    """Numbers by the names of the parameters that they are for; those that count something as int,
    if they are whole.

    Any other number is left as it is to the checks of the parameter.
    """
    given = zip(fields(kind), arguments, strict=False)
    return {
        f.name: int(n) if isinstance(f.default, int) and n.is_integer() else n for f, n in given
    }


def _close(word: str, known: Iterable[str]) -> str:
    near = get_close_matches(word, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(known)}."
