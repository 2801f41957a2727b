"""Recurrent networks: layers, cells, states that are learned or come from the input, packed
sequences.
"""

import torch
from torch import Tensor, nn


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
    """All that a recurrent layer gives is used; it starts from zeros, from a learned state or from
    one of the input.
    """

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
        steps, states = self.layer(
            x, *((given if self.states == 2 else given[0],) if given else ())
        )
        states = states if isinstance(states, tuple) else (states,)
        last = [s.transpose(0, 1).flatten(1) for s in states]
        return self.classifier(
            torch.cat([steps.mean(1 if self.layer.batch_first else 0), *last], dim=1)
        )


class TiedLayers(nn.Module):
    """Two recurrent layers with one weight, a change in place, and a third layer whose weight is
    normalized.
    """

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
        self.lstm, self.gru, self.rnn = (
            nn.LSTMCell(6, 3),
            nn.GRUCell(3, 3, bias=False),
            nn.RNNCell(3, 3),
        )
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
        self.first, self.layer, self.fc = (
            nn.Linear(6, 2),
            nn.LSTM(2, 3, batch_first=True),
            nn.Linear(3 + 6, 3),
        )

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
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        return self.fc(self.layer(packed)[1][0][0])


class ParallelSequences(nn.Module):
    """Three sequences of one input, side by side on the batch axis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = nn.GRU(2, 3, batch_first=True), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.layer(x.unflatten(2, (3, 2)).transpose(1, 2).flatten(0, 1))
        return self.fc(h[:, -1].reshape(len(x), 9))
