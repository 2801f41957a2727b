"""`score` and `compare`: from a model and inputs to one number for each input."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.guard import untouched
from qualms.gradients.inputs import count
from qualms.gradients.layers import Params
from qualms.gradients.norms import Settings, numbered
from qualms.gradients.smoothing import Smoothing
from qualms.methods.evidence import Evidence, Study
from qualms.methods.method import Method
from qualms.methods.registry import DEFAULT, parse, spec_of

Progress = bool | Callable[[int], None]


def score(model: nn.Module, x: Any, method: str | Method = DEFAULT, **more: Any) -> Float[Tensor, " b"]:
    """How uncertain the model is about each input; higher means more uncertain, always.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used inside.
        x: a tensor, a tuple or dict of tensors, or an iterable of batches (labels are ignored).
        method: a spec such as `"exgrad+layers(0.4)"`, or a method object; the paper's REGrad* by default.
        more: as for `compare`.
    """
    return next(iter(compare(model, x, [method], **more).values()))


def compare(
    model: nn.Module,
    x: Any,
    methods: Sequence[str | Method],
    *,
    train: Any = None,
    models: Iterable[nn.Module] = (),
    engine: str = "exact",
    layers: str = "module",
    norm: str = "l2",
    params: Params = None,
    seed: int = 0,
    batch_size: int | None = None,
    budget: int | None = None,
    progress: Progress = False,
) -> dict[str, Float[Tensor, " b"]]:
    """Several scores of the same inputs, each expensive pass shared by all that need it.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used inside.
        x: a tensor, a tuple or dict of tensors, or an iterable of batches (labels are ignored).
        methods: specs or method objects.
        train: training inputs, an iterable of batches, for the methods that need them.
        models: further members, for `ensemble`.
        engine: how class gradients are computed: `exact` or `reference`.
        layers: what `+layers` counts: `module`, `tensor` or `block`.
        norm: of the gradients, `l2` or `l1`.
        params: which parameters count: a pattern, or a function of names; all by default.
        seed: decides every random draw, together with an input's number.
        batch_size: at most so many inputs at once.
        budget: bytes that the work on one chunk of inputs may take.
        progress: True for a count on the terminal, or a function that is told how many inputs are done.

    Returns:
        The scores by spec, in the order given.
    """
    chosen = _named(methods)
    settings = Settings(engine, layers, norm, params, budget, batch_size, seed)
    rows: dict[str, list[Tensor]] = {name: [] for name in chosen}
    done = 0
    with untouched(model) as inner:
        study = Study(inner, settings, train, tuple(models), _directions(chosen.values()))
        for first, batch in numbered(x):
            seen = Evidence(study, batch, first)
            for name, method in chosen.items():
                rows[name].append(method.score(seen).detach().to(seen.dtype))
            done += count(batch)
            _tell(progress, done)
    _tell(progress, None)
    return {name: torch.cat(parts) for name, parts in rows.items()}


def _named(methods: Sequence[str | Method]) -> dict[str, Method]:
    if isinstance(methods, str) or not methods:
        raise QualmsError("methods is empty or a string; pass a list of specs such as ['regrad', 'entropy'].")
    return {m if isinstance(m, str) else spec_of(m): parse(m) if isinstance(m, str) else m for m in methods}


def _directions(methods: Iterable[Any]) -> dict[Smoothing | None, tuple[str, ...]]:
    """Which gradients each pass must give, plain and smoothed."""
    wanted: dict[Smoothing | None, tuple[str, ...]] = {}
    for m in methods:
        if hasattr(m, "direction"):
            wanted[m.smooth] = tuple(dict.fromkeys((*wanted.get(m.smooth, ()), m.direction)))
    return wanted


def _tell(progress: Progress, done: int | None) -> None:
    if callable(progress):
        if done is not None:
            progress(done)
    elif progress and sys.stderr.isatty():
        print(
            "\r" if done is None else f"\r{done} inputs scored", end="" if done else "\n", file=sys.stderr, flush=True
        )
