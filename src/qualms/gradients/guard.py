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
    if any(p.is_inference() for p in model.parameters()):
        raise QualmsError("the model was made in inference mode, so it has no gradients; make it outside of that.")
    # Forward passes may replace attributes and buffers (caches, counters, hook-based weight_norm) or write into them.
    ours = [m for m in modules if not isinstance(m, torch.jit.ScriptModule)]
    attributes = [(m, dict(vars(m)), dict(m._buffers)) for m in ours]
    kept = [t for m in ours for t in (*vars(m).values(), *m._buffers.values()) if isinstance(t, Tensor)]
    kept += [m.weight for m in modules if getattr(m, "max_norm", None) is not None and isinstance(m.weight, Tensor)]
    values = [(t, t._version, t.detach().clone()) for t in kept]
    versions = {name: p._version for name, p in model.named_parameters()}
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
            for m, before, buffers in attributes:
                vars(m).clear()
                vars(m).update(before)
                m._buffers.clear()
                m._buffers.update(buffers)
            for t, version, value in values:
                if t._version != version:
                    with torch.no_grad():
                        t.copy_(value)
                    versions = {n: v for n, v in versions.items() if model.get_parameter(n) is not t}
        changed = [name for name, version in versions.items() if model.get_parameter(name)._version != version]
        if changed:
            raise QualmsError(f"the model changes its parameter {changed[0]} in its forward pass; score a copy of it.")


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
