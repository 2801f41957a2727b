"""Small models with inputs, and their gradients by plain autograd."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qualms.gradients.settings import Smoothing


def small_cnn() -> nn.Sequential:
    """Convolution, batch normalization, dropout and two linear layers: something for every method."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 5),
    )  # fmt: skip


@dataclass
class Setting:
    """logits [b, c], probs [b, c], gradients[b][c][layer] flat vectors of ∇ log p_c, layers of the
    model in order.
    """

    model: nn.Sequential
    x: Tensor
    logits: Tensor
    probs: Tensor
    gradients: list[list[list[Tensor]]]

    def class_gradient(self, b: int, c: int) -> Tensor:
        return torch.cat(self.gradients[b][c])


def layer_gradients(model: nn.Module, x: Tensor) -> list[list[Tensor]]:
    """∇ log p_c(x) of one input, for each class and layer."""
    layers = [m for m in model if list(m.parameters(recurse=False))]
    log_p = model(x[None])[0].log_softmax(0)
    found = []
    for c in range(len(log_p)):
        g = [torch.autograd.grad(log_p[c], list(m.parameters()), retain_graph=True) for m in layers]
        found.append([torch.cat([t.flatten() for t in of_layer]) for of_layer in g])
    return found


def smoothed_gradients(
    model: nn.Module, x: Tensor, smooth: Smoothing, index: int, seed: int
) -> list[list[Tensor]]:
    """The mean of the gradients over the input and its perturbed copies."""
    copies = x + smooth.noise(tuple(x.shape), index, seed).to(x)
    each = [layer_gradients(model, copy) for copy in copies]
    classes, layers = len(each[0]), len(each[0][0])
    return [
        [torch.stack([g[c][m] for g in each]).mean(0) for m in range(layers)]
        for c in range(classes)
    ]


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from tests.cases import hugging_face_bert, padded_text

    torch.manual_seed(0)
    return hugging_face_bert(), padded_text()


def training_text() -> dict[str, Tensor]:
    """More inputs than half of the features, which `vim` needs."""
    noise = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (40, 6), generator=noise)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
