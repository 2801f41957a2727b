"""Scores at the positions of a model's answers: every token of a text, every pixel of an image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
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
from qualms.gradients.position_input import Alone, AtPositions, inside, live_positions, named
from qualms.gradients.precision import at_least_float32
from qualms.gradients.request import GradientRequest
from qualms.gradients.settings import Engine, Sketch
from qualms.methods.at_positions import (
    NOWHERE,
    TangentSums,
    blocks,
    groups_of,
    logit_scores,
    require_positions,
)
from qualms.methods.context import BatchContext, ModelContext
from qualms.methods.divergence import log_softmax
from qualms.methods.gradient_score import GradientScore
from qualms.methods.method import Method
from qualms.reduction import Reduce, Spans, reduced, require_reduction
from qualms.result import Scored, require_names

LIKELIEST = 5  # classes that are kept at every position
# What is found, by what it is (score, error, probs, classes, target, sequence) and by method;
# positions are its axes.
Found = dict[tuple[str, str], Tensor]


def next_tokens(ids: Int[Tensor, "b t"], mask: Tensor | None = None) -> Int[Tensor, "b t"]:
    """The token that follows each token of some texts, -100 where none does: the `targets` of a
    language model.

    Args:
        ids: the tokens.
        mask: which of them are not padding, as tokenizers give it.

    Example:
        ```python
        import torch
        import qualms

        assert qualms.next_tokens(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, -100]]
        ```
    """
    following = torch.full_like(ids, NOWHERE)
    following[:, :-1] = ids[:, 1:]
    if mask is not None:
        following[:, :-1] = torch.where(
            mask[:, 1:].bool() & mask[:, :-1].bool(), following[:, :-1], NOWHERE
        )
    return following


@dataclass(frozen=True)
class Positions:
    """How a model's answers are read, and which of them are wanted; the arguments are those of
    `Scorer`.
    """

    class_dim: int
    reduce: Reduce = None
    chosen: tuple[int, ...] | None = None
    ignore_index: int | None = None

    @classmethod
    def read(
        cls,
        class_dim: int | None,
        reduce: Reduce,
        chosen: Sequence[int] | None,
        ignore_index: int | None,
    ) -> "Positions | None":
        """None for a model that gives one answer for each input."""
        require_reduction(reduce)
        if class_dim is not None and not isinstance(class_dim, int):
            raise QualmsError(
                f"class_dim={class_dim!r} is not a whole number; use -1 for language models."
            )
        if chosen is not None and (
            not chosen or not all(isinstance(place, int) for place in chosen)
        ):
            raise QualmsError(
                f"positions={list(chosen)!r} are not whole numbers, one or more; count them row by row."
            )
        if class_dim is not None:
            return cls(class_dim, reduce, None if chosen is None else tuple(chosen), ignore_index)
        if (reduce, chosen, ignore_index) != (None, None, None):
            raise QualmsError(f"reduce, positions and ignore_index are {MANY}")
        return None

    def engine(self, asked: Engine | Sketch | None) -> Engine | Sketch:
        """The engine: at all positions the sketch, at a few any."""
        if self.chosen is not None and asked == "auto":
            raise QualmsError(
                "engine='auto' does not choose for a few positions=; use exact, or sketch."
            )
        if self.chosen is not None:
            return asked or "exact"
        if asked in ("exact", "reference"):
            raise QualmsError(
                f"engine={asked!r} takes a backward pass for each class at each position; name a few of them in "
                "positions=, or use engine='sketch'."
            )
        return "sketch" if asked in (None, "auto") else asked


MANY = "for models that answer at many positions; pass class_dim=."


@dataclass(frozen=True)
class PositionTargets:
    """What is given beside the inputs: which positions count, their true classes, and spans of
    tokens.
    """

    mask: Any = None
    targets: Any = None
    spans: Spans | None = None

    def require_use(self, at: Positions | None) -> None:
        """An error if it would be left unused."""
        if at is None and any(given is not None for given in (self.mask, self.targets, self.spans)):
            raise QualmsError(f"mask, targets and spans are {MANY}")
        if at is not None and self.spans is not None and at.reduce is None:
            raise QualmsError(
                "spans need reduce=, what to make of a span's scores: mean, max, sum or a quantile."
            )
        if (
            at is not None
            and at.chosen is not None
            and (self.spans is not None or self.targets is not None)
        ):
            raise QualmsError(
                "spans and targets are for scores at all positions; leave out positions=."
            )

    def require_all(self, inputs: int) -> None:
        """An error if it is for more inputs than there are."""
        for called, given in (
            ("mask", self.mask),
            ("targets", self.targets),
            ("spans", self.spans),
        ):
            if given is not None and len(given) > inputs:
                raise QualmsError(
                    f"{called} is for {len(given)} inputs, and there are {inputs}; give an entry for each."
                )

    def part(self, start: int, end: int) -> "PositionTargets":
        """What belongs to some of the inputs."""

        def cut(called: str, given: Any) -> Any:
            if given is not None and len(given) < end:
                raise QualmsError(
                    f"{called} is for {len(given)} inputs of {end} or more; give an entry for each."
                )
            return None if given is None else given[start:end]

        mask, targets = cut("mask", self.mask), cut("targets", self.targets)
        goals = None if targets is None else torch.as_tensor(targets)
        if goals is not None and goals.is_floating_point():
            raise QualmsError(f"targets are {goals.dtype} numbers; give classes, as whole numbers.")
        return PositionTargets(
            None if mask is None else torch.as_tensor(mask).bool(), goals, cut("spans", self.spans)
        )


@dataclass(frozen=True)
class PositionScores:
    """A model that answers at many positions, and the methods that score them."""

    subject: ModelContext
    methods: Mapping[str, Method]
    at: Positions
    class_names: tuple[str, ...] | None = None

    def of_batch(self, batch: Batch, numbers: Sequence[int], given: PositionTargets) -> Scored:
        """The scores of each input; NaN, and class -1, at positions that are masked."""
        if self.at.chosen is None:
            require_positions(self.methods)
        batch = named(self.subject.model, batch)
        parts: list[Found] = []
        notes: dict[str, str] = {}
        for i, number in enumerate(numbers):
            alone = Alone.of(batch, i)
            if self.at.chosen is None:
                targets = self._targets(given, batch, i)
                parts.append(
                    self._everywhere(alone, number, None if targets is None else alone.own(targets))
                )
            else:
                parts.append(self._at_some(alone, number, self.at.chosen, notes))
        found = self._masked(
            {key: torch.stack([part[key] for part in parts]) for key in parts[0]}, batch, given
        )
        scores = {name: found["score", name] for name in self.methods}
        errors = {name: found["error", name] for name in self.methods}
        estimated = tuple(
            name for name, method in self.methods.items() if self._estimates(method, errors[name])
        )
        if self.at.reduce is not None:
            scores = {
                name: reduced(values, self.at.reduce, given.spans)
                for name, values in scores.items()
            }
            errors = {
                name: torch.full_like(s, torch.nan if name in estimated else 0.0)
                for name, s in scores.items()
            }
        return Scored(
            scores,
            errors,
            found["probs", ""],
            numbers,
            sketched=estimated,
            notes=notes,
            classes=found["classes", ""],
            target_log_probs=found.get(("target", "")),
            sequence=found.get(("sequence", "")),
            of_spans=given.spans is not None,
        )

    def _estimates(self, method: Method, errors: Tensor) -> bool:
        """Whether a method's scores are estimates: from tangents, or from some of many classes."""
        sketched = self.subject.settings.sketch is not None and isinstance(method, GradientScore)
        return sketched or bool((errors > 0).any())

    def _targets(self, given: PositionTargets, batch: Batch, i: int) -> Int[Tensor, "..."] | None:
        """The targets of one input, none where its positions are masked."""
        if given.targets is None:
            return None
        found = given.targets[i]
        live = live_positions(batch, tuple(found.shape))
        for keep in (
            None if given.mask is None else given.mask[i],
            None if live is None else live[i],
        ):
            found = (
                found
                if keep is None or keep.shape != found.shape
                else found.masked_fill(~keep, NOWHERE)
            )
        return (
            found
            if self.at.ignore_index is None
            else found.masked_fill(found == self.at.ignore_index, NOWHERE)
        )

    def _logits(self, alone: Alone) -> Float[Tensor, "... c"]:
        """The logits of one input, at its own positions."""
        logits = plain_logits(self.subject.model, self.at.class_dim, alone.batch)
        require_names(self.class_names, logits.shape[-1])
        alone.require_fit(len(logits))
        return logits

    def _everywhere(self, alone: Alone, number: int, targets: Tensor | None) -> Found:
        """At all positions: gradients are sketched."""
        logits = self._logits(alone)
        shape, flat = logits.shape[:-1], logits.flatten(0, -2)
        self.subject.cache.warn_of_probabilities(flat)
        if targets is not None and targets.shape != shape:
            raise QualmsError(
                f"the targets of an input have the shape {tuple(targets.shape)}, and the model answers at positions of "
                f"shape {tuple(shape)}; give one target for each position."
            )
        goals = None if targets is None else targets.flatten().to(flat.device)
        dtype, size = at_least_float32(flat).dtype, (flat.shape[0], flat.shape[1])
        found: Found = _likeliest(flat)
        scores = logit_scores(self.methods, flat, self.subject)
        if goals is not None:
            found["target", ""] = _log_probs(flat, goals)
        expected = ExpectedLogits.of(flat)
        engine = PositionSketchEngine(self.subject.cache)
        like = flat[:1].clone()
        del logits, flat  # passes of the sketch have logits of their own
        text: float | None = None
        for (smooth, lam), methods in groups_of(self.methods).items():
            plain_norms = (
                smooth is None and lam is None
            )  # those that the gradient of a text is measured by
            sums = TangentSums(
                methods,
                size,
                smooth.draws + 1 if smooth else 1,
                goals if plain_norms else None,
                like,
            )
            request = self._job(alone, number, smooth)
            held = TangentSums.held(size, smooth.draws + 1 if smooth else 1)
            plan = engine.plan(request, expected, lam, held)
            for pushed in engine.run(plan, request):
                sums.add(pushed)
                del pushed  # before the next pass begins
            for name, (value, error) in sums.scores(self._logits(alone).flatten(0, -2)).items():
                scores[name], found["error", name] = value, error.to(dtype)
            text = sums.of_text() if plain_norms else text
        for name in self.methods:
            found["score", name] = scores[name].to(dtype)
            found.setdefault(("error", name), torch.zeros_like(found["score", name]))
        found = {
            key: alone.put_back(t.unflatten(0, shape), _missing(t)) for key, t in found.items()
        }
        if goals is not None and (None, None) in groups_of(self.methods):
            found["sequence", ""] = torch.tensor(torch.nan if text is None else text, dtype=dtype)
        return found

    def _at_some(
        self, alone: Alone, number: int, at: tuple[int, ...], notes: dict[str, str]
    ) -> Found:
        """At a few positions, each as a classifier of its own."""
        logits = self._logits(alone)
        flat, parts = logits.flatten(0, -2), list[Found]()
        live = live_positions(alone.batch, tuple(logits.shape[:-1]))
        length = len(flat) if alone.kept is None else alone.length
        beyond = [place for place in at if not -length <= place < length]
        if beyond:
            raise QualmsError(
                f"positions= names {beyond[0]}, and the model answers at {length} positions."
            )
        model, how = self.subject.model, self.subject.settings
        how = replace(how, params=inside(model, how.params))
        for place in at:
            own = _index(alone, place % length)
            found = _likeliest(flat[[own or 0]])
            if own is None or (
                live is not None and not bool(live[0, own])
            ):  # padding, or a hole in the mask
                found = {key: torch.full_like(t, _missing(t)) for key, t in found.items()}
                gap = found["probs", ""][:, 0]
                parts.append(
                    found
                    | {(kind, name): gap for kind in ("score", "error") for name in self.methods}
                )
                continue
            reads, *members = (
                AtPositions(one, self.at.class_dim, [own]) for one in (model, *self.subject.members)
            )
            learnt = self.subject.cache.once(("position", own), PlanCache)
            subject = replace(
                self.subject,
                model=reads,
                settings=how,
                members=tuple(members),
                cache=learnt,
                fitted={},
            )
            passes = BatchContext(subject, alone.batch, [number])
            for name, method in self.methods.items():
                found["score", name] = method.score(passes).detach().to(passes.dtype)
                found["error", name] = method.error(passes).detach().to(passes.dtype)
                said = method.note(passes)
                notes |= {} if said is None else {name: said}
            parts.append(found)
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    def _job(self, alone: Alone, number: int, smooth: Any) -> GradientRequest:
        model, how = self.subject.model, self.subject.settings
        how = replace(how, params=inside(model, how.params))
        return GradientRequest(
            AtPositions(model, self.at.class_dim),
            alone.batch,
            [number],
            how,
            Directions(()),
            smooth,
        )

    def _masked(self, found: Found, batch: Batch, given: PositionTargets) -> Found:
        shape, chosen, ignored = (
            found["classes", ""].shape[:-1],
            self.at.chosen,
            self.at.ignore_index,
        )
        live = torch.ones(shape, dtype=torch.bool, device=found["classes", ""].device)
        counted = None if given.targets is None or ignored is None else given.targets != ignored
        of_batch = None if chosen is not None else live_positions(batch, tuple(shape[1:]))
        for called, mask in (
            ("mask", given.mask),
            ("targets", counted),
            ("attention_mask", of_batch),
        ):
            if mask is None:
                continue
            here = mask if chosen is None else mask.flatten(1)[:, list(chosen)]
            if here.shape != shape:
                raise QualmsError(
                    f"{called} has the shape {tuple(mask.shape)}, and the model answers at positions of shape "
                    f"{tuple(shape)}; give one entry for each position."
                )
            live &= here.to(live.device)
        return {key: t if key[0] == "sequence" else _hidden(t, live) for key, t in found.items()}


