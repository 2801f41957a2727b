"""`Provenance`: which method, network and settings computed some scores."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from qualms.errors import QualmsError
from qualms.gradients.layers import select_parameters
from qualms.gradients.settings import Settings
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import LOGITS, Method
from qualms.models.fingerprint import fingerprint

# The types of fields in a file; fields that are not listed are strings.
_FIELD_TYPES: dict[str, tuple[type, ...]] = {"tolerance": (int, float), "seed": (int,)}


@dataclass(frozen=True)
class Provenance:
    """How some scores were computed. Scores computed differently are on a different scale.

    All but the first two are None for a method that reads the logits alone.

    Args:
        method: the method with its parameters; noise is in the units of the model's input.
        network: a digest of the weights.
        engine: the engine that computed the gradients, with its options.
        layers: what `+layers` counts: `module`, `tensor` or `block`.
        norm: the norm of the gradients, `l2` or `l1`.
        params: a digest of the names of the parameters that count; None for all of them.
        tolerance: the relative standard error that was allowed.
        seed: the seed of the random draws.
    """

    method: str
    network: str
    engine: str | None = None
    layers: str | None = None
    norm: str | None = None
    params: str | None = None
    tolerance: float | None = None
    seed: int | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Provenance":
        """Create a provenance from a dict of its fields that was read from a file.

        Args:
            values: what `dataclasses.asdict` returned for a provenance, in a file that may be
                damaged.

        Raises:
            TypeError: if a key is unknown or missing.
            ValueError: if a value has another type than its field.
        """
        provenance = cls(**values)
        for field in fields(cls):
            value = getattr(provenance, field.name)
            if value is None and field.default is None:  # an optional field
                continue
            # Not isinstance: True would count as an int.
            if type(value) not in _FIELD_TYPES.get(field.name, (str,)):
                raise ValueError(f"{field.name} is a {type(value).__name__}")
        if provenance.tolerance is not None:
            finite_float(provenance.tolerance)
        return provenance

    def require_same(self, other: "Provenance") -> None:
        """Raise an error if a threshold with this provenance is used on other scores.

        Args:
            other: the provenance of the scores that the threshold is compared with.

        Raises:
            QualmsError: if any field differs; the error names all that do.
        """
        differences = []
        for field in fields(self):
            calibrated = getattr(self, field.name)
            current = getattr(other, field.name)
            if calibrated != current:
                differences.append(f"{field.name} {calibrated}, not {current}")
        if differences:
            raise QualmsError(
                f"the threshold was calibrated with other settings: {'; '.join(differences)}; "
                "use those settings, or calibrate a new threshold."
            )


def describe_scores(
    model: nn.Module,
    method: Method,
    settings: Settings,
    *,
    members: Iterable[nn.Module] = (),
    positions: object = None,
) -> Provenance:
    """Describe how a method's scores are computed, to check later whether others are comparable.

    Args:
        model: the model that is scored, not compiled.
        method: the method with its parameters.
        settings: how gradients are computed.
        members: further models, for `ensemble`.
        positions: how outputs are read, and which positions are scored, if the model answers at
            many positions. Its `repr` becomes a part of the description of the method.

    Returns:
        What must be equal for two sets of scores to be comparable.
    """
    network = "+".join(fingerprint(member) for member in (model, *members))
    description = repr(method)
    if positions is not None:
        description += f" at {positions}"
    # No setting of the gradients affects a method that reads the logits alone.
    if method.needs == (LOGITS,):
        return Provenance(description, network)
    engine: str = settings.engine_name
    tolerance = float(settings.tolerance or 0.0)
    if settings.sketch is not None:
        engine = repr(settings.sketch)
    if not isinstance(method, GradientScore) and engine in ("auto", "exact"):
        # No engine has to be chosen for a method that is no gradient score: it uses none, or always
        # the exact one.
        engine, tolerance = "exact", 0.0
    params = None
    if settings.params is not None:
        params = _digest_names(select_parameters(model, settings.params))
    return Provenance(
        description,
        network,
        engine,
        layers=settings.granularity,
        norm=settings.norm,
        params=params,
        tolerance=tolerance,
        seed=settings.seed,
    )


def finite_float(number: Any) -> float:
    """Convert a finite number from a file to a float.

    Raises:
        ValueError: if it is not a number, or if it is NaN or infinite.
    """
    # Not isinstance: True would count as an int.
    if type(number) not in (int, float) or not math.isfinite(number):
        raise ValueError(f"{number!r} is not a finite number")
    return float(number)


def _digest_names(names: Iterable[str]) -> str:
    """Return the number of some parameters and a hash of their names, as in `12 parameters, 9f…`.

    The names identify a selection of parameters that a user made by a function, which itself cannot
    be compared with a function of another run.

    Args:
        names: the names of the selected parameters.
    """
    names = list(names)
    digest = hashlib.sha256(" ".join(names).encode()).hexdigest()[:16]
    return f"{len(names)} parameters, {digest}"
