"""Scores at every position: those of the exact engine where that can be asked, and of each text
alone.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.engines import position_sketch
from qualms.gradients.sketching.tangents import TangentDistribution, Tangents
from qualms.methods import at_positions
from tests.helpers import language
from tests.helpers.language import MODELS, TOKENS, WORDS

MANY = 256  # tangents: the standard error of a norm is 4.4 %
GRADIENTS = ["regrad", "exgrad", "ungrad", "gradnorm", "fisher", "isotropic"]
LOGITS = ["entropy", "msp", "max-logit", "energy", "gen", "exgrad-v"]


class Segmenter(nn.Module):
    """Four classes at every pixel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.Tanh(), nn.Conv2d(5, 4, 1))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def images() -> Tensor:
    return torch.randn(2, 3, 4, 5, dtype=torch.double, generator=torch.Generator().manual_seed(2))


def same(have: Tensor, want: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(have, want, rtol=rtol, atol=0.0, equal_nan=True)


def log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).logits.log_softmax(-1)


QUICK = ("GPT-2",)  # the others run with the slow tests
IN_32_BITS = (
    "Llama",
    "Mistral",
    "Gemma",
    "Qwen",
    "T5",
)  # norms or rotations, also in a model of 64 bits
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_sketch_and_exact_agree_at_chosen_positions(name: str) -> None:
    make, inputs = MODELS[name]
    model, at = make(), [0, 4]
    methods = ["regrad", "fisher", "entropy"]
    exact = qualms.Scorer(model, methods, class_dim=-1, positions=at)(inputs())
    found = qualms.Scorer(model, methods, class_dim=-1, engine=qualms.Sketch(MANY))(inputs())
    assert (exact.sketched, found.sketched) == ((), ("regrad", "fisher"))
    same(found.scores["entropy"][:, at], exact.scores["entropy"])
    for method, power in (("regrad", 1), ("fisher", 2)):
        off = found.scores[method][:, at] / exact.scores[method] - 1
        assert off.abs().max() < 4 * power / math.sqrt(2 * MANY)
    error = found.errors["fisher"][:, at]
    assert (error / exact.scores["fisher"]).max() < math.sqrt(
        2 / MANY
    )  # that of one direction; many have less
    assert ((found.scores["fisher"][:, at] - exact.scores["fisher"]).abs() / error).max() < 5


