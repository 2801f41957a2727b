"""`Normalization`: bytes to the numbers that a network was trained on."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32, UInt8
from torch import Tensor

from qualms.errors import QualmsError


@dataclass(frozen=True)
class Normalization:
    """Normalizes images for a network: (x / 255 - mean) / std, separately for each channel.

    Args:
        mean: one number for each channel, for pixels from 0 to 1.
        std: one number above 0 for each channel.

    Example:
        ```python
        import torch
        from qualms.data import Normalization

        halves = Normalization(mean=(0.5,), std=(0.5,))
        x = halves.apply(torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1))
        assert x.flatten().tolist() == [-1, 1]
        ```
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        """Raise an error unless each mean has a positive std, and all results are finite."""
        if len(self.mean) != len(self.std) or not self.mean:
            raise QualmsError(
                f"the normalization has {len(self.mean)} means and {len(self.std)} standard "
                "deviations; pass one of each per channel."
            )
        if not all(channel_std > 0 for channel_std in self.std):
            raise QualmsError(
                f"the normalization divides by std={self.std}; each value must be above 0."
            )
        mean = torch.tensor(self.mean, dtype=torch.float32)
        std = torch.tensor(self.std, dtype=torch.float32)
        black, white = -mean / std, (1 - mean) / std
        if not bool(torch.stack([mean, std, black, white]).isfinite().all()):
            raise QualmsError(
                f"normalizing with mean={self.mean} and std={self.std} gives numbers that are not "
                "finite; correct these values."
            )

    def apply(self, pixels: UInt8[Tensor, "n c h w"]) -> Float32[Tensor, "n c h w"]:
        """Compute the network's input from bytes: (pixels / 255 - mean) / std.

        Args:
            pixels: bytes [n, channels, height, width].
        """
        if pixels.shape[1] != len(self.mean):
            raise QualmsError(
                f"the images have {pixels.shape[1]} channels, but the normalization has "
                f"{len(self.mean)}; use images.convert({len(self.mean)}, size), or pass another "
                "normalization."
            )
        # [channels, 1, 1], to broadcast over height and width.
        mean = torch.tensor(self.mean, dtype=torch.float32)[:, None, None]
        std = torch.tensor(self.std, dtype=torch.float32)[:, None, None]
        return (pixels.float() / 255 - mean) / std

    def in_model_units(self, value: float) -> float | tuple[float, ...]:
        """Convert the standard deviation of noise on pixels to units of the network's input.

        Args:
            value: the standard deviation for pixels from 0 to 1.

        Returns:
            value / std: a number if there is one channel, else a number for each channel.
        """
        noise_stds = tuple(value / channel_std for channel_std in self.std)
        return noise_stds if len(noise_stds) > 1 else noise_stds[0]

    def of_channels(self, channels: int) -> "Normalization":
        """Repeat a normalization of one channel for images with several channels.

        Args:
            channels: the number of channels of the images.

        Returns:
            A normalization of `channels` channels; the same object if it has that many already.
        """
        if len(self.mean) == channels:
            return self
        if len(self.mean) == 1:
            return Normalization(self.mean * channels, self.std * channels)
        raise QualmsError(
            f"the normalization has {len(self.mean)} channels, but the images have {channels}; "
            "pass one value per channel."
        )
