"""Two sizes of the paper's experiments: `paper`, the full protocol, which wants a GPU, and `cpu`, for two cores."""

from dataclasses import dataclass, replace

from qualms.gradients.settings import Engine
from qualms.gradients.smoothing import Smoothing
from qualms.tasks.active import Plan
from qualms.tasks.paper import SIGMA
from qualms.training.recipes import RECIPES, Recipe


@dataclass(frozen=True)
class Setup:
    """One in-distribution dataset: which network, how trained, and how many images are scored.

    Args:
        network: a name in the zoo. If `weights` in the data folder holds its published file, that is used.
        recipe: how it is trained otherwise.
        train: the number of training images; None for all.
        images: the number of test images of each dataset; None for all.
        engine: of the gradient scores.
    """

    network: str
    recipe: Recipe
    train: int | None = None
    images: int | None = None
    engine: Engine = "exact"


@dataclass(frozen=True)
class Preset:
    """How each experiment is run; `cuts` says what differs from the paper."""

    name: str
    cuts: str
    seeds: tuple[int, ...]
    smooth: Smoothing
    setups: dict[str, Setup]
    vit: dict[str, Setup]
    active: dict[str, Plan]
    active_test: int | None  # test images that active learning is judged on
    active_methods: tuple[str, ...] | None  # rows of the table; None for all


PAPER = Preset(
    name="paper",
    cuts=(
        "nothing of the protocol; but the vision transformer is ours for 32x32 images, trained from scratch, where the "
        "paper fine-tunes timm's, and the gradient baselines have L2 norms, where it took the better of L1 and L2"
    ),
    seeds=(0, 1, 2),
    smooth=Smoothing(SIGMA, draws=100, antithetic=False),
    setups={
        "mnist": Setup("mnist-cnn", RECIPES["mnist"]),
        "cifar10": Setup("resnet18", RECIPES["cifar10"]),
        "svhn": Setup("svhn-cnn", RECIPES["svhn"]),
        "cifar100": Setup("resnet152", RECIPES["cifar100"]),
    },
    vit={name: Setup("vit-small", RECIPES["vit"]) for name in ("cifar10", "cifar100")},
    active={
        "mnist": Plan(20, 20, RECIPES["active"]),
        "cifar10": Plan(500, 100, RECIPES["active"]),
        "svhn": Plan(500, 100, RECIPES["active"]),
        "cifar100": Plan(1000, 500, RECIPES["active"]),
    },
    active_test=None,
    active_methods=None,
)

# Twenty images make one step an epoch: only larger starts can do with fewer epochs, with smaller batches to make up.
_MANY = replace(RECIPES["active"], validate_every=10)
_SHORT = replace(RECIPES["active"], epochs=20, batch=32, validate_every=4)
CPU = Preset(
    name="cpu",
    cuts=(
        "one seed; smoothing with 8 antithetic draws instead of 100; 500, 192, 256 and 64 test images of each dataset "
        "(for MNIST, CIFAR-10, SVHN and CIFAR-100); sketched gradients for CIFAR-100's hundred classes; 5000 training "
        "images for LA; MNIST and SVHN CNNs trained for 3 epochs; ResNet-20 and -56 in place of -18 and -152, with "
        "published weights where the folder `weights` has them, else trained for 3 epochs on 5000 images; a ViT of 4 "
        "blocks, 5 epochs on 5000 images, 64 test images of each dataset; active learning with 3 cycles, at most 20 "
        "epochs of batches of 32 (MNIST: 200 epochs), 500 images to validate on, a pool of 500 (MNIST: 1000), 2000 "
        "test images and 4 methods, and for CIFAR-100 500 images to start with and 100 more in each cycle instead of "
        "1000 and 500"
    ),
    seeds=(0,),
    smooth=Smoothing(SIGMA),
    setups={
        "mnist": Setup("mnist-cnn", RECIPES["mnist"].shortened(3), images=500),
        "cifar10": Setup("cifar10-resnet20", RECIPES["cifar10"].shortened(3), train=5000, images=192),
        "svhn": Setup("svhn-cnn", RECIPES["svhn"].shortened(3), images=256),
        "cifar100": Setup("cifar100-resnet56", RECIPES["cifar100"].shortened(3), 5000, images=64, engine="sketch"),
    },
    vit={
        name: Setup("vit-tiny", replace(RECIPES["vit"].shortened(5), rate=1e-3, batch=128), train=5000, images=64)
        for name in ("cifar10", "cifar100")
    },
    active={
        "mnist": Plan(20, 20, _MANY, cycles=3, pool=1000, validation=500),
        "cifar10": Plan(500, 100, _SHORT, cycles=3, pool=500, validation=500),
        "svhn": Plan(500, 100, _SHORT, cycles=3, pool=500, validation=500),
        "cifar100": Plan(500, 100, _SHORT, cycles=3, pool=500, validation=500),
    },
    active_test=2000,
    active_methods=("Random", "Entropy", "ExGrad", "REGrad*"),
)

PRESETS = {preset.name: preset for preset in (CPU, PAPER)}