@pytest.mark.parametrize(
    "name", [one for one in EACH if one.values != ("Bloom",)]
)  # by differences, to 1e-3
def test_every_tangent_gives_what_plain_autograd_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v·(J s) = ⟨Jᵀv, s⟩ at every position and for every class."""
    make, inputs = MODELS[name]
    model, batch = make(), inputs()
    pushed: list[Any] = []
    drawn: list[Tangents] = []
    add, stacked = at_positions.TangentSums.add, Tangents.stack
    monkeypatch.setattr(
        at_positions.TangentSums, "add", lambda s, p: (pushed.append(p), add(s, p))[1]
    )
    monkeypatch.setattr(Tangents, "stack", lambda s, *a: (drawn.append(s), stacked(s, *a))[1])
    one = {key: t[:1] for key, t in batch.items()}
    qualms.Scorer(model, "fisher", class_dim=-1, engine=qualms.Sketch(4))(one)
    dz = torch.cat([p.tangents for p in pushed])
    assert dz.shape[0] == 4
    named = dict(model.named_parameters())
    for t in (0, dz.shape[1] - 1):
        for c in (0, 3):
            logits = model(**one).logits
            found = torch.autograd.grad(logits[0, t, c], list(named.values()), allow_unused=True)
            for j in range(4):
                s = drawn[0].distribution.draw(j)
                want = sum(
                    float((g * s[f"model.{n}"]).sum())
                    for n, g in zip(named, found, strict=True)
                    if g is not None
                )
                assert float(dz[j, t, c]) == pytest.approx(
                    want, rel=1e-5 if name in IN_32_BITS else 1e-8, abs=1e-10
                )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", EACH)
def test_a_padded_batch_gives_the_scores_of_single_texts(name: str, side: str) -> None:
    make, inputs = MODELS[name]
    model, batch = make(), inputs()
    lengths = [TOKENS, 4]
    mask = torch.zeros(2, TOKENS, dtype=torch.long)
    for i, n in enumerate(lengths):
        mask[i, TOKENS - n :] = 1 if side == "left" else 0
        mask[i, :n] = 1 if side == "right" else mask[i, :n]
    padded = batch | {"input_ids": batch["input_ids"] * mask, "attention_mask": mask}
    scorer = qualms.Scorer(model, ["regrad", "entropy"], class_dim=-1)
    found = scorer(padded)
    for i in range(2):
        live = mask[i].bool()
        alone = {key: t[i : i + 1] for key, t in batch.items()} | {
            "input_ids": batch["input_ids"][i : i + 1, live]
        }
        own = scorer(alone)
        for method, values in own.scores.items():
            if name == "T5":  # answers at the decoder's positions, which are not padded
                same(found.scores[method][i], values[0])
            else:
                same(found.scores[method][i, live], values[0])
                assert bool(found.scores[method][i, ~live].isnan().all())
                assert bool((found.prediction[i, ~live] == -1).all())


@pytest.mark.slow
def test_a_decoder_has_padding_of_its_own() -> None:
    model, batch = language.t5(), language.text_pair()
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    scorer = qualms.Scorer(model, "regrad", class_dim=-1)
    found = scorer(batch | {"decoder_attention_mask": mask}).scores["regrad"]
    same(
        found[1, :2],
        scorer({k: t[1:, :2] if "decoder" in k else t[1:] for k, t in batch.items()}).scores[
            "regrad"
        ][0],
    )
    assert bool(found[1, 2:].isnan().all())


def test_scores_of_logits_are_those_of_each_position() -> None:
    model, batch = language.gpt2(), language.text()
    found = qualms.Scorer(model, LOGITS, class_dim=-1)(batch)
    logits = model(**batch).logits.detach()

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.one

    want = qualms.compare(Table().double(), logits.flatten(0, 1), LOGITS)
    for method in LOGITS:
        same(found.scores[method].flatten(), want[method])
    assert found.prediction.equal(logits.argmax(-1))
    same(found.confidence, logits.softmax(-1).amax(-1))
    assert found.classes is not None
    same(found.probs, logits.softmax(-1).gather(-1, found.classes))
    assert found.probs.shape == (2, TOKENS, 5)


@pytest.mark.parametrize("method", GRADIENTS)
def test_pixels_of_a_segmentation_have_the_shape_of_the_image(method: str) -> None:
    model, x = Segmenter(), images()
    found = qualms.Scorer(model, method, class_dim=1, engine=qualms.Sketch(MANY))(x)
    assert found.scores[method].shape == (2, 4, 5)
    assert found.prediction.equal(model(x).argmax(1))
    at = [0, 7, 19]
    exact = qualms.Scorer(model, method, class_dim=1, positions=at)(x)
    off = found.scores[method].flatten(1)[:, at] / exact.scores[method] - 1
    assert off.abs().max() < 8 / math.sqrt(2 * MANY)
    reference = qualms.Scorer(model, method, class_dim=1, positions=at, engine="reference")(x)
    same(exact.scores[method], reference.scores[method])


@pytest.mark.slow
def test_several_count_tangents_per_pass_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = language.gpt2(), language.text()
    methods = ["regrad+layers", "fisher", "regrad+smooth(0.1,2)"]
    several = qualms.Scorer(model, methods, class_dim=-1)(
        batch, targets=qualms.next_tokens(batch["input_ids"])
    )
    monkeypatch.setattr(position_sketch, "_count_tangents_per_pass", lambda *_: 1)
    alone = qualms.Scorer(model, methods, class_dim=-1)(
        batch, targets=qualms.next_tokens(batch["input_ids"])
    )
    for method in methods:
        same(several.scores[method], alone.scores[method])
    assert several.sequence is not None
    assert alone.sequence is not None
    same(several.sequence, alone.sequence)


@pytest.mark.slow
def test_positions_in_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = language.gpt2(), language.text()
    methods = ["regrad", "fisher", "gradnorm", "entropy", "regrad+smooth(0.1,2)"]
    whole = qualms.Scorer(model, methods, class_dim=-1)(batch)
    monkeypatch.setattr(at_positions, "BLOCK_BYTES", 1)
    parts = qualms.Scorer(model, methods, class_dim=-1)(batch)
    for method in methods:
        same(parts.scores[method], whole.scores[method])


@pytest.mark.slow
def test_the_score_of_a_text_is_no_matter_of_its_company_or_of_the_batch() -> None:
    model, batch = language.like_llama("Llama")(), language.text()
    scorer = qualms.Scorer(model, ["regrad", "regrad+layers+smooth(0.1,2)"], class_dim=-1)
    both = scorer(batch)
    second = scorer({key: t[1:] for key, t in batch.items()}, first=1)
    stream = list(scorer.stream([batch["input_ids"][:1], batch["input_ids"][1:]]))
    for method, values in both.scores.items():
        same(values[1:], second.scores[method])
        same(values, torch.cat([part.scores[method] for part in stream]))


@pytest.mark.slow
def test_smoothing_averages_gradients_over_perturbed_embeddings_before_any_norm() -> None:
    """The noise of both engines is the same, so that the exact one is the judge."""
    model, batch = language.gpt2(), language.text()
    spec = "fisher+smooth(0.3,2)"
    exact = qualms.Scorer(model, [spec, "fisher"], class_dim=-1, positions=[2, 5])(batch)
    found = qualms.Scorer(model, spec, class_dim=-1, engine=qualms.Sketch(1024))(batch).scores[
        spec
    ][:, [2, 5]]
    assert (found / exact.scores[spec] - 1).abs().max() < 0.15
    assert (
        exact.scores["fisher"] / exact.scores[spec] - 1
    ).abs().min() > 0.3  # so that a lost average would show


@pytest.mark.slow
def test_the_gradient_of_a_whole_text_is_that_of_its_log_likelihood() -> None:
    model, batch = language.gpt2(), language.text()
    targets = qualms.next_tokens(batch["input_ids"])
    found = qualms.Scorer(model, "fisher", class_dim=-1, engine=qualms.Sketch(1024))(
        batch, targets=targets
    )
    assert found.sequence is not None
    assert found.target_log_probs is not None
    for i in range(2):
        logs = log_probs(model, {"input_ids": batch["input_ids"][i : i + 1]})[0, :-1]
        each = logs.gather(-1, batch["input_ids"][i, 1:, None])[:, 0]
        same(found.target_log_probs[i, :-1], each.detach())
        assert bool(found.target_log_probs[i, -1].isnan())
        squares = sum(
            float(g.square().sum())
            for g in torch.autograd.grad(each.sum(), list(model.parameters()))
        )
        assert float(found.sequence[i]) == pytest.approx(math.sqrt(squares) / (TOKENS - 1), rel=0.1)


@pytest.mark.slow
def test_positions_without_a_target_do_not_count_for_the_text() -> None:
    model, batch = language.gpt2(), language.text()
    one = torch.full_like(batch["input_ids"], -100)
    one[:, 2] = batch["input_ids"][:, 3]
    found = qualms.Scorer(model, "fisher", class_dim=-1, engine=qualms.Sketch(1024))(
        batch, targets=one
    ).sequence
    assert found is not None
    for i in range(2):
        log_p = log_probs(model, {"input_ids": batch["input_ids"][i : i + 1]})[0, 2, one[i, 2]]
        squares = sum(
            float(g.square().sum()) for g in torch.autograd.grad(log_p, list(model.parameters()))
        )
        assert float(found[i]) == pytest.approx(math.sqrt(squares), rel=0.1)


def test_next_tokens_know_of_padding_on_either_side() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    assert qualms.next_tokens(ids).tolist() == [[6, 7, 8, -100]]
    assert qualms.next_tokens(ids, torch.tensor([[1, 1, 0, 0]])).tolist() == [[6, -100, -100, -100]]
    assert qualms.next_tokens(ids, torch.tensor([[0, 0, 1, 1]])).tolist() == [[-100, -100, 8, -100]]


def test_masked_positions_are_not_scored() -> None:
    model, x = Segmenter(), images()
    mask = torch.ones(2, 4, 5, dtype=torch.bool)
    mask[0, 1, 2] = False
    labels = torch.zeros(2, 4, 5, dtype=torch.long)
    labels[1, 3, 4] = 255
    scorer = qualms.Scorer(model, ["fisher", "entropy"], class_dim=1, ignore_index=255)
    whole, found = scorer(x), scorer(x, mask=mask, targets=labels)
    live = mask & (labels != 255)
    for method, values in found.scores.items():
        assert values.isnan().equal(~live)
        same(values[live], whole.scores[method][live])
    assert found.target_log_probs is not None
    same(found.target_log_probs[live], model(x).log_softmax(1)[:, 0][live].detach())
    table = found.columns()
    assert len(table["id"]) == int(live.sum())
    assert (0, 1, 2) not in set(zip(table["id"], table["row"], table["column"], strict=True))
    assert table["prediction"] == found.prediction[live].tolist()


def test_a_mask_with_holes_is_left_to_the_model() -> None:
    model, batch = language.bert()(), language.text()
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, 3] = 0
    found = qualms.Scorer(model, "entropy", class_dim=-1)(batch | {"attention_mask": mask})
    logs = log_probs(model, batch | {"attention_mask": mask}).detach()
    want = -(logs.exp() * logs).sum(-1)
    same(found.scores["entropy"][mask.bool()], want[mask.bool()])
    assert bool(found.scores["entropy"][1, 3].isnan())
    some = qualms.Scorer(model, "entropy", class_dim=-1, positions=[2, 3])(
        batch | {"attention_mask": mask}
    )
    same(some.scores["entropy"], found.scores["entropy"][:, 2:4])


@pytest.mark.parametrize(
    ("reduce", "want"),
    [("mean", 2.5), ("max", 4.0), ("sum", 10.0), (0.5, 2.5)],
    ids=["mean", "max", "sum", "median"],
)
def test_one_number_is_made_of_the_positions_that_count(reduce: str | float, want: float) -> None:
    from qualms.positions import reduce_positions

    values = torch.tensor([[1.0, 2.0, 3.0, 4.0, math.nan], [math.nan] * 5])
    assert float(reduce_positions(values, reduce)[0]) == want
    assert bool(reduce_positions(values, reduce)[1].isnan())


@pytest.mark.usefixtures("as_users_meet_it")
def test_spans_of_tokens_are_reduced_each_by_itself() -> None:
    model, batch = language.gpt2(), language.text()
    tokens = qualms.Scorer(model, "entropy", class_dim=-1)(batch).scores["entropy"]
    scorer = qualms.Scorer(model, "entropy", class_dim=-1, reduce="mean")
    same(scorer(batch).scores["entropy"], tokens.mean(1))
    spans = [[(0, 2), (2, 7)], [(1, 4)]]
    found = scorer(batch, spans=spans)
    same(found.scores["entropy"][0], torch.stack([tokens[0, :2].mean(), tokens[0, 2:].mean()]))
    same(found.scores["entropy"][1, 0], tokens[1, 1:4].mean())
    assert found.columns()["span"] == [0, 1, 0]
    with pytest.raises(
        qualms.QualmsError, match="from 3 to 9 is invalid for an input of 7 positions"
    ):
        scorer(batch, spans=[[(3, 9)], []])


def test_texts_of_other_lengths_are_put_together_with_masked_positions() -> None:
    scorer = qualms.Scorer(language.gpt2(), ["entropy", "fisher"], class_dim=-1)
    long, short = (scorer(language.ids(1, n), first=n) for n in (6, 3))
    both = long + short
    same(both.scores["fisher"][0], long.scores["fisher"][0])
    same(both.scores["fisher"][1, :3], short.scores["fisher"][0])
    assert bool(both.scores["fisher"][1, 3:].isnan().all())
    assert len(both.columns()["position"]) == 9
    assert both[[1]].columns()["score_fisher"] == short.columns()["score_fisher"]


def test_a_threshold_marks_tokens() -> None:
    model, batch = language.gpt2(), language.text()
    plain = qualms.Scorer(model, "fisher", class_dim=-1)
    scores = plain(batch).scores["fisher"]
    limit = qualms.Threshold.from_scores(
        scores.flatten(), coverage=0.5, provenance=plain.provenance
    )
    found = qualms.Scorer(model, "fisher", class_dim=-1, threshold=limit)(batch)
    assert int(found.accepted.sum()) == TOKENS
    assert found.percentile.shape == (2, TOKENS)
    with pytest.raises(qualms.QualmsError, match="other settings"):
        qualms.Scorer(model, "fisher", class_dim=-1, reduce="mean", threshold=limit)


@pytest.mark.slow
def test_layers_and_parameters_are_counted_as_in_the_model_itself() -> None:
    model, batch = language.gpt2(), language.text()
    at = [3]
    last = "transformer.h.1.*"
    methods = ["fisher", "fisher+layers(0.5)"]
    exact = qualms.Scorer(model, methods, class_dim=-1, positions=at, params=last)(batch)
    sketch = qualms.Scorer(model, methods, class_dim=-1, params=last, engine=qualms.Sketch(512))(
        batch
    )
    assert (sketch.scores["fisher"][:, at] / exact.scores["fisher"] - 1).abs().max() < 0.25

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.inner(input_ids).logits[:, 3]

    want = qualms.compare(Last(), batch, methods, params=f"inner.{last}")
    for method in methods:
        same(exact.scores[method][:, 0], want[method])


def test_the_model_leaves_as_it_came() -> None:
    model, batch = language.gpt2(), language.text()
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    qualms.Scorer(model, ["regrad", "entropy"], class_dim=-1)(batch)
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert attributes == {name: set(vars(m)) for name, m in model.named_modules()}
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


@pytest.mark.slow
def test_weights_in_16_bits_are_scored_in_32() -> None:
    model, batch = language.like_llama("Llama")(), language.text()
    want = qualms.Scorer(model, ["entropy", "fisher"], class_dim=-1)(batch)
    found = qualms.Scorer(model.bfloat16(), ["entropy", "fisher"], class_dim=-1)(batch)
    assert found.scores["fisher"].dtype == torch.float32
    torch.testing.assert_close(
        found.scores["entropy"].double(), want.scores["entropy"], rtol=0.02, atol=0.02
    )
    torch.testing.assert_close(
        found.scores["fisher"].double(), want.scores["fisher"], rtol=0.2, atol=0.0
    )


class Difference(nn.Module):
    """Its autograd function has no rule for forward mode."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return 2 * grads[0]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.Twice.apply(self.layer(x)).tanh()


