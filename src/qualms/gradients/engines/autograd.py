"""Plain autograd, one sample at a time: exact whatever the model does, and slow.

Each gradient is reduced to its norms before the next one is computed, so that the gradients of all
classes never exist at once. The graphs of a sample's rows are kept as far as memory allows; those of
further rows are built again for every direction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.gradients.batch import num_samples, slices
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.measure import norm_of
from qualms.gradients.memory import require_room, saved_bytes
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import check_repeatable, gradients_of, require_differentiable
from qualms.gradients.tracing.param_use import UseOrder
from qualms.gradients.tracing.traced_forward import use_order

# How often a gradient may be computed, where the gradients of all directions do not fit at once.
MAX_REPEATS = 8
# The gradient along one direction: a dict from each parameter's name to its p entries, flat [p].
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
    """Computes gradients by plain autograd, one sample after the other."""

    def plan(self, request: GradientRequest) -> AutogradPlan:
        """Measure the memory of the first row, and find the order in which parameters are used."""
        first_sample = request.make_rows(slice(0, 1))
        row_bytes = measure_graph_bytes(request, first_sample.take([0]))
        order = use_order(request.model, first_sample, request.selected)
        return AutogradPlan(row_bytes, order)

    def run(self, plan: AutogradPlan, request: GradientRequest) -> ClassNorms:
        """Compute the norms, or inner products, of all samples, one sample at a time.

        Args:
            plan: what `plan` returned for this request.
            request: the samples, and which of their gradients to compute.
        """
        norms_of_samples: list[ClassNorms] = []
        for one_sample in slices(request.num_samples, 1):
            sample_request = request.with_directions_of(one_sample)
            rows = request.make_rows(one_sample)
            norms_of_samples.append(plain_autograd(sample_request, rows, plan.row_bytes))
        norms = ClassNorms.concatenate(norms_of_samples)
        return add_unused_parameters(norms, request, plan.use_order)


def add_unused_parameters(
    norms: ClassNorms,
    request: GradientRequest,
    order: UseOrder,
) -> ClassNorms:
    """Add zeros for selected parameters that no sample uses, and sort parameters by first use.

    Args:
        norms: the norms, or inner products, of the request's samples; changed in place.
        request: the request, whose `selected` parameters are wanted.
        order: the order in which the forward pass uses the parameters.

    Returns:
        `norms` itself.
    """
    num_directions = request.directions.num_directions(norms.logits.shape[1])
    shape: tuple[int, ...] = (request.num_samples, num_directions)
    # Inner products are a matrix for each sample.
    if request.gram:
        shape = (*shape, num_directions)
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

    No tracing is involved. A sample's gradients are averaged over its rows (the sample and its
    perturbed copies) before the norm is taken.

    Args:
        request: the request; its directions are those of the samples in `model_input`, which may
            be a part of its batch.
        model_input: the rows of the samples.
        row_bytes: the bytes that autograd saves for one row.

    Raises:
        QualmsError: if one row and one of its gradients do not fit into memory.
    """
    gradient_bytes = 0
    for p in request.selected.values():
        gradient_bytes += at_least_float32(p.detach()).nbytes
    # A kept graph and that of the row that runs; the sum of gradients and the one to add.
    needed = 2 * row_bytes + 2 * gradient_bytes
    require_room(needed, request.limit, "the graph of one row and one of its gradients")
    # Kept graphs may take half of the budget.
    num_kept_graphs = request.budget // 2 // max(1, row_bytes)
    rows_per_sample = model_input.rows_per_sample
    norms_of_samples: list[ClassNorms] = []
    for i in range(num_samples(model_input.batch) // rows_per_sample):
        rows = model_input.take(slice(i * rows_per_sample, (i + 1) * rows_per_sample))
        sample_request = request.with_directions_of(slice(i, i + 1))
        graphs = SampleGraphs(sample_request, rows, num_kept_graphs)
        norms_of_samples.append(
            ClassNorms(
                values=_measure_sample(graphs, gradient_bytes),
                # Of row 0, the sample itself; the slice keeps the sample axis.
                logits=graphs.logits[:1],
                without_rule=set(request.selected),
            )
        )
    return ClassNorms.concatenate(norms_of_samples)


def measure_graph_bytes(request: GradientRequest, row: ModelInput) -> int:
    """Measure the bytes that autograd saves in a forward pass over one row, besides parameters."""
    parameter_storages = {p.untyped_storage().data_ptr() for p in request.model.parameters()}
    with (
        all_parameters_differentiable(request.model),
        saved_bytes(parameter_storages) as total_in_list,
    ):
        forward_logits(request.model, row)
    return total_in_list[0]


def _measure_sample(graphs: "SampleGraphs", gradient_bytes: int) -> dict[str, Tensor]:
    """Compute norms [1, m], or inner products [1, m, m], of one sample's gradients by parameter.

    m is the number of directions.

    Args:
        graphs: the rows of the sample, and the request.
        gradient_bytes: the bytes of all parameters' gradients along one direction.
    """
    if graphs.request.gram:
        block_size = _count_gradients_that_fit(graphs, gradient_bytes)
        return _compute_inner_products(graphs, block_size)
    return _compute_norms(graphs)


def _compute_norms(graphs: "SampleGraphs") -> dict[str, Float[Tensor, "1 m"]]:
    """Compute ‖g‖ or Σ|g| of one sample along all m directions, by the parameter's name."""
    kind = graphs.request.kind
    values: dict[str, Tensor] = {}
    for j, (gradient, scale) in enumerate(graphs.compute_gradients()):
        for name, g in gradient.items():
            if name not in values:
                values[name] = scale.new_zeros(1, graphs.directions.num_directions)
            # `norm_of` takes a batch of gradients; this is a batch of one.
            (norm,) = norm_of(g[None], kind)
            values[name][0, j] = norm * scale
    return values


def _count_gradients_that_fit(graphs: "SampleGraphs", gradient_bytes: int) -> int:
    """How many gradients of a sample fit into memory at once, to compute their inner products.

    They may take half of the budget.

    Args:
        graphs: the rows of the sample, and the request.
        gradient_bytes: the bytes of all parameters' gradients along one direction.

    Raises:
        QualmsError: if so few fit that a gradient would be computed more than `MAX_REPEATS` times.
    """
    num_directions = graphs.directions.num_directions
    max_bytes = graphs.request.budget // 2
    fewest = -(-num_directions // MAX_REPEATS)  # rounded up
    needs = f"{fewest} of {num_directions} gradients of one input"
    require_room(fewest * gradient_bytes, max_bytes, needs)
    return max(1, max_bytes // gradient_bytes)


def _compute_inner_products(
    graphs: "SampleGraphs",
    block_size: int,
) -> dict[str, Float[Tensor, "1 m m"]]:
    """Compute ⟨g_i, g_j⟩ for all pairs i, j of the m directions of one sample.

    A block of gradients g_i is held in memory while the gradients g_j, for j from the start of the
    block on, are computed one after the other. Products with earlier j follow by symmetry.

    Args:
        graphs: the rows of the sample.
        block_size: the largest number of gradients in a block.

    Returns:
        The inner products by the parameter's name. Parameters that the logits do not depend on are
        missing.
    """
    m = graphs.directions.num_directions
    values: dict[str, Tensor] = {}
    for start in range(0, m, block_size):
        block = _GradientBlock(start, min(block_size, m - start))
        for j, (gradient, scale) in enumerate(graphs.compute_gradients(start), start):
            for name, products in block.add_and_multiply(j, gradient, scale).items():
                if name not in values:
                    values[name] = products.new_zeros(1, m, m)
                # The products with gradients `start` to `stop - 1`; the matrix is symmetric.
                stop = start + len(products)
                values[name][0, start:stop, j] = products
                values[name][0, j, start:stop] = products
    return values


class _GradientBlock:
    """A block of gradients held in memory, to compute their inner products with other gradients.

    Each gradient is divided by its largest absolute entry: without the division, products of two
    gradients may underflow or overflow in float32.

    Args:
        start: the index of the block's first direction.
        size: the number of directions in the block.
    """

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size
        # For each parameter's name the gradients [size, p], divided by their largest absolute entry.
        self.normalized: dict[str, Tensor] = {}
        # For each parameter's name the largest absolute entry [size] of each gradient.
        self.maxima: dict[str, Tensor] = {}
        # The factor `scale` of each gradient that the block holds so far, in order.
        self.scales: list[Tensor] = []

    def add_and_multiply(
        self,
        index: int,
        gradient: Gradient,
        scale: Float[Tensor, ""],
    ) -> dict[str, Float[Tensor, " n"]]:
        """Add a gradient to the block if there is room; compute its inner products with the block.

        Gradients come in order: the first `size` of them fill the block, later ones are only
        multiplied with it.

        Args:
            index: the index of the gradient's direction.
            gradient: the flat gradient [p] of each parameter, by name.
            scale: a factor that is still missing from `gradient`.

        Returns:
            For each parameter the inner products [n] with the n gradients in the block, in float64.
        """
        joins_block = len(self.scales) < self.size
        if joins_block:
            self.scales.append(scale)
        scales = torch.stack(self.scales)
        n = len(scales)
        products: dict[str, Tensor] = {}
        for name, g in gradient.items():
            if name not in self.normalized:
                self.normalized[name] = g.new_zeros(self.size, len(g))
                self.maxima[name] = scale.new_zeros(self.size)
            largest = torch.linalg.vector_norm(g, torch.inf)
            # Otherwise products of gradients might underflow or overflow in float32.
            g_normalized = g / torch.where(largest > 0, largest, 1.0)
            if joins_block:
                self.normalized[name][index - self.start] = g_normalized
                self.maxima[name][index - self.start] = largest.double()
            product = self.normalized[name][:n] @ g_normalized
            # In float64: multiply by what the gradients on both sides were divided by.
            maxima = self.maxima[name][:n]
            products[name] = product * maxima * largest.double() * scales * scale
        return products


class SampleGraphs:
    """The rows of one sample, run one at a time; the autograd graphs of the first rows are kept.

    The constructor runs each row twice, and compares the logits of the two runs.

    Args:
        request: the request; its directions are those of this sample.
        rows: the r rows of the sample.
        num_kept_graphs: the number of graphs that fit into memory; at least one is kept.

    Attributes:
        logits: the logits [r, c] of all rows, without graph.
        directions: the directions of the request at these logits, as cotangents.

    Raises:
        QualmsError: if a second run of a row gives other logits.
    """

    def __init__(
        self,
        request: GradientRequest,
        rows: ModelInput,
        num_kept_graphs: int,
    ) -> None:
        self.request, self.rows = request, rows
        # The logits [1, c] of each of the first rows, with their autograd graph.
        self._kept_logits: list[Tensor] = []
        logits: list[Tensor] = []
        for i in range(num_samples(rows.batch)):
            # One graph is always kept: `plain_autograd` has made sure that it fits.
            if i < max(1, num_kept_graphs):
                self._kept_logits.append(self._run_row(i))
                logits.append(self._kept_logits[-1].detach())
            else:
                with torch.no_grad():
                    logits.append(forward_logits(request.model, rows.take([i])))
        self.logits = torch.cat(logits)
        for i, z in enumerate(self.logits):
            check_repeatable(request.model, rows.take([i]), z[None])
        # `cotangents_at` takes logits [samples, rows, classes]; this is one sample.
        self.directions = request.directions.cotangents_at(self.logits[None])

    def compute_gradients(self, start: int = 0) -> Iterator[tuple[Gradient, Float[Tensor, ""]]]:
        """Yield (g, s) for each direction from index `start` on: the sample's gradient is s·g.

        It is the mean over the rows, computed as a sum: cotangents are divided by the number of
        rows. Rows whose graph was not kept run again for each direction.
        """
        for cotangent, scale in islice(self._iterate_cotangents(), start, None):
            total: Gradient = {}
            for i, v in enumerate(cotangent.to(self.logits.dtype)):
                self._add_gradient_of_row(total, i, v)
            yield total, scale

    def _iterate_cotangents(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the cotangent [r, c] of each direction, and the scale that it was divided by."""
        for block, scales in self.directions.blocks():
            # `scales` has a column for each sample; this is the only sample.
            yield from zip(block, scales[:, 0], strict=True)

    def _add_gradient_of_row(
        self,
        total: Gradient,
        index: int,
        cotangent: Float[Tensor, " c"],
    ) -> None:
        """Add one row's gradient along a cotangent to `total`, which is changed in place.

        Args:
            total: the sum so far, by the parameter's name. Parameters that the logits of no row so
                far depend on are missing.
            index: the index of the row.
            cotangent: the entries of the direction for the row's c logits.
        """
        is_kept = index < len(self._kept_logits)
        logits = self._kept_logits[index] if is_kept else self._run_row(index)
        selected = self.request.selected
        gradients = gradients_of(logits, list(selected.values()), cotangent[None])
        for name, g in zip(selected, gradients, strict=True):
            # None: the logits of this row do not depend on the parameter.
            if g is not None:
                flat = at_least_float32(g).reshape(-1)
                total[name] = total[name] + flat if name in total else flat

    def _run_row(self, index: int) -> Tensor:
        """Run the row with this index, and return its logits [1, c] with their autograd graph."""
        with all_parameters_differentiable(self.request.model):
            logits = forward_logits(self.request.model, self.rows.take([index]))
        require_differentiable(logits)
        return logits
