"""Plain autograd, one sample at a time: exact whatever the model does, and slow.

Each gradient is reduced to its norms before the next one is computed, so that C of them never exist
at once. Graphs of a sample's rows are kept as far as there is room, and made again for every
direction where there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples, slices
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.measure import norm_of
from qualms.gradients.memory import require_room, saved_bytes
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import NO_PATH, check_repeatable, gradients_of
from qualms.gradients.tracing.param_use import UseOrder
from qualms.gradients.tracing.traced_forward import use_order

# Times that a gradient is computed at most, where those of all directions do not fit at once.
MAX_REPEATS = 8
Gradient = dict[str, Tensor]  # along one direction, flat, by the parameter's name


@dataclass(frozen=True)
class AutogradPlan:
    """What plain autograd needs to know.

    Attributes:
        row_bytes: what autograd keeps for one row.
        use_order: the order in which the forward pass uses the parameters.
    """

    row_bytes: int
    use_order: UseOrder


class AutogradEngine:
    """Computes the gradients of one sample after the other.

    Args:
        cache: of the model.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> AutogradPlan:
        """Size the work by the first row."""
        first = request.rows(slice(0, 1))
        row_bytes = graph_bytes(request, first.take([0]))
        return AutogradPlan(row_bytes, use_order(request.model, first, request.selected))

    def run(self, plan: AutogradPlan, request: GradientRequest) -> ClassNorms:
        """The norms of all samples."""
        parts: list[ClassNorms] = []
        for one in slices(request.num_samples, 1):
            sample = request.with_directions_of(one)
            parts.append(plain_autograd(sample, request.rows(one), plan.row_bytes))
        return add_unused_parameters(ClassNorms.concatenate(parts), request, plan.use_order)


def add_unused_parameters(
    norms: ClassNorms,
    request: GradientRequest,
    order: UseOrder,
) -> ClassNorms:
    """The same norms with all parameters that count, in the model's order.

    A parameter that no sample here uses has norm zero.

    Args:
        norms: of the samples of the request.
        request: whose parameters count.
        order: in which the forward pass uses them.
    """
    number = request.directions.size(norms.logits.shape[1])
    shape: tuple[int, ...] = (request.num_samples, number)
    if request.gram:
        shape = (*shape, number)
    zeros = torch.zeros(shape, dtype=torch.double, device=norms.logits.device)
    values: dict[str, Tensor] = {}
    for name in order.relevant(norms.values, request.selected):
        values[name] = norms.values.get(name, zeros)
    norms.values = values
    return norms


