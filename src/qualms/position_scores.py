"""Scores at the positions of a model's outputs, one input at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qualms.errors import QualmsError
from qualms.gradients.batch import Batch
from qualms.gradients.directions import Directions
from qualms.gradients.engines.position_sketch import (
    ExpectedLogits,
    PositionSketchEngine,
    plain_logits,
)
from qualms.gradients.plan_cache import PlanCache
from qualms.gradients.position_input import (
    AtPositions,
    SampleAlone,
    inner_params,
    live_positions,
    name_arguments,
)
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Smoothing
from qualms.methods.at_positions import (
    NOWHERE,
    TangentSums,
    groups_of,
    logit_scores,
    require_positions,
)
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method, estimate_scores
from qualms.position_table import (
    PositionTable,
    flatten_targets,
    log_probs_of_targets,
    missing_value,
)
from qualms.positions import Positions, PositionTargets, reduce_positions
from qualms.result import Scored, require_names


@dataclass(frozen=True)
class PositionScorer:
    """Scores the outputs of a model at many positions.

    Attributes:
        model_context: the model, its settings and caches.
        methods: the methods by name.
        positions: how outputs are read, and at which positions scores are wanted.
        class_names: the names of the model's classes, if they are known.
    """

    model_context: ModelContext
    methods: Mapping[str, Method]
    positions: Positions
    class_names: tuple[str, ...] | None = None

    def score_batch(
        self,
        batch: Batch,
        numbers: Sequence[int],
        position_targets: PositionTargets,
    ) -> Scored:
        """Score a batch, each input alone and without its padding.

        Args:
            batch: the inputs.
            numbers: a number for each input, which decides its random draws.
            position_targets: the masks, targets and spans of the inputs.

        Returns:
            The scores; masked positions have the score NaN and the class -1.
        """
        if self.positions.chosen is None:
            require_positions(self.methods)
        batch = name_arguments(self.model_context.model, batch)
        tables: list[PositionTable] = []
        notes: dict[str, str] = {}
        for index, number in enumerate(numbers):
            sample = SampleAlone.of(batch, index)
            if self.positions.chosen is None:
                targets = self._targets_of(position_targets, batch, index)
                tables.append(self._score_everywhere(sample, number, targets))
            else:
                tables.append(self._score_chosen(sample, number, notes))
        table = PositionTable.join(tables, torch.stack)
        is_counted = self._find_counted_positions(table, batch, position_targets)
        table = table.hide_positions(is_counted)
        return self._to_scored(table, numbers, notes, position_targets)

    def _to_scored(
        self,
        table: PositionTable,
        numbers: Sequence[int],
        notes: dict[str, str],
        position_targets: PositionTargets,
    ) -> Scored:
        """Create the `Scored` of a batch; with `reduce`, an input's scores become one number.

        The standard error of such a number is unknown, so NaN, if the scores are estimates.

        Args:
            table: the predictions and scores at the positions of all inputs.
            numbers: a number for each input, which becomes its id.
            notes: remarks on the scores, by the name of the method.
            position_targets: the masks, targets and spans of the inputs.
        """
        scores = {name: table.scores[name] for name in self.methods}
        errors = {name: table.errors[name] for name in self.methods}
        estimated = [name for name in self.methods if self._is_estimate(name, errors[name])]
        reduce = self.positions.reduce
        if reduce is not None:
            for name, values in scores.items():
                scores[name] = reduce_positions(values, reduce, position_targets.spans)
                error = torch.nan if name in estimated else 0.0
                errors[name] = torch.full_like(scores[name], error)
        return Scored(
            scores,
            errors,
            table.probs,
            numbers,
            sketched=tuple(estimated),
            notes=notes,
            classes=table.classes,
            target_log_probs=table.target_log_probs,
            sequence=table.sequence,
            of_spans=position_targets.spans is not None,
        )

    def _is_estimate(self, name: str, errors: Tensor) -> bool:
        """Whether the scores of a method are estimates: from tangents, or from a few classes.

        Args:
            name: the name of the method.
            errors: the standard errors of the method's scores.
        """
        # Also where an estimate has no error, as for a gradient that is zero.
        is_sketch = self.model_context.settings.sketch is not None
        if is_sketch and isinstance(self.methods[name], GradientScore):
            return True
        return bool((errors > 0).any())

    def _targets_of(
        self,
        position_targets: PositionTargets,
        batch: Batch,
        index: int,
    ) -> Int[Tensor, "..."] | None:
        """Return the targets of one input, -100 (`NOWHERE`) at masked positions; None without any.

        Args:
            position_targets: the masks, targets and spans of the batch.
            batch: the inputs.
            index: which input of the batch.
        """
        if position_targets.targets is None:
            return None
        targets: Tensor = position_targets.targets[index]
        masks: list[Tensor] = []
        if position_targets.mask is not None:
            masks.append(position_targets.mask[index])
        is_token = live_positions(batch, tuple(targets.shape))
        if is_token is not None:
            masks.append(is_token[index])
        if self.positions.ignore_index is not None:
            masks.append(targets != self.positions.ignore_index)
        for mask in masks:
            # Masks of another shape raise an error later, in `_find_counted_positions`.
            if mask.shape == targets.shape:
                targets = targets.masked_fill(~mask, NOWHERE)
        return targets

    def _compute_logits(self, sample: SampleAlone) -> Float[Tensor, "*t c"]:
        """Compute the logits of one input in a plain forward pass.

        Args:
            sample: the input, without padding.

        Returns:
            The logits [*t, c] of c classes, with [*t] the axes of the positions.

        Raises:
            QualmsError: if there is not one class name for each logit, or, where padding was cut
                off, not one position for each token.
        """
        model = self.model_context.model
        logits = plain_logits(model, self.positions.class_dim, sample.batch)
        require_names(self.class_names, logits.shape[-1])
        sample.require_fit(len(logits))
        return logits

    def _score_everywhere(
        self,
        sample: SampleAlone,
        number: int,
        targets: Int[Tensor, "..."] | None,
    ) -> PositionTable:
        """Score one input at all positions; gradient scores are estimated by the sketch.

        Args:
            sample: the input.
            number: the number of the input, which decides its random draws.
            targets: the true classes at all positions, padding included; None without targets.
        """
        logits = self._compute_logits(sample)
        position_shape = logits.shape[:-1]
        flat = logits.flatten(0, -2)  # [t, c], with t the number of positions
        self.model_context.cache.warn_of_probabilities(flat)
        if targets is not None:
            unpadded = sample.remove_padding(targets)
            targets = flatten_targets(unpadded, position_shape).to(flat.device)
        table = PositionTable.of_logits(flat)
        table.scores.update(logit_scores(self.methods, flat, self.model_context))
        if targets is not None:
            table = replace(table, target_log_probs=log_probs_of_targets(flat, targets))
        # A summary, which the engine compares with the logits that it computes.
        expected = ExpectedLogits.of(flat)
        # Has the logits' dtype and device, but does not keep their memory.
        like = flat[:1].clone()
        dtype = at_least_float32(like).dtype
        # Frees memory for the passes of the sketch; the logits are computed again below.
        del logits, flat
        # Scores with the same smoothing and layer weight λ share their passes.
        for smooth, lam in groups_of(self.methods):
            sums = self._sum_tangents(sample, number, (smooth, lam), targets, expected, like)
            flat_logits = self._compute_logits(sample).flatten(0, -2)
            for name, (values, errors) in sums.scores(flat_logits).items():
                table.scores[name] = values
                table.errors[name] = errors.to(dtype)
            # The one group whose tangents also measure the gradient of the targets' likelihood.
            if targets is not None and smooth is None and lam is None:
                norm = sums.text_norm()
                sequence = torch.tensor(torch.nan if norm is None else norm, dtype=dtype)
                table = replace(table, sequence=sequence)
        for name in self.methods:
            table.scores[name] = table.scores[name].to(dtype)
            # Scores of the logits are exact.
            table.errors.setdefault(name, torch.zeros_like(table.scores[name]))

        def restore_positions(values: Tensor) -> Tensor:
            """Give values [t, …] at flat positions the shape of the output, with padding."""
            return sample.restore_padding(
                values.unflatten(0, position_shape), missing_value(values)
            )

        return table.map(restore_positions)

    def _sum_tangents(
        self,
        sample: SampleAlone,
        number: int,
        group: tuple[Smoothing | None, float | None],
        targets: Int[Tensor, " t"] | None,
        expected: ExpectedLogits,
        like: Float[Tensor, "1 c"],
    ) -> TangentSums:
        """Run all random tangents over one input, for the scores that share these tangents.

        Args:
            sample: the input.
            number: the number of the input, which decides its random draws.
            group: the smoothing and the layer weight λ that these scores have in common, a key of
                `groups_of`.
            targets: the true class at each position, for the norm of the gradient of their
                likelihood, which is measured only in the group without smoothing and λ; None
                without targets.
            expected: a summary of the logits of a plain pass. The engine raises an error if the
                logits that it computes differ.
            like: a tensor with the logits' dtype and device.

        Returns:
            The sums over all tangents, from which the scores follow.
        """
        smooth, lam = group
        methods = groups_of(self.methods)[group]
        # Rows of the model's input: the sample itself, and its perturbed copies.
        rows = smooth.draws + 1 if smooth else 1
        measured_targets = targets if group == (None, None) else None
        sums = TangentSums(methods, expected.shape, rows, measured_targets, like)
        context = self.model_context
        # To the engine, the model with all its positions is one classifier.
        model = AtPositions(context.model, self.positions.class_dim)
        params = inner_params(context.model, context.settings.params)
        settings = replace(context.settings, params=params)
        request = GradientRequest(
            model,
            sample.batch,
            [number],
            settings,
            Directions(()),  # none: the sketch at positions draws random tangents
            smooth,
        )
        engine = PositionSketchEngine(context.cache)
        bytes_per_tangent = TangentSums.bytes_per_tangent(expected.shape, rows)
        plan = engine.plan(request, expected, lam, bytes_per_tangent)
        for products in engine.run(plan, request):
            sums.add(products)
            # Frees its memory before the loop runs the next pass.
            del products
        return sums

    def _score_chosen(
        self,
        sample: SampleAlone,
        number: int,
        notes: dict[str, str],
    ) -> PositionTable:
        """Score one input at a few positions; at each, the model is treated as a classifier.

        Args:
            sample: the input.
            number: the number of the input, which decides its random draws.
            notes: remarks by the name of the method, to which new ones are added.

        Returns:
            A table with a row for each chosen position.
        """
        logits = self._compute_logits(sample)
        flat = logits.flatten(0, -2)  # [positions, classes]
        is_token = live_positions(sample.batch, tuple(logits.shape[:-1]))
        # The number of positions of the input, padding included.
        length = len(flat) if sample.kept is None else sample.length
        tables: list[PositionTable] = []
        for position in self.positions.chosen or ():
            if not -length <= position < length:
                raise QualmsError(
                    f"positions= includes {position}, but the model predicts at {length} positions."
                )
            # None if the position is padding. `%` counts negative positions from the end.
            unpadded = sample.position_without_padding(position % length)
            # A list as index keeps the axis of positions. A padded position gets a table of
            # position 0, whose entries are replaced below.
            table = PositionTable.of_logits(flat[[unpadded or 0]])
            is_hole = False  # in the attention mask, between tokens
            if unpadded is not None and is_token is not None:
                is_hole = not bool(is_token[0, unpadded])
            if unpadded is None or is_hole:
                table = table.map(lambda values: torch.full_like(values, missing_value(values)))
                for name in self.methods:
                    # The probabilities are NaN here, and have the dtype of scores.
                    table.scores[name] = table.errors[name] = table.probs[:, 0]
            else:
                self._score_one(table, sample, number, unpadded, notes)
            tables.append(table)
        return PositionTable.join(tables, torch.cat)

    def _score_one(
        self,
        table: PositionTable,
        sample: SampleAlone,
        number: int,
        position: int,
        notes: dict[str, str],
    ) -> None:
        """Score one position of one input by all methods; changes the table and the notes in place.

        Args:
            table: the table of this position, to which scores and errors are added.
            sample: the input.
            number: the number of the input, which decides its random draws.
            position: the index of the position in the input without padding.
            notes: remarks by the name of the method, to which new ones are added.
        """
        context = self.model_context
        class_dim = self.positions.class_dim
        models = (context.model, *context.members)
        models_at = [AtPositions(model, class_dim, [position]) for model in models]
        params = inner_params(context.model, context.settings.params)
        # The context of a classifier that predicts at this position alone, with its own caches.
        at_position = replace(
            context,
            model=models_at[0],
            settings=replace(context.settings, params=params),
            members=tuple(models_at[1:]),
            cache=context.cache.get_or_compute(("position", position), PlanCache),
            method_cache={},
        )
        batch_context = BatchContext(at_position, sample.batch, [number])
        for name, method in self.methods.items():
            estimate = estimate_scores(method, batch_context)
            table.scores[name] = estimate.values.detach().to(batch_context.dtype)
            table.errors[name] = estimate.errors_as(table.scores[name])
            note = method.note(batch_context)
            if note is not None:
                notes[name] = note

    def _find_counted_positions(
        self,
        table: PositionTable,
        batch: Batch,
        position_targets: PositionTargets,
    ) -> Bool[Tensor, "b ..."]:
        """Find the positions that neither a mask nor an ignored target leaves out.

        Args:
            table: the predictions and scores at the positions of b inputs.
            batch: the b inputs.
            position_targets: the masks, targets and spans of the inputs.

        Returns:
            Whether each position counts, in the shape of the scores.

        Raises:
            QualmsError: if a mask has another shape than the model's output.
        """
        shape = table.classes.shape[:-1]  # without the axis of the likeliest classes
        chosen, ignored = self.positions.chosen, self.positions.ignore_index
        # By the name of the argument that errors blame.
        masks: dict[str, Tensor | None] = {"mask": position_targets.mask}
        if position_targets.targets is not None and ignored is not None:
            masks["targets"] = position_targets.targets != ignored
        if chosen is None:
            masks["attention_mask"] = live_positions(batch, tuple(shape[1:]))
        is_counted = torch.ones(shape, dtype=torch.bool, device=table.classes.device)
        for name, mask in masks.items():
            if mask is None:
                continue
            mask_of_scores = mask
            if chosen is not None:
                mask_of_scores = mask.flatten(1)[:, list(chosen)]
            if mask_of_scores.shape != shape:
                raise QualmsError(
                    f"{name} has shape {tuple(mask.shape)}, but the model predicts at positions of "
                    f"shape {tuple(shape)}; pass one entry per position."
                )
            is_counted &= mask_of_scores.to(is_counted.device)
        return is_counted
