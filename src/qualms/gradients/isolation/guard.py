"""Runs a model so that its weights, buffers, modes, attributes and the random state are unchanged."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from qualms.errors import QualmsError
from qualms.gradients.isolation import interrupts
from qualms.gradients.isolation.snapshot import (
    ModelFingerprint,
    ModuleContainers,
    copy_tensors,
    model_fingerprint,
    restore_contents,
    restore_tensors,
    tensor_checksum,
)

# Held inside `preserve_state`, so that only one thread runs a model. The random state, the switches
# of attention kernels, forward mode, the compiler's stance and Python's warning filters belong to
# the process, and two models may share modules. Nearly all the time is spent in torch's operations,
# each of which runs on several threads, so running two models at once would gain little.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class _Guard:
    """What `preserve_state` keeps of a model while the model is inside of it.

    Attributes:
        fingerprint: the model's fingerprint on entry.
        containers: the dictionaries, lists, sets and tensors that the model's modules hold.
        device: the device for tensors that the model creates without naming one; None for torch's
            default.
    """

    fingerprint: ModelFingerprint
    containers: ModuleContainers
    device: torch.device | None


# The guards of the models that are inside `preserve_state` now, by `id` of the model.
_guards: dict[int, _Guard] = {}


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the module inside the wrapper of `torch.compile`, or the model if it has no wrapper.

    The inner module holds the same parameters under their own names.
    """
    return getattr(model, "_orig_mod", model)


def validate_model(model: object) -> nn.Module:
    """Return the model unchanged, or raise an error if it is no module or has no usable weights.

    Raises:
        QualmsError: if it is not a module, is spread over several devices, has lazy parameters or
            buffers, or was created in inference mode.
    """
    if not isinstance(model, nn.Module):
        raise QualmsError(f"model is a {type(model).__name__}; pass a torch.nn.Module.")
    inner = unwrap_compiled(model)
    devices = sorted({str(p.device) for p in inner.parameters()})
    if len(devices) > 1:
        raise QualmsError(
            f"the model's parameters are on several devices ({', '.join(devices)}); load the model "
            "onto one device, without device_map."
        )
    for name, t in (*inner.named_parameters(), *inner.named_buffers()):
        if is_lazy(t):
            kind = "parameter" if isinstance(t, nn.Parameter) else "buffer"
            raise QualmsError(
                f"the {kind} {name} belongs to a lazy module and has no shape yet; run the model "
                "once first."
            )
    if any(p.is_inference() for p in inner.parameters()):
        raise QualmsError(
            "the model was created in inference mode, so it has no gradients; create it outside "
            "torch.inference_mode."
        )
    return model


@contextmanager
def preserve_state(model: object) -> Iterator[nn.Module]:
    """Put a model into evaluation mode with gradients enabled; on exit its state is restored.

    The state is restored even after an error or Ctrl-C. Other threads wait until this one is done.

    Args:
        model: the user's module, possibly in the wrapper of `torch.compile`.

    Yields:
        The module to run, without that wrapper.

    Raises:
        QualmsError: if the model is not usable (`validate_model`), or changes its own parameters.
    """
    inner = unwrap_compiled(validate_model(model))
    with _ONE_AT_A_TIME, interrupts.defer_interrupts():
        parameter = next(inner.parameters(), None)
        device = None if parameter is None else parameter.device
        # Inside, the default device is the CPU. A model built for another default gets its
        # parameters' device back in each forward pass (`isolate_forward`).
        has_cpu_default = torch.get_default_device().type == "cpu"
        default_device = None if has_cpu_default else device
        with _set_process_state(inner, device):
            fingerprint = model_fingerprint(inner)
            with _isolate_modules(inner, fingerprint, default_device):
                yield inner
            _require_same_weights(inner, fingerprint)


