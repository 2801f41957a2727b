"""The model leaves as it came: weights, buffers, modes, gradients, attributes and random state."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qualms.errors import QualmsError
from qualms.gradients import interrupts
from qualms.gradients.bits import state_of, sum_of
from qualms.gradients.traces import ModuleSnapshot, copies_of, put_back, restore

# One thread at a time, whatever the model: the random state, the switches of attention kernels,
# forward mode, the compiler's stance and Python's filters of warnings belong to the process, and
# two models may share modules. Nearly all the time goes to torch's operations, which have threads
# of their own, so more of ours would gain little.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class _Held:
    state: Any  # the fingerprint of the model as it came
    traces: ModuleSnapshot
    device: (
        torch.device | None
    )  # for tensors that the model makes without naming one; None: torch's own default


_held: dict[int, _Held] = {}  # by the id of a model that is untouched


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The module under `torch.compile`'s wrapper, which holds the same parameters under their own
    names.
    """
    return getattr(model, "_orig_mod", model)


def validate_model(model: object) -> nn.Module:
    """The model itself; an error if it is not a module, or has no weights yet."""
    if not isinstance(model, nn.Module):
        raise QualmsError(f"model is a {type(model).__name__}; pass a torch.nn.Module.")
    inner = unwrap_compiled(model)
    devices = sorted({str(p.device) for p in inner.parameters()})
    if len(devices) > 1:
        raise QualmsError(
            f"the model's parameters are on several devices ({', '.join(devices)}); load it on one, without device_map."
        )
    for kind, named in (("parameter", inner.named_parameters()), ("buffer", inner.named_buffers())):
        for name, t in named:
            if is_lazy(t):
                raise QualmsError(
                    f"the {kind} {name} is that of a lazy module, which has no shape yet; run the model once."
                )
            if kind == "parameter" and t.is_inference():
                raise QualmsError(
                    "the model was made in inference mode, so it has no gradients; make it outside of that."
                )
    return model


@contextmanager
def preserve_state(model: object) -> Iterator[nn.Module]:
    """Evaluation mode with gradients on; every trace of it is gone afterwards, even after an error
    or Ctrl-C.

    Other threads wait until this one is done.
    """
    model = unwrap_compiled(validate_model(model))
    with _ONE_AT_A_TIME, interrupts.defer_interrupts(), ExitStack() as process:
        elsewhere = torch.get_default_device().type != "cpu"
        if (
            elsewhere
        ):  # the user has changed it; what we make ourselves goes where we say, or to the CPU
            process.enter_context(torch.device("cpu"))
        process.enter_context(torch.inference_mode(False))
        process.enter_context(torch.enable_grad())
        process.enter_context(
            torch.random.fork_rng(devices=_devices(model), device_type=_device_type(model))
        )
        modules = list(model.modules())
        if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) for m in modules):
            process.enter_context(torch.compiler.set_stance("force_eager"))
        parameter = next(model.parameters(), None)
        device = parameter.device if elsewhere and parameter is not None else None
        state, traces = state_of(model), ModuleSnapshot(modules)
        own = [m for m in modules if _switches_itself(m)]
        kept = [
            *traces.tensors,
            *model.buffers(),
            *(p for m in own for p in m.parameters(recurse=False)),
        ]
        kept += [
            m.weight
            for m in modules
            if getattr(m, "max_norm", None) is not None and isinstance(m.weight, Tensor)
        ]
        with ExitStack() as stack:
            stack.callback(restore, copies_of(kept))
            stack.callback(put_back, traces.noted())
            stack.enter_context(_evaluating(model, modules, bool(own)))
            if own:  # they may keep things in new places now
                traces = ModuleSnapshot(modules)
            stack.enter_context(_entered(model, _Held(state, traces, device)))
            yield model
        _require_same_weights(model, state)


@contextmanager
def isolate_forward(model: nn.Module) -> Iterator[None]:
    """A forward pass, of which nothing stays on the modules of a model that is `preserve_state`.

    What one pass caches belongs to its graph, or has no graph at all: either would be wrong for the
    next.
    """
    interrupts.deliver()
    held = _held.get(id(model))
    if held is None:
        yield
        return
    before = held.traces.noted_before_a_pass()
    try:
        if held.device is None:
            yield
        else:
            with torch.device(held.device):
                yield
    finally:
        put_back(before)


def state_on_entry(model: nn.Module) -> Any:
    """The fingerprint of a model that is `preserve_state`, as it came."""
    return _held[id(model)].state


@contextmanager
def _entered(model: nn.Module, held: _Held) -> Iterator[None]:
    outer = _held.get(id(model))
    _held[id(model)] = held
    try:
        yield
    finally:
        if outer is None:
            del _held[id(model)]
        else:
            _held[id(model)] = outer


@contextmanager
def _evaluating(model: nn.Module, modules: Sequence[nn.Module], own: bool) -> Iterator[None]:
    """All modules in evaluation mode, then each in its own again.

    With `own` there are modules that do more than note the mode, such as dropping what they have
    cached when training
    begins: they are told of both modes, so that they begin without a cache.
    """
    modes = [
        (m, m.training) for m in modules if hasattr(m, "training")
    ]  # a frozen script has no mode
    try:
        if own:
            _switch(model, True)
            _switch(model, False)
        for m, _ in modes:
            m.training = False
        yield
    finally:
        try:
            if own and model.training != modes[0][1]:
                _switch(model, modes[0][1])
        finally:
            for m, mode in modes:
                m.training = mode


def _switch(model: nn.Module, training: bool) -> None:
    try:
        model.train() if training else model.eval()
    except NotImplementedError:  # an exported graph has no modes
        return


def _switches_itself(m: nn.Module) -> bool:
    own = type(m).train is not nn.Module.train or type(m).eval is not nn.Module.eval
    return own or not {"train", "eval"}.isdisjoint(vars(m))


def _require_same_weights(model: nn.Module, state: Any) -> None:
    for (name, p), before in zip(model.named_parameters(), state[1], strict=False):
        if sum_of(p) != before:
            raise QualmsError(
                f"the model changes its parameter {name} in its forward pass; score a copy of it."
            )


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
