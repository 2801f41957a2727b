"""Scores at every position of one input: positions take the place of inputs.

Scores of the logits alone read the logits of a block of positions at a time. Gradient scores
accumulate projections of gradients g_m on random tangents: Σ_m w_m ‖g_m‖ needs the squared
projections of all classes at all positions, Σ_m w_m ‖g_m‖² one number for each tangent and
position.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import slices
from qualms.gradients.directions import project_one_set
from qualms.gradients.engines.position_sketch import PositionProducts
from qualms.gradients.precision import at_least_float32
from qualms.gradients.settings import Smoothing
from qualms.gradients.sketching.projections import unbiased_root
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.gradient_score import GradientScore, weighted_sum
from qualms.methods.head import Head
from qualms.methods.method import LOGITS, Method

BLOCK_BYTES = 2**25  # the largest size of the projections that exist at once
DOUBLE_BYTES = 8  # of one number in float64
# Stands for a missing target, as `ignore_index` does in torch's losses.
NOWHERE = -100
# The smoothing and the λ that scores which share tangents have in common.
Group = tuple[Smoothing | None, float | None]


def require_positions(methods: Mapping[str, Method]) -> None:
    """Raise an error if a method cannot score the single positions of an input.

    Only gradient scores and scores of the logits alone can.

    Args:
        methods: the methods by name.
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
    """Compute the scores that need the logits alone, at every position.

    Args:
        methods: the methods by name; gradient scores are ignored.
        logits: the logits at t positions.
        model_context: the model, its settings and caches.

    Returns:
        A dict from the name of each method to its scores at all positions.
    """
    logit_methods = {name: m for name, m in methods.items() if not isinstance(m, GradientScore)}
    block_scores: dict[str, list[Tensor]] = {name: [] for name in logit_methods}
    for block in position_blocks(*logits.shape):
        context = _LogitsContext(model_context, logits[block])
        for name, method in logit_methods.items():
            block_scores[name].append(method.score(context))
    return {name: torch.cat(scores) for name, scores in block_scores.items()}


class _LogitsContext(BatchContext):
    """A context whose `batch` is the logits at some positions, which count as inputs.

    It runs no model, so it serves scores of the logits alone.
    """

    @cached_property
    def _plain_results(
        self,
    ) -> tuple[Float[Tensor, "t c"], Head | QualmsError]:
        """The batch itself, which is the logits; and an error, as positions have no head."""
        logits = self.batch
        assert isinstance(logits, Tensor)
        return logits, QualmsError("positions have no last layer of their own.")


def groups_of(
    methods: Mapping[str, Method],
) -> dict[Group, dict[str, GradientScore]]:
    """Group the gradient scores by smoothing and λ: scores that have both in common share tangents.

    Args:
        methods: the methods by name; those that are not gradient scores are ignored.

    Returns:
        A dict from each pair of smoothing and λ to the scores of this group by name.
    """
    groups: dict[Group, dict[str, GradientScore]] = {}
    for name, method in methods.items():
        if isinstance(method, GradientScore):
            groups.setdefault((method.smooth, method.layers), {})[name] = method
    return groups


