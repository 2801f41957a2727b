"""Why does UNGrad rank forwards on MNIST in the paper, and backwards here? Every reading of it that
could tell.

    QUALMS_DATA=folder python benchmarks/ungrad.py [NETWORK …] [--out runs]

UNGrad is the mean over classes of ‖∇θ log p_c‖. Each variant changes one thing: the norm, what is
summed, whose gradient is taken, how log p is computed, how the network was trained. Rows go to
`results/ungrad.jsonl`, one for each network and other dataset, with every variant's AUROC, and its
rAULC on own images; `results_page.py` makes the table. The networks of the paper's recipe are those
of `paper_tables.py` in the same folder; the others are trained here, for 3 epochs of it.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoints import root
from jaxtyping import Float
from torch import Tensor, nn

import qualms
from qualms.data import DATASETS, Images, load
from qualms.metrics import auroc, raulc
from qualms.models import load_model
from qualms.models.cnn import mnist_cnn
from qualms.models.zoo import ZOO
from qualms.stream.network import Network
from qualms.tasks.presets import CPU
from qualms.training import RECIPES, fit

RESULTS = Path(__file__).parent / "results" / "ungrad.jsonl"
COUNT, FEW = 500, 200  # images of each dataset, and for L1 norms, which have no short cut
EPOCHS = 3
FLOORS = (1e-2, 1e-4, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-12)
Gram = Float[Tensor, "b l c c"]


class SoftmaxTwice(nn.Module):
    """A network that ends in a softmax, trained by a loss that applies another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Probabilities, which the loss takes for logits."""
        return self.inner(x).softmax(-1)


def with_dropout() -> nn.Module:
    """The paper's CNN with half of the last features dropped in training."""
    *before, last = mnist_cnn()
    return nn.Sequential(*before, nn.Dropout(0.5), last)


def networks(out: Path) -> dict[str, tuple[Callable[[], Network], tuple[str, ...]]]:
    """By name: how each is made, and the datasets that it is to tell from its own, which comes
    first.
    """
    digits, numbers = ("mnist", "omniglot", "fashion-mnist"), ("svhn", "cifar10", "cifar100")
    objects = ("cifar10", "svhn", "tiny-imagenet-32")
    return {
        "MNIST, the paper's recipe, seed 0": (lambda: recipe_network("mnist", 0, out), digits),
        "MNIST, the paper's recipe, seed 1": (lambda: recipe_network("mnist", 1, out), digits),
        "MNIST, 3 epochs": (lambda: short_network("plain", mnist_cnn, out), digits),
        "MNIST, 3 epochs with dropout": (
            lambda: short_network("dropout", with_dropout, out),
            digits,
        ),
        "MNIST, 3 epochs, softmax twice in the loss": (
            lambda: short_network("softmax-twice", lambda: SoftmaxTwice(mnist_cnn()), out),
            digits,
        ),
        "MNIST, 3 epochs without weight decay": (
            lambda: short_network("no-decay", mnist_cnn, out, decay=0.0),
            digits,
        ),
        "MNIST CNN 5x5, published": (lambda: published("mnist-cnn-5x5"), digits),
        "SVHN, the paper's recipe, seed 0": (lambda: recipe_network("svhn", 0, out), numbers),
        "CIFAR-10 ResNet-20, published": (lambda: published("cifar10-resnet20"), objects),
    }


def recipe_network(dataset: str, seed: int, out: Path) -> Network:
    """As `paper_tables.py` left it."""
    setup = CPU.setups[dataset]
    file = out / CPU.name / "networks" / f"{dataset}-{setup.network}-seed{seed}.pt"
    return Network(dataset, load_model(setup.network, file), DATASETS[dataset].normalization)


def published(name: str) -> Network:
    """By others."""
    entry = ZOO[name]
    assert entry.normalization is not None
    return Network(
        name, load_model(name, root() / "weights" / str(entry.file)), entry.normalization
    )


def short_network(name: str, build: Callable[[], nn.Module], out: Path, **changes: Any) -> Network:
    """Three epochs of the paper's recipe for MNIST, or of a variant."""
    torch.manual_seed(0)
    model, normalization = build(), DATASETS["mnist"].normalization
    recipe = replace(RECIPES["mnist"].shortened(EPOCHS), **changes)
    fit(
        model,
        load("data:mnist", root(), "train"),
        recipe,
        normalization,
        checkpoint=out / "ungrad" / f"{name}.pt",
    )
    return Network(
        "mnist", model.inner if isinstance(model, SoftmaxTwice) else model, normalization
    )


