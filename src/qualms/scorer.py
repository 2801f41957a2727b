"""`Scorer`: a model together with the methods that score its inputs, fitted once and used for every batch."""

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from qualms.errors import QualmsError, UnitsWarning
from qualms.gradients.choice import choose_engine
from qualms.gradients.directions import Directions
from qualms.gradients.guard import eager, state_on_entry, untouched, usable
from qualms.gradients.inputs import Batch, batches, count, numbered_batches, tensors
from qualms.gradients.layers import Granularity, Norm, Params, selected_parameters
from qualms.gradients.learnt import Learnt
from qualms.gradients.settings import Engine, Settings, Sketch
from qualms.gradients.smoothing import Smoothing
from qualms.methods.few_classes import classes_needed
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import LOGITS, Method, Noise
from qualms.methods.passes import Passes, Subject
from qualms.methods.registry import DEFAULT, parse
from qualms.models.fingerprint import fingerprint
from qualms.scored import Scored
from qualms.threshold import MadeBy, Threshold

MANY = 1000  # classes, to weigh passes by
Methods = str | Method | Sequence[str | Method] | Mapping[str, str | Method]
PixelStd = float | Sequence[float] | None
MARGIN = 0.05  # beyond [0, 1], by which resized pixels may overshoot


class Scorer:
    """Scores batches of inputs of one model, by one or several methods.

    What methods learn from training data, the sketch's random tangents, the engine that `auto` picks, and what the
    engines find out about the model on its first batch are kept for all further batches. If the model's weights have
    changed since the last call, all of this but the engine is found anew. Between calls the model is as it came; during
    a call it is in evaluation mode, so nothing else should run it then. Several threads may score: they take turns.

    Args:
        model: any classifier that returns logits.
        methods: a spec such as `"exgrad+layers(0.4)"` or a method object, or several: a list, or a dict that gives them
            names of your own. The paper's REGrad* by default.
        train: training inputs, an iterable of batches, for the methods that need them. If the batches are pairs of
            inputs and labels, `mahalanobis` and `quam` use the labels; else the model's predictions stand in for them.
        models: further members, for `ensemble`.
        engine: how class gradients are computed: `exact`; `sketch`, estimates whose cost does not depend on the number
            of classes (`qualms.Sketch` for its options); `auto`, the cheaper of the two by measured time; or
            `reference`. Sketched `+layers` scores add layers in quadrature, so they rank alike but have other values:
            compare scores, and use a threshold, within one engine.
        layers: what `+layers` counts: `module`, `tensor` or `block`.
        norm: of the gradients, `l2` or `l1`.
        params: which parameters count: a pattern, or a function of names; all by default.
        seed: decides every random draw, together with an input's number.
        batch_size: the most inputs to run at once.
        budget: bytes that the work on one chunk of inputs may take.
        tolerance: the share of its value that a score by the exact engine may be off by, to save passes; 0 is exact.
            With more than 24 classes, only those that count most for an input and a few of the others are run: enough
            for a standard error, which is reported, within this share. In `+layers` scores, early layers that add less
            than this share are left out; what they add is measured on some of the directions, not proven.
        threshold: the highest score of the first method that is accepted; a number, or a `qualms.Threshold`.
            It is refused if it knows that it was set on scores of another method, network or settings.
        class_names: names of the classes, in the order of the logits.
        pixel_std: what pixels from 0 to 1 were divided by to make the model's inputs, a number or one for each channel.
            Noise in specs (`+smooth`, `perturb-x`, `mc-aa`, `odin`) is then in pixels, as papers give it, and not in
            the units of the tensor.

    Example:
        ```python
        import torch
        import qualms

        model, known = torch.nn.Linear(4, 3), torch.randn(100, 4)
        threshold = qualms.Threshold.from_scores(qualms.score(model, known), coverage=0.9)
        scorer = qualms.Scorer(model, ["regrad+layers+smooth", "energy"], threshold=threshold)
        for part in scorer.stream([torch.randn(8, 4), torch.randn(8, 4)]):
            print(part.ids, part.prediction, part.accepted, part.scores["energy"])
        ```
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Methods = DEFAULT,
        *,
        train: Any = None,
        models: Iterable[nn.Module] = (),
        engine: Engine | Sketch = "exact",
        layers: Granularity = "module",
        norm: Norm = "l2",
        params: Params = None,
        seed: int = 0,
        batch_size: int | None = None,
        budget: int | None = None,
        tolerance: float = 0.0,
        threshold: Threshold | float | None = None,
        class_names: Sequence[str] | None = None,
        pixel_std: PixelStd = None,
    ) -> None:
        self.model = model
        self.methods = {name: in_pixels(method, pixel_std) for name, method in by_name(methods).items()}
        self._unscaled = _noisy_specs(methods) if pixel_std is None else ()
        self.settings = Settings(engine, layers, norm, params, budget, batch_size, seed, tolerance)
        self.threshold = _threshold(threshold)
        self.class_names = None if class_names is None else tuple(class_names)
        self._train, self._members = train, tuple(models)
        self._learnt, self._fitted = Learnt(), dict[Any, Any]()
        self._state: tuple[Any, ...] | None = None  # of the model at the last batch
        if self.settings.engine != "auto":
            self._require_own_threshold()

    def __call__(self, x: Any, first: int = 0, numbers: Sequence[int] | None = None) -> Scored:
        """The scores of all inputs of `x`.

        Args:
            x: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset (labels are
                ignored).
            first: the number of the first input, which decides its draws; give it where `x` goes on from another call.
            numbers: of all inputs, in place of first, first + 1, …: an input that keeps its number keeps its draws.
        """
        return Scored.concatenated(self.stream(x, first, numbers))

    def stream(self, batches: Any, first: int = 0, numbers: Sequence[int] | None = None) -> Iterator[Scored]:
        """The scores of each batch as it comes, so that a long run can keep what it has; arguments as for a call."""
        usable(self.model)
        for number in (first, *(numbers or ())):
            if not isinstance(number, int) or number < 0:
                raise QualmsError(f"an input has the number {number!r}; numbers are whole, 0 or more.")
        end = 0
        for start, batch in numbered_batches(batches, eager(self.model)):
            end = start + count(batch)
            if numbers is not None and len(numbers) < end:
                raise QualmsError(f"there are {len(numbers)} numbers for {end} inputs or more; number every input.")
            yield self._scored(batch, range(first + start, first + end) if numbers is None else numbers[start:end])
        if numbers is not None and len(numbers) > end:
            raise QualmsError(f"there are {len(numbers)} numbers for {end} inputs; number every input once.")

    @property
    def made_by(self) -> MadeBy:
        """What makes the scores of the first method, for a `Threshold` to remember."""
        model, method, how = eager(usable(self.model)), next(iter(self.methods.values())), self.settings
        network = "+".join(map(fingerprint, (model, *self._members)))
        if method.needs == (LOGITS,):
            return MadeBy(repr(method), network)
        if how.engine == "auto":
            raise QualmsError("engine='auto' has not chosen an engine yet; call choose_engine, or score a batch.")
        counted = None if how.params is None else _digest(selected_parameters(model, how.params))
        engine = repr(how.sketch) if how.sketch else how.engine_name
        return MadeBy(repr(method), network, engine, how.granularity, how.norm, counted, float(how.tolerance), how.seed)

    def choose_engine(self, x: Any) -> Engine | Sketch:
        """The engine, which `auto` picks on the first batch it sees: here, that of `x`."""
        if self.settings.engine == "auto":
            usable(self.model)
            batch = next(batches(x, eager(self.model)))
            with untouched(self.model) as inner:
                self._pick_engine(inner, batch)
        return self.settings.engine

    def _scored(self, batch: Batch, numbers: Sequence[int]) -> Scored:
        with untouched(self.model) as inner:
            state = state_on_entry(inner)
            new = self._state != state
            if new:
                self._learnt, self._fitted, self._state = Learnt(), {}, state
            self._pick_engine(inner, batch)
            if new:
                self._require_own_threshold()
            self._warn_of_units(batch)
            more = (self._train, self._members, self._gradient_methods(), self._learnt, self._fitted)
            passes = Passes(Subject(inner, self.settings, *more, compares=self._compares()), batch, numbers)
            found = {name: method.score(passes).detach().to(passes.dtype) for name, method in self.methods.items()}
            errors = {name: method.error(passes).detach().to(passes.dtype) for name, method in self.methods.items()}
            said = {name: method.note(passes) for name, method in self.methods.items()}
            probs = passes.probs.detach()
            gradients = {name: m for name, m in self.methods.items() if isinstance(m, GradientScore)}
            estimated = tuple(name for name, m in gradients.items() if passes.estimates(m))
        if self.class_names is not None and len(self.class_names) != probs.shape[1]:
            raise QualmsError(
                f"there are {len(self.class_names)} class_names and {probs.shape[1]} logits; name every class once."
            )
        notes = {name: note for name, note in said.items() if note is not None}
        return Scored(found, errors, probs, numbers, self.class_names, self.threshold, estimated, notes)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: what was found out holds tensors of a graph, and is found out again there."""
        return {**vars(self), "_learnt": Learnt(), "_fitted": {}, "_state": None}

    def _require_own_threshold(self) -> None:
        if self.threshold is not None and self.threshold.made_by is not None:
            self.threshold.made_by.require_same(self.made_by)

    def _warn_of_units(self, batch: Batch) -> None:
        """Warn once if noise is meant for pixels, and the inputs are images in other units."""
        x = tensors(batch)[0]
        if not self._unscaled or x.ndim != 4 or not x.is_floating_point():
            return
        low, high = (float(end) for end in x.aminmax())
        if low < -MARGIN or high > 1 + MARGIN:
            method, self._unscaled = self._unscaled[0], ()
            warnings.warn(
                f"the images go from {low:.3g} to {high:.3g}, so they are not in pixels from 0 to 1, and the noise of "
                f"{method} is taken in their units; pass pixel_std=, what the pixels were divided by, or 1 to keep it.",
                UnitsWarning,
                stacklevel=2,
            )

    def _gradient_methods(self) -> tuple[GradientScore, ...]:
        return tuple(method for method in self.methods.values() if isinstance(method, GradientScore))

    def _compares(self) -> bool:
        """Whether the exact engine will run on the inputs themselves, for which the logits serve as a check."""
        exact = self.settings.engine_name == "exact"
        plain = [m for m in self.methods.values() if m.smooth is None]
        return any(m.always_exact or (exact and isinstance(m, GradientScore)) for m in plain)

    def _pick_engine(self, model: nn.Module, batch: Batch) -> None:
        """Picks the engine for `auto`, judged by the most expensive pass that the methods need."""
        methods = self._gradient_methods()
        if self.settings.engine != "auto" or not methods:
            return
        subject = Subject(model, gradient_methods=methods)
        wanted = {method.smooth: subject.directions(method.smooth).names for method in methods}
        smooth, names = max(wanted.items(), key=_price)
        summed = [m for m in methods if m.smooth == smooth and m.direction == "classes"]
        few = partial(classes_needed, summed, tolerance=self.settings.tolerance) if self.settings.tolerance else None
        picked = choose_engine(self.settings, model, batch, names, smooth, needed=few if summed else None)
        self.settings = replace(self.settings, engine=picked)


