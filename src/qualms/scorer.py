"""`Scorer`: a model with the methods that score its inputs, set up once for all batches."""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from qualms.deprecated import RenamedAttribute
from qualms.errors import QualmsError, UnitsWarning
from qualms.gradients.batch import Batch, batch_tensors, num_samples, take_samples
from qualms.gradients.engines.choice import (
    requested_engine,
    requested_position_engine,
    resolve_engine,
)
from qualms.gradients.input_data import batches, numbered_batches
from qualms.gradients.isolation import (
    entry_fingerprint,
    preserve_state,
    unwrap_compiled,
    validate_model,
)
from qualms.gradients.layers import Granularity, Norm, Params
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.settings import Engine, Settings, Sketch
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.methods.pricing import LONG, Price, price_of, warn_of_long_run
from qualms.methods.registry import DEFAULT, Methods, PixelStd, in_pixels, name_methods, noisy_specs
from qualms.position_scores import PositionScorer
from qualms.positions import Positions, PositionTargets, Reduce, Spans
from qualms.provenance import Provenance, describe_scores
from qualms.result import Scored, require_names
from qualms.sample_scores import score_samples
from qualms.threshold import Threshold

PIXEL_MARGIN = 0.05  # how far resized pixels may lie outside of [0, 1]


class Scorer:
    """Scores batches of inputs of one model, by one or several methods.

    A scorer keeps what further batches can use again: what methods fit to training data, the random
    tangents of the sketch, the engine that `auto` picks, and what the engines learn about the model
    on its first batch. If the model's weights change between two calls, all of this but the choice
    of engine is computed anew.

    The model is left unchanged. During a call it is in evaluation mode, so nothing else should run
    it then. Several threads may score; they take turns.

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
        """Set up the scores of a model; the model does not run yet.

        Args:
            model: any classifier that returns logits.
            methods: a spec such as `"exgrad+layers(0.4)"` or a method object, or several: a list,
                or a dict that gives them names of your own. The paper's REGrad* by default.
            train: training inputs, an iterable of batches, for the methods that need them. If the
                batches are pairs of inputs and labels, `mahalanobis` and `quam` use the labels;
                otherwise they use the model's predictions instead.
            models: further models, the other members of the `ensemble`.
            engine: how class gradients are computed. `auto`, the default, is `exact` where that
                takes at most 60 forward passes a sample, as counted, and else estimates from some
                of the classes, with a standard error of 3 %. `exact` is exact; `sketch` estimates
                from random tangents, at a cost that does not depend on the number of classes
                (`qualms.Sketch` for its options); `reference` is the paper's loop. At all positions
                of a model that answers at many it is always the sketch. Sketched `+layers` scores
                add layers in quadrature, so they rank alike but have other values: compare scores,
                and use a threshold, within one engine.
            layers: what `+layers` counts: `module`, `tensor` or `block`.
            norm: the norm of the gradients, `l2` or `l1`.
            params: which parameters count: a pattern, or a function of names; all by default.
            seed: decides every random draw, together with an input's number.
            batch_size: the most inputs to run at once.
            budget: bytes that the work on one chunk of inputs may take.
            tolerance: the standard error that a score may have, relative to its value, to save
                passes; 0 is exact. With 25 classes or more, only those that count most for an input
                and a few of the others are run. In `+layers` scores, early layers that add less
                than a part of this share are left out; what they add is measured on some of the
                inputs, not proven. The errors are reported.
            threshold: the highest score of the first method that is accepted; a number, or a
                `qualms.Threshold`. It is refused if it knows that it was calibrated on scores of
                another method, network or settings.
            class_names: names of the classes, in the order of the logits.
            pixel_std: what pixels from 0 to 1 were divided by to make the model's inputs, a number
                or one for each channel. Noise in specs (`+smooth`, `perturb-x`, `mc-aa`, `odin`) is
                then in pixels, as papers give it, and not in the units of the tensor.
            class_dim: for models that answer at many positions, the axis of the classes in their
                logits: -1 for language models, 1 for segmentation. Scores then have the shape of
                the positions, [B, T] or [B, H, W]. Each input runs alone, without its padding, and
                gradients are sketched.
            reduce: makes one number of an input's positions: `mean`, `max`, `sum`, or a quantile
                between 0 and 1.
            positions: a few positions to score instead of all, by any engine and method: [B, P]. In
                images they are counted row by row.
            ignore_index: positions with this target are not scored.
        """
        self.model = model
        self.methods: dict[str, Method] = {}
        for name, method in name_methods(methods).items():
            self.methods[name] = in_pixels(method, pixel_std)
        # Specs with noise, such as `+smooth(0.02)`, that is meant for pixels in [0, 1] but is added
        # to the inputs unscaled, as no `pixel_std` was passed. `_warn_of_units` warns of them.
        self._unscaled_noisy_specs = noisy_specs(methods) if pixel_std is None else ()
        self._positions = Positions.read(class_dim, reduce, positions, ignore_index)
        if self._positions is None:
            engine = requested_engine(engine, tolerance)
        else:
            engine = requested_position_engine(engine, at_all=self._positions.chosen is None)
        self.settings = Settings(
            engine,
            layers,
            norm,
            params,
            budget=budget,
            batch_size=batch_size,
            seed=seed,
            tolerance=tolerance,
        )
        self.threshold = _as_threshold(threshold)
        self.class_names = None if class_names is None else tuple(class_names)
        self._train = train
        self._members = tuple(models)
        # What the engines learn about the model on its first batch.
        self._cache = PlanCache()
        # What the methods keep for the model, such as a posterior that they fit to `train`.
        self._method_cache: dict[Any, Any] = {}
        # The fingerprint of the model's state at the last batch; None before the first batch.
        self._model_state: tuple[Any, ...] | None = None
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
        """Score all inputs of `x`.

        Args:
            x: a tensor or array, a tuple or dict of them, an iterable of batches or a torch dataset
                (labels are ignored).
            first: the number of the first input, which decides its draws; pass it where `x`
                continues another call.
            numbers: a number for each input, in place of first, first + 1, …: an input that keeps
                its number keeps its random draws.
            mask: for models that answer at many positions, which of them to score, [inputs,
                *positions]; the others are NaN, as is padding by an `attention_mask` in `x`.
            targets: the true class at each position, -100 where there is none (see `next_tokens`).
            spans: with `reduce`, (start, end) of the spans of each text, in tokens; one number for
                each span.

        Returns:
            The scores by method, with predictions; see `Scored`.
        """
        parts = self.stream(
            x,
            first,
            numbers,
            mask=mask,
            targets=targets,
            spans=spans,
        )
        return Scored.concatenate(parts)

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
        """Score one batch after the other, so that a long run can save its results as it goes.

        Args:
            batches: the inputs, as `x` of `__call__`.
            first: the number of the first input, as for `__call__`.
            numbers: a number for each input, as for `__call__`.
            mask: which positions to score, as for `__call__`.
            targets: the true class at each position, as for `__call__`.
            spans: the spans of each text, as for `__call__`.

        Yields:
            The scores of each batch, as soon as they are computed.
        """
        validate_model(self.model)
        for number in (first, *(numbers or ())):
            if not isinstance(number, int) or number < 0:
                raise QualmsError(f"numbers= contains {number!r}; pass whole numbers, 0 or more.")
        position_targets = PositionTargets(mask, targets, spans)
        position_targets.require_use(self._positions)
        end = 0  # the number of inputs read so far
        for start, batch in numbered_batches(batches, unwrap_compiled(self.model)):
            end = start + num_samples(batch)
            batch_numbers: Sequence[int]
            if numbers is None:
                batch_numbers = range(first + start, first + end)
            else:
                _require_numbers(numbers, end)
                batch_numbers = numbers[start:end]
            if self._positions is None:
                yield self._score_batch(batch, batch_numbers)
            else:
                batch_targets = position_targets.select_inputs(start, end)
                yield self._score_positions(self._positions, batch, batch_numbers, batch_targets)
        # Whether the user passed too many is known only after the last batch.
        position_targets.require_no_more_than(end)
        if numbers is not None and len(numbers) > end:
            raise QualmsError(
                f"there are {len(numbers)} numbers for {end} inputs; pass one number per input."
            )

    @property
    def provenance(self) -> Provenance:
        """How the first method's scores are computed: the method, the network and the settings.

        Pass it to `Threshold.from_scores` or `Threshold.from_labels`, so that the threshold is
        refused for other scores.

        Raises:
            QualmsError: if `engine="auto"` has not chosen an engine yet.
        """
        if self._is_engine_open:
            raise QualmsError(
                "engine='auto' has not chosen an engine yet; call choose_engine, or score a batch."
            )
        return self._describe_scores()

    made_by = RenamedAttribute("provenance")

    def choose_engine(self, x: Any) -> Settings:
        """Choose an engine now, if `engine="auto"` would choose it on the first batch.

        Args:
            x: inputs like those that will be scored; only the first batch is used.

        Returns:
            The settings, with the engine that all further batches use.
        """
        validate_model(self.model)
        batch = next(batches(x, unwrap_compiled(self.model)))
        with self._open_model(batch) as model_context:
            self._resolve_engine(BatchContext(model_context, batch))
        return self.settings

    def price(self, x: Any) -> Price:
        """Count the work, time and memory that the scores of one input take.

        Args:
            x: inputs like those that will be scored, as for `__call__`; only the first input is
                used.
        """
        validate_model(self.model)
        batch = take_samples(next(batches(x, unwrap_compiled(self.model))), slice(0, 1))
        if self._positions is not None:
            raise QualmsError(
                "prices are available only for one score per input; leave out class_dim, "
                "or time the scores of a few inputs."
            )
        with self._open_model(batch) as model_context:
            context = BatchContext(model_context, batch)
            self._resolve_engine(context)
            # Turns off the warning of a long run: who asks for the price knows it.
            self._cache.warned.add(LONG)
            return price_of(context, self.methods.values())

    def _score_batch(self, batch: Batch, numbers: Sequence[int]) -> Scored:
        """Score a batch by a model that gives one output for each input.

        Args:
            batch: the inputs.
            numbers: a number for each input, which decides its random draws.
        """
        with self._open_model(batch) as model_context:
            context = BatchContext(model_context, batch, numbers)
            start = time.perf_counter()
            # Reading `context.logits` runs the plain forward pass, whose time predicts the run's.
            num_inputs = len(context.logits)
            seconds_each = (time.perf_counter() - start) / num_inputs
            self._resolve_engine(context)
            warn_of_long_run(context, self.methods.values(), seconds_each)
            scored = score_samples(context, self.methods, numbers)
        require_names(self.class_names, scored.probs.shape[1])
        return replace(scored, class_names=self.class_names, threshold=self.threshold)

    def _score_positions(
        self,
        positions: Positions,
        batch: Batch,
        numbers: Sequence[int],
        position_targets: PositionTargets,
    ) -> Scored:
        """Score a batch by a model that gives outputs at many positions.

        Args:
            positions: how outputs are read, and at which positions scores are wanted.
            batch: the inputs.
            numbers: a number for each input, which decides its random draws.
            position_targets: the masks, targets and spans of the inputs.
        """
        with self._open_model(batch) as model_context:
            scorer = PositionScorer(model_context, self.methods, positions, self.class_names)
            scored = scorer.score_batch(batch, numbers, position_targets)
        return replace(scored, class_names=self.class_names, threshold=self.threshold)

    @contextmanager
    def _open_model(self, batch: Batch) -> Iterator[ModelContext]:
        """Put the model into evaluation mode for the block, and restore its state afterwards.

        If the model's weights have changed since the last batch, all caches are emptied first.

        Args:
            batch: the inputs; a warning is issued if their units do not fit the methods' noise.

        Yields:
            The model with the settings, data and caches of its scores.
        """
        with preserve_state(self.model) as inner:
            state = entry_fingerprint(inner)
            if self._model_state != state:
                self._model_state = state
                self._cache = PlanCache()
                self._method_cache = {}
                # A threshold that was calibrated on the old weights no longer fits.
                self._require_own_threshold()
            self._warn_of_units(batch)
            yield ModelContext(
                inner,
                self.settings,
                self._train,
                self._members,
                self._gradient_methods(),
                self._cache,
                self._method_cache,
                # The exact engine checks its logits against those of the plain forward pass.
                compares_logits=self._positions is None and self._may_run_exact_engine(),
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy or pickle, with empty caches.

        The caches hold tensors of an autograd graph, which can be neither copied nor pickled.
        """
        return {**vars(self), "_cache": PlanCache(), "_method_cache": {}, "_model_state": None}

    def _first_method(self) -> Method:
        """Return the first of the methods, whose scores the threshold is compared with."""
        return next(iter(self.methods.values()))

    def _gradient_methods(self) -> tuple[GradientScore, ...]:
        """Return the gradient scores among the methods."""
        return tuple(m for m in self.methods.values() if isinstance(m, GradientScore))

    @property
    def _is_engine_open(self) -> bool:
        """Whether the first method is a gradient score whose engine `auto` has yet to choose."""
        return self.settings.engine == "auto" and isinstance(self._first_method(), GradientScore)

    def _may_run_exact_engine(self) -> bool:
        """Whether a method uses the exact engine, or could use it, as `auto` may choose it."""
        may_be_exact = self.settings.engine_name in ("exact", "auto")
        if may_be_exact and self._gradient_methods():
            return True
        # Methods that use the exact engine, whatever engine was chosen.
        return any(method.always_exact for method in self.methods.values())

    def _resolve_engine(self, context: BatchContext) -> None:
        """Replace `engine="auto"` by the engine chosen for this model and batch.

        Does nothing if the engine is set already, or if no method is a gradient score.

        Args:
            context: the model with a batch. The settings of its `model_context` are changed, as
                are those of this scorer.
        """
        if self.settings.engine != "auto" or not self._gradient_methods():
            return
        model_context = context.model_context
        self.settings = resolve_engine(
            self.settings,
            model_context.model,
            context.batch,
            context.logits.shape[1],
            self._cache,
        )
        model_context.settings = self.settings
        self._require_own_threshold()

    def _describe_scores(self) -> Provenance:
        """Describe how the first method's scores are computed.

        A threshold is saved with this description, so that a scorer can refuse it for scores that
        are computed otherwise. It applies to the first method's scores alone.
        """
        return describe_scores(
            unwrap_compiled(validate_model(self.model)),
            self._first_method(),
            self.settings,
            members=self._members,
            positions=self._positions,
        )

    def _require_own_threshold(self) -> None:
        """Raise an error if the threshold was calibrated with another method, network or settings.

        A threshold without provenance, such as a plain number, is accepted.
        """
        if self.threshold is None or self.threshold.provenance is None:
            return
        calibrated = self.threshold.provenance
        current = self._describe_scores()
        if self._is_engine_open:
            # `auto` has not chosen an engine yet. `_resolve_engine` compares the chosen one.
            current = replace(current, engine=calibrated.engine, tolerance=calibrated.tolerance)
        calibrated.require_same(current)

    def _warn_of_units(self, batch: Batch) -> None:
        """Warn once if noise meant for pixels in [0, 1] is added to images of another range.

        `+smooth(0.02)` adds noise of standard deviation 0.02 to the inputs. That is 2 % of a
        pixel's range for pixels in [0, 1], but not for normalized images, unless `pixel_std` was
        passed.

        Args:
            batch: the inputs. They count as images if their first tensor is [n, c, h, w] of floats.
        """
        if not self._unscaled_noisy_specs:
            # No spec has noise, `pixel_std` was passed, or the warning has been given.
            return
        images = batch_tensors(batch)[0]
        if images.ndim != 4 or not images.is_floating_point():
            return
        low, high = (float(end) for end in images.aminmax())
        if low >= -PIXEL_MARGIN and high <= 1 + PIXEL_MARGIN:
            return
        spec = self._unscaled_noisy_specs[0]
        # Emptied, so that later batches do not repeat the warning.
        self._unscaled_noisy_specs = ()
        warnings.warn(
            f"the images range from {low:.3g} to {high:.3g}, so they look normalized; pass "
            "pixel_std= (the standard deviation that the pixels were divided by) to scale the "
            f"noise of {spec} to pixels from 0 to 1, or pixel_std=1 to keep it in these units.",
            UnitsWarning,
            stacklevel=2,
        )


def _require_numbers(numbers: Sequence[int], num_inputs: int) -> None:
    """Raise an error if the user passed fewer numbers than inputs have been read so far.

    Args:
        numbers: the `numbers` argument of a `Scorer` call, one number for each input.
        num_inputs: how many inputs have been read so far.
    """
    if len(numbers) < num_inputs:
        raise QualmsError(
            f"there are {len(numbers)} numbers for at least {num_inputs} inputs; "
            "pass one number per input."
        )


def _as_threshold(threshold: Threshold | float | None) -> Threshold | None:
    """Convert a number to a `Threshold` without provenance; return others unchanged.

    Args:
        threshold: the `threshold` argument of `Scorer`.

    Raises:
        QualmsError: if it is neither a number, nor a `Threshold`, nor None.
    """
    if threshold is None or isinstance(threshold, Threshold):
        return threshold
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise QualmsError(
            f"threshold is a {type(threshold).__name__}; pass a number, or a qualms.Threshold."
        )
    return Threshold(float(threshold), samples=0, rule="given")
