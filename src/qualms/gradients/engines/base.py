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

# What an engine's `plan` returns and its `run` takes.
PlanT = TypeVar("PlanT")


class Engine(Protocol[PlanT]):
    """One way to compute the gradients of a request.

    An engine is created with the `PlanCache` of its model: it reads the plans and measurements of
    earlier batches from it, and stores new ones in it.
    """

    def plan(self, request: GradientRequest) -> PlanT | Fallback:
        """Decide how to handle a request, or return a `Fallback` with the reason why not.

        Args:
            request: the samples, and which of their gradients to compute.

        Returns:
            A plan for `run`: facts about the model, how many samples run at once, and whatever else
            the engine decides beforehand.
        """

    def run(self, plan: PlanT, request: GradientRequest) -> "ClassNorms":
        """Carry out a plan.

        Args:
            plan: what `plan` returned for this request.
            request: the samples, and which of their gradients to compute.

        Returns:
            The norms, or inner products, of the gradients of all samples of the request.
        """


@dataclass
class ClassNorms:
    """What an engine returns: a value for each sample, direction and parameter.

    A direction v in logit space has the gradient g = Jᵀv, with J the Jacobian of the logits with
    respect to the parameters. There are b samples, m directions and c classes.

    Attributes:
        values: a dict from each parameter's name, in order of first use, to a tensor [b, m] with
            ‖g‖ (l2) or Σ|g| (l1) for each sample and direction; or [b, m, m], the inner products
            between the gradients along all pairs of directions (gram). Float64: in float32, ‖g‖ of
            a confident prediction underflows to 0.
        logits: the logits of the samples (not of perturbed copies), as the engine computed them.
        without_rule: the names of the parameters without a fast gradient rule.
        errors: the standard errors of `values`, if these are estimates; both dicts are then keyed
            by layer instead of parameter. None if `values` are exact.
        left_out: the largest observed share that the early layers left out contribute to
            Σ_l a_l ‖g_l‖, the sum over layers l with weights a_l.
        num_left_out: the number of early layers left out.
    """

    values: dict[str, Tensor]
    logits: Float[Tensor, "b c"]
    without_rule: set[str]
    errors: dict[str, Tensor] | None = None
    left_out: float = 0.0
    num_left_out: int = 0

    @classmethod
    def concatenate(cls, parts: "list[ClassNorms]") -> "ClassNorms":
        """Concatenate the results of consecutive parts of the samples, along the sample axis.

        `left_out` and `num_left_out` are taken from the last part, which has the newest evidence.
        """
        last = parts[-1]
        errors = None
        if last.errors is not None:
            errors = _concatenate_by_name([p.errors or {} for p in parts], parts)
        return cls(
            values=_concatenate_by_name([p.values for p in parts], parts),
            logits=torch.cat([p.logits for p in parts]),
            without_rule=set().union(*(p.without_rule for p in parts)),
            errors=errors,
            left_out=last.left_out,
            num_left_out=last.num_left_out,
        )


def _concatenate_by_name(
    tables: list[dict[str, Tensor]],
    parts: list[ClassNorms],
) -> dict[str, Tensor]:
    """Concatenate tensors of consecutive parts of the samples, name by name.

    A name that is missing from a part gets zeros there: the logits of that part do not depend on
    the parameter.

    Args:
        tables: for each part, a dict from names of parameters or layers to tensors [b, …], with b
            the number of samples of the part.
        parts: the parts that the dicts belong to, in the same order.
    """
    shape_of_sample: dict[str, torch.Size] = {}
    for table in tables:
        for name, value in table.items():
            shape_of_sample[name] = value.shape[1:]
    concatenated: dict[str, Tensor] = {}
    for name, shape in shape_of_sample.items():
        tensors: list[Tensor] = []
        for table, part in zip(tables, parts, strict=True):
            tensor = table.get(name)
            if tensor is None:
                zeros_shape = (len(part.logits), *shape)
                tensor = part.logits.new_zeros(zeros_shape, dtype=torch.double)
            tensors.append(tensor)
        concatenated[name] = torch.cat(tensors)
    return concatenated


def run_first(
    engines: list[Engine[Any]],
    request: GradientRequest,
    cache: PlanCache,
) -> ClassNorms:
    """Run the first engine whose `plan` does not return a `Fallback` for a request.

    Args:
        engines: engines in order of preference.
        request: the samples, and which of their gradients to compute.
        cache: the model's cache, which warns the user once for each slow fallback.

    Raises:
        QualmsError: if no engine can serve the request.
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
    """Combine the values of a layer's parameters into the value of the layer.

    Args:
        values: for each parameter of the layer a tensor [b, …] of values, as in `ClassNorms`.
        kind: what the values are. Norms of kind `l2` combine to the root of their sum of squares;
            L1 norms (`l1`) and inner products (`gram`) add up.
    """
    # `hypot(a, b)` is √(a² + b²), without the underflow of a².
    combine = torch.hypot if kind == "l2" else torch.add
    return reduce(combine, values)