@pytest.mark.slow
def test_where_forward_mode_cannot_go_a_difference_does() -> None:
    model, x = Difference(), torch.randn(2, 5, 3, dtype=torch.double)
    found = qualms.Scorer(model, "fisher", class_dim=-1, engine=qualms.Sketch(MANY))(x).scores[
        "fisher"
    ]
    exact = qualms.Scorer(model, "fisher", class_dim=-1, positions=range(5))(x).scores["fisher"]
    assert (found / exact - 1).abs().max() < 8 / math.sqrt(2 * MANY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"methods": "heat", "class_dim": -1},
            "heat cannot score single positions",
        ),
        ({"methods": "knn", "class_dim": -1}, "knn cannot score single positions"),
        ({"methods": "entropy"}, "many positions; pass the axis of the classes"),
        ({"methods": "regrad"}, "many positions; pass the axis of the classes"),
        ({"methods": "regrad", "class_dim": 0}, "class_dim=0 is not a class axis"),
        ({"methods": "regrad", "class_dim": 5}, "class_dim=5 is not a class axis"),
        ({"methods": "regrad", "class_dim": -1, "norm": "l1"}, "supports only L2 norms"),
        (
            {"methods": "regrad+layers", "class_dim": -1, "engine": qualms.Sketch(8, "sum")},
            "in quadrature",
        ),
        (
            {"methods": "regrad", "class_dim": -1, "budget": 1000},
            "7 positions and 23 classes",
        ),
    ],
)
def test_what_cannot_be_done_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(qualms.QualmsError, match=message):
        qualms.Scorer(language.gpt2(), **options)(language.text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"class_dim": -1, "engine": "exact"},
            "engine='exact' takes one backward pass per class",
        ),
        (
            {"reduce": "mean"},
            r"reduce, positions and ignore_index are only for models that predict at many positions",
        ),
        (
            {"class_dim": -1, "reduce": "median"},
            r"reduce='median' is invalid; choose mean, max, sum",
        ),
        ({"class_dim": -1, "reduce": 1.5}, r"reduce=1.5 is invalid"),
        ({"class_dim": -1, "engine": "foo"}, r"engine='foo' is invalid"),
        (
            {"class_dim": -1, "engine": "auto", "positions": [1]},
            r"engine='auto' cannot be used with positions=",
        ),
        ({"class_dim": -1, "positions": []}, r"positions=\[\] is not a list of whole numbers"),
        (
            {"class_dim": -1, "positions": [1.5]},
            r"positions=\[1.5\] is not a list of whole numbers",
        ),
        ({"class_dim": 1.0}, r"class_dim=1.0 is not a whole number"),
    ],
)
@pytest.mark.usefixtures("as_users_meet_it")
def test_options_that_do_not_fit_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(qualms.QualmsError, match=message):
        qualms.Scorer(language.gpt2(), "regrad", **options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"mask": torch.ones(2, 3)},
            r"mask has shape \(2, 3\), .* positions of shape \(2, 7\)",
        ),
        (
            {"targets": torch.full((2, TOKENS), WORDS)},
            f"a target is {WORDS}, but there are {WORDS} classes",
        ),
        ({"targets": torch.zeros(2, 3).long()}, r"the targets of an input have shape \(3,\)"),
        ({"mask": torch.ones(1, TOKENS)}, "mask has 1 entries"),
        ({"mask": torch.ones(3, TOKENS)}, "mask has 3 entries"),
        ({"targets": torch.full((2, TOKENS), -7)}, "a target is -7"),
        ({"targets": torch.zeros(2, TOKENS)}, "targets are torch.float32;"),
        ({"spans": [[(0, 2)], []]}, "spans need reduce="),
    ],
)
@pytest.mark.usefixtures("as_users_meet_it")
def test_what_is_given_beside_the_inputs_must_fit_them(given: dict[str, Any], message: str) -> None:
    with pytest.raises(qualms.QualmsError, match=message):
        qualms.Scorer(language.gpt2(), "entropy", class_dim=-1)(language.text(), **given)