@contextmanager
def _set_process_state(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Set the state of the process for running a model; on exit it is restored.

    Inside, the CPU is the default device, autograd is on, and compiled models run uncompiled. On
    exit the random generators are back in the state that they had.

    Args:
        model: the model to run.
        device: the device of the model's parameters; None if it has no parameters.
    """
    with ExitStack() as stack:
        # This package names the device of every tensor that it creates elsewhere than on the CPU.
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if device is None or device.type == "cpu":
            stack.enter_context(torch.random.fork_rng(devices=[]))
        else:
            indices = [device.index or 0]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=device.type))
        if any(map(_has_compiler, model.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _has_compiler(module: nn.Module) -> bool:
    """Whether a module is compiled by `torch.compile`, as a wrapper or in place."""
    is_wrapper = hasattr(module, "_orig_mod")
    return is_wrapper or bool(getattr(module, "_compiled_call_impl", None))


@contextmanager
def _isolate_modules(
    model: nn.Module,
    fingerprint: ModelFingerprint,
    device: torch.device | None,
) -> Iterator[None]:
    """Put all modules into evaluation mode and register the model's `_Guard`.

    On exit, modes, buffers, containers and parameters that modules write to are restored.

    Args:
        model: the model to isolate.
        fingerprint: the model's fingerprint on entry.
        device: the device for tensors that the model creates without naming one; None for torch's
            default.
    """
    modules = list(model.modules())
    containers = ModuleContainers(modules)
    # These modules may do anything when their mode is switched.
    switching = [m for m in modules if _overrides_mode_switch(m)]
    tensors = [*containers.tensors, *model.buffers(), *_find_written_parameters(modules, switching)]
    with ExitStack() as stack:
        stack.callback(restore_tensors, copy_tensors(tensors))
        stack.callback(restore_contents, containers.copy_all())
        stack.enter_context(_set_evaluation_mode(model, modules, call_methods=bool(switching)))
        # An overridden `train` or `eval` may have replaced a module's containers.
        if switching:
            containers = ModuleContainers(modules)
        stack.enter_context(_register_guard(model, _Guard(fingerprint, containers, device)))
        yield


def _find_written_parameters(
    modules: Sequence[nn.Module], switching: Sequence[nn.Module]
) -> list[Tensor]:
    """List the parameters that modules may write to, in a forward pass or a switch of modes.

    Args:
        modules: all modules of a model.
        switching: the modules that override `train` or `eval`, and may write to their parameters
            there.
    """
    written: list[Tensor] = []
    for m in switching:
        written += m.parameters(recurse=False)
    # In a forward pass, embeddings with `max_norm` rescale rows of their weight.
    for m in modules:
        if getattr(m, "max_norm", None) is not None and isinstance(m.weight, Tensor):
            written.append(m.weight)
    return written


@contextmanager
def isolate_forward(model: nn.Module) -> Iterator[None]:
    """Isolate the forward pass inside the block from later ones: modules keep nothing of it.

    A tensor that one pass caches on a module has the graph of that pass, or none: either would be
    wrong for the next pass. For a model outside `preserve_state`, modules are left as they are.
    """
    # Raise KeyboardInterrupt here if Ctrl-C was pressed since the last pass.
    interrupts.deliver()
    guard = _guards.get(id(model))
    if guard is None:
        yield
        return
    before = guard.containers.copy_dicts()
    try:
        # The default device of the tensors that the model creates, which `preserve_state` changed.
        with nullcontext() if guard.device is None else torch.device(guard.device):
            yield
    finally:
        restore_contents(before)


def entry_fingerprint(model: nn.Module) -> ModelFingerprint:
    """Return the fingerprint that a model inside `preserve_state` had on entry.

    It tells a caller whether the model has changed since an earlier entry.
    """
    return _guards[id(model)].fingerprint


@contextmanager
def _register_guard(model: nn.Module, guard: _Guard) -> Iterator[None]:
    """Add a model's guard to `_guards`; on exit it is removed, or replaced by one from before."""
    # The model may be inside another `preserve_state` block already.
    outer = _guards.get(id(model))
    _guards[id(model)] = guard
    try:
        yield
    finally:
        del _guards[id(model)]
        if outer is not None:
            _guards[id(model)] = outer


@contextmanager
def _set_evaluation_mode(
    model: nn.Module, modules: Sequence[nn.Module], call_methods: bool
) -> Iterator[None]:
    """Put all modules into evaluation mode; on exit each is back in the mode that it had.

    Args:
        model: the model that has the modules.
        modules: all modules of the model, itself first.
        call_methods: whether to call the model's `train()` and `eval()`: modules that override
            them may drop a cache when training begins, so that the pass starts without one.
    """
    # A frozen script module has no mode.
    modes = [(m, m.training) for m in modules if hasattr(m, "training")]
    try:
        if call_methods:
            _switch_mode(model, is_training=True)
            _switch_mode(model, is_training=False)
        for m, _ in modes:
            m.training = False
        yield
    finally:
        # If the model's own method fails, the attributes are restored anyway.
        try:
            if call_methods:
                _, was_training = modes[0]
                if model.training != was_training:
                    _switch_mode(model, was_training)
        finally:
            for m, was_training in modes:
                m.training = was_training


def _switch_mode(model: nn.Module, is_training: bool) -> None:
    """Call the model's `train()` or `eval()`; does nothing for a model without modes."""
    switch = model.train if is_training else model.eval
    # An exported graph has no modes.
    with suppress(NotImplementedError):
        switch()


def _overrides_mode_switch(m: nn.Module) -> bool:
    """Whether a module overrides `nn.Module.train` or `eval`, in its class or on the object."""
    own_train = type(m).train is not nn.Module.train or "train" in vars(m)
    own_eval = type(m).eval is not nn.Module.eval or "eval" in vars(m)
    return own_train or own_eval


def _require_same_weights(model: nn.Module, fingerprint: ModelFingerprint) -> None:
    """Raise QualmsError if a parameter has changed since the fingerprint was taken."""
    # The fingerprint lists the parameters, then the buffers; `zip` stops after the parameters.
    for (name, p), before in zip(model.named_parameters(), fingerprint.tensors, strict=False):
        if tensor_checksum(p) != before:
            raise QualmsError(
                f"the model modifies its parameter {name} in its forward pass; remove this "
                "modification, or turn it off in evaluation mode."
            )


@contextmanager
def all_parameters_differentiable(model: nn.Module) -> Iterator[None]:
    """Set `requires_grad` for frozen floating-point parameters; on exit they are frozen again."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
