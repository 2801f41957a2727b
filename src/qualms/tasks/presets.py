"""Two sizes of the paper's experiments: `paper`, the full protocol, and `cpu`, for two cores.

`paper` needs a GPU.
"""

from dataclasses import dataclass, replace

from qualms.gradients.settings import Engine, Smoothing
from qualms.tasks.active import Plan
from qualms.tasks.paper_numbers import DRAWS, SIGMA
from qualms.training.recipes import RECIPES, Recipe

SEEDS = (0, 1, 2)  # the paper's three runs


@dataclass(frozen=True)
class Setup:
    """How one in-distribution dataset is evaluated.

    Args:
        network: the name of a network in the zoo. Its published weights are used if the folder
            `weights` among the datasets has them.
        recipe: how the network is trained if there are no published weights.
        train: the number of training images; None for all.
        images: the number of test images of each dataset; None for all.
        engine: the engine of the gradient scores.
        seeds: a network is trained for each seed; published weights have one seed.
    """

    network: str
    recipe: Recipe
    train: int | None = None
    images: int | None = None
    engine: Engine = "exact"
    seeds: tuple[int, ...] = SEEDS


@dataclass(frozen=True)
class Learning:
    """Active learning on one dataset.

    Args:
        plan: how many images, how often, and how to train.
        smooth: the smoothing of REGrad*.
        methods: the names of the methods, as rows of table 3; None for all.
        seeds: the experiment is run once for each seed.
    """

    plan: Plan
    smooth: Smoothing
    methods: tuple[str, ...] | None = None
    seeds: tuple[int, ...] = SEEDS


@dataclass(frozen=True)
class Preset:
    """How each experiment is run.

    Args:
        name: the name of the preset on the command line.
        cuts: all differences from the paper, in words.
        smooth: the smoothing of REGrad*.
        draws: the number of random draws of Perturb x, Perturb θ and MC-AA.
        setups: the setups of tables 1, 2, 4 and 5, by dataset.
        vit: the setups of the vision transformer's table, by dataset.
        active: the settings of active learning (table 3), by dataset.
        active_test: the number of test images that active learning is judged on; None for all.
        timed: the number of images that the runtime of methods is measured on.
    """

    name: str
    cuts: str
    smooth: Smoothing
    draws: int
    setups: dict[str, Setup]
    vit: dict[str, Setup]
    active: dict[str, Learning]
    active_test: int | None
    timed: int


_PLAIN = Smoothing(SIGMA, draws=100, antithetic=False)
PAPER = Preset(
    name="paper",
    cuts=(
        "none in the protocol, except that the vision transformer is our own for 32x32 images, "
        "trained from scratch, whereas the paper fine-tunes timm's; the gradient baselines have "
        "L2 norms, whereas the paper took the better of L1 and L2; and active learning leaves out "
        "NEGrad, whose scores are all zero"
    ),
    smooth=_PLAIN,
    draws=DRAWS,
    setups={
        "mnist": Setup("mnist-cnn", RECIPES["mnist"]),
        "cifar10": Setup("resnet18", RECIPES["cifar10"]),
        "svhn": Setup("svhn-cnn", RECIPES["svhn"]),
        "cifar100": Setup("resnet152", RECIPES["cifar100"]),
    },
    vit={name: Setup("vit-small", RECIPES["vit"]) for name in ("cifar10", "cifar100")},
    active={
        "mnist": Learning(Plan(20, 20, RECIPES["active"]), _PLAIN),
        "cifar10": Learning(Plan(500, 100, RECIPES["active"]), _PLAIN),
        "svhn": Learning(Plan(500, 100, RECIPES["active"]), _PLAIN),
        "cifar100": Learning(Plan(1000, 500, RECIPES["active"]), _PLAIN),
    },
    active_test=None,
    timed=1000,
)

# With 20 labeled images, an epoch is one step, so fewer epochs are possible only for experiments that
# start with more images; their smaller batches make more steps of an epoch.
_LONG_RECIPE = replace(RECIPES["active"], epochs=60, validate_every=5)
_SHORT_RECIPE = replace(
    RECIPES["active"],
    epochs=20,
    batch=32,
    validate_every=4,
)
# On MNIST, two draws rank images as a hundred do (docs/performance.md); on other networks they do not.
_TWO_DRAWS = Smoothing(SIGMA, draws=2)
_COLOR_PLAN = Plan(
    500,
    100,
    _SHORT_RECIPE,
    cycles=3,
    pool=1000,
    validation=500,
)
_FEW_METHODS = ("Random", "Entropy", "ExGrad", "LA", "REGrad*")


def _vit_recipe(epochs: int, augment: bool) -> Recipe:
    """Return a recipe to train a vision transformer in few epochs, so at a higher learning rate.

    Args:
        epochs: the number of epochs.
        augment: whether the training images are augmented.
    """
    return replace(
        RECIPES["vit"].shortened(epochs),
        rate=1e-3,
        batch=128,
        augment=augment,
        validate_every=2,
    )


CPU = Preset(
    name="cpu",
    cuts=(
        "2000, 1000, 1000 and 500 test images of each dataset (for MNIST, CIFAR-10, SVHN and "
        "CIFAR-100); smoothing with 8 antithetic draws instead of 100, and 20 draws instead of 100 "
        "for Perturb x, Perturb θ and MC-AA; sketched gradients for the hundred classes of "
        "CIFAR-100; 5000 training images for LA and the other methods that need some; ResNet-20 "
        "and -56 instead of -18 and -152, with published weights where the folder `weights` has "
        "them (one network, one seed), otherwise trained for 3 epochs on 5000 images; ViTs with 4 "
        "blocks, one seed, 500 test images of each dataset, for MNIST (5 epochs) and CIFAR-10 "
        "(20 epochs); active learning: 500 validation images, 2000 test images; MNIST with two "
        "seeds, a pool of 2000, 60 epochs instead of 200 (the loss is zero after 40) and 2 draws "
        "for REGrad*; CIFAR-10 and SVHN with one seed, a pool of 1000, 3 cycles, 20 epochs with "
        "batches of 32, and 5 methods; no CIFAR-100; costs on 16 images"
    ),
    smooth=Smoothing(SIGMA),
    draws=20,
    setups={
        "mnist": Setup("mnist-cnn", RECIPES["mnist"], images=2000),
        "cifar10": Setup(
            "cifar10-resnet20",
            RECIPES["cifar10"].shortened(3),
            train=5000,
            images=1000,
            seeds=(0,),
        ),
        "svhn": Setup("svhn-cnn", RECIPES["svhn"], images=1000),
        "cifar100": Setup(
            "cifar100-resnet56",
            RECIPES["cifar100"].shortened(3),
            train=5000,
            images=500,
            engine="sketch",
            seeds=(0,),
        ),
    },
    vit={
        "mnist": Setup("vit-tiny", _vit_recipe(5, augment=False), images=500, seeds=(0,)),
        "cifar10": Setup("vit-tiny", _vit_recipe(20, augment=True), images=500, seeds=(0,)),
    },
    active={
        "mnist": Learning(
            Plan(20, 20, _LONG_RECIPE, pool=2000, validation=500), _TWO_DRAWS, seeds=(0, 1)
        ),
        "cifar10": Learning(_COLOR_PLAN, Smoothing(SIGMA), _FEW_METHODS, seeds=(0,)),
        "svhn": Learning(_COLOR_PLAN, Smoothing(SIGMA), _FEW_METHODS, seeds=(0,)),
    },
    active_test=2000,
    timed=16,
)

PRESETS = {preset.name: preset for preset in (CPU, PAPER)}
