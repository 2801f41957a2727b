"""How gradients are computed: engine, layers, norm, limits of memory, smoothing."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.layers import Granularity, Norm, Params
from qualms.parameters import NOISE, check_parameters, whole
from qualms.random import generator

Engine = Literal["exact", "reference", "sketch", "auto"]
# What is measured: ‖g‖, Σ|g|, or inner products.
Kind = Literal["l2", "l1", "gram"]


@dataclass(frozen=True)
class Sketch:
    """`engine="sketch"` with its options.

    Args:
        tangents: k, the number of passes; the relative error of a norm is about 1/sqrt(2k)
            (quadrature) or sqrt(2/k) (sum).
        combine: how layers are combined: in `quadrature`, or as the `sum` that the paper uses.

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
        check_parameters(self, "the sketch", tangents=whole(2))
        _require_known("combine", self.combine, ("quadrature", "sum"))


@dataclass(frozen=True)
class Settings:
    """How gradients are computed, for every score that uses them.

    Args:
        engine: the name of the engine, or a sketch with options.
        granularity: what a layer is: a module, a parameter tensor or a block.
        norm: which norm of each gradient is taken.
        params: the parameters whose gradients are wanted: a pattern, or a function of names; None
            for all.
        budget: bytes that the work on one chunk of samples may take; None for a share of what is
            free.
        batch_size: the most samples to run at once; None for as many as fit.
        seed: the seed of all random draws.
        tolerance: the standard error that a score may have, as a share of the score; None for the
            default of the engine.
    """

    engine: "Engine | Sketch" = "auto"
    granularity: Granularity = "module"
    norm: Norm = "l2"
    params: Params = None
    budget: int | None = None
    batch_size: int | None = None
    seed: int = 0
    tolerance: float | None = None

    def __post_init__(self) -> None:
        """Raise an error that names the argument if a setting is invalid."""
        for argument, value in (("budget", self.budget), ("batch_size", self.batch_size)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise QualmsError(
                    f"{argument}={value!r} is invalid; pass a positive whole number, or leave it "
                    "out for the default."
                )
        if not isinstance(self.seed, int) or self.seed < 0:
            raise QualmsError(f"seed={self.seed!r} is invalid; pass a whole number, 0 or more.")
        if self.tolerance is not None and not _is_share(self.tolerance):
            raise QualmsError(
                f"tolerance={self.tolerance!r} is invalid; pass a fraction of the score, from "
                "0 (exact) to below 1."
            )
        if not isinstance(self.engine, Sketch):
            _require_known("engine", self.engine, get_args(Engine))
        _require_known("layers", self.granularity, get_args(Granularity))
        _require_known("norm", self.norm, get_args(Norm))

    @property
    def sketch(self) -> Sketch | None:
        """The options of the sketch; None if another engine was chosen."""
        if isinstance(self.engine, Sketch):
            return self.engine
        return Sketch() if self.engine == "sketch" else None

    @property
    def description(self) -> str:
        """How scores are computed, for users: how precise an estimate is, or the engine's name."""
        if self.sketch is not None:
            return f"a sketch with {self.sketch.tangents} tangents"
        if self.tolerance:
            return f"standard error of at most {100 * self.tolerance:g} %"
        return str(self.engine_name)

    @property
    def engine_name(self) -> Engine:
        """The name of the engine, without options."""
        return "sketch" if isinstance(self.engine, Sketch) else self.engine


def _is_share(value: object) -> bool:
    """Whether a value is a number from 0 to below 1."""
    return isinstance(value, (int, float)) and 0 <= value < 1


def _require_known(argument: str, value: object, known: tuple[str, ...]) -> None:
    """Raise an error that names the argument unless its value is one of the known values."""
    if value not in known:
        raise QualmsError(f"{argument}={value!r} is invalid; choose one of {', '.join(known)}.")


@dataclass(frozen=True)
class Smoothing:
    """Average class gradients over small perturbations of the input, before any norm is taken.

    g_c becomes (1/(N+1)) Σ_{i=0..N} ∇θ log p_c(x_i), with x_0 the input and x_i = x_0 + N(0, σ²I)
    (Wang & Ji, CVPR 2024, section 4.3). With antithetic draws the perturbations come in pairs ±Δ,
    whose odd terms cancel: eight of them rank inputs like a hundred independent ones.

    Args:
        sigma: standard deviation in the units of the tensor that the model receives; a number, or
            one per channel.
        draws: N, the number of perturbed inputs in addition to the input itself.
        antithetic: draw in pairs ±Δ (an odd last draw stands alone).

    Example:
        ```python
        import torch
        import qualms

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
        x = torch.rand(2, 4)
        noise = qualms.Smoothing(sigma=0.1, draws=4)
        smoothed = qualms.class_gradient_norms(model, x, smoothing=noise)
        print(smoothed.norms)
        ```
    """

    sigma: float | tuple[float, ...] = 0.02
    draws: int = 8
    antithetic: bool = True

    def __post_init__(self) -> None:
        # σ > 0, one or one per channel, and at least one draw.
        check_parameters(self, "smoothing", sigma=NOISE, draws=whole(1))

    @classmethod
    def of(cls, value: Any) -> "Smoothing | None":
        """Convert what a user passes as the argument `smoothing`.

        Args:
            value: a `Smoothing`, a standard deviation σ, or a pair (σ, N) with the number of draws;
                None for no smoothing.
        """
        if value is None or isinstance(value, Smoothing):
            return value
        arguments = value if isinstance(value, tuple) else (value,)
        sigma = arguments[0]
        # σ may be a tuple with a number for each channel.
        sigmas = sigma if isinstance(sigma, tuple) else (sigma,)
        if len(arguments) > 2 or not all(map(_is_number, sigmas)):
            raise QualmsError(
                f"smoothing={value!r} is invalid; pass qualms.Smoothing, a number σ, or the pair "
                "(σ, N)."
            )
        return cls(*arguments)

    def noise(
        self,
        shape: tuple[int, ...],
        number: int,
        seed: int,
    ) -> Float[Tensor, "rows ..."]:
        """Draw the perturbations of one sample: zeros for the sample itself, then N random ones.

        Args:
            shape: the shape of the sample.
            number: the number of the sample in the whole data; draws differ from sample to sample.
            seed: the seed that all samples share.

        Returns:
            N + 1 perturbations [rows, *shape].
        """
        random = generator(seed, number)
        if self.antithetic:
            # A pair ±Δ takes one draw; the last pair is cut if N is odd.
            num_pairs = -(-self.draws // 2)
            halves = torch.randn((num_pairs, *shape), generator=random)
            pairs = torch.stack([halves, -halves], dim=1)
            draws = pairs.flatten(0, 1)[: self.draws]
        else:
            draws = torch.randn((self.draws, *shape), generator=random)
        perturbations = torch.cat([torch.zeros(1, *shape), draws])
        return perturbations.mul_(self._sigma_for(shape))

    def _sigma_for(self, shape: tuple[int, ...]) -> Tensor:
        """Return σ as a tensor that broadcasts to a sample of this shape.

        Raises:
            QualmsError: if there is a σ for each channel, and the sample has other channels.
        """
        if not isinstance(self.sigma, tuple):
            return torch.tensor(self.sigma)
        # A sample without axes has no channels.
        channels = shape[0] if shape else 0
        if not shape or len(self.sigma) not in (1, channels):
            raise QualmsError(
                f"smoothing has {len(self.sigma)} values of sigma, but an input of shape {shape} "
                f"has {channels} channels; pass one number, or one per channel."
            )
        other_axes = [1] * (len(shape) - 1)
        return torch.tensor(self.sigma).reshape(-1, *other_axes)


def _is_number(value: Any) -> bool:
    """Whether a value is an integer or a float; a bool is neither here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
