"""The general path for a whole model: exact whatever it does, at the price of one row at a time.

Each gradient is reduced to its norms before the next one is computed, so that C of them never exist
at once. Graphs of an input's rows are kept as far as there is room, and made again for every
direction where there is none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import num_samples
from qualms.gradients.engines.base import ClassNorms
from qualms.gradients.isolation import all_parameters_differentiable
from qualms.gradients.measure import Kind, norm_of
from qualms.gradients.memory import require_room, saved_bytes
from qualms.gradients.model_input import ModelInput, forward_logits
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.single_sample import NO_PATH, gradients_of, require_repeatable

REPEATS = (
    8  # times that a gradient is computed at most, where those of all directions do not fit at once
)
Gradient = dict[str, Tensor]  # along one direction, flat, by the parameter's name


def plain_autograd(
    job: GradientRequest, on: ModelInput, kind: Kind, row_bytes: int | None = None
) -> ClassNorms:
    """Every input of these rows, its gradients averaged over its own; `row_bytes` is what autograd
    keeps for a row.
    """
    if row_bytes is None:
        row_bytes = graph_bytes(job, on.take([0]))
    gradient_bytes = sum(at_least_float32(p.detach()).nbytes for p in job.selected.values())
    require_room(
        2 * row_bytes + 2 * gradient_bytes,
        job.limit,
        "the graph of one row and one of its gradients",
    )
    kept_rows = job.budget // 2 // max(1, row_bytes)
    done = []
    for i in range(num_samples(on.batch) // on.rows_per_sample):
        rows = on.take(slice(i * on.rows_per_sample, (i + 1) * on.rows_per_sample))
        graphs = Graphs(job.along_own(slice(i, i + 1)), rows, kept_rows)
        if kind == "gram":
            some = -(-graphs.directions.number // REPEATS)
            what = f"{some} of {graphs.directions.number} gradients of one input"
            require_room(some * gradient_bytes, job.budget // 2, what)
            values = _inner_products(graphs, max(1, job.budget // 2 // gradient_bytes))
        else:
            values = _norms(graphs, kind)
        done.append(ClassNorms(values, graphs.logits[:1], set(job.selected)))
    return ClassNorms.concatenate(done)


def graph_bytes(job: GradientRequest, row: ModelInput) -> int:
    """What autograd keeps for one row."""
    constants = {p.untyped_storage().data_ptr() for p in job.model.parameters()}
    with all_parameters_differentiable(job.model), saved_bytes(constants) as total:
        forward_logits(job.model, row)
    return total[0]


def _norms(graphs: "Graphs", kind: Kind) -> dict[str, Float[Tensor, "1 m"]]:
    values: dict[str, Tensor] = {}
    for j, (gradient, size) in enumerate(graphs.gradients()):
        for name, g in gradient.items():
            if name not in values:
                values[name] = size.new_zeros(1, graphs.directions.number)
            values[name][0, j] = norm_of(g[None], kind)[0] * size
    return values


def _inner_products(graphs: "Graphs", at_once: int) -> dict[str, Float[Tensor, "1 m m"]]:
    """⟨g_i, g_j⟩ with blocks of i held; where they do not all fit, the gradients after a block are
    computed again.
    """
    m = graphs.directions.number
    values: dict[str, Tensor] = {}
    for start in range(0, m, at_once):
        held: dict[str, Tensor] = {}
        units: dict[
            str, Tensor
        ] = {}  # what held gradients are divided by: their products may not fit 32 bits
        sizes: list[Tensor] = []
        for j, (gradient, size) in enumerate(graphs.gradients(start), start):
            if len(sizes) < at_once:
                sizes.append(size)
            stop = start + len(sizes)
            for name, g in gradient.items():
                rows = held.setdefault(name, g.new_zeros(min(at_once, m - start), len(g)))
                of_rows = units.setdefault(name, size.new_zeros(len(rows)))
                largest = torch.linalg.vector_norm(g, torch.inf)
                one, unit = g / torch.where(largest > 0, largest, 1.0), largest.double()
                if j < stop:
                    rows[j - start], of_rows[j - start] = one, unit
                products = (
                    (rows[: len(sizes)] @ one)
                    * of_rows[: len(sizes)]
                    * unit
                    * torch.stack(sizes)
                    * size
                )
                whole = values.setdefault(name, products.new_zeros(1, m, m))
                whole[0, start:stop, j] = whole[0, j, start:stop] = products
    return values


@dataclass
class Graphs:
    """The rows of one input, run one at a time; the graphs of the first `kept_rows` stay."""

    job: GradientRequest
    rows: ModelInput
    kept_rows: int
    logits: Float[Tensor, "r c"] = field(init=False)
    kept: list[Tensor] = field(init=False)  # logits that lead back to the parameters

    def __post_init__(self) -> None:
        graphs = [
            self._graph(row) if row < max(1, self.kept_rows) else None
            for row in range(num_samples(self.rows.batch))
        ]
        self.kept = [g for g in graphs if g is not None]
        with torch.no_grad():
            rest = [
                forward_logits(self.job.model, self.rows.take([row]))
                for row, g in enumerate(graphs)
                if g is None
            ]
        self.logits = torch.cat([*(g.detach() for g in self.kept), *rest])
        for row, logits in enumerate(self.logits):
            require_repeatable(self.job.model, self.rows.take([row]), logits[None])
        self.directions = self.job.directions.along(self.logits[None])

    def gradients(self, start: int = 0) -> Iterator[tuple[Gradient, Float[Tensor, ""]]]:
        """g and s of each direction from number `start` on: the gradient along it is s g."""
        each = (
            (v, s)
            for block, sizes in self.directions.blocks()
            for v, s in zip(block, sizes[:, 0], strict=True)
        )
        parameters = list(self.job.selected.values())
        for cotangent, size in islice(each, start, None):
            total: Gradient = {}
            for row, v in enumerate(cotangent.to(self.logits.dtype)):
                graph = self.kept[row] if row < len(self.kept) else self._graph(row)
                found = gradients_of(graph, parameters, v[None])
                for name, g in zip(self.job.selected, found, strict=True):
                    if g is not None:
                        flat = at_least_float32(g).reshape(-1)
                        total[name] = total[name] + flat if name in total else flat
            yield total, size

    def _graph(self, row: int) -> Tensor:
        with all_parameters_differentiable(self.job.model):
            logits = forward_logits(self.job.model, self.rows.take([row]))
        if not logits.requires_grad:
            raise QualmsError(NO_PATH)
        return logits
