"""`fingerprint`: a digest that identifies the weights of a model."""

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Hash a model's state to sixteen hex digits: each tensor's name, dtype, shape and values."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        # As bytes, since NumPy lacks some of torch's dtypes, such as bfloat16.
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