def test_a_classifier_needs_no_class_dim() -> None:
    with pytest.raises(qualms.QualmsError, match="one prediction per input; leave out class_dim"):
        qualms.Scorer(nn.Linear(3, 4), "entropy", class_dim=-1)(torch.randn(2, 3))
    with pytest.raises(qualms.QualmsError, match="mask, targets and spans are only for models"):
        qualms.Scorer(nn.Linear(3, 4), "entropy")(torch.randn(2, 3), mask=torch.ones(2, 3))


def test_a_text_of_which_nothing_is_left_is_an_error() -> None:
    batch = language.text() | {"attention_mask": torch.tensor([[1] * TOKENS, [0] * TOKENS])}
    with pytest.raises(
        qualms.QualmsError, match="the attention_mask of input 1 of the batch masks every token"
    ):
        qualms.Scorer(language.gpt2(), "entropy", class_dim=-1)(batch)


def test_a_model_spread_over_devices_gets_a_clear_answer() -> None:
    model = language.gpt2()
    model.lm_head = nn.Linear(16, WORDS, bias=False, device="meta", dtype=torch.double)
    with pytest.raises(
        qualms.QualmsError, match=r"parameters are on several devices \(cpu, meta\)"
    ):
        qualms.Scorer(model, "entropy", class_dim=-1)(language.text())


