"""A small vision transformer for 32x32 images (Dosovitskiy et al., ICLR 2021; the size is DeiT-Ti's
at half its depth).

Attention, layer normalization, a class token and a positional embedding: what the paper's networks
do not have.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer block: attention, then a network of two linear layers.

    Each of these two parts starts with a layer normalization, and its output is added to its input.

    Args:
        width: channels of every token.
        heads: the number of attention heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, tokens, width] to [n, tokens, width]."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))
        # From [n, tokens, 3, heads, d] to three tensors [n, heads, tokens, d]; d = width / heads.
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v)
        # Back to [n, tokens, width].
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    """A vision transformer on patches of 4x4 pixels, which classifies by the class token."""

    def __init__(self, width: int, depth: int, heads: int, classes: int) -> None:
        """Create the network with random weights.

        Args:
            width: channels of every token.
            depth: the number of blocks.
            heads: the number of attention heads in each block.
            classes: the number of classes.
        """
        super().__init__()
        # One token for each patch of 4x4 pixels, and one more for the class.
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        # 32x32 pixels have 8x8 patches; with the class token, that makes 65.
        self.position = nn.Parameter(torch.empty(1, 65, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.position, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n, 3, 32, 32] to [n, classes]."""
        patches = self.patches(x).flatten(2).transpose(1, 2)  # [n, 64, width]
        class_token = self.token.expand(len(x), -1, -1)
        tokens = torch.cat([class_token, patches], dim=1) + self.position
        class_output = self.norm(self.blocks(tokens))[:, 0]
        return self.head(class_output)


def vit_small(classes: int = 10) -> VisionTransformer:
    """Create a vision transformer with 192 channels, 6 blocks, 3 heads: 2.7 million parameters."""
    return VisionTransformer(
        width=192,
        depth=6,
        heads=3,
        classes=classes,
    )


def vit_tiny(classes: int = 10) -> VisionTransformer:
    """Create a vision transformer with 96 channels, 4 blocks, 3 heads: 0.46 million parameters.

    It is small enough to be trained on a CPU.
    """
    return VisionTransformer(
        width=96,
        depth=4,
        heads=3,
        classes=classes,
    )
