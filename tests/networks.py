"""Small networks of every kind that the engines must handle, built for tests only."""

import warnings

import numpy as np
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))


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
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.shortcut is not None:
            x = self.shortcut(x)
        elif self.stride != 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        h += x
        return self.relu(h)


class ResNet(nn.Module):
    """A ResNet for small images; ResNet-18 with widths (64, 128, 256, 512) and two blocks a stage."""

    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int, padded_shortcut: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        stages = []
        inside = widths[0]
        for i, width in enumerate(widths):
            first = BasicBlock(inside, width, 1 if i == 0 else 2, padded_shortcut)
            stages.append(nn.Sequential(first, *(BasicBlock(width, width, 1, False) for _ in range(blocks - 1))))
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
    """Class token, position embedding, and torch's encoder with the batch on the first or the second axis."""

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
    """A learned query attends to the input: query, keys and values differ, with bias_k, bias_v and a zero position."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, 1, 8))
        self.attention = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, kdim=6, vdim=6)
        self.fc = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        keys = x.transpose(0, 1)
        h, _ = self.attention(self.query.expand(-1, x.shape[0], -1), keys, keys)
        return self.fc(h.transpose(0, 1).flatten(1))


class Recurrent(nn.Module):
    """Embedding, a recurrent layer, and a linear layer on the last step."""

    def __init__(self, cell: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 5, padding_idx=0)
        self.cell = cell(5, 6, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.fc = nn.Linear(12, 4)
        self.batch_first = batch_first

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids if self.batch_first else ids.T)
        h, _ = self.cell(h)
        return self.fc(h[:, -1] if self.batch_first else h[-1])


class FromStates(nn.Module):
    """All that a recurrent layer gives is used; it starts from zeros, from a learned state or from one of the input."""

    def __init__(self, layer: nn.RNNBase, begin: str = "zeros") -> None:
        super().__init__()
        self.layer, self.begin = layer, begin
        directions = 2 if layer.bidirectional else 1
        each = layer.num_layers * directions
        self.states = 2 if isinstance(layer, nn.LSTM) else 1
        self.shape = (each, layer.hidden_size)
        if begin == "learned":
            self.first = nn.Parameter(torch.randn(self.states, each, 1, layer.hidden_size))
        elif begin == "of the input":
            self.first = nn.Linear(layer.input_size, self.states * each * layer.hidden_size)
        given = layer.proj_size or layer.hidden_size
        cells = each * layer.hidden_size if self.states == 2 else 0
        self.classifier = nn.Linear((directions + each) * given + cells, 3)

    def forward(self, x: Tensor) -> Tensor:
        given = ()
        if self.begin == "learned":
            given = self.first.expand(-1, -1, len(x), -1).unbind()
        elif self.begin == "of the input":
            first = self.first(x[:, 0]).tanh().unflatten(1, (self.states, *self.shape))
            given = first.permute(1, 2, 0, 3).unbind()
        x = x if self.layer.batch_first else x.transpose(0, 1)
        steps, states = self.layer(x, *((given if self.states == 2 else given[0],) if given else ()))
        states = states if isinstance(states, tuple) else (states,)
        last = [s.transpose(0, 1).flatten(1) for s in states]
        return self.classifier(torch.cat([steps.mean(1 if self.layer.batch_first else 0), *last], dim=1))


class TiedLayers(nn.Module):
    """Two recurrent layers with one weight, a change in place, and a third layer whose weight is normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.GRU(4, 4, num_layers=2)
        self.pair.weight_hh_l1 = self.pair.weight_hh_l0
        self.pair.weight_ih_l1 = self.pair.weight_ih_l0
        self.third = torch.nn.utils.parametrizations.weight_norm(nn.LSTM(4, 3), "weight_hh_l0")
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.pair(x.transpose(0, 1))
        h += x.transpose(0, 1)
        return self.fc(self.third(h.tanh_())[0][-1])