def by_name(methods: Methods) -> dict[str, Method]:
    """The methods parsed, by name: the dict's key, else the spec as it was written."""
    if isinstance(methods, (str, Method)):
        methods = [methods]
    if not methods:
        raise QualmsError("methods is empty; name one, such as 'regrad' or 'entropy'.")
    named: dict[str, Method] = {}
    for name, one in methods.items() if isinstance(methods, Mapping) else [(None, one) for one in methods]:
        method = parse(one) if isinstance(one, str) else one
        if not isinstance(method, Method):
            raise QualmsError(f"a method is a {type(one).__name__}; pass a spec, or a qualms.methods.Method.")
        called = name or (one if isinstance(one, str) else method.spec)
        if named.setdefault(called, method) != method:
            raise QualmsError(f"two methods are called {called!r}; give each a name of your own, in a dict.")
    return named


def in_pixels(method: Method, pixel_std: PixelStd) -> Method:
    """A method whose noise is in pixels from 0 to 1, with the noise in the units of inputs divided by `pixel_std`."""
    if pixel_std is None:
        return method
    each = tuple(pixel_std) if isinstance(pixel_std, Sequence) else (pixel_std,)
    if not each or not all(isinstance(s, (int, float)) and not isinstance(s, bool) and s > 0 for s in each):
        raise QualmsError(f"pixel_std is {pixel_std!r}; pass a number above 0, or one for each channel.")

    def scaled(level: float) -> Noise:
        levels = tuple(level / s for s in each)
        return levels if len(levels) > 1 else levels[0]

    return method.in_units(scaled)


