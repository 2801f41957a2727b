"""The contract of an engine: plan a request, run the plan, return norms class by class."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.fallback import Fallback
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.request import GradientRequest

PlanT = TypeVar("PlanT")


class Engine(Protocol[PlanT]):
    """One way to compute the gradients of a request.

    An engine is made with the `PlanCache` of its model, from which it takes what earlier batches
    have shown, and in which it keeps what it finds out.
    """

    def plan(self, request: GradientRequest) -> PlanT | Fallback:
        """Decide how to handle a request, or return a `Fallback` with the reason why not.

        Args:
            request: what to compute.

        Returns:
            A plan for `run`: what is known of the model, how many samples run at once, and whatever
            else the engine decides beforehand.
        """

    def run(self, plan: PlanT, request: GradientRequest) -> "ClassNorms":
        """Carry out a plan.

        Args:
            plan: what `plan` returned for this request.
            request: what to compute.

        Returns:
            The norms, or inner products, of all samples of the request.
        """


@dataclass
class ClassNorms:
    """What an engine returns: a value for each sample, direction and parameter.

    In double precision: ‖g‖ of a confident prediction is zero in 32 bits.

    Attributes:
        values: by the parameter's name, in order of first use, [b, m]: ‖g‖ (l2) or Σ|g| (l1) for
            each sample and direction; or [b, m, m], the inner products between directions (gram).
        logits: of the samples as the engine ran them.
        general: parameters that no rule covered.
        errors: standard errors of the values, where they are estimates. The names of both are then
            those of layers, not of parameters.
        left_out: the largest share of Σ_l a_l ‖g_l‖ that layers which were left out were seen to
            add.
        num_left_out: how many of the first layers were left out.
    """

    values: dict[str, Tensor]
    logits: Float[Tensor, "b c"]
    general: set[str]
    errors: dict[str, Tensor] | None = None
    left_out: float = 0.0
    num_left_out: int = 0

    @classmethod
    def concatenate(cls, parts: "list[ClassNorms]") -> "ClassNorms":
        """The samples of all parts, in their order."""
        last = parts[-1]
        errors = None
        if last.errors is not None:
            errors = _concatenate([p.errors or {} for p in parts], parts)
        return cls(
            _concatenate([p.values for p in parts], parts),
            torch.cat([p.logits for p in parts]),
            set().union(*(p.general for p in parts)),
            errors,
            last.left_out,
            last.num_left_out,
        )


def _concatenate(
    tables: list[dict[str, Tensor]],
    parts: list[ClassNorms],
) -> dict[str, Tensor]:
    """Tables of consecutive samples as one.

    A parameter that the logits of a part do not depend on has gradient zero there.

    Args:
        tables: one for each part, by name [b, …].
        parts: the parts that the tables belong to.
    """
    shapes: dict[str, torch.Size] = {}
    for table in tables:
        for name, value in table.items():
            shapes[name] = value.shape[1:]
    whole: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        columns: list[Tensor] = []
        for table, part in zip(tables, parts, strict=True):
            column = table.get(name)
            if column is None:
                size = (len(part.logits), *shape)
                column = part.logits.new_zeros(size, dtype=torch.double)
            columns.append(column)
        whole[name] = torch.cat(columns)
    return whole


def run_first(
    engines: list[Engine[Any]],
    request: GradientRequest,
    cache: PlanCache,
) -> ClassNorms:
    """Run the first of several engines that can handle a request.

    Args:
        engines: in order of preference.
        request: what to compute.
        cache: where the user is warned if what is done instead is slow.
    """
    reason = "there is no engine"
    for engine in engines:
        plan = engine.plan(request)
        if not isinstance(plan, Fallback):
            return engine.run(plan, request)
        reason = plan.reason
        if plan.is_slow:
            cache.warn_slow(plan)
    raise QualmsError(f"no engine can handle this request: {reason}.")


def combine_parameters(values: Iterable[Tensor], kind: str) -> Tensor:
    """Combine the norms of several parameters: (Σ‖g‖²)^½ for l2, else the sum.

    `hypot` keeps squares that are zero in 64 bits.
    """
    return reduce(torch.hypot if kind == "l2" else torch.add, values)