class Cells(nn.Module):
    """Single cells in a loop of one's own, one of which starts from a learned state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(6, 3), nn.GRUCell(3, 3, bias=False), nn.RNNCell(3, 3)
        self.first = nn.Parameter(torch.randn(1, 3))
        self.fc = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first.expand(len(x), -1)
        state, h, last = (first, torch.zeros_like(first)), first, torch.zeros_like(first)
        for step in x.unbind(1):
            state = self.lstm(step, state)
            h = self.gru(state[0], h)
            last = self.rnn(h, last)
        return self.fc(last)


class Decoder(nn.Module):
    """The input is where a recurrent layer starts from; what it reads step by step is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.randn(3, 1, 2))
        self.first, self.layer, self.fc = nn.Linear(6, 4), nn.GRU(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.layer(self.steps.expand(-1, len(x), -1), self.first(x[:, 0]).unsqueeze(0))
        return self.fc(h[-1])


class RecurrentSlope(nn.Module):
    """The logits depend on the derivative of a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.fc = nn.Linear(6, 2), nn.LSTM(2, 3, batch_first=True), nn.Linear(3 + 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            h = self.layer(self.first(x))[0][:, -1]
            (slope,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
        return self.fc(torch.cat([h, slope[:, 0]], dim=1))


class Packed(nn.Module):
    """Sequences of several lengths, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.LSTM(6, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0).sum(1).clamp_min(1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.fc(self.layer(packed)[1][0][0])


class ParallelSequences(nn.Module):
    """Three sequences of one input, side by side on the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.GRU(2, 3, batch_first=True), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.layer(x.unflatten(2, (3, 2)).transpose(1, 2).flatten(0, 1))
        return self.fc(h[:, -1].reshape(len(x), 9))


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


class UsedTwice(nn.Module):
    """One convolution and one linear layer, each applied twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.fc = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(8, 8), nn.Linear(3 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.conv(x).relu()).relu()
        return self.fc(self.linear(self.linear(h).relu()).flatten(1))


class LowRank(nn.Module):
    """A LoRA-style adapter: a frozen weight plus a product of two small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(48, 6)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 48)), nn.Parameter(torch.randn(6, 2))
        self.merged_down, self.merged_up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(4, 2))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        h = self.base(x) + (x @ self.down.T) @ self.up.T  # beside the weight
        return F.linear(h, self.head.weight + self.merged_up @ self.merged_down, self.head.bias)  # merged into it


class BareParameters(nn.Module):
    """Parameters in plain arithmetic: scale, shift, temperature, mixing matrices on either side, an outer index."""

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
        self.register_buffer("index", torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [3, 2, 1, 0]]))
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


class Square(torch.autograd.Function):
    """(x w)², hidden from torch's function modes."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.save_for_backward(x, w)
        return (x * w) ** 2

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def,override]
        x, w = ctx.saved_tensors
        return 2 * grad * x * w**2, (2 * grad * x**2 * w).sum(0)


class Hidden(nn.Module):
    """Uses a parameter where the recorder cannot see it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6))
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(Square.apply(x.mean(1), self.w))


class Mixing(nn.Module):
    """Subtracts the mean over the batch: one input's logits depend on the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.fc = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x.mean(1))
        if len(h) > 1:
            h = h - 0.5 * h.mean(0)
        return self.fc(h.tanh())


class Routed(nn.Module):
    """Which expert is used depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 3) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        h = x.mean(1)
        return torch.stack([self.experts[int(v[0] > 0)](v) for v in h])


class MatrixExperts(nn.Module):
    """Each word goes to the two experts that its router likes best, and experts keep their matrices in one parameter.

    With `bias` they are multiplied from the right, and a row of another parameter is added.
    """

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embed, self.router, self.fc = nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(6, 3)
        self.inner, self.outer = nn.Parameter(torch.randn(4, 5, 6)), nn.Parameter(torch.randn(4, 6, 5))
        self.bias = nn.Parameter(torch.randn(4, 6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).flatten(0, 1)
        share, choice = self.router(h).softmax(-1).topk(2)
        asked = F.one_hot(choice, 4).permute(2, 1, 0)
        out = torch.zeros_like(h)
        for expert in (asked.sum((1, 2)) > 0).nonzero()[:, 0]:
            rank, word = torch.where(asked[expert])
            if self.bias is None:
                new = F.linear(F.linear(h[word], self.inner[expert]).tanh(), self.outer[expert])
            else:
                new = (h[word] @ self.inner[expert].T).tanh() @ self.outer[expert].T + self.bias[expert]
            out.index_add_(0, word, new * share[word, rank, None])
        return self.fc(torch.tanh(h + out).view(x.shape).sum(1))


class GatedWords(nn.Module):
    """Words without padding, in an operation without a rule, of whose results the logits need one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.GRUCell(6, 6), nn.Linear(6, 3)
        self.start = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept = x[:, :, 0] > 0
        words = self.cell(x[kept])
        first, _ = torch.linalg.qr(words[:, :, None] * self.start)
        owner = torch.arange(len(x))[:, None].expand_as(kept)[kept]
        return self.fc(x.new_zeros(len(x), 6).index_add(0, owner, words + first[:, :, 0].abs()))


class Choices(nn.Module):
    """Multiple choice: the answers to a question stand beside each other in the batch, all with the same positions."""

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
    """Normalised pixels as a sequence behind a class token: the cotangent of an image alone has strides of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.fc = nn.BatchNorm2d(24), nn.Linear(24, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.view(-1, 24, 2, 2)).flatten(2).transpose(1, 2)
        h = torch.cat([x.new_ones(len(h), 1, 24), h], dim=1)
        return self.fc(self.inner(h).tanh()[:, 1:].pow(2).sum(1))


class MasksPadding(nn.Module):
    """A mask is added to the biases of attention, but only in a batch that has anything to mask, as T5 does it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(30, 6), nn.Linear(6, 3)
        self.table = nn.Parameter(torch.randn(1, 6, 6))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h, bias = self.embed(input_ids), self.table
        if not attention_mask.all():
            bias = bias.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        return self.fc(((h @ h.mT + bias).softmax(-1) @ h).tanh().sum(1))


class CutsPositions(nn.Module):
    """Writes as many positions as an input has, from a table, into a tensor for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.fc = nn.Embedding(30, 6), nn.Linear(6, 3)
        self.table = nn.Parameter(torch.randn(6, 6))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.zeros(*input_ids.shape, 6, dtype=self.table.dtype)
        for row, length in enumerate(attention_mask.sum(1).tolist()):
            places[row, :length] = self.table[6 - length :].tanh()
        return self.fc((self.embed(input_ids) + places).tanh().sum(1))


# Models that try to slip past the recorder. Row 0 of their inputs looks innocent.


class Bypassed(nn.Module):
    """Three linear layers; subclasses lead the input around torch's function modes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)


class ScriptedActivation(Bypassed):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.swish = torch.jit.script(nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(h + self.b(self.swish(h)))


class ThroughNumpy(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(torch.from_numpy(np.tanh(x.detach().numpy()))) + x)


class ThroughNumbers(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] * 10).long().remainder(6).tolist()
        return self.c((self.a(x) + torch.stack([self.b.weight[i].exp() for i in rows])).tanh())


class StaleView(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x)
        view = h[:, :]
        h.copy_(x)
        return self.c(F.linear(view, self.a.weight) + self.b(h))


class SortsItsInputs(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        order = x.sum(1).argsort()
        return self.c(self.a(x[order]).tanh()[order.argsort()])


class Unpads(nn.Module):
    """Only some positions of each input go through a layer; the numbers happen to add up to a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.c = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :, 0] > 0
        out = x.new_zeros(*x.shape[:2], 4)
        out[mask] = self.e(x[mask]).tanh()
        return self.c(out.sum(1))


class ScalesByTheBatch(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x / x.abs().max()).tanh())


class BranchesOnTheBatch(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c((self.a if x.max() < 2.2 else self.b)(x))


class SilentOnTheFirstInput(Bypassed):
    """A scripted layer whose gradient is zero for the first input."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.g = torch.jit.script(nn.Linear(6, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x)) + self.g(x.relu())


class WritesIntoATokenCopy(Bypassed):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 2, 6))

    def forward(self, x: Tensor) -> Tensor:
        t = self.token.expand(len(x), -1, -1).clone()
        t[:, 0] = x
        return self.c(self.a(t).tanh().sum(1))


