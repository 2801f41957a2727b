"""The model leaves as it came: weights, buffers, modes, gradients, attributes and random state."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from qualms.errors import QualmsError


def eager(model: nn.Module) -> nn.Module:
    """The module under `torch.compile`'s wrapper, which holds the same parameters under their own names."""
    return getattr(model, "_orig_mod", model)


@contextmanager
def untouched(model: object) -> Iterator[nn.Module]:
    """Evaluation mode with gradients on; every trace of it is gone afterwards, also after an error."""
    if not isinstance(model, nn.Module):
        raise QualmsError(f"model is a {type(model).__name__}; pass a torch.nn.Module.")
    model = eager(model)
    modules = list(model.modules())
    training = [m.training for m in modules]
    buffers = [(b, b._version, b.detach().clone()) for b in model.buffers()]
    # Hook-based weight_norm and caches keep tensors as plain attributes and replace them in forward.
    attributes = [(m, {k: v for k, v in vars(m).items() if isinstance(v, Tensor)}) for m in modules]
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=_devices(model), device_type=_device_type(model)))
        if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in modules):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for m in modules:
                m.training = False
            yield model
        finally:
            for m, mode in zip(modules, training, strict=True):
                m.training = mode
            for buffer, version, value in buffers:
                if buffer._version != version:
                    with torch.no_grad():
                        buffer.copy_(value)
            for m, kept in attributes:
                for key in [k for k, v in vars(m).items() if isinstance(v, Tensor) and k not in kept]:
                    delattr(m, key)
                for key, value in kept.items():
                    if vars(m).get(key) is not value:
                        setattr(m, key, value)


@contextmanager
def all_parameters_differentiable(model: nn.Module) -> Iterator[None]:
    """Frozen parameters take part as well; `requires_grad` is put back afterwards."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


def _device_type(model: nn.Module) -> str:
    kinds = {p.device.type for p in model.parameters()} - {"cpu"}
    return kinds.pop() if kinds else "cuda"


def _devices(model: nn.Module) -> list[int]:
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type != "cpu"})