def variants(
    gram: Gram, logits: Float[Tensor, "b c"], tensors: list[str]
) -> Iterator[tuple[str, Float[Tensor, " b"]]]:
    """Each variant of UNGrad, by name: all are quadratic forms of the Gram matrices of the logits,
    tensor by tensor.
    """
    p, eye = logits.softmax(-1), torch.eye(logits.shape[1], dtype=logits.dtype)
    toward = eye - p[:, None]  # [b, c, k]: row c is e_c - p
    whole = gram.sum(1)

    def norms(
        cotangents: Float[Tensor, "b c k"], of: Gram = whole[:, None]
    ) -> Float[Tensor, "b c"]:
        """Σ_l ‖J_lᵀ v_c‖ for the cotangents v_c."""
        return (
            torch.einsum("bck,blkm,bcm->blc", cotangents, of, cotangents).clamp(min=0).sqrt().sum(1)
        )

    plain = norms(toward)
    yield "UNGrad", plain.mean(1)
    yield "sum of the tensors' norms", norms(toward, gram).mean(1)
    biases = [name.endswith("bias") for name in tensors]
    yield (
        "without biases",
        norms(toward, gram[:, [not b for b in biases]].sum(1, keepdim=True)).mean(1),
    )
    yield "biases alone", norms(toward, gram[:, biases].sum(1, keepdim=True)).mean(1)
    owners = [name.rpartition(".")[0] for name in tensors]
    for which, owner in (("first", owners[0]), ("last", owners[-1])):
        yield (
            f"{which} layer alone",
            norms(toward, gram[:, [o == owner for o in owners]].sum(1, keepdim=True)).mean(1),
        )
    yield "of unnormalized logits", norms(eye.expand_as(toward)).mean(1)
    yield (
        "the predicted class left out",
        (plain.sum(1) - plain.gather(1, p.argmax(1, keepdim=True))[:, 0]),
    )
    yield "the largest of the classes", plain.amax(1)
    yield "divided by the logits' norm", plain.mean(1) / logits.norm(dim=1)
    of_softmax = torch.diag_embed(p) - p[:, :, None] * p[:, None]  # ∂p/∂z
    yield "log softmax of the softmax", norms((eye - p.softmax(-1)[:, None]) @ of_softmax).mean(1)
    yield "of p_c (the weights of ExGrad)", (p * plain).mean(1)
    yield "weights √p_c (REGrad)", (p.sqrt() * plain).sum(1)
    # What torch.distributions.Categorical(probs=p).log_prob does: no gradient comes through a
    # clamp.
    least = torch.finfo(torch.float32).eps
    yield "p_c clamped as by torch.distributions", (((p > least) & (p < 1 - least)) * plain).mean(1)
    for floor in FLOORS:
        yield f"log(p_c + {floor:g})", (p / (p + floor) * plain).mean(1)


def images_of(network: Network, dataset: str, count: int) -> Images:
    """The first images of a dataset, in the network's size."""
    images = load(
        str(root() / dataset) if dataset.startswith("tiny") else f"data:{dataset}", root()
    ).subset(count)
    return images.convert(
        len(network.normalization.mean), 28 if network.name.startswith("mnist") else 32
    )


def scores(network: Network, images: Images) -> dict[str, Tensor]:
    """Every variant on some images."""
    x = network.inputs(images)
    found = qualms.class_gradient_gram(network.model, list(x.split(50)), layers="tensor")
    own = dict(variants(found.gram.double(), found.logits.double(), found.layers))
    l1 = qualms.class_gradient_norms(
        network.model, list(x[:FEW].split(20)), layers="tensor", norm="l1"
    )
    return {**own, "L1 norm": l1.norms.double().sum(2).mean(1)}


def main() -> None:
    """Run what has no row yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    given = parser.parse_args()
    every = networks(given.out)
    have = (
        {json.loads(line)["network"] for line in RESULTS.read_text().splitlines()}
        if RESULTS.exists()
        else set()
    )
    for name in [n for n in given.names or every if n not in have]:
        build, (known, *others) = every[name]
        network = build()
        images = images_of(network, known, COUNT)
        assert images.labels is not None
        correct, inside = (
            network.logits(images).argmax(1).eq(images.labels),
            scores(network, images),
        )
        calibrated = {
            variant: round(raulc(s, correct[: len(s)]), 4) for variant, s in inside.items()
        }
        about = {
            "network": name,
            "in": known,
            "accuracy": network.accuracy(load(f"data:{known}", root())),
        }
        for other in others:
            outside = scores(network, images_of(network, other, COUNT))
            found = {
                variant: round(auroc(inside[variant], outside[variant]), 4) for variant in inside
            }
            row = {
                **about,
                "out": other,
                "n": COUNT,
                "n_l1": FEW,
                "auroc": found,
                "raulc": calibrated,
            }
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