class OneAtATime(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(x.view(1, 6)).tanh())


class Checkpointed(Bypassed):
    def forward(self, x: Tensor) -> Tensor:
        def inner(h: Tensor) -> Tensor:
            return torch.einsum("bi,ij->bj", h, self.a.weight).tanh()

        return self.c(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False))


class Wide(nn.Module):
    """More classes than features before the last layer, so that fewer backward passes than classes will do."""

    def __init__(self, bias: bool = True, certain: float = 0.0) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.fc = nn.Linear(3, 40, bias=bias)
        self.register_buffer("certain", torch.zeros(40).index_fill(0, torch.tensor(7), certain))

    def features(self, x: Tensor) -> Tensor:
        h = self.b(self.norm(self.a(x).tanh())).tanh()
        return self.c(self.b(h).tanh().mean(1)).tanh()  # one layer is used twice

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.features(x), self.fc.weight, self.certain if self.fc.bias is None else self.fc.bias)


class WideInOtherWays(Wide):
    """The same with a last layer of another form."""

    def __init__(self, form: str) -> None:
        super().__init__(bias=False)
        self.form = form
        self.matrix = nn.Parameter(torch.randn(3, 40))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x)
        if self.form == "matmul":
            return h @ self.matrix
        if self.form == "addmm":
            return torch.addmm(self.certain, h, self.matrix)
        if self.form == "view":
            return self.fc(h.unsqueeze(1)).squeeze(1)
        if self.form == "features-used-again":
            return self.fc(h) + h.sum(1, keepdim=True) * self.certain.index_fill(0, torch.tensor(3), 1.0)
        if self.form == "derived-weight":
            return h @ (self.matrix * self.norm.weight.sum())
        raise ValueError(self.form)


class WideTied(nn.Module):
    """The last layer's weight is also the embedding: more classes than features, and a weight of two uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(40, 3), nn.Linear(3, 3)
        self.output = nn.Linear(3, 40, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.hidden(self.embedding(ids)).tanh().mean(1))


class ChangesItsInput(Bypassed):
    """Normalises what it was given in place."""

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.3
        return self.c(self.a(x.mul_(2)).tanh())


class CastsInside(Bypassed):
    """Normalises in 32 bits whatever the model's own precision, as language models do."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.c(self.b(h.to(x.dtype)).tanh())


class CachesInEvaluation(Bypassed):
    """Keeps what it computes from a weight until training begins, as LeViT does with its attention biases."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> "CachesInEvaluation":
        if mode:
            self.cache = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.c(self.a(x) + self.b.weight.exp().sum(1))
        if "bias" not in self.cache:
            self.cache["bias"] = self.b.weight.exp().sum(1)
        return self.c(self.a(x) + self.cache["bias"])