def _hidden(values: Tensor, live: Tensor) -> Tensor:
    keep = live if values.ndim == live.ndim else live.unsqueeze(-1)
    return torch.where(
        keep, values, torch.full((), _missing(values), dtype=values.dtype, device=values.device)
    )


def _missing(values: Tensor) -> float:
    """What stands where there is nothing: NaN, or class -1."""
    return torch.nan if values.is_floating_point() else -1.0


def _index(alone: Alone, place: int) -> int | None:
    """Where a position of the padded input is without the padding; None if it is padding."""
    if alone.kept is None:
        return place
    found = (alone.kept == place).nonzero()
    return int(found[0]) if len(found) else None


def _likeliest(logits: Float[Tensor, "t c"]) -> Found:
    """The likeliest classes at each position, with their probabilities."""
    tops = []
    for some in blocks(*logits.shape):
        tops.append(logits[some].double().softmax(-1).topk(min(LIKELIEST, logits.shape[1])))
    dtype = at_least_float32(logits[:1]).dtype
    probs, classes = (
        torch.cat([top.values for top in tops]),
        torch.cat([top.indices for top in tops]),
    )
    return {("probs", ""): probs.to(dtype), ("classes", ""): classes}


def _log_probs(logits: Float[Tensor, "t c"], targets: Int[Tensor, " t"]) -> Float[Tensor, " t"]:
    """log p of the targets, NaN where there is none."""
    wrong = targets[(targets != NOWHERE) & ((targets < 0) | (targets >= logits.shape[1]))]
    if len(wrong):
        raise QualmsError(
            f"a target is {int(wrong[0])}, and there are {logits.shape[1]} classes; count them from 0."
        )
    parts = [
        log_softmax(logits[some].double()).gather(-1, targets[some].clamp_min(0)[:, None])[:, 0]
        for some in blocks(*logits.shape)
    ]
    return torch.where(targets >= 0, torch.cat(parts), torch.nan).to(
        at_least_float32(logits[:1]).dtype
    )
