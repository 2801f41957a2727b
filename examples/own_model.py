# %% [markdown]
"""Score a model of your own: a Hugging Face transformer, an exported file, a text classifier.

    python examples/own_model.py

Weights are random, so that nothing is downloaded; yours come from `from_pretrained`.
"""

# %% A vision transformer of Hugging Face: all it takes is an output with `.logits`.
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import qualms
from qualms.models import load_model

torch.manual_seed(0)
small: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
vit = ViTForImageClassification(
    ViTConfig(**small, image_size=32, patch_size=8)
)  # two classes, its default
images = torch.rand(4, 3, 32, 32)
print("a vision transformer:", qualms.score(vit, {"pixel_values": images}))

# %% A text classifier: token ids cannot be perturbed, so smoothing perturbs their embeddings.
bert = BertForSequenceClassification(BertConfig(**small, vocab_size=100))
batch = {
    "input_ids": torch.randint(0, 100, (4, 7)),
    "attention_mask": torch.ones(4, 7, dtype=torch.long),
}
print("a text classifier:", qualms.score(bert, batch))

# %% An exported network, and one by an import path.
network = load_model("cifar10-resnet20")
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "model.pt2"
    dynamic = ({0: torch.export.Dim("batch")},)
    torch.export.save(
        torch.export.export(network, (torch.rand(2, 3, 32, 32),), dynamic_shapes=dynamic), path
    )
    exported = load_model(path)
want, have = (qualms.score(m, images, "regrad+layers") for m in (network, exported))
print("exported, the same scores:", bool(torch.allclose(want, have, rtol=1e-3)))
factory = load_model("qualms.models.cifar_resnet:resnet20", classes=100)
print("by an import path, 100 classes:", qualms.score(factory, images, "energy"))

# %% Which layers does the uncertainty come from?
g = qualms.class_gradient_norms(network, images)
by_layer = torch.einsum("bc,bcl->l", g.probs.sqrt(), g.norms)
for share, layer in sorted(
    zip((by_layer / by_layer.sum()).tolist(), g.layers, strict=True), reverse=True
)[:3]:
    print(f"{layer}: {share:.0%}")
