"""Every method on a Hugging Face text classifier; discrete inputs are perturbed at their
embeddings.
"""

import pytest
import torch
from torch import Tensor, nn

import qualms
from qualms.gradients.settings import Smoothing
from qualms.methods.registry import METHODS
from tests.helpers.settings import bert, training_text


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(kind.name for kind in METHODS), "regrad+layers+smooth"])
def test_every_method_runs_on_text(name: str) -> None:
    model, x = bert()
    model = model.double()
    if name == "mc-batchnorm":
        with pytest.raises(qualms.QualmsError, match="needs batch normalization"):
            qualms.score(model, x, name, train=[x])
        return
    if name in ("rankfeat", "gaia"):
        with pytest.raises(qualms.QualmsError, match=f"{name} needs .*feature map.*; use energy"):
            qualms.score(model, x, name)
        return
    train = [training_text()]
    out = qualms.score(model, x, name, train=train, models=[bert()[0].double()])
    assert out.shape == (8,)
    assert torch.isfinite(out).all()
    if name != "negrad":
        alone = qualms.score(
            model, {k: v[:1] for k, v in x.items()}, name, train=train, models=[bert()[0].double()]
        )
        torch.testing.assert_close(alone, out[:1], rtol=1e-6, atol=1e-12)


def test_perturb_x_moves_the_embeddings() -> None:
    model, x = bert()
    model = model.double().eval()
    have = qualms.score(model, x, "perturb-x(0.3,5)", seed=4)
    embedded = model.bert.embeddings.word_embeddings(x["input_ids"])
    p = model(**x).logits.softmax(1)
    for b in range(8):
        noise = Smoothing(0.3, 5, antithetic=False).noise((6, 16), b, seed=4)[1:].double()
        mask = x["attention_mask"][b : b + 1].expand(5, -1)
        q = model(inputs_embeds=embedded[b] + noise, attention_mask=mask).logits.softmax(1)
        torch.testing.assert_close(have[b], (q * (q / p[b]).log()).sum(1).mean().detach())


def test_a_model_with_nothing_to_perturb_is_told_the_alternatives() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(9, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.fc(torch.nn.functional.one_hot(ids, 9).float().sum(1))

    for name in ("regrad+smooth", "perturb-x", "mc-aa", "odin"):
        with pytest.raises(qualms.QualmsError, match=r"no embedding .* use .*perturb-theta"):
            qualms.score(Bag(), torch.randint(0, 9, (3, 4)), name)
    assert qualms.score(Bag(), torch.randint(0, 9, (3, 4)), "regrad+layers").shape == (3,)