class Longer(nn.Module):
    """Has one more layer for texts of more than four tokens; without a gradient, if it is `frozen`
    there.
    """

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.more, self.head = nn.Embedding(9, 5), nn.Linear(5, 5), nn.Linear(5, 4)
        self.frozen = frozen
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).tanh()
        if x.shape[1] > 4:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
                h = self.more(h.detach() if self.frozen else h).tanh()
        return self.head(h)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_longer_text_may_take_another_path(frozen: bool) -> None:
    model, long, short = Longer(frozen), torch.randint(0, 9, (1, 6)), torch.randint(0, 9, (1, 3))
    alone = qualms.Scorer(model, ["fisher", "fisher+layers(1.0)"], class_dim=-1)(long)
    scorer = qualms.Scorer(model, ["fisher", "fisher+layers(1.0)"], class_dim=-1)
    scorer(short)
    after = scorer(long)
    for method, values in alone.scores.items():
        same(after.scores[method], values)


def test_forward_mode_that_gives_other_logits_is_not_believed() -> None:
    class Shifty(Segmenter):
        """Adds to its logits wherever a function transform is at work."""

        def forward(self, x: Tensor) -> Tensor:
            from torch._C._functorch import is_functorch_wrapped_tensor

            weight = self.layers[0].weight
            return self.layers(x) + (0.5 if is_functorch_wrapped_tensor(weight) else 0.0)

    scorer = qualms.Scorer(Shifty(), "regrad", class_dim=1)
    with pytest.raises(qualms.QualmsError, match="different logits in forward-mode AD"):
        scorer(images())


