"""The user's model is left unchanged: guard, snapshots, fingerprints and deferred interrupts."""

from qualms.gradients.isolation.guard import (
    all_parameters_differentiable,
    entry_fingerprint,
    isolate_forward,
    preserve_state,
    unwrap_compiled,
    validate_model,
)

__all__ = [
    "all_parameters_differentiable",
    "entry_fingerprint",
    "isolate_forward",
    "preserve_state",
    "unwrap_compiled",
    "validate_model",
]