def position_blocks(
    num_positions: int,
    num_classes: int,
    num_tangents: int = 1,
) -> list[slice]:
    """Split positions into blocks, each so small that its projections take 32 MiB at most.

    Args:
        num_positions: the number of positions.
        num_classes: the number of classes.
        num_tangents: the number of tangents that run at once.
    """
    bytes_per_position = DOUBLE_BYTES * num_classes * num_tangents
    return slices(num_positions, max(1, BLOCK_BYTES // bytes_per_position))


@dataclass
class TangentSums:
    """Accumulates, over random tangents s, what gradient scores at each position of one input need.

    J is the derivative of the logits with respect to the parameters. The engine yields J s for some
    tangents at a time. From it follow the projections g_m·s of the gradients g_m along m
    directions, from which the scores Σ_m w_m ‖g_m‖ and Σ_m w_m ‖g_m‖² are estimated.

    Axes: t positions (n in a block of them), g tangents that run at once, m directions, c classes.

    Attributes:
        methods: the scores by name; all have the same smoothing and λ.
        shape: the number of positions and the number of classes.
        rows: the number of rows, which are the input and its perturbed copies; projections are
            averaged over them before anything is squared.
        targets: the true class at each position, NOWHERE where there is none; None without targets.
        like: a tensor with the logits' dtype and device.
        tangents: the number of tangents added so far.
        squares: for scores with power 1, a dict from the name of a set of directions to the sum of
            the squared projections over all tangents, [t, m].
        quadratic: for scores with power 2, a dict from the name of the method to a list with
            Σ_m w_m (g_m·s)² at all positions, [t], for each tangent s.
        target_sums: Σ_t g_{y_t}·s for each tangent s, with y_t the target at position t.
        mean: a dict from the name of a set of directions to the projections of the tangents that
            now run, averaged over the rows, [t, g, m]; complete once the last row is added.
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
        """List the sets of directions to project on, and create the attributes derived from them."""
        names = [m.direction for m in self.methods.values()]
        if self.targets is not None:
            names.append("classes")
        self.directions = tuple(dict.fromkeys(names))
        self.linear_directions = {m.direction for m in self.methods.values() if m.power == 1}
        self.quadratic = {name: [] for name, m in self.methods.items() if m.power == 2}
        # The likeliest class of each position, [t, 1]; None before the first row is added.
        self.likeliest: Tensor | None = None
        # The sum of the squared projections for the likeliest class, in double precision: if the
        # model is certain of a class, its gradient may be 1e-26, whose square is zero in float32.
        self.likeliest_squares = self.like.new_zeros(self.shape[0], 1, dtype=torch.double)
        # The logits of the unperturbed input (row 0), which the weights of the scores depend on;
        # None before row 0 and after the last row.
        self.own_logits: Tensor | None = None

    @staticmethod
    def bytes_per_tangent(shape: tuple[int, int], rows: int) -> int:
        """Compute the bytes that are kept for each tangent while it runs: its mean projections.

        A single row needs no mean.

        Args:
            shape: the number of positions and the number of classes.
            rows: the number of rows, which are the input and its perturbed copies.
        """
        num_positions, num_classes = shape
        return DOUBLE_BYTES * num_positions * num_classes if rows > 1 else 0

    def add(self, products: PositionProducts) -> None:
        """Add the products J s of some tangents s, with J the derivative of the logits of one row.

        A row is the input (row 0) or a perturbed copy of it. The caller adds all rows of the same
        tangents one after the other, row 0 first. Projections are averaged over the rows; at the
        last row, the means are squared and added to the sums over tangents.

        Args:
            products: the products, with the index and the logits of the row.
        """
        if products.row == 0:
            self.own_logits = products.logits
            if self.likeliest is None:
                self.likeliest = products.logits.argmax(-1, keepdim=True)
        is_last_row = products.row == self.rows - 1
        num_tangents = len(products.tangents)
        quadratic_blocks: dict[str, list[Tensor]] = {name: [] for name in self.quadratic}
        target_sums = self.like.new_zeros(num_tangents, dtype=torch.double)
        for block in position_blocks(*self.shape, num_tangents):
            block_products = products.tangents[:, block].movedim(0, 1)  # [n, g, c]
            if not bool(torch.isfinite(block_products).all()):
                raise QualmsError(
                    "the sketch overflowed the range of the model's dtype; use float32, or pass a "
                    "few positions as positions= and use engine='exact'."
                )
            projections: dict[str, Tensor] = {}
            for direction in self.directions:
                projections[direction] = self._average_rows(
                    direction, block, products.logits[block], block_products
                )
            # The means are not complete before the last row.
            if not is_last_row:
                continue
            self._add_squares(block, projections)
            for name, sums in quadratic_blocks.items():
                sums.append(self._quadratic_sum(name, block, projections))
            if self.targets is not None:
                target_sums += self._target_sum(self.targets[block], projections["classes"])
        if is_last_row:
            self.tangents += num_tangents
            # The next tangents begin again with row 0.
            self.mean.clear()
            self.own_logits = None
            for name, sums in quadratic_blocks.items():
                self.quadratic[name] += list(torch.cat(sums, dim=1))
            self.target_sums += list(target_sums)

    def _average_rows(
        self,
        direction: str,
        block: slice,
        logits: Float[Tensor, "n c"],
        products: Float[Tensor, "n g c"],
    ) -> Float[Tensor, "n g m"]:
        """Add one row's projections to their mean over all rows, and return the mean so far.

        Each row adds 1/rows of its projections, so the mean is complete at the last row.

        Args:
            direction: the name of the set of m directions.
            block: n of the positions.
            logits: the logits of this row at the positions of the block.
            products: the products J s of this row with g tangents s, at the positions of the block.
        """
        row_projections = project_one_set(direction, logits[:, None], products)
        if self.rows == 1:
            return row_projections
        if direction not in self.mean:
            shape = (self.shape[0], *row_projections.shape[1:])
            self.mean[direction] = row_projections.new_zeros(shape)
        self.mean[direction][block] += row_projections / self.rows
        return self.mean[direction][block]

    def _add_squares(
        self,
        block: slice,
        projections: Mapping[str, Float[Tensor, "n g m"]],
    ) -> None:
        """Add up squared projections over tangents, for the norms in scores with power 1.

        Args:
            block: n of the positions.
            projections: a dict from the name of a set of m directions to the projections g_m·s of
                the gradients at these positions on g new tangents s.
        """
        for direction in self.linear_directions:
            squares = projections[direction].square().sum(1)  # [n, m]
            if direction not in self.squares:
                # Sums of a single direction take little memory, so they stay in double precision.
                is_single = squares.shape[1] == 1
                dtype = squares.dtype if is_single else at_least_float32(self.like).dtype
                self.squares[direction] = torch.zeros(
                    self.shape[0],
                    squares.shape[1],
                    dtype=dtype,
                    device=squares.device,
                )
            self.squares[direction][block] += squares.to(self.squares[direction])
            if direction == "classes":
                # Summed in double precision too, as tiny ones become zero in float32.
                assert self.likeliest is not None
                self.likeliest_squares[block] += squares.gather(-1, self.likeliest[block])

    def _quadratic_sum(
        self,
        name: str,
        block: slice,
        projections: Mapping[str, Float[Tensor, "n g m"]],
    ) -> Float[Tensor, "g n"]:
        """Compute Σ_m w_m (g_m·s)² of a method for each tangent s, at a block of positions.

        w_m are the method's weights of the m directions.

        Args:
            name: the name of the method.
            block: n of the positions.
            projections: a dict from the name of a set of m directions to the projections g_m·s of
                the gradients at these positions on g tangents s.
        """
        method = self.methods[name]
        assert self.own_logits is not None
        weights = method.weights_at(self.own_logits[block])
        return torch.einsum("nm,ngm->gn", weights, projections[method.direction].square())

    def _target_sum(
        self,
        targets: Int[Tensor, " n"],
        projections: Float[Tensor, "n g c"],
    ) -> Float[Tensor, " g"]:
        """Sum the projections of the targets' gradients over a block of positions, for each tangent.

        Args:
            targets: the true class at each of n positions; negative where there is none, which adds
                nothing to the sum.
            projections: the projections of the gradients of all classes on g tangents.
        """
        # Class 0 stands in where there is no target, so that `gather` gets valid indices.
        index = targets.clamp_min(0)[:, None, None].expand(-1, projections.shape[1], 1)
        target_projections = projections.gather(-1, index)[..., 0]  # [n, g]
        return torch.where((targets >= 0)[:, None], target_projections, 0.0).sum(0)

    def scores(
        self,
        logits: Float[Tensor, "t c"],
    ) -> dict[str, tuple[Float[Tensor, " t"], Float[Tensor, " t"]]]:
        """Compute each score with its standard error from the sums over all tangents.

        The error of a sum of norms is NaN, for unknown: it would need all projections at once.

        Args:
            logits: the logits of the input at all positions.

        Returns:
            A dict from the name of each method to its scores and their errors at all positions.
        """
        scores: dict[str, tuple[Tensor, Tensor]] = {}
        for name, method in self.methods.items():
            if method.power == 2:
                per_tangent = torch.stack(self.quadratic[name])  # [tangents, t]
                error = per_tangent.std(0) / len(per_tangent) ** 0.5
                scores[name] = per_tangent.mean(0), error
            else:
                values = self._sum_norms(method, logits)
                scores[name] = values, torch.full_like(values, torch.nan)
        return scores

    def _sum_norms(
        self,
        method: GradientScore,
        logits: Float[Tensor, "t c"],
    ) -> Float[Tensor, " t"]:
        """Estimate Σ_m w_m ‖g_m‖ at every position, from the sums of squared projections.

        Args:
            method: a score with power 1, which gives the weights w_m.
            logits: the logits of the input at all positions.
        """
        block_sums: list[Tensor] = []
        for block in position_blocks(*self.shape):
            squares = self.squares[method.direction][block].double()
            if method.direction == "classes":
                assert self.likeliest is not None
                # For the likeliest class there are sums in double precision.
                index = self.likeliest[block]
                squares = squares.scatter(-1, index, self.likeliest_squares[block])
            norms = unbiased_root(squares / self.tangents, self.tangents)
            block_sums.append(weighted_sum(norms, method.weights_at(logits[block])))
        return torch.cat(block_sums)

    def text_norm(self) -> float | None:
        """Estimate ‖∇θ Σ_t log p(y_t)‖ / (number of targets), y_t the target at position t.

        Returns:
            One number for the whole input; None without targets.
        """
        # Targets are negative at positions that have none.
        num_targets = 0 if self.targets is None else int((self.targets >= 0).sum())
        if num_targets == 0:
            return None
        mean_square = torch.stack(self.target_sums).square().mean()
        return float(unbiased_root(mean_square, self.tangents)) / num_targets
