"""How gradients are computed, whatever they are for."""

from dataclasses import dataclass
from typing import Literal, get_args

from qualms.errors import QualmsError
from qualms.gradients.layers import Granularity, Norm, Params

Engine = Literal["exact", "reference", "sketch", "auto"]
Kind = Literal["l2", "l1", "gram"]  # of a value: ‖g‖, Σ|g|, or inner products


@dataclass(frozen=True)
class Sketch:
    """`engine="sketch"` with its options.

    Args:
        tangents: k, the passes spent; the relative error of a norm is about 1/sqrt(2k) (quadrature)
            or sqrt(2/k) (sum).
        combine: how layers are put together: in `quadrature`, or as the `sum` that the paper takes.

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1000)  # exact gradients would take a pass for each class
        print(qualms.score(model, torch.rand(2, 4), "exgrad", engine=qualms.Sketch(tangents=32)))
        ```
    """

    tangents: int = 16
    combine: Literal["quadrature", "sum"] = "quadrature"

    def __post_init__(self) -> None:
        if not isinstance(self.tangents, int) or self.tangents < 2:
            raise QualmsError(
                f"the sketch has {self.tangents!r} tangents; at least two are needed, and a whole number."
            )
        if self.combine not in ("quadrature", "sum"):
            raise QualmsError(f"the sketch has combine={self.combine!r}; choose quadrature or sum.")


@dataclass(frozen=True)
class Settings:
    """How gradients are computed, whatever they are for."""

    engine: "Engine | Sketch" = "auto"
    granularity: Granularity = "module"
    norm: Norm = "l2"
    params: Params = None
    budget: int | None = None
    batch_size: int | None = None
    seed: int = 0
    tolerance: float | None = None  # None: what the engine does by itself

    def __post_init__(self) -> None:
        for argument, value in (("budget", self.budget), ("batch_size", self.batch_size)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise QualmsError(
                    f"{argument}={value!r} is not a positive whole number; leave it out for the default."
                )
        if not isinstance(self.seed, int) or self.seed < 0:
            raise QualmsError(f"seed={self.seed!r} is not a whole number from 0 on.")
        if self.tolerance is not None and (
            not isinstance(self.tolerance, (int, float)) or not 0 <= self.tolerance < 1
        ):
            raise QualmsError(
                f"tolerance={self.tolerance!r} is not a share from 0 (exact) to below 1."
            )
        if not isinstance(self.engine, Sketch):
            _require_known("engine", self.engine, get_args(Engine))
        _require_known("layers", self.granularity, get_args(Granularity))
        _require_known("norm", self.norm, get_args(Norm))

    @property
    def sketch(self) -> Sketch | None:
        """The options of the sketch, if that is the engine."""
        if isinstance(self.engine, Sketch):
            return self.engine
        return Sketch() if self.engine == "sketch" else None

    @property
    def description(self) -> str:
        """How gradient scores are computed, for people: exact, or how good an estimate they are."""
        if self.sketch is not None:
            return f"a sketch with {self.sketch.tangents} tangents"
        if self.tolerance:
            return f"standard error of at most {100 * self.tolerance:g} %"
        return str(self.engine_name)

    @property
    def engine_name(self) -> Engine:
        """The engine without its options."""
        return "sketch" if isinstance(self.engine, Sketch) else self.engine


def _require_known(argument: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise QualmsError(f"{argument}={value!r} is not known; choose one of {', '.join(known)}.")
