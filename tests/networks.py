"""Small networks of every kind that the engines must handle, built for tests only.

Those of one family have a file of their own: `recurrent.py`, `scattered.py`, `wide.py`,
`evasive.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)
    )


def mnist_cnn(dense: int = 16, hidden_layers: int = 1) -> nn.Module:
    """The paper's CNN, at 12x12: Conv(4x4)-ReLU-Conv(4x4)-ReLU-MaxPool2-Dense-ReLU-Dense."""
    hidden: list[nn.Module] = []
    for i in range(hidden_layers):
        hidden += [nn.Linear(6 * 9 if i == 0 else dense, dense), nn.ReLU()]
    return nn.Sequential(
        nn.Conv2d(1, 6, 4), nn.ReLU(), nn.Conv2d(6, 6, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *hidden,
        nn.Linear(dense, 5),
    )  # fmt: skip


class ViewingCNN(nn.Module):
    """Flattens with `view`, which refuses the channels-last memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).relu()
        return self.fc(h.view(h.shape[0], -1))


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int, padded_shortcut: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.stride, self.more = stride, outside - inside
        self.shortcut: nn.Module | None = None
        if stride != 1 and not padded_shortcut:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.stride != 1:
            x = F.pad(
                x[:, :, :: self.stride, :: self.stride],
                (0, 0, 0, 0, self.more // 2, self.more - self.more // 2),
            )
        h += x
        return self.relu(h)


class ResNet(nn.Module):
    """A ResNet for small images; ResNet-18 with widths (64, 128, 256, 512) and two blocks a stage."""

    def __init__(
        self, widths: tuple[int, ...], blocks: int, classes: int, padded_shortcut: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        stages = []
        inside = widths[0]
        for i, width in enumerate(widths):
            first = BasicBlock(inside, width, 1 if i == 0 else 2, padded_shortcut)
            stages.append(
                nn.Sequential(
                    first, *(BasicBlock(width, width, 1, False) for _ in range(blocks - 1))
                )
            )
            inside = width
        self.stages = nn.Sequential(*stages)
        self.linear = nn.Linear(inside, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stages(F.relu(self.bn1(self.conv1(x))))
        return self.linear(h.mean((2, 3)))


class DenseNet(nn.Module):
    """Each layer sees the concatenation of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3 + 4 * i, 4, 3, padding=1) for i in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(3 + 4 * i) for i in range(3)])
        self.fc = nn.Linear(15, 4)

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(F.relu(norm(x)))], dim=1)
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


class ViT(nn.Module):
    """Class token, position embedding, and torch's encoder with the batch on the first or the
    second axis.
    """

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1) + self.position
        h = h if self.batch_first else h.transpose(0, 1)
        h = self.encoder(h)
        return self.head(h[:, 0] if self.batch_first else h[0])


class CrossAttention(nn.Module):
    """A learned query attends to the input: query, keys and values differ, with bias_k, bias_v and
    a zero position.
    """

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, 1, 8))
        self.attention = nn.MultiheadAttention(
            8, 2, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=6
        )
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = x.transpose(0, 1)
        h, _ = self.attention(self.query.expand(-1, x.shape[0], -1), keys, keys)
        return self.fc(h.transpose(0, 1).flatten(1))


class ChannelsLastNorms(nn.Module):
    """Maps normalized over channels on their last axis, and then over groups of channels without a
    copy in between.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.group_norm, self.fc = (
            nn.LayerNorm(4),
            nn.GroupNorm(2, 4),
            nn.Linear(4, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer_norm(x.movedim(1, -1)).movedim(-1, 1).relu()
        return self.fc(self.group_norm(h).tanh().mean((2, 3)))


class AroundInstanceNorm(nn.Module):
    """Instance normalization between convolutions, for whose cotangent in channels-last format
    torch is wrong.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1, bias=False), nn.InstanceNorm2d(4, affine=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.relu())
        return self.fc(self.conv((h + self.norm(h)).relu()).mean((2, 3)))


class TextCNN(nn.Module):
    """Embedding with padding, one-dimensional convolution, maximum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5, padding_idx=0)
        self.conv = nn.Conv1d(5, 6, 3, padding=1)
        self.fc = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.conv(self.embedding(ids).transpose(1, 2)).relu().amax(2))


class Tied(nn.Module):
    """The output layer is the embedding, transposed: one weight, two uses of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, 9)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.hidden(self.embedding(ids)).tanh().mean(1))