def _noisy_specs(methods: Methods) -> tuple[str, ...]:
    """The specs whose noise would be scaled; who makes a method object has set its noise."""
    values = methods.values() if isinstance(methods, Mapping) else [methods] if isinstance(methods, str) else methods
    specs = [one for one in values if isinstance(one, str)] if not isinstance(values, Method) else []
    return tuple(spec for spec in specs if in_pixels(parse(spec), 0.5) != parse(spec))


def _digest(names: Iterable[str]) -> str:
    """Which parameters these are: a function that picks them has no name to compare."""
    every = list(names)
    return f"{len(every)} parameters, {hashlib.sha256(' '.join(every).encode()).hexdigest()[:16]}"


def _price(wanted: tuple[Smoothing | None, tuple[str, ...]]) -> int:
    """What decides the price: gradients of all classes, and of many perturbed inputs."""
    smooth, names = wanted
    return (1 + (smooth.draws if smooth else 0)) * Directions(names).size(MANY)


def _threshold(threshold: Threshold | float | None) -> Threshold | None:
    if threshold is None or isinstance(threshold, Threshold):
        return threshold
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise QualmsError(f"threshold is a {type(threshold).__name__}; pass a number, or a qualms.Threshold.")
    return Threshold(float(threshold), 0, "given")
