"""How the paper trains its networks (Wang & Ji, CVPR 2024, appendix B)."""

from dataclasses import dataclass, replace

from qualms.errors import QualmsError


@dataclass(frozen=True)
class Recipe:
    """Stochastic gradient descent with momentum, or Adam for transformers.

    Args:
        epochs: passes over the training images.
        rate: the learning rate to begin with.
        drops: the epochs after which the rate is divided by ten; with Adam it falls along a cosine
            instead.
        batch: the number of images in a step.
        augment: whether images are cropped, flipped and rotated at random.
        validation: the share of the training images that is kept aside to choose the best epoch.
        adam: whether Adam is used instead of gradient descent.
        momentum: the momentum of gradient descent.
        decay: the weight decay.
        validate_every: the accuracy on the validation images is measured every this many epochs.

    Example:
        ```python
        from qualms.training import Recipe

        recipe = Recipe(epochs=100, rate=0.1, drops=(30, 60, 90), augment=True)
        assert recipe.shortened(10).drops == (3, 6, 9)
        ```
    """

    epochs: int
    rate: float
    drops: tuple[int, ...] = ()
    batch: int = 128
    augment: bool = False
    validation: float = 0.1
    adam: bool = False
    momentum: float = 0.9
    decay: float = 5e-4
    validate_every: int = 1

    def __post_init__(self) -> None:
        """Raise an error if a number is not positive, or if `validation` is not between 0 and 1."""
        if self.epochs < 1 or self.batch < 1 or self.rate <= 0 or self.validate_every < 1:
            raise QualmsError(
                f"a recipe has {self.epochs} epochs, batches of {self.batch} and a learning "
                f"rate of {self.rate}; all must be positive."
            )
        if not 0 < self.validation < 1:
            raise QualmsError(
                f"a recipe holds out {self.validation} of the images for validation; pass a share "
                "above 0 and below 1."
            )

    def shortened(self, epochs: int) -> "Recipe":
        """Return the recipe with another number of epochs.

        The learning rate drops after the same shares of the epochs as before.

        Args:
            epochs: the number of epochs of the new recipe.
        """
        drops = tuple(max(1, round(drop * epochs / self.epochs)) for drop in self.drops)
        return replace(self, epochs=epochs, drops=drops)


RECIPES: dict[str, Recipe] = {
    "mnist": Recipe(epochs=30, rate=0.01),
    "cifar10": Recipe(epochs=100, rate=0.1, drops=(30, 60, 90), augment=True),
    "cifar100": Recipe(epochs=120, rate=0.1, drops=(40, 70, 100), batch=64, augment=True),
    "svhn": Recipe(epochs=50, rate=0.05, drops=(15, 30), batch=64),
    "active": Recipe(epochs=200, rate=0.01),
    "vit": Recipe(epochs=200, rate=1e-4, batch=512, augment=True, adam=True, decay=0.0),
    "digits": Recipe(epochs=30, rate=0.05, batch=64),
}
"""The recipes, by the name of the dataset; `active` for each cycle of active learning, `vit` for
transformers on CIFAR.

Example:
    ```python
    from qualms.training import RECIPES

    print(RECIPES["cifar10"])
    ```
"""