def plain_autograd(
    request: GradientRequest,
    model_input: ModelInput,
    row_bytes: int,
) -> ClassNorms:
    """The norms of the gradients of each sample, averaged over its rows.

    Args:
        request: the directions are those of these samples.
        model_input: the rows of the samples.
        row_bytes: what autograd keeps for one row.

    Raises:
        QualmsError: if one row and one of its gradients do not fit into memory.
    """
    gradient_bytes = sum(at_least_float32(p.detach()).nbytes for p in request.selected.values())
    needed = 2 * row_bytes + 2 * gradient_bytes
    require_room(needed, request.limit, "the graph of one row and one of its gradients")
    kept_rows = request.budget // 2 // max(1, row_bytes)
    rows = model_input.rows_per_sample
    parts: list[ClassNorms] = []
    for i in range(num_samples(model_input.batch) // rows):
        sample = model_input.take(slice(i * rows, (i + 1) * rows))
        graphs = SampleGraphs(request.with_directions_of(slice(i, i + 1)), sample, kept_rows)
        values = _measure(graphs, gradient_bytes)
        parts.append(ClassNorms(values, graphs.logits[:1], set(request.selected)))
    return ClassNorms.concatenate(parts)


def graph_bytes(request: GradientRequest, row: ModelInput) -> int:
    """What autograd keeps for one row."""
    constants = {p.untyped_storage().data_ptr() for p in request.model.parameters()}
    with all_parameters_differentiable(request.model), saved_bytes(constants) as total:
        forward_logits(request.model, row)
    return total[0]


def _measure(graphs: "SampleGraphs", gradient_bytes: int) -> dict[str, Tensor]:
    if graphs.request.gram:
        return _inner_products(graphs, _count_held(graphs, gradient_bytes))
    return _norms(graphs)


def _norms(graphs: "SampleGraphs") -> dict[str, Float[Tensor, "1 m"]]:
    kind = graphs.request.kind
    values: dict[str, Tensor] = {}
    for j, (gradient, scale) in enumerate(graphs.gradients()):
        for name, g in gradient.items():
            if name not in values:
                values[name] = scale.new_zeros(1, graphs.directions.number)
            values[name][0, j] = norm_of(g[None], kind)[0] * scale
    return values


def _count_held(graphs: "SampleGraphs", gradient_bytes: int) -> int:
    """How many gradients of a sample are held at once for their inner products.

    Raises:
        QualmsError: if so few fit that each would be computed too often.
    """
    number, room = graphs.directions.number, graphs.request.budget // 2
    fewest = -(-number // MAX_REPEATS)
    require_room(fewest * gradient_bytes, room, f"{fewest} of {number} gradients of one input")
    return max(1, room // gradient_bytes)


def _inner_products(
    graphs: "SampleGraphs",
    held: int,
) -> dict[str, Float[Tensor, "1 m m"]]:
    """⟨g_i, g_j⟩, a block of i at a time.

    Where the blocks do not all fit, the gradients after a block are computed again.

    Args:
        graphs: of one sample.
        held: how many gradients are held at once.
    """
    number = graphs.directions.number
    values: dict[str, Tensor] = {}
    for start in range(0, number, held):
        block = _HeldGradients(start, min(held, number - start))
        for j, (gradient, scale) in enumerate(graphs.gradients(start), start):
            for name, products in block.multiply(j, gradient, scale).items():
                if name not in values:
                    values[name] = products.new_zeros(1, number, number)
                stop = start + len(products)
                values[name][0, start:stop, j] = products
                values[name][0, j, start:stop] = products
    return values


class _HeldGradients:
    """A block of gradients, each divided by its largest entry.

    The products of two may not fit 32 bits.

    Args:
        start: the number of the first direction.
        size: how many directions there are in the block.
    """

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        self.rows: dict[str, Tensor] = {}  # [size, p]
        self.units: dict[str, Tensor] = {}  # the largest entries [size]
        self.scales: list[Tensor] = []

    def multiply(
        self,
        number: int,
        gradient: Gradient,
        scale: Float[Tensor, ""],
    ) -> dict[str, Float[Tensor, " n"]]:
        """Inner products of a gradient with those held so far; it is held if it is in the block.

        Args:
            number: of its direction.
            gradient: by the parameter's name.
            scale: what the gradient is to be multiplied with.
        """
        is_held = len(self.scales) < self.size
        if is_held:
            self.scales.append(scale)
        scales = torch.stack(self.scales)
        count = len(scales)
        products: dict[str, Tensor] = {}
        for name, g in gradient.items():
            if name not in self.rows:
                self.rows[name] = g.new_zeros(self.size, len(g))
                self.units[name] = scale.new_zeros(self.size)
            rows, units = self.rows[name], self.units[name]
            largest = torch.linalg.vector_norm(g, torch.inf)
            one, unit = g / torch.where(largest > 0, largest, 1.0), largest.double()
            if is_held:
                rows[number - self.start], units[number - self.start] = one, unit
            products[name] = (rows[:count] @ one) * units[:count] * unit * scales * scale
        return products


class SampleGraphs:
    """The rows of one sample, run one at a time; the graphs of the first rows are kept.

    Args:
        request: the directions are those of this sample.
        rows: of the sample.
        kept_rows: how many graphs fit into memory.
    """

    def __init__(
        self,
        request: GradientRequest,
        rows: ModelInput,
        kept_rows: int,
    ) -> None:
        self.request, self.rows = request, rows
        self._graphs: list[Tensor] = []  # logits that lead back to the parameters
        logits: list[Tensor] = []
        for row in range(num_samples(rows.batch)):
            if row < max(1, kept_rows):
                self._graphs.append(self._graph(row))
                logits.append(self._graphs[-1].detach())
            else:
                with torch.no_grad():
                    logits.append(forward_logits(request.model, rows.take([row])))
        self.logits = torch.cat(logits)
        for row, z in enumerate(self.logits):
            check_repeatable(request.model, rows.take([row]), z[None])
        self.directions = request.directions.along(self.logits[None])

    def gradients(self, start: int = 0) -> Iterator[tuple[Gradient, Float[Tensor, ""]]]:
        """g and s of each direction from number `start` on: the gradient along it is s g."""
        for cotangent, scale in islice(self._cotangents(), start, None):
            total: Gradient = {}
            for row, v in enumerate(cotangent.to(self.logits.dtype)):
                self._add_row(total, row, v)
            yield total, scale

    def _cotangents(self) -> Iterator[tuple[Tensor, Tensor]]:
        for block, scales in self.directions.blocks():
            yield from zip(block, scales[:, 0], strict=True)

    def _add_row(
        self,
        total: Gradient,
        row: int,
        cotangent: Float[Tensor, " c"],
    ) -> None:
        graph = self._graphs[row] if row < len(self._graphs) else self._graph(row)
        selected = self.request.selected
        found = gradients_of(graph, list(selected.values()), cotangent[None])
        for name, g in zip(selected, found, strict=True):
            if g is not None:
                flat = at_least_float32(g).reshape(-1)
                total[name] = total[name] + flat if name in total else flat

    def _graph(self, row: int) -> Tensor:
        with all_parameters_differentiable(self.request.model):
            logits = forward_logits(self.request.model, self.rows.take([row]))
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        return logits
