"""All that belongs to a model, to be compared before and after a call."""

from typing import Any

import torch
from torch import Tensor, nn


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a user could notice."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_state_dict_hooks",
    )
    return {
        "parameters": [
            (n, id(p), p.requires_grad, p._version, p.detach().clone())
            for n, p in model.named_parameters()
        ],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "buffers": [(n, id(b), b.clone()) for n, b in model.named_buffers()],
        "training": [m.training for m in model.modules()],
        "hooks": [{h: list(getattr(m, h)) for h in hooks} for m in model.modules()],
        "attributes": [
            {k: id(v) if isinstance(v, Tensor) else None for k, v in vars(m).items()}
            for m in model.modules()
        ],
        "random": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
