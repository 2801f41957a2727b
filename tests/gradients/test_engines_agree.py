"""The exact engine says what the reference says, for every model of the list."""

import warnings

import pytest
import torch

import qualms
from qualms.errors import SlowWarning
from qualms.gradients.batch import take_samples
from qualms.gradients.input_data import validate_batch
from tests.cases import CASES, INPUTS, Case
from tests.helpers.engines import SMOOTHINGS, assert_norms_equal

WAYS = [("l2", "plain"), ("l2", "smoothed"), ("l1", "smoothed")]


@pytest.mark.parametrize(
    ("norm", "smoothing"),
    [
        pytest.param(
            n, SMOOTHINGS[s], marks=() if s == "plain" else pytest.mark.slow, id=f"{n}-{s}"
        )
        for n, s in WAYS
    ],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_equals_reference(case: Case, norm: str, smoothing: qualms.Smoothing | None) -> None:
    model, x = case.make()
    want = qualms.class_gradient_norms(model, x, norm=norm, smoothing=smoothing, engine="reference")
    with warnings.catch_warnings():
        if isinstance(case.general, tuple):
            warnings.simplefilter("error", SlowWarning)
        have = qualms.class_gradient_norms(model, x, norm=norm, smoothing=smoothing)
    assert have.layers == want.layers
    torch.testing.assert_close(have.probs, want.probs, rtol=1e-9, atol=1e-12)
    assert_norms_equal(have.norms, want.norms)
    if case.general is not ...:
        assert have.general == (have.layers if case.general is None else list(case.general))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_batch_size_does_not_matter(case: Case) -> None:
    model, x = case.make()
    plain = qualms.class_gradient_norms(model, x)
    for size in (1, 3):
        cut = qualms.class_gradient_norms(model, x, batch_size=size)
        assert cut.layers == plain.layers
        assert_norms_equal(cut.norms, plain.norms)
    last = qualms.class_gradient_norms(
        model, take_samples(validate_batch(x), slice(INPUTS - 1, INPUTS))
    )
    alone = dict(zip(last.layers, last.norms.unbind(-1), strict=True))
    for place, layer in enumerate(
        plain.layers
    ):  # a layer that this input does not use is missing there
        want = alone.get(layer, torch.zeros_like(plain.norms[-1:, :, place]))
        torch.testing.assert_close(plain.norms[-1:, :, place], want, rtol=1e-9, atol=1e-12)
    smooth = {"smoothing": SMOOTHINGS["smoothed"]}
    assert_norms_equal(
        qualms.class_gradient_norms(model, x, **smooth, batch_size=3).norms,
        qualms.class_gradient_norms(model, x, **smooth).norms,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gram_gives_the_same_norms(case: Case) -> None:
    model, x = case.make()
    norms = qualms.class_gradient_norms(model, x)
    gram = qualms.class_gradient_gram(model, x)
    assert gram.layers == norms.layers
    directions = (
        torch.eye(norms.probs.shape[1], dtype=torch.double) - norms.probs[:, None, :]
    )  # [b, c, c']
    squares = torch.einsum("bci,blij,bcj->bcl", directions, gram.gram, directions)
    torch.testing.assert_close(squares, norms.norms**2, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(gram.logits.softmax(-1), norms.probs)
