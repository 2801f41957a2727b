"""Scores at every position of one input: positions stand where inputs stand elsewhere.

Scores of the logits read them a block of positions at a time. Gradient scores add up what each
random tangent says; Σ_m w_m ‖g_m‖ needs the squares of all classes at all positions, Σ_m w_m ‖g_m‖²
one number for a tangent and position.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.directions import project_one_set
from qualms.gradients.engines.position_sketch import PositionProducts
from qualms.gradients.precision import at_least_float32
from qualms.gradients.settings import Smoothing
from qualms.gradients.sketching.projections import unbiased_root
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import LOGITS, Method

BLOCK_BYTES = 2**25  # of the projections that exist at once
DOUBLE = 8  # bytes
NOWHERE = -100  # a target that stands for none, as torch's losses have it
Group = tuple[
    Smoothing | None, float | None
]  # scores that share their tangents: by perturbations and λ


def require_positions(methods: Mapping[str, Method]) -> None:
    """An error if a method cannot score every position."""
    for name, method in methods.items():
        if not isinstance(method, GradientScore) and method.needs != (LOGITS,):
            raise QualmsError(
                f"{name} scores whole inputs, not every position; use regrad, fisher, entropy or energy."
            )


def logit_scores(
    methods: Mapping[str, Method], logits: Float[Tensor, "t c"], model_context: ModelContext
) -> dict[str, Float[Tensor, " t"]]:
    """The scores that read the logits alone."""
    chosen = {name: m for name, m in methods.items() if not isinstance(m, GradientScore)}
    parts: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for some in blocks(*logits.shape):
        context = _LogitsAlone(model_context, logits[some])
        for name, method in chosen.items():
            parts[name].append(method.score(context))
    return {name: torch.cat(values) for name, values in parts.items()}


class _LogitsAlone(BatchContext):
    """Positions in place of inputs, with nothing but their logits."""

    def __init__(self, model_context: ModelContext, logits: Float[Tensor, "t c"]) -> None:
        super().__init__(model_context, logits)
        self.__dict__["_outcome"] = (
            logits,
            QualmsError("positions have no last layer of their own."),
        )


def groups_of(methods: Mapping[str, Method]) -> dict[Group, dict[str, GradientScore]]:
    """The gradient scores, by the tangents that they share."""
    groups: dict[Group, dict[str, GradientScore]] = {}
    for name, method in methods.items():
        if isinstance(method, GradientScore):
            groups.setdefault((method.smooth, method.layers), {})[name] = method
    return groups


def blocks(positions: int, classes: int, at_once: int = 1) -> Iterator[slice]:
    """Positions whose projections on some tangents are held at the same time."""
    size = max(1, BLOCK_BYTES // (DOUBLE * classes * at_once))
    return (slice(i, min(i + size, positions)) for i in range(0, positions, size))


@dataclass
class TangentSums:
    """What the tangents have said so far of one input, for the scores of one group.

    `rows` are averaged over before anything is squared; `targets` are the classes of a given text,
    NOWHERE where it has none.
    """

    methods: Mapping[str, GradientScore]
    shape: tuple[int, int]  # positions, classes
    rows: int
    targets: Int[Tensor, " t"] | None
    like: Tensor
    tangents: int = 0
    squares: dict[str, Tensor] = field(default_factory=dict)  # by direction, [t, m]
    quadratic: dict[str, list[Tensor]] = field(
        default_factory=dict
    )  # by method, [t] for each tangent
    of_targets: list[Tensor] = field(default_factory=list)  # a number for each tangent
    mean: dict[str, Tensor] = field(
        default_factory=dict
    )  # by direction, [t, g, m], of the rows so far

    def __post_init__(self) -> None:
        names = [m.direction for m in self.methods.values()] + (
            ["classes"] if self.targets is not None else []
        )
        self.directions = tuple(dict.fromkeys(names))
        self.summed = {m.direction for m in self.methods.values() if m.power == 1}
        self.quadratic = {name: [] for name, m in self.methods.items() if m.power == 2}
        # The square of a gradient of size 1e-26, that of a class of which the model is certain, is
        # zero in 32 bits.
        self.likeliest = self.like.new_zeros(self.shape[0], 1, dtype=torch.double)
        self.surest: Any = None  # that class, at each position
        self.own: Tensor | None = (
            None  # the logits of the input itself, while its other rows are taken in
        )

    @staticmethod
    def held(shape: tuple[int, int], rows: int) -> int:
        """Bytes kept for each tangent at once: the rows' mean, where there are several."""
        return DOUBLE * shape[0] * shape[1] if rows > 1 else 0

    def add(self, pushed: PositionProducts) -> None:
        """Take in what some tangents say of one row."""
        if pushed.row == 0:
            self.own = pushed.logits
            if self.surest is None:
                self.surest = pushed.logits.argmax(-1, keepdim=True)
        at_once = len(pushed.tangents)
        found: dict[str, list[Tensor]] = {name: [] for name in self.quadratic}
        texts = self.like.new_zeros(at_once, dtype=torch.double)
        for some in blocks(*self.shape, at_once):
            y = pushed.tangents[:, some].movedim(0, 1)
            if not bool(torch.isfinite(y).all()):
                raise QualmsError(
                    "the sketch met numbers too large for the model's precision; use float32, or a few positions= with "
                    "engine='exact'."
                )
            at = {name: self._averaged(name, some, pushed, y) for name in self.directions}
            if pushed.row < self.rows - 1:
                continue
            for name in self.summed:
                squares = at[name].square().sum(1)
                if name not in self.squares:
                    dtype = (
                        squares.dtype
                        if squares.shape[1] == 1
                        else at_least_float32(self.like).dtype
                    )
                    self.squares[name] = torch.zeros(
                        self.shape[0], squares.shape[1], dtype=dtype, device=squares.device
                    )
                self.squares[name][some] += squares.to(self.squares[name])
                if name == "classes":
                    self.likeliest[some] += squares.gather(-1, self.surest[some])
            assert self.own is not None
            for name in found:
                method = self.methods[name]
                found[name].append(
                    torch.einsum(
                        "tm,tgm->gt",
                        method.weights_at(self.own[some]),
                        at[method.direction].square(),
                    )
                )
            if self.targets is not None:
                targets = self.targets[some]
                chosen = at["classes"].gather(
                    -1, targets.clamp_min(0)[:, None, None].expand(-1, at_once, 1)
                )[..., 0]
                texts += torch.where((targets >= 0)[:, None], chosen, 0.0).sum(0)
        if pushed.row == self.rows - 1:
            self.tangents += at_once
            self.mean.clear()
            self.own = None
            for name, parts in found.items():
                self.quadratic[name] += list(torch.cat(parts, dim=1))
            self.of_targets += list(texts)

    def _averaged(
        self, name: str, some: slice, pushed: PositionProducts, y: Float[Tensor, "n g c"]
    ) -> Float[Tensor, "n g m"]:
        """The projections, averaged over the rows up to this one."""
        now = project_one_set(name, pushed.logits[some][:, None], y)
        if self.rows == 1:
            return now
        if name not in self.mean:
            self.mean[name] = now.new_zeros(self.shape[0], *now.shape[1:])
        self.mean[name][some] += now / self.rows
        return self.mean[name][some]

    def scores(
        self, logits: Float[Tensor, "t c"]
    ) -> dict[str, tuple[Float[Tensor, " t"], Float[Tensor, " t"]]]:
        """Each score, and its standard error; NaN where only all projections at once would tell it."""
        found = {}
        for name, method in self.methods.items():
            if method.power == 2:
                each = torch.stack(self.quadratic[name])
                found[name] = each.mean(0), each.std(0) / len(each) ** 0.5
                continue
            parts = []
            for some in blocks(*self.shape):
                squares = self.squares[method.direction][some].double()
                if method.direction == "classes":
                    squares = squares.scatter(-1, self.surest[some], self.likeliest[some])
                norms = unbiased_root(squares / self.tangents, self.tangents)
                parts.append((method.weights_at(logits[some]) * norms).sum(-1))
            value = torch.cat(parts)
            found[name] = value, torch.full_like(value, torch.nan)
        return found

    def of_text(self) -> float | None:
        """‖∇θ Σ_t log p(y_t)‖ of the targets y_t, for each of them; None if there are none."""
        number = 0 if self.targets is None else int((self.targets >= 0).sum())
        if number == 0:
            return None
        return (
            float(unbiased_root(torch.stack(self.of_targets).square().mean(), self.tangents))
            / number
        )
