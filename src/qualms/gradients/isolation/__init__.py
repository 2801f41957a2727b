"""Leaves the user's model unchanged by scoring.

- `guard.py`: evaluation mode and the restoring of the model's and the process's state.
- `snapshot.py`: copies of what modules hold, and checksums of weights.
- `interrupts.py`: Ctrl-C is delayed until an exception does no harm.
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
