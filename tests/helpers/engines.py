"""How results of two engines are compared, and models that engines treat specially."""

from torch import Tensor, nn

import qualms

SMOOTHINGS = {"plain": None, "smoothed": qualms.Smoothing(0.1, draws=3)}


def assert_norms_equal(have: Tensor, want: Tensor) -> None:
    """Equal to 1e-9 for each class and layer; what is zero but for rounding is compared to the
    input's own scale.
    """
    rounding = 1e-13 * want.amax(dim=(1, 2), keepdim=True)
    assert ((have - want).abs() <= 1e-9 * want + rounding).all(), float(
        ((have - want).abs() / want).max()
    )


class OneByOne(nn.Module):
    """Shows its input to Python, so that inputs run one at a time."""

    def forward(self, z: Tensor) -> Tensor:
        return z + 0 * z.mean()


WITHOUT_DERIVATIVE = {
    "rounded-weight"
}  # what its backward pass says is not the derivative of its forward pass
