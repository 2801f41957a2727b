"""Leaves the user's model unchanged by scoring.

- `guard.py` sets evaluation mode, and restores the state of the model and of the process.
- `snapshot.py` copies what modules hold, and computes checksums of weights.
- `interrupts.py` delays Ctrl-C until an exception does no harm.
"""

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
