"""A dozen classifiers of the sweep (`make sweep`), one for each cause that once kept a model from
running batched.
"""

import warnings

import pytest
import torch

import qualms

pytest.importorskip("transformers")

from benchmarks.tiny_models import lively, transformers_model

CAUSES = {
    "BertForMultipleChoice": "rows and choices share an axis, and positions do not tell their order",
    "XLNetForMultipleChoice": "the batch is the second axis",
    "MixtralForSequenceClassification": "experts take the words meant for them",
    "GptOssForSequenceClassification": "and add a row of another parameter",
    "JetMoeForSequenceClassification": "experts by lists of lengths",
    "T5ForSequenceClassification": "a mask only where something is padded",
    "Siglip2ForImageClassification": "positions written for each image",
    "MobileViTForImageClassification": "patches are folded into the batch axis",
    "CvtForImageClassification": "batch normalization of an image alone, with a cotangent in another order",
    "SqueezeBertForSequenceClassification": "convolutions instead of linear layers",
    "Wav2Vec2ForSequenceClassification": "sound, and a weight-normalized convolution",
    "LlamaForSequenceClassification": "casts to single precision inside",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSES)
@pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
)
def test_runs_in_batches_and_says_what_the_reference_says(name: str) -> None:
    model, x = transformers_model(name)
    model = lively(model)
    want = qualms.class_gradient_norms(model, x, engine="reference")
    with warnings.catch_warnings():
        warnings.simplefilter("error", qualms.SlowWarning)
        have = qualms.class_gradient_norms(model, x)
    assert have.layers == want.layers
    rounding = 1e-12 * want.norms.amax(dim=(1, 2), keepdim=True)
    assert bool(((have.norms - want.norms).abs() <= 1e-8 * want.norms + rounding).all())
    assert bool((have.norms > 0).any(dim=(0, 1)).sum() > 1)
    assert torch.equal(have.probs.argmax(-1), want.probs.argmax(-1))
