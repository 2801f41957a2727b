"""`fingerprint`: a digest that identifies the weights of a model."""

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Hash the names, dtypes, shapes and values of a model's state to sixteen hex digits."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
