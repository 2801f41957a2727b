"""`Scorer`: a model together with the methods that score its inputs, fitted once and used for every
batch.
"""

import hashlib
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from qualms.errors import QualmsError, UnitsWarning
from qualms.gradients.batch import Batch, batch_tensors, num_samples, take_samples
from qualms.gradients.engines.choice import resolve_engine
from qualms.gradients.input_data import batches, numbered_batches
from qualms.gradients.isolation import (
    entry_fingerprint,
    preserve_state,
    unwrap_compiled,
    validate_model,
)
from qualms.gradients.layers import Granularity, Norm, Params, selected_parameters
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.settings import Engine, Settings, Sketch
from qualms.methods.chosen import Methods, PixelStd, by_name, in_pixels, noisy_specs
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import LOGITS, in_range
from qualms.methods.price import LONG, Price, price_of, warn_of_long_run
from qualms.methods.registry import DEFAULT
from qualms.models.fingerprint import fingerprint
from qualms.positions import Positions, PositionScores, PositionTargets
from qualms.reduction import Reduce, Spans
from qualms.result import Scored, require_names
from qualms.threshold import Provenance, Threshold

MARGIN = 0.05  # beyond [0, 1], by which resized pixels may overshoot


class Scorer:
    """Scores batches of inputs of one model, by one or several methods.

    What methods learn from training data, the sketch's random tangents, the engine that `auto`
    picks, and what the engines find out about the model on its first batch are kept for all further
    batches. If the model's weights have changed since the last call, all of this but the engine is
    found anew. Between calls the model is as it came; during a call it is in evaluation mode, so
    nothing else should run it then. Several threads may score: they take turns.

    Args:
        model: any classifier that returns logits.
        methods: a spec such as `"exgrad+layers(0.4)"` or a method object, or several: a list, or a
            dict that gives them names of your own. The paper's REGrad* by default.
        train: training inputs, an iterable of batches, for the methods that need them. If the
            batches are pairs of inputs and labels, `mahalanobis` and `quam` use the labels; else
            the model's predictions stand in for them.
        models: further members, for `ensemble`.
        engine: how class gradients are computed. `auto`, the default, is `exact` where that takes
            at most 60 forward passes a row, as counted, and else estimates from some of the
            classes, with a standard error of 3 %. `exact` is exact; `sketch` has estimates from
            random tangents, whose cost does not depend on the number of classes (`qualms.Sketch`
            for its options); `reference` is the paper's loop. At all positions of a model that
            answers at many it is always the sketch. Sketched `+layers` scores add layers in
            quadrature, so they rank alike but have other values: compare scores, and use a
            threshold, within one engine.
        layers: what `+layers` counts: `module`, `tensor` or `block`.
        norm: of the gradients, `l2` or `l1`.
        params: which parameters count: a pattern, or a function of names; all by default.
        seed: decides every random draw, together with an input's number.
        batch_size: the most inputs to run at once.
        budget: bytes that the work on one chunk of inputs may take.
        tolerance: the standard error that a score may have, as a share of its value, to save
            passes; 0 is exact. With 25 classes or more, only those that count most for an input and
            a few of the others are run. In `+layers` scores, early layers that add less than a part
            of this share are left out; what they add is measured on some of the inputs, not proven.
            The errors are reported.
        threshold: the highest score of the first method that is accepted; a number, or a
            `qualms.Threshold`. It is refused if it knows that it was set on scores of another
            method, network or settings.
        class_names: names of the classes, in the order of the logits.
        class_dim: for models that answer at many positions, the axis of the classes in their
            logits: -1 for language models, 1 for segmentation. Scores then have the shape of the
                positions, [B, T] or [B, H, W]. Each input
            runs alone, without its padding, and gradients are sketched.
        reduce: makes one number of an input's positions: `mean`, `max`, `sum`, or a quantile
            between 0 and 1.
        positions: a few positions to score instead of all, by any engine and method: [B, P]. In
            images they are counted row by row.
        ignore_index: positions with this target are not scored.
        pixel_std: what pixels from 0 to 1 were divided by to make the model's inputs, a number or
            one for each channel. Noise in specs (`+smooth`, `perturb-x`, `mc-aa`, `odin`) is then
            in pixels, as papers give it, and not in the units of the tensor.

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
        engine: Engine | Sketch | None = None,
        layers: Granularity = "module",
        norm: Norm = "l2",
        params: Params = None,
        seed: int = 0,
        batch_size: int | None = None,
        budget: int | None = None,
        tolerance: float | None = None,
        threshold: Threshold | float | None = None,
        class_names: Sequence[str] | None = None,
        pixel_std: PixelStd = None,
        class_dim: int | None = None,
        reduce: Reduce = None,
        positions: Sequence[int] | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.model = model
        self.methods = {
            name: in_pixels(method, pixel_std) for name, method in by_name(methods).items()
        }
        self._unscaled = noisy_specs(methods) if pixel_std is None else ()
        self._at = Positions.read(class_dim, reduce, positions, ignore_index)
        engine = engine or "auto" if self._at is None else self._at.engine(engine)
        if engine == "auto" and tolerance is not None:
            engine = "exact"  # which is what it says then: within the tolerance
        self.settings = Settings(engine, layers, norm, params, budget, batch_size, seed, tolerance)
        self.threshold = _threshold(threshold)
        self.class_names = None if class_names is None else tuple(class_names)
        self._train, self._members = train, tuple(models)
        self._learnt, self._fitted = PlanCache(), dict[Any, Any]()
        self._state: tuple[Any, ...] | None = None  # of the model at the last batch
        self._require_own_threshold()

    def __call__(
        self,
        x: Any,
        first: int = 0,
        numbers: Sequence[int] | None = None,
        *,
        mask: Any = None,
        targets: Any = None,
        spans: Spans | None = None,
    ) -> Scored:
        """The scores of all inputs of `x`.

        Args:
            x: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
                (labels are ignored).
            first: the number of the first input, which decides its draws; give it where `x` goes on
                from another call.
            numbers: of all inputs, in place of first, first + 1, …: an input that keeps its number
                keeps its draws.
            mask: for models that answer at many positions, which of them to score, [inputs,
                *positions]; the others are NaN, as is padding by an `attention_mask` in `x`.
            targets: the true class at each position, -100 where there is none (see `next_tokens`).
            spans: with `reduce`, (start, end) of the spans of each text, in tokens; one number for
                each span.
        """
        return Scored.concatenated(
            self.stream(x, first, numbers, mask=mask, targets=targets, spans=spans)
        )

    def stream(
        self,
        batches: Any,
        first: int = 0,
        numbers: Sequence[int] | None = None,
        *,
        mask: Any = None,
        targets: Any = None,
        spans: Spans | None = None,
    ) -> Iterator[Scored]:
        """The scores of each batch as it comes, so that a long run can keep what it has; arguments
        as for a call.
        """
        validate_model(self.model)
        for number in (first, *(numbers or ())):
            if not isinstance(number, int) or number < 0:
                raise QualmsError(
                    f"an input has the number {number!r}; numbers are whole, 0 or more."
                )
        given = PositionTargets(mask, targets, spans)
        given.require_use(self._at)
        end = 0
        for start, batch in numbered_batches(batches, unwrap_compiled(self.model)):
            end = start + num_samples(batch)
            if numbers is not None and len(numbers) < end:
                raise QualmsError(
                    f"there are {len(numbers)} numbers for {end} inputs or more; number every input."
                )
            own = range(first + start, first + end) if numbers is None else numbers[start:end]
            if self._at is None:
                yield self._scored(batch, own)
                continue
            with self._subject(batch) as subject:
                scores = PositionScores(subject, self.methods, self._at, self.class_names)
                scored = scores.of_batch(batch, own, given.part(start, end))
            yield replace(scored, class_names=self.class_names, threshold=self.threshold)
        given.require_all(end)
        if numbers is not None and len(numbers) > end:
            raise QualmsError(
                f"there are {len(numbers)} numbers for {end} inputs; number every input once."
            )

    @property
    def made_by(self) -> Provenance:
        """What makes the scores of the first method, for a `Threshold` to remember."""
        if self._undecided:
            raise QualmsError(
                "engine='auto' has not chosen an engine yet; call choose_engine, or score a batch."
            )
        return self._made_by(self.settings)

    def _made_by(self, how: Settings) -> Provenance:
        model, method = (
            unwrap_compiled(validate_model(self.model)),
            next(iter(self.methods.values())),
        )
        network = "+".join(map(fingerprint, (model, *self._members)))
        said = repr(method) if self._at is None else f"{method!r} at {self._at}"
        if method.needs == (LOGITS,):
            return Provenance(said, network)
        counted = None if how.params is None else _digest(selected_parameters(model, how.params))
        engine, tolerance = (
            repr(how.sketch) if how.sketch else how.engine_name,
            float(how.tolerance or 0.0),
        )
        if not isinstance(method, GradientScore) and engine in ("auto", "exact"):
            engine, tolerance = "exact", 0.0  # it asks no engine, or always the exact one
        return Provenance(
            said, network, engine, how.granularity, how.norm, counted, tolerance, how.seed
        )

    def choose_engine(self, x: Any) -> Settings:
        """How scores are computed; what `auto` leaves open is decided on the first batch: here,
        that of `x`.
        """
        validate_model(self.model)
        batch = next(batches(x, unwrap_compiled(self.model)))
        with self._subject(batch) as subject:
            self._choose_engine(BatchContext(subject, batch))
        return self.settings

    def price(self, x: Any) -> Price:
        """What the scores of one input like those of `x` cost: counted, after a look at the first
        of them.
        """
        validate_model(self.model)
        batch = take_samples(next(batches(x, unwrap_compiled(self.model))), slice(0, 1))
        if self._at is not None:
            raise QualmsError(
                "a price is counted for one score an input; leave out class_dim, or score a few inputs."
            )
        with self._subject(batch) as subject:
            passes = BatchContext(subject, batch)
            self._choose_engine(passes)
            subject.cache.warned.add(LONG)  # who asks for the price need not be warned of it
            return price_of(passes, self.methods.values())

    def _scored(self, batch: Batch, numbers: Sequence[int]) -> Scored:
        with self._subject(batch) as subject:
            passes = BatchContext(subject, batch, numbers)
            start, inputs = (
                time.perf_counter(),
                len(passes.logits),
            )  # which runs the plain forward pass
            each_forward = (time.perf_counter() - start) / inputs
            self._choose_engine(passes)
            warn_of_long_run(passes, self.methods.values(), each_forward)
            each = {
                method: method.score(passes) for method in dict.fromkeys(self.methods.values())
            }  # equal ones once
            found = {
                name: in_range(each[method], passes.dtype, name, numbers)
                for name, method in self.methods.items()
            }
            errors = {
                name: method.error(passes).detach().to(passes.dtype)
                for name, method in self.methods.items()
            }
            said = {name: method.note(passes) for name, method in self.methods.items()}
            probs = passes.probs.detach()
            gradients = {
                name: m for name, m in self.methods.items() if isinstance(m, GradientScore)
            }
            estimated = tuple(name for name, m in gradients.items() if passes.estimates(m))
        require_names(self.class_names, probs.shape[1])
        notes = {name: note for name, note in said.items() if note is not None}
        return Scored(
            found, errors, probs, numbers, self.class_names, self.threshold, estimated, notes
        )

    @contextmanager
    def _subject(self, batch: Batch) -> Iterator[ModelContext]:
        """The model as it came, with what is known of it; anew if its weights have changed."""
        with preserve_state(self.model) as inner:
            state = entry_fingerprint(inner)
            new = self._state != state
            if new:
                self._learnt, self._fitted, self._state = PlanCache(), {}, state
            if new:
                self._require_own_threshold()
            self._warn_of_units(batch)
            more = (
                self._train,
                self._members,
                self._gradient_methods(),
                self._learnt,
                self._fitted,
            )
            yield ModelContext(
                inner, self.settings, *more, compares=self._at is None and self._compares()
            )

    def __getstate__(self) -> dict[str, Any]:
        """For copies and other processes: what was found out holds tensors of a graph, and is found
        out again there.
        """
        return {**vars(self), "_learnt": PlanCache(), "_fitted": {}, "_state": None}

    def _require_own_threshold(self) -> None:
        """An error if the threshold belongs to other scores; what `auto` leaves open is compared
        later.
        """
        if self.threshold is None or self.threshold.made_by is None:
            return
        theirs = self.threshold.made_by
        ours = self._made_by(self.settings)
        if self._undecided:
            ours = replace(ours, engine=theirs.engine, tolerance=theirs.tolerance)
        theirs.require_same(ours)

    @property
    def _undecided(self) -> bool:
        """Whether it is still open how the scores of the first method are computed."""
        return self.settings.engine == "auto" and isinstance(
            next(iter(self.methods.values())), GradientScore
        )

    def _warn_of_units(self, batch: Batch) -> None:
        """Warn once if noise is meant for pixels, and the inputs are images in other units."""
        x = batch_tensors(batch)[0]
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
        return tuple(
            method for method in self.methods.values() if isinstance(method, GradientScore)
        )

    def _compares(self) -> bool:
        """Whether the exact engine will run on the inputs themselves, for which the logits serve as
        a check.
        """
        exact = self.settings.engine_name in ("exact", "auto")
        return any(
            m.always_exact or (exact and isinstance(m, GradientScore))
            for m in self.methods.values()
        )

    def _choose_engine(self, passes: BatchContext) -> None:
        """Settles what `auto` leaves open, by counted work, if any score asks for it."""
        if self.settings.engine != "auto" or not self._gradient_methods():
            return
        subject, classes = passes.model_context, passes.logits.shape[1]
        self.settings = resolve_engine(
            self.settings, subject.model, passes.batch, classes, subject.cache
        )
        subject.settings = self.settings
        self._require_own_threshold()


def _digest(names: Iterable[str]) -> str:
    """Which parameters these are: a function that picks them has no name to compare."""
    every = list(names)
    return f"{len(every)} parameters, {hashlib.sha256(' '.join(every).encode()).hexdigest()[:16]}"


def _threshold(threshold: Threshold | float | None) -> Threshold | None:
    if threshold is None or isinstance(threshold, Threshold):
        return threshold
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise QualmsError(
            f"threshold is a {type(threshold).__name__}; pass a number, or a qualms.Threshold."
        )
    return Threshold(float(threshold), 0, "given")
