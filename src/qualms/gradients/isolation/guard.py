"""The model is left unchanged: weights, buffers, modes, gradients, attributes and random state."""

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

# One thread at a time, whatever the model: the random state, the switches of attention kernels,
# forward mode, the compiler's stance and Python's filters of warnings belong to the process, and
# two models may share modules. Nearly all the time goes to torch's operations, which have threads
# of their own, so more of ours would gain little.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class _Guard:
    """What is kept for a model while it is inside `preserve_state`.

    Attributes:
        fingerprint: of the model on entry.
        containers: where its modules keep things.
        device: for tensors that the model makes without naming one; None for torch's default.
    """

    fingerprint: ModelFingerprint
    containers: ModuleContainers
    device: torch.device | None


_guards: dict[int, _Guard] = {}  # by the id of the model


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """The module inside the wrapper of `torch.compile`, or the model itself if it has none.

    The inner module holds the same parameters under their own names.
    """
    return getattr(model, "_orig_mod", model)


def validate_model(model: object) -> nn.Module:
    """Return the model, or raise an error if it is no module or has no usable weights.

    Raises:
        QualmsError: if it is not a module, is spread over several devices, has lazy parameters or
            buffers, or was made in inference mode.
    """
    if not isinstance(model, nn.Module):
        raise QualmsError(f"model is a {type(model).__name__}; pass a torch.nn.Module.")
    inner = unwrap_compiled(model)
    devices = sorted({str(p.device) for p in inner.parameters()})
    if len(devices) > 1:
        raise QualmsError(
            f"the model's parameters are on several devices ({', '.join(devices)}); load it onto "
            "one, without device_map."
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
    """Hold a model in evaluation mode with gradients on, and restore it afterwards.

    Everything is put back even after an error or Ctrl-C. Other threads wait until this one is done.

    Args:
        model: a module; the wrapper of `torch.compile` is taken off.

    Yields:
        The module to run.

    Raises:
        QualmsError: if the model is not usable (`validate_model`), or changes its own parameters.
    """
    inner = unwrap_compiled(validate_model(model))
    with _ONE_AT_A_TIME, interrupts.defer_interrupts():
        parameter = next(inner.parameters(), None)
        device = None if parameter is None else parameter.device
        device_of_new = None if torch.get_default_device().type == "cpu" else device
        with _set_process_state(inner, device):
            fingerprint = model_fingerprint(inner)
            with _restore_modules(inner, fingerprint, device_of_new):
                yield inner
            _require_same_weights(inner, fingerprint)


@contextmanager
def _set_process_state(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Set what belongs to the process: default device, autograd, random state and compiler.

    Args:
        model: the model.
        device: of its parameters, if it has any.
    """
    with ExitStack() as stack:
        if torch.get_default_device().type != "cpu":
            # The tensors that we make ourselves go where we say, or to the CPU.
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if device is None or device.type == "cpu":
            stack.enter_context(torch.random.fork_rng(devices=[]))
        else:
            numbers = [device.index or 0]
            stack.enter_context(torch.random.fork_rng(devices=numbers, device_type=device.type))
        if any(map(_has_compiler, model.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _has_compiler(module: nn.Module) -> bool:
    is_wrapper = hasattr(module, "_orig_mod")
    return is_wrapper or bool(getattr(module, "_compiled_call_impl", None))


@contextmanager
def _restore_modules(
    model: nn.Module,
    fingerprint: ModelFingerprint,
    device: torch.device | None,
) -> Iterator[None]:
    """Put all modules into evaluation mode, and restore their modes and contents afterwards."""
    modules = list(model.modules())
    containers = ModuleContainers(modules)
    switching = [m for m in modules if _switches_modes_itself(m)]
    tensors = [*containers.tensors, *model.buffers(), *_written_parameters(modules, switching)]
    with ExitStack() as stack:
        stack.callback(restore_tensors, copy_tensors(tensors))
        stack.callback(restore_contents, containers.copy_all())
        stack.enter_context(_evaluation_mode(model, modules, bool(switching)))
        if switching:  # they may keep things in new places now
            containers = ModuleContainers(modules)
        stack.enter_context(_register(model, _Guard(fingerprint, containers, device)))
        yield


def _written_parameters(
    modules: Sequence[nn.Module], switching: Sequence[nn.Module]
) -> list[Tensor]:
    """Parameters that modules may write to when they change modes or run."""
    found: list[Tensor] = []
    for m in switching:
        found += m.parameters(recurse=False)
    for m in modules:  # embeddings with a largest norm rescale their weight
        if getattr(m, "max_norm", None) is not None and isinstance(m.weight, Tensor):
            found.append(m.weight)
    return found


@contextmanager
def isolate_forward(model: nn.Module) -> Iterator[None]:
    """Run a forward pass that leaves no state on the modules of a model inside `preserve_state`.

    What one pass caches belongs to its graph, or has no graph at all: either would be wrong for the
    next pass.
    """
    interrupts.deliver()
    guard = _guards.get(id(model))
    if guard is None:
        yield
        return
    before = guard.containers.copy_dicts()
    try:
        with nullcontext() if guard.device is None else torch.device(guard.device):
            yield
    finally:
        restore_contents(before)


def entry_fingerprint(model: nn.Module) -> ModelFingerprint:
    """The fingerprint that a model inside `preserve_state` had on entry."""
    return _guards[id(model)].fingerprint


@contextmanager
def _register(model: nn.Module, guard: _Guard) -> Iterator[None]:
    outer = _guards.get(id(model))
    _guards[id(model)] = guard
    try:
        yield
    finally:
        del _guards[id(model)]
        if outer is not None:
            _guards[id(model)] = outer


@contextmanager
def _evaluation_mode(
    model: nn.Module, modules: Sequence[nn.Module], call_methods: bool
) -> Iterator[None]:
    """Put all modules into evaluation mode, then each back into its own.

    Args:
        model: the model.
        modules: all of its modules.
        call_methods: whether there are modules that do more than note the mode, such as dropping a
            cache when training begins. Both modes are announced to them, so they start without a
            cache.
    """
    # A frozen script has no mode.
    modes = [(m, m.training) for m in modules if hasattr(m, "training")]
    try:
        if call_methods:
            _switch_mode(model, True)
            _switch_mode(model, False)
        for m, _ in modes:
            m.training = False
        yield
    finally:
        try:
            if call_methods and model.training != modes[0][1]:
                _switch_mode(model, modes[0][1])
        finally:
            for m, mode in modes:
                m.training = mode


def _switch_mode(model: nn.Module, training: bool) -> None:
    switch = model.train if training else model.eval
    with suppress(NotImplementedError):  # an exported graph has no modes
        switch()


def _switches_modes_itself(m: nn.Module) -> bool:
    """Whether a module has a `train` or `eval` of its own, in its class or on the object."""
    has_train = type(m).train is not nn.Module.train
    has_eval = type(m).eval is not nn.Module.eval
    return has_train or has_eval or not {"train", "eval"}.isdisjoint(vars(m))


def _require_same_weights(model: nn.Module, fingerprint: ModelFingerprint) -> None:
    for (name, p), before in zip(model.named_parameters(), fingerprint.tensors, strict=False):
        if tensor_checksum(p) != before:
            raise QualmsError(
                f"the model changes its parameter {name} in its forward pass; score a copy of it."
            )


@contextmanager
def all_parameters_differentiable(model: nn.Module) -> Iterator[None]:
    """Turn gradients on for frozen parameters too; `requires_grad` is restored afterwards."""
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