class Extra(nn.Module):
    """Beside tokens takes features of the whole text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.features, self.head = nn.Embedding(9, 5), nn.Linear(6, 5), nn.Linear(5, 4)
        self.double().eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, features: Tensor) -> Tensor:
        return self.head(self.words(input_ids) + self.features(features)[:, None])


def test_what_only_looks_like_tokens_is_not_cut() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    batch = {
        "input_ids": torch.zeros(1, 6).long(),
        "attention_mask": mask,
        "features": torch.randn(1, 6).double(),
    }
    with pytest.raises(qualms.QualmsError, match="features of x is as long as the padded texts"):
        qualms.Scorer(Extra(), "entropy", class_dim=-1)(batch)
    whole = qualms.Scorer(Extra(), "entropy", class_dim=-1)(
        batch | {"attention_mask": torch.ones(1, 6).long()}
    )
    assert bool(torch.isfinite(whole.scores["entropy"]).all())


def test_a_certain_prediction_keeps_its_digits_in_32_bits() -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(6, 5), torch.randn(1, 3, 6)
    with torch.no_grad():
        model.bias[2] = 60.0
    found = qualms.Scorer(model, "exgrad", class_dim=-1, engine=qualms.Sketch(MANY))(x).scores[
        "exgrad"
    ]
    exact = qualms.Scorer(model, "exgrad", class_dim=-1, positions=range(3))(x).scores["exgrad"]
    assert (found / exact - 1).abs().max() < 4 / math.sqrt(2 * MANY)


class TokensFirst(nn.Module):
    """[tokens, texts, classes]."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.words(x).transpose(0, 1)