class TiedPadding(nn.Module):
    """The row of an embedding that stands for padding has a gradient from the weight's other use
    alone.

    Its last layer has no rule in forward mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(6, 6, padding_idx=0), nn.Linear(6, 6)
        self.hidden.weight = self.embedding.weight
        self.fc = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.hidden(self.embedding(ids)).tanh().mean(1))


class UsedTwice(nn.Module):
    """One convolution and one linear layer, each applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.fc = (
            nn.Conv2d(3, 3, 3, padding=1),
            nn.Linear(8, 8),
            nn.Linear(3 * 64, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.conv(x).relu()).relu()
        return self.fc(self.linear(self.linear(h).relu()).flatten(1))


def two_names() -> nn.Sequential:
    """One layer, registered in two places."""
    shared = nn.Linear(6, 6)
    return nn.Sequential(shared, nn.Tanh(), shared, nn.Flatten(), nn.Linear(30, 3))


class Bilinear(nn.Module):
    """Two inputs, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.fc = nn.Bilinear(6, 6, 5), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.fc(self.bilinear(a, b).tanh())


class LowRank(nn.Module):
    """A LoRA-style adapter: a frozen weight plus a product of two small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(48, 6)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 48)), nn.Parameter(torch.randn(6, 2))
        self.merged_down, self.merged_up = (
            nn.Parameter(torch.randn(2, 6)),
            nn.Parameter(torch.randn(4, 2)),
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        h = self.base(x) + (x @ self.down.T) @ self.up.T  # beside the weight
        return F.linear(
            h, self.head.weight + self.merged_up @ self.merged_down, self.head.bias
        )  # merged into it


class BareParameters(nn.Module):
    """Parameters in plain arithmetic: scale, shift, temperature, mixing matrices on either side, an
    outer index.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(1, 5, 1))
        self.left, self.right = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(6, 6))
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.mix = nn.Parameter(torch.randn(5, 6, 4))
        self.table = nn.Parameter(torch.randn(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = x * self.scale
        h += self.shift
        h = self.left @ h @ self.right + self.table[torch.arange(5) + 1]
        h = torch.where(h > 0, h, h * self.temperature.exp())
        return torch.einsum("bte,tec->bc", h, self.mix) / (1 + self.temperature**2)


class Windows(nn.Module):
    """Attention windows merged into the batch axis, with a bias table added to each, as in Swin."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.table = nn.Parameter(torch.randn(4, 3))
        self.register_buffer(
            "index", torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]])
        )
        self.qkv, self.out, self.fc = nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        h = self.embed(x.permute(0, 2, 3, 1))
        h = h.reshape(b, 4, 2, 4, 2, 6).permute(0, 1, 3, 2, 4, 5).reshape(b * 16, 4, 6)
        q, k, v = self.qkv(h).reshape(b * 16, 4, 3, 3, 2).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(4, 4, 3).permute(2, 0, 1)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
        h = self.out(h.transpose(1, 2).reshape(b * 16, 4, 6))
        return self.fc(h.reshape(b, 64, 6).mean(1))


class Conv1D(nn.Module):
    """GPT-2's transposed linear layer: addmm on a view that merges batch and time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5))
        self.fc = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.bias, x.view(-1, 6), self.weight).view(*x.shape[:2], 5)
        return self.fc(h.tanh().sum(1))


class Choices(nn.Module):
    """Multiple choice: the answers to a question stand beside each other in the batch, all with the
    same positions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kinds, self.places = nn.Embedding(2, 6), nn.Embedding(5, 6)
        self.inner, self.fc = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, 1)
        kinds = torch.zeros_like(words[:, :, 0]).long()
        places = torch.arange(5) + kinds
        h = self.inner(words + self.kinds(kinds) + self.places(places)).tanh()
        return self.fc(h.sum(1)).view(x.shape[:2])


class PixelsAsWords(nn.Module):
    """Normalized pixels as a sequence behind a class token: the cotangent of an image alone has
    strides of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.fc = nn.BatchNorm2d(24), nn.Linear(24, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.view(-1, 24, 2, 2)).flatten(2).transpose(1, 2)
        h = torch.cat([x.new_ones(len(h), 1, 24), h], dim=1)
        return self.fc(self.inner(h).tanh()[:, 1:].pow(2).sum(1))
