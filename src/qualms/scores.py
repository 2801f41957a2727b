"""`score` and `compare`: from a model and inputs to one number for each input."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qualms.errors import QualmsError
from qualms.gradients.choice import settled
from qualms.gradients.guard import untouched
from qualms.gradients.inputs import Batch
from qualms.gradients.layers import Params
from qualms.gradients.norms import numbered_batches
from qualms.gradients.settings import Settings, Sketch
from qualms.gradients.smoothing import Smoothing
from qualms.methods.method import Method
from qualms.methods.passes import Passes, Subject
from qualms.methods.registry import DEFAULT, parse

Progress = bool | Callable[[int], None]
Methods = Sequence[str | Method] | Mapping[str, str | Method]


def score(model: nn.Module, x: Any, method: str | Method = DEFAULT, **more: Any) -> Float[Tensor, " b"]:
    """How uncertain the model is about each input; higher means more uncertain, always.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used inside.
        x: a tensor, a tuple or dict of tensors, or an iterable of batches (labels are ignored).
        method: a spec such as `"exgrad+layers(0.4)"`, or a method object; the paper's REGrad* by default.
        more: as for `compare`.
    """
    return next(iter(compare(model, x, [method], **more).values()))


def score_with_error(
    model: nn.Module, x: Any, method: str | Method = DEFAULT, **more: Any
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """Scores, and the standard error that the random tangents of `engine="sketch"` give them (0 for other engines).

    The tangents are shared by all inputs, so most of the error is common to them: rankings suffer less than it says.
    """
    errors: dict[str, Tensor] = {}
    scores = compare(model, x, [method], errors=errors, **more)
    return next(iter(scores.values())), next(iter(errors.values()))


def compare(
    model: nn.Module,
    x: Any,
    methods: Methods,
    *,
    train: Any = None,
    models: Iterable[nn.Module] = (),
    engine: str | Sketch = "exact",
    layers: str = "module",
    norm: str = "l2",
    params: Params = None,
    seed: int = 0,
    batch_size: int | None = None,
    budget: int | None = None,
    tolerance: float = 0.0,
    progress: Progress = False,
    errors: dict[str, Tensor] | None = None,
) -> dict[str, Float[Tensor, " b"]]:
    """Several scores of the same inputs, each expensive pass shared by all that need it.

    Args:
        model: any classifier that returns logits. It leaves as it came; evaluation mode is used inside.
        x: a tensor, a tuple or dict of tensors, or an iterable of batches (labels are ignored).
        methods: specs or method objects; a dict gives them names of your own.
        train: training inputs, an iterable of batches, for the methods that need them.
        models: further members, for `ensemble`.
        engine: how class gradients are computed: `exact`; `sketch`, estimates whose cost does not depend on the number
            of classes (`qualms.Sketch` for its options); `auto`, the cheaper of the two by measured time; or
            `reference`. Sketched `+layers` scores add layers in quadrature, so they rank alike but have other values:
            compare scores, and use a threshold, within one engine.
        layers: what `+layers` counts: `module`, `tensor` or `block`.
        norm: of the gradients, `l2` or `l1`.
        params: which parameters count: a pattern, or a function of names; all by default.
        seed: decides every random draw, together with an input's number.
        batch_size: at most so many inputs at once.
        budget: bytes that the work on one chunk of inputs may take.
        tolerance: the share of a `+layers` score that may be left out with early layers, to save the exact engine
            passes through them. What they add is measured on some of the directions, not proven; 0 leaves out nothing.
        progress: True for a count on the terminal, or a function that is told how many inputs are done.
        errors: a dict to be filled, by spec, with the standard errors that the tangents of `sketch` give the scores.

    Returns:
        The scores by spec or by your name, in the order given.
    """
    settings = Settings(engine, layers, norm, params, budget, batch_size, seed, tolerance)
    rows: list[dict[str, Tensor]] = []
    spread: list[dict[str, Tensor]] = []
    done = 0
    for part in compare_batches(
        model, x, methods, settings, train=train, models=models, errors=None if errors is None else spread
    ):
        rows.append(part)
        done += len(next(iter(part.values())))
        _tell(progress, done)
    _tell(progress, None)
    if errors is not None:
        errors.update({name: torch.cat([part[name] for part in spread]) for name in spread[0]})
    return {name: torch.cat([part[name] for part in rows]) for name in rows[0]}


def compare_batches(
    model: nn.Module,
    x: Any,
    methods: Methods,
    settings: Settings,
    *,
    train: Any = None,
    models: Iterable[nn.Module] = (),
    first: int = 0,
    errors: list[dict[str, Tensor]] | None = None,
) -> Iterator[dict[str, Float[Tensor, " b"]]]:
    """The scores of each batch of `x` as it comes, so that a long run can keep what it has.

    What methods learn from the training data is learnt once. Between batches the model is in evaluation mode; it is as
    it came when the iterator ends or is closed.

    Args:
        model: as for `compare`, and so are `x`, `methods`, `train` and `models`.
        settings: of the engine.
        first: the number of the first input, which decides its draws.
        errors: a list that gets the standard errors of each batch.
    """
    chosen = _named(methods)
    with untouched(model) as inner:
        wanted = _directions(chosen.values())
        subject = Subject(
            inner, settings, train, tuple(models), wanted, _smallest_lambda(chosen.values()), errors is not None
        )
        for start, batch in numbered_batches(x):
            if wanted and start == 0:
                subject.settings = _settled(settings, inner, batch, wanted)
            passes = Passes(subject, batch, first + start)
            scores = {name: method.score(passes).detach().to(passes.dtype) for name, method in chosen.items()}
            if errors is not None:
                errors.append({name: passes.standard_error(m).to(passes.dtype) for name, m in chosen.items()})
            yield scores


def definite_engine(model: nn.Module, x: Any, methods: Methods, settings: Settings) -> str | Sketch:
    """The engine that `auto` picks for these methods, so that several runs, whose scores are compared, share it."""
    wanted = _directions(_named(methods).values())
    if settings.engine != "auto" or not wanted:
        return settings.engine
    with untouched(model) as inner:
        _, batch = next(iter(numbered_batches(x)))
        return _settled(settings, inner, batch, wanted).engine


def _settled(
    settings: Settings, model: nn.Module, batch: Batch, wanted: dict[Smoothing | None, tuple[str, ...]]
) -> Settings:
    smooth, names = max(wanted.items(), key=_passes)
    return settled(settings, model, batch, names, smooth)


def _named(methods: Methods) -> dict[str, Method]:
    if isinstance(methods, str) or not methods:
        raise QualmsError("methods is empty or a string; pass a list of specs such as ['regrad', 'entropy'].")
    given = (
        methods.items() if isinstance(methods, Mapping) else [(m if isinstance(m, str) else m.spec, m) for m in methods]
    )
    named: dict[str, Method] = {}
    for name, one in given:
        method = parse(one) if isinstance(one, str) else one
        if named.setdefault(name, method) != method:
            raise QualmsError(f"two methods are called {name!r}; give each a name of your own, in a dict.")
    return named


def _directions(methods: Iterable[Method]) -> dict[Smoothing | None, tuple[str, ...]]:
    """Which gradients each pass must give, plain and smoothed."""
    wanted: dict[Smoothing | None, tuple[str, ...]] = {}
    for m in methods:
        if m.direction is not None:
            wanted[m.smooth] = tuple(dict.fromkeys((*wanted.get(m.smooth, ()), m.direction)))
    return wanted


def _passes(wanted: tuple[Smoothing | None, tuple[str, ...]]) -> int:
    """What decides the price: gradients of all classes, and of many perturbed inputs."""
    smooth, names = wanted
    return (1 + (smooth.draws if smooth else 0)) * (1000 if "classes" in names else 1)


def _smallest_lambda(methods: Iterable[Method]) -> dict[Smoothing | None, float | None]:
    """The least that early layers are weighted down by any score of each pass; None if one does not weight them."""
    found: dict[Smoothing | None, float | None] = {}
    for m in methods:
        if m.direction is not None:
            known = found.get(m.smooth, m.layers)
            found[m.smooth] = None if known is None or m.layers is None else min(known, m.layers)
    return found


def _tell(progress: Progress, done: int | None) -> None:
    if callable(progress):
        if done is not None:
            progress(done)
    elif progress and sys.stderr.isatty():
        print(
            "\r" if done is None else f"\r{done} inputs scored", end="" if done else "\n", file=sys.stderr, flush=True
        )