class OneMore(TokensFirst):
    """Answers once more than it has tokens."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.words(torch.cat([input_ids[:, :1], input_ids], 1))


def test_answers_that_are_not_where_the_tokens_are_get_an_error() -> None:
    ids, mask = torch.zeros(2, 5).long(), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with pytest.raises(qualms.QualmsError, match="first axis must be the batch"):
        qualms.Scorer(TokensFirst(), "entropy", class_dim=-1)(ids)
    for more in ({}, {"positions": [0, 4]}):
        with pytest.raises(qualms.QualmsError, match="predicts at 4 positions for 3 tokens"):
            qualms.Scorer(OneMore(), "entropy", class_dim=-1, **more)(
                {"input_ids": ids, "attention_mask": mask}
            )
    holes = {"input_ids": ids[:1], "attention_mask": torch.tensor([[1, 0, 1, 1, 1]])}
    with pytest.raises(qualms.QualmsError, match="predicts at 6 positions for 5 tokens"):
        qualms.Scorer(OneMore(), "entropy", class_dim=-1)(holes)


def test_arguments_in_a_tuple_are_known_by_their_names() -> None:
    model, ids = language.bert()(), language.ids()
    mask = torch.tensor([[1] * TOKENS, [1, 1, 1, 0, 0, 0, 0]])
    scorer = qualms.Scorer(model, "entropy", class_dim=-1)
    same(
        scorer((ids, mask)).scores["entropy"],
        scorer({"input_ids": ids, "attention_mask": mask}).scores["entropy"],
    )


def test_a_chosen_position_may_be_padding_in_some_texts() -> None:
    model = language.gpt2()
    mask = torch.tensor([[1] * TOKENS, [1, 1, 1, 0, 0, 0, 0]])
    batch = language.text() | {"attention_mask": mask}
    found = qualms.Scorer(model, "fisher", class_dim=-1, positions=[-1])(batch)
    assert found.scores["fisher"].isnan().tolist() == [[False], [True]]
    assert int(found.prediction[1, 0]) == -1
    with pytest.raises(qualms.QualmsError, match="positions= includes 9, but"):
        qualms.Scorer(model, "fisher", class_dim=-1, positions=[9])(language.text())


@pytest.mark.slow
def test_the_gradient_of_a_text_does_not_depend_on_other_methods_or_on_masked_targets() -> None:
    model, batch = language.bert()(), language.text()
    targets = qualms.next_tokens(batch["input_ids"])
    plain = qualms.Scorer(model, "fisher", class_dim=-1)(batch, targets=targets).sequence
    assert plain is not None
    for methods in (["fisher+layers", "fisher"], ["fisher", "regrad+layers"]):
        found = qualms.Scorer(model, methods, class_dim=-1)(batch, targets=targets).sequence
        assert found is not None
        same(found, plain)
    assert (
        qualms.Scorer(model, "fisher+layers", class_dim=-1)(batch, targets=targets).sequence is None
    )
    mask = torch.ones(2, TOKENS).long()
    mask[0, 3] = 0
    holes, without = batch | {"attention_mask": mask}, targets.clone()
    without[0, 3] = -100
    scorer = qualms.Scorer(model, "fisher", class_dim=-1)
    have, want = scorer(holes, targets=targets).sequence, scorer(holes, targets=without).sequence
    assert have is not None
    assert want is not None
    same(have, want)


def test_as_many_spans_as_tokens_are_still_spans() -> None:
    spans = [[(i, i + 1) for i in range(TOKENS)]] * 2
    table = qualms.Scorer(language.gpt2(), "entropy", class_dim=-1, reduce="max")(
        language.text(), spans=spans
    ).columns()
    assert "span" in table
    assert "prediction" not in table


def test_masked_positions_have_no_percentile_and_no_name() -> None:
    model, batch = (
        language.gpt2(),
        language.text() | {"attention_mask": torch.tensor([[1] * TOKENS, [1] * 3 + [0] * 4])},
    )
    limit = qualms.Threshold.from_scores(torch.arange(10.0))
    names = [f"word {i}" for i in range(WORDS)]
    found = qualms.Scorer(model, "entropy", class_dim=-1, threshold=limit, class_names=names)(batch)
    assert found.percentile.isnan().equal(found.scores["entropy"].isnan())
    assert found.predicted_names[1][3:] == [None] * 4
    assert found.predicted_names[0][0] == names[int(found.prediction[0, 0])]
    with pytest.raises(qualms.QualmsError, match=f"there are 2 class_names but {WORDS} logits"):
        qualms.Scorer(model, "entropy", class_dim=-1, class_names=["a", "b"])(batch)


def test_the_model_may_change_what_it_is_given() -> None:
    class Halves(Segmenter):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.mul_(0.5))

    x = images()
    scorer = qualms.Scorer(Halves(), ["entropy", "fisher"], class_dim=1)
    first = scorer(x)
    assert x.equal(images())
    same(scorer(x).scores["fisher"], first.scores["fisher"])


def test_a_token_that_sees_nothing_is_no_matter_of_company() -> None:
    model, batch = language.like_llama("Llama")(), language.text()
    mask = torch.tensor([[1] * TOKENS, [0, 1, 0, 1, 1, 1, 1]])
    scorer = qualms.Scorer(model, "fisher", class_dim=-1)
    both = scorer(batch | {"attention_mask": mask}).scores["fisher"]
    alone = scorer({"input_ids": batch["input_ids"][1:], "attention_mask": mask[1:]}).scores[
        "fisher"
    ]
    same(both[1:], alone, rtol=1e-5)
    assert both[1].isnan().tolist() == (mask[1] == 0).tolist()


def test_tangents_that_could_not_all_be_drawn_are_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, batch = language.gpt2(), language.text()
    scorer = qualms.Scorer(model, "fisher", class_dim=-1)
    want = scorer(batch).scores["fisher"]
    (tangents,) = (one for one in scorer._cache.entries.values() if isinstance(one, Tangents))
    draw = TangentDistribution.draw
    assert tangents.stack_range == (0, 16)
    monkeypatch.setattr(
        TangentDistribution, "draw", lambda s, j, *out: draw(s, j, *out) if j < 4 else 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        tangents.stack(1, 17)  # others, of which the first few are written
    monkeypatch.setattr(TangentDistribution, "draw", draw)
    same(scorer(batch).scores["fisher"], want)
