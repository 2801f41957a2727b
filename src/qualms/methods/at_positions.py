"""Scores at every position of one input: positions take the place of inputs.

Scores of the logits read them a block of positions at a time. Gradient scores add up projections on
random tangents: Σ_m w_m ‖g_m‖ needs the squares of all classes at all positions, Σ_m w_m ‖g_m‖² one
number for a tangent and position.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

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
from qualms.methods.gradient_score import GradientScore, weighted_sum
from qualms.methods.head import Head
from qualms.methods.method import LOGITS, Method

BLOCK_BYTES = 2**25  # the size of the projections that exist at once
DOUBLE = 8  # bytes
# The target of a position without one, as in torch's losses.
NOWHERE = -100
# Perturbations and λ of scores that share tangents.
Group = tuple[Smoothing | None, float | None]


def require_positions(methods: Mapping[str, Method]) -> None:
    """Raise an error if a method cannot score every position.

    Only gradient scores and scores of the logits alone can.
    """
    for name, method in methods.items():
        if not isinstance(method, GradientScore) and method.needs != (LOGITS,):
            raise QualmsError(
                f"{name} cannot score single positions, only whole inputs; "
                "use regrad, fisher, entropy or energy."
            )


def logit_scores(
    methods: Mapping[str, Method],
    logits: Float[Tensor, "t c"],
    model_context: ModelContext,
) -> dict[str, Float[Tensor, " t"]]:
    """Compute the scores that need the logits alone.

    Args:
        methods: the methods by name; gradient scores are left out.
        logits: the logits at all positions.
        model_context: the model, its settings and caches.

    Returns:
        The scores at all positions, by the name of the method.
    """
    logit_methods = {name: m for name, m in methods.items() if not isinstance(m, GradientScore)}
    parts: dict[str, list[Tensor]] = {name: [] for name in logit_methods}
    for some in blocks(*logits.shape):
        context = _LogitsContext(model_context, logits[some])
        for name, method in logit_methods.items():
            parts[name].append(method.score(context))
    return {name: torch.cat(values) for name, values in parts.items()}


class _LogitsContext(BatchContext):
    """A context whose inputs are positions and whose batch is their logits; no model is run."""

    @cached_property
    def _plain_results(
        self,
    ) -> tuple[Float[Tensor, "t c"], Head | QualmsError]:
        """The batch itself as logits, and an error in place of a head: positions have none."""
        logits = self.batch
        assert isinstance(logits, Tensor)
        return logits, QualmsError("positions have no last layer of their own.")


def groups_of(
    methods: Mapping[str, Method],
) -> dict[Group, dict[str, GradientScore]]:
    """Group the gradient scores by smoothing and λ: scores that have both in common share tangents.

    Returns:
        The scores by name in each group. Methods that are no gradient scores are left out.
    """
    groups: dict[Group, dict[str, GradientScore]] = {}
    for name, method in methods.items():
        if isinstance(method, GradientScore):
            groups.setdefault((method.smooth, method.layers), {})[name] = method
    return groups


def blocks(positions: int, classes: int, at_once: int = 1) -> Iterator[slice]:
    """Split positions into blocks, each so small that its projections fit into `BLOCK_BYTES`.

    Args:
        positions: the number of positions.
        classes: the number of classes.
        at_once: the number of tangents that run at once.
    """
    size = max(1, BLOCK_BYTES // (DOUBLE * classes * at_once))
    for start in range(0, positions, size):
        yield slice(start, min(start + size, positions))


@dataclass
class TangentSums:
    """Accumulates, for one input, what the gradient scores of one group need from each tangent.

    The engine runs a tangent s and yields J s for every row. Its projection g_m·s, along direction
    m at a position, is what the scores are estimated from; w_m is the weight of ‖g_m‖ in a score.
    Axes: t positions, g tangents that run at once, m directions.

    Attributes:
        methods: the scores by name; all have the same smoothing and λ.
        shape: the numbers of positions and of classes.
        rows: the number of rows, which are the input and its perturbed copies; projections are
            averaged over them before anything is squared.
        targets: the true class at each position, NOWHERE where there is none; None without targets.
        like: a tensor with the logits' dtype and device.
        tangents: the number of tangents added so far.
        squares: the sums of squared projections [t, m] over all tangents, by the name of the set of
            directions, for scores with power 1.
        quadratic: Σ_m w_m (g_m·s)² [t] of each tangent s, by method, for scores with power 2.
        target_sums: Σ_t g_{y_t}·s of each tangent s, for the targets y_t.
        mean: the projections [t, g, m] of the tangents that now run, averaged over the rows so
            far, by the name of the set of directions.
    """

    methods: Mapping[str, GradientScore]
    shape: tuple[int, int]
    rows: int
    targets: Int[Tensor, " t"] | None
    like: Tensor
    tangents: int = 0
    squares: dict[str, Tensor] = field(default_factory=dict)
    quadratic: dict[str, list[Tensor]] = field(default_factory=dict)
    target_sums: list[Tensor] = field(default_factory=list)
    mean: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """List the sets of directions to project on, and set up the sums that need no tangent."""
        names = [m.direction for m in self.methods.values()]
        if self.targets is not None:
            names.append("classes")
        self.directions = tuple(dict.fromkeys(names))
        self.linear_directions = {m.direction for m in self.methods.values() if m.power == 1}
        self.quadratic = {name: [] for name, m in self.methods.items() if m.power == 2}
        # The likeliest class of each position, and its squares in double precision: the square of a
        # gradient of size 1e-26, that of a class of which the model is certain, is zero in 32 bits.
        self.likeliest: Tensor | None = None
        self.likeliest_squares = self.like.new_zeros(self.shape[0], 1, dtype=torch.double)
        # The logits of the input itself, while its other rows are added.
        self.own_logits: Tensor | None = None

    @staticmethod
    def held(shape: tuple[int, int], rows: int) -> int:
        """Compute the bytes kept for each tangent that runs: the mean over rows, if it is needed.

        Args:
            shape: the numbers of positions and of classes.
            rows: the number of rows: the input and its perturbed copies.
        """
        return DOUBLE * shape[0] * shape[1] if rows > 1 else 0

    def add(self, products: PositionProducts) -> None:
        """Add the products J s of some tangents s with one row.

        The rows of the same tangents follow each other, row 0 first. Projections are averaged over
        them, and added to the sums over tangents at the last row.
        """
        if products.row == 0:
            self.own_logits = products.logits
            if self.likeliest is None:
                self.likeliest = products.logits.argmax(-1, keepdim=True)
        is_last = products.row == self.rows - 1
        at_once = len(products.tangents)
        quadratic: dict[str, list[Tensor]] = {name: [] for name in self.quadratic}
        target_sums = self.like.new_zeros(at_once, dtype=torch.double)
        for block in blocks(*self.shape, at_once):
            y = products.tangents[:, block].movedim(0, 1)  # [positions, tangents, classes]
            if not bool(torch.isfinite(y).all()):
                raise QualmsError(
                    "the sketch overflowed the range of the model's dtype; use float32, or pass a "
                    "few positions as positions= and use engine='exact'."
                )
            projections = {n: self._average_rows(n, block, products, y) for n in self.directions}
            if not is_last:
                continue
            self._add_squares(block, projections)
            for name, sums in quadratic.items():
                sums.append(self._quadratic_sum(name, block, projections))
            if self.targets is not None:
                target_sums += self._target_sum(self.targets[block], projections["classes"])
        if is_last:
            self.tangents += at_once
            self.mean.clear()
            self.own_logits = None
            for name, parts in quadratic.items():
                self.quadratic[name] += list(torch.cat(parts, dim=1))
            self.target_sums += list(target_sums)

    def _average_rows(
        self,
        name: str,
        block: slice,
        products: PositionProducts,
        y: Float[Tensor, "n g c"],
    ) -> Float[Tensor, "n g m"]:
        """Compute the projections along one set of directions, averaged over the rows so far.

        Each row adds 1/rows of its projections, so the result is the mean at the last row.

        Args:
            name: the name of the set of directions.
            block: the positions.
            products: the logits and the products with tangents of this row, at all positions.
            y: the products of this row at the positions of the block.
        """
        now = project_one_set(name, products.logits[block][:, None], y)
        if self.rows == 1:
            return now
        if name not in self.mean:
            self.mean[name] = now.new_zeros(self.shape[0], *now.shape[1:])
        self.mean[name][block] += now / self.rows
        return self.mean[name][block]

    def _add_squares(self, block: slice, projections: Mapping[str, Float[Tensor, "n g m"]]) -> None:
        """Add the squared projections of a block of positions to `squares`.

        Args:
            block: the positions.
            projections: g_m·s at these positions, by the name of the set of directions.
        """
        for name in self.linear_directions:
            squares = projections[name].square().sum(1)
            if name not in self.squares:
                # Sums of a single direction take little memory, so they stay in double precision.
                is_single = squares.shape[1] == 1
                dtype = squares.dtype if is_single else at_least_float32(self.like).dtype
                self.squares[name] = torch.zeros(
                    self.shape[0],
                    squares.shape[1],
                    dtype=dtype,
                    device=squares.device,
                )
            self.squares[name][block] += squares.to(self.squares[name])
            if name == "classes":
                assert self.likeliest is not None
                self.likeliest_squares[block] += squares.gather(-1, self.likeliest[block])

    def _quadratic_sum(
        self,
        name: str,
        block: slice,
        projections: Mapping[str, Float[Tensor, "n g m"]],
    ) -> Float[Tensor, "g n"]:
        """Compute Σ_m w_m (g_m·s)² of a method for each tangent s, at a block of positions.

        Args:
            name: the name of the method.
            block: the positions.
            projections: g_m·s at these positions, by the name of the set of directions.
        """
        method = self.methods[name]
        assert self.own_logits is not None
        weights = method.weights_at(self.own_logits[block])
        return torch.einsum("tm,tgm->gt", weights, projections[method.direction].square())

    def _target_sum(
        self,
        targets: Int[Tensor, " n"],
        projections: Float[Tensor, "n g c"],
    ) -> Float[Tensor, " g"]:
        """Compute Σ_t g_{y_t}·s over a block of positions, for each tangent s.

        Args:
            targets: the true classes y_t at these positions; negative ones do not count.
            projections: g_c·s at these positions.
        """
        index = targets.clamp_min(0)[:, None, None].expand(-1, projections.shape[1], 1)
        of_targets = projections.gather(-1, index)[..., 0]
        return torch.where((targets >= 0)[:, None], of_targets, 0.0).sum(0)

    def scores(
        self,
        logits: Float[Tensor, "t c"],
    ) -> dict[str, tuple[Float[Tensor, " t"], Float[Tensor, " t"]]]:
        """Compute each score with its standard error from the sums over all tangents.

        The error of a sum of norms is NaN: it would need all projections at once.

        Args:
            logits: the logits of the input at all positions.

        Returns:
            Scores and errors at all positions, by the name of the method.
        """
        scores: dict[str, tuple[Tensor, Tensor]] = {}
        for name, method in self.methods.items():
            if method.power == 2:
                per_tangent = torch.stack(self.quadratic[name])  # [tangents, t]
                error = per_tangent.std(0) / len(per_tangent) ** 0.5
                scores[name] = per_tangent.mean(0), error
                continue
            value = self._sum_norms(method, logits)
            scores[name] = value, torch.full_like(value, torch.nan)
        return scores

    def _sum_norms(
        self,
        method: GradientScore,
        logits: Float[Tensor, "t c"],
    ) -> Float[Tensor, " t"]:
        """Estimate Σ_m w_m ‖g_m‖ of a method from `squares`, a block of positions at a time."""
        parts: list[Tensor] = []
        for block in blocks(*self.shape):
            squares = self.squares[method.direction][block].double()
            if method.direction == "classes":
                assert self.likeliest is not None
                # For the likeliest class there are squares in double precision.
                index = self.likeliest[block]
                squares = squares.scatter(-1, index, self.likeliest_squares[block])
            norms = unbiased_root(squares / self.tangents, self.tangents)
            parts.append(weighted_sum(norms, method.weights_at(logits[block])))
        return torch.cat(parts)

    def of_text(self) -> float | None:
        """Estimate ‖∇θ Σ_t log p(y_t)‖ / (the number of targets y_t); None without targets."""
        num_targets = 0 if self.targets is None else int((self.targets >= 0).sum())
        if num_targets == 0:
            return None
        mean_square = torch.stack(self.target_sums).square().mean()
        return float(unbiased_root(mean_square, self.tangents)) / num_targets
