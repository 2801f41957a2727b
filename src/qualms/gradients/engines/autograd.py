"""Plain autograd, one sample at a time: exact whatever the model does, and slow.

Each gradient is reduced to its norms before the next one is computed, so that the gradients of all
C classes never exist at once. The graphs of a sample's rows are kept as far as memory allows; the
others are built again for every direction.
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

# How often a gradient may be computed, where the gradients of all directions do not fit at once.
MAX_REPEATS = 8
# The gradient along one direction: for each parameter's name its entries [p], flattened.
Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class AutogradPlan:
    """The memory of one row, and the order in which the model uses its parameters.

    Attributes:
        row_bytes: the bytes that autograd saves for one row.
        use_order: the order in which the forward pass uses the parameters.
    """

    row_bytes: int
    use_order: UseOrder


class AutogradEngine:
    """Computes gradients by plain autograd, one sample after the other.

    Args:
        cache: the plans of the model; unused, all engines are created with it.
    """

    def __init__(self, cache: PlanCache) -> None:
        self.cache = cache

    def plan(self, request: GradientRequest) -> AutogradPlan:
        """Measure the memory of the first row, and find the order of the parameters."""
        first = request.make_rows(slice(0, 1))
        row_bytes = graph_bytes(request, first.take([0]))
        return AutogradPlan(row_bytes, use_order(request.model, first, request.selected))

    def run(self, plan: AutogradPlan, request: GradientRequest) -> ClassNorms:
        """Compute the norms, or inner products, of all samples, one sample at a time.

        Args:
            plan: what `plan` returned for this request.
            request: what to compute.
        """
        parts: list[ClassNorms] = []
        for index in slices(request.num_samples, 1):
            sample = request.with_directions_of(index)
            parts.append(plain_autograd(sample, request.make_rows(index), plan.row_bytes))
        return add_unused_parameters(ClassNorms.concatenate(parts), request, plan.use_order)


def add_unused_parameters(
    norms: ClassNorms,
    request: GradientRequest,
    order: UseOrder,
) -> ClassNorms:
    """Add zeros for selected parameters that no sample uses, and sort by the model's order.

    Args:
        norms: the norms, or inner products, of the request's samples; changed in place.
        request: the request, whose `selected` parameters are wanted.
        order: the order in which the forward pass uses the parameters.

    Returns:
        `norms` itself.
    """
    number = request.directions.num_directions(norms.logits.shape[1])
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
    """Compute norms, or inner products, of each sample's gradients, one sample at a time.

    This is plain autograd without any tracing. A sample's gradients are averaged over its rows (the
    sample and its perturbed copies) before the norm is taken.

    Args:
        request: the request; its directions are those of the samples in `model_input`, which may
            be a part of its batch.
        model_input: the rows of the samples.
        row_bytes: the bytes that autograd saves for one row.

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
    """Measure the bytes that autograd saves in a forward pass over one row, without parameters."""
    constants = {p.untyped_storage().data_ptr() for p in request.model.parameters()}
    with all_parameters_differentiable(request.model), saved_bytes(constants) as total:
        forward_logits(request.model, row)
    return total[0]


def _measure(graphs: "SampleGraphs", gradient_bytes: int) -> dict[str, Tensor]:
    """Compute norms [1, m], or inner products [1, m, m], of one sample's gradients.

    Args:
        graphs: the rows of the sample, and the request.
        gradient_bytes: the bytes of all parameters' gradients along one direction.
    """
    if graphs.request.gram:
        return _inner_products(graphs, _count_held(graphs, gradient_bytes))
    return _norms(graphs)


def _norms(graphs: "SampleGraphs") -> dict[str, Float[Tensor, "1 m"]]:
    """Compute ‖g‖ or Σ|g| of one sample along all m directions, by the parameter's name."""
    kind = graphs.request.kind
    values: dict[str, Tensor] = {}
    for j, (gradient, scale) in enumerate(graphs.gradients()):
        for name, g in gradient.items():
            if name not in values:
                values[name] = scale.new_zeros(1, graphs.directions.num_directions)
            values[name][0, j] = norm_of(g[None], kind)[0] * scale
    return values


