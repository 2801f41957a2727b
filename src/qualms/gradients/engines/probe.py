"""The former name of the plan."""

from qualms.gradients.plan import Plan as Probe

__all__ = ["Probe"]