def _count_held(graphs: "SampleGraphs", gradient_bytes: int) -> int:
    """How many of a sample's gradients are held in memory at once for their inner products.

    Args:
        graphs: the rows of the sample, and the request.
        gradient_bytes: the bytes of all parameters' gradients along one direction.

    Raises:
        QualmsError: if so few fit that a gradient would be computed more than `MAX_REPEATS` times.
    """
    number, room = graphs.directions.num_directions, graphs.request.budget // 2
    fewest = -(-number // MAX_REPEATS)
    require_room(fewest * gradient_bytes, room, f"{fewest} of {number} gradients of one input")
    return max(1, room // gradient_bytes)


def _inner_products(
    graphs: "SampleGraphs",
    held: int,
) -> dict[str, Float[Tensor, "1 m m"]]:
    """Compute ⟨g_i, g_j⟩ for all pairs of directions of one sample, a block of i at a time.

    Each block is multiplied with the gradients j from its start on, which are computed again for
    every block. Earlier j are known by symmetry.

    Args:
        graphs: the rows of the sample.
        held: the number of gradients in a block.

    Returns:
        The inner products by the parameter's name; a parameter that no gradient depends on is
        missing.
    """
    number = graphs.directions.num_directions
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
    """A block of gradients held in memory, whose inner products with others are computed.

    Each is divided by its largest entry: without the division, products of two gradients may
    underflow or overflow in float32.

    Args:
        start: the index of the block's first direction.
        size: the number of directions in the block.
    """

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        # By the parameter's name: the divided gradients [size, p], and their largest entries [size].
        self.rows: dict[str, Tensor] = {}
        self.units: dict[str, Tensor] = {}
        # What each gradient has to be multiplied by, as in `multiply`.
        self.scales: list[Tensor] = []

    def multiply(
        self,
        number: int,
        gradient: Gradient,
        scale: Float[Tensor, ""],
    ) -> dict[str, Float[Tensor, " n"]]:
        """Compute the inner products of a gradient with those held; hold it too if there is room.

        A gradient that is held is among those that it is multiplied with.

        Args:
            number: the index of the gradient's direction.
            gradient: the flat gradient [p] of each parameter, by name.
            scale: the number that the gradient has to be multiplied by; the caller's cotangents are
                scaled to a size near 1.

        Returns:
            For each parameter the inner products [n] with the n gradients held, in float64.
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
            normalized, unit = g / torch.where(largest > 0, largest, 1.0), largest.double()
            if is_held:
                rows[number - self.start], units[number - self.start] = normalized, unit
            products[name] = (rows[:count] @ normalized) * units[:count] * unit * scales * scale
        return products


class SampleGraphs:
    """The rows of one sample, run one at a time; the graphs of the first rows are kept.

    Each row is run twice when this is made: its logits must be the same. `logits` are those of all
    rows, `directions` the cotangents at these logits.

    Args:
        request: the request; its directions are those of this sample.
        rows: the rows of the sample.
        kept_rows: the number of graphs that fit into memory; one is always kept.

    Raises:
        QualmsError: if a second run of a row gives other logits.
    """

    def __init__(
        self,
        request: GradientRequest,
        rows: ModelInput,
        kept_rows: int,
    ) -> None:
        self.request, self.rows = request, rows
        # Logits that lead back to the parameters.
        self._graphs: list[Tensor] = []
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
        self.directions = request.directions.cotangents_at(self.logits[None])

    def gradients(self, start: int = 0) -> Iterator[tuple[Gradient, Float[Tensor, ""]]]:
        """Yield (g, s) for each direction from index `start` on; the gradient along it is s·g.

        g is the sum over the sample's rows; s·g is their mean, as cotangents are divided by the
        number of rows. Rows whose graph was not kept run again for each direction.
        """
        for cotangent, scale in islice(self._cotangents(), start, None):
            total: Gradient = {}
            for row, v in enumerate(cotangent.to(self.logits.dtype)):
                self._add_row(total, row, v)
            yield total, scale

    def _cotangents(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the cotangent [r, c] of each direction, and the scale that it was divided by."""
        for block, scales in self.directions.blocks():
            yield from zip(block, scales[:, 0], strict=True)

    def _add_row(
        self,
        total: Gradient,
        row: int,
        cotangent: Float[Tensor, " c"],
    ) -> None:
        """Add one row's gradient along a cotangent to `total`, which changes in place.

        Args:
            total: the sum so far; parameters that no row depended on are missing.
            row: the index of the row.
            cotangent: the entries of the direction for this row.
        """
        graph = self._graphs[row] if row < len(self._graphs) else self._graph(row)
        selected = self.request.selected
        gradients = gradients_of(graph, list(selected.values()), cotangent[None])
        for name, g in zip(selected, gradients, strict=True):
            if g is not None:
                flat = at_least_float32(g).reshape(-1)
                total[name] = total[name] + flat if name in total else flat

    def _graph(self, row: int) -> Tensor:
        """Run one row, and return its logits [1, c] with their graph."""
        with all_parameters_differentiable(self.request.model):
            logits = forward_logits(self.request.model, self.rows.take([row]))
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        return logits
