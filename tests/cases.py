"""The one list of models that every engine and score is held to: name, model, input, and whether a rule covers it."""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests import evasive, recurrent, scattered, wide
from tests import networks as net

INPUTS = 8


@dataclass(frozen=True)
class Case:
    """`general`: layers on the general path; None if all are (plain autograd, one row at a time), ... if unsure."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    general: Any = ()

    def make(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = self.build().double()
        if not isinstance(model, torch.fx.GraphModule):  # an exported graph has no modes to switch
            model.eval()
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._NormBase) and m.running_mean is not None:
                m.running_mean.normal_()  # as after training, not the neutral values of a new layer
                m.running_var.uniform_(0.5, 2)
        for p in model.parameters():
            if p.ndim == 1:
                p.data += 0.1 * torch.randn_like(p)
        return model, self.inputs()

    def __str__(self) -> str:
        return self.name


def images(channels: int = 3, size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(INPUTS, channels, size, size, dtype=torch.double)


def sequences(length: int = 5, features: int = 6) -> Callable[[], Tensor]:
    return lambda: torch.randn(INPUTS, length, features, dtype=torch.double)


def ids(words: int = 20, length: int = 6) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, words, (INPUTS, length))


def innocent_first() -> Tensor:
    """The first two inputs are in order, and the first one is the largest, and negative."""
    x = torch.randn(INPUTS, 6, dtype=torch.double)
    x[0] = -x[0].abs() - 1.2
    x[1] = x[1].abs().clamp_max(1) - 0.5
    x[4, 2] = 3
    return x


def first_two_alike() -> Tensor:
    x = torch.randn(INPUTS, 6, dtype=torch.double)
    x[:2] = 0
    x[1, 0] = 1e-30
    return x


def unpadded() -> Tensor:
    """Positions that count: 2, 2, 3, 1 and so on, two for each input on average."""
    x = torch.randn(INPUTS, 3, 6, dtype=torch.double)
    lengths = torch.tensor([2, 2, 3, 1, 3, 1, 2, 2])
    x[:, :, 0] = torch.where(torch.arange(3) < lengths[:, None], 1.0, -1.0) * x[:, :, 0].abs()
    return x


def conv_case(name: str, conv: Callable[[], nn.Module], **more: Any) -> Case:
    """One convolution between an input of 3x8x8 and a classifier."""

    def build() -> nn.Module:
        first = conv()
        features = first(torch.zeros(1, 3, 8, 8)).numel()
        return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(features, 4))

    return Case(name, build, images(), **more)


def after_conv(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3), layer(), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)
    )


def hugging_face_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=12, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def hugging_face_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4,
        num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config)


def padded_text() -> dict[str, Tensor]:
    lengths = torch.tensor([6, 4, 5, 6, 2, 3, 6, 5])
    mask = (torch.arange(6) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 30, (INPUTS, 6)) * mask, "attention_mask": mask}


def partly_frozen() -> nn.Module:
    model = net.mnist_cnn()
    for p in list(model.parameters())[:3]:
        p.requires_grad_(False)
    return model


def exported() -> nn.Module:
    """Saved as a `.pt2` file and read back."""
    model = net.ResNet((4, 6), 1, 3).double().eval()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        example = (torch.randn(4, 3, 8, 8, dtype=torch.double),)
        program = torch.export.export(model, example, dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
        torch.export.save(program, Path(folder) / "model.pt2")
        return torch.export.load(Path(folder) / "model.pt2").module()


def compiled() -> nn.Module:
    return torch.compile(net.mnist_cnn(), backend="eager")  # type: ignore[return-value]


def traced() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(net.mlp(), torch.randn(2, 3, 4, 4))


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.utils.weight_norm(layer)


def weight_norm_last(model: nn.Sequential) -> nn.Module:
    weight_norm(model[-1])
    return model


FORMS = ("matmul", "addmm", "view", "features-used-again", "derived-weight")
weight_norm = torch.nn.utils.parametrizations.weight_norm

CASES = [
    Case("mlp", net.mlp, images(3, 4)),
    Case("mnist-cnn", net.mnist_cnn, images(1, 12)),
    Case("svhn-cnn", lambda: net.mnist_cnn(hidden_layers=2), images(1, 12)),
    Case("cnn-with-view", net.ViewingCNN, lambda: torch.randn(INPUTS, 3, 6, 6, dtype=torch.double)),
    Case("resnet-18", lambda: net.ResNet((4, 6, 8, 10), 2, 4), images()),
    Case("resnet-padded-shortcut", lambda: net.ResNet((4, 8), 2, 4, padded_shortcut=True), images()),
    Case("densenet", net.DenseNet, images()),
    conv_case("grouped-conv", lambda: nn.Conv2d(3, 6, 3, groups=3)),
    conv_case(
        "depthwise-separable", lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1, groups=3), nn.Conv2d(3, 5, 1))
    ),
    conv_case("strided-conv", lambda: nn.Conv2d(3, 5, (3, 2), stride=(2, 3), padding=(1, 0))),
    conv_case("dilated-conv", lambda: nn.Conv2d(3, 5, 3, dilation=2, padding=2)),
    conv_case("dilated-strided-grouped", lambda: nn.Conv2d(3, 6, 3, stride=2, dilation=2, padding=1, groups=3)),
    conv_case("padding-same", lambda: nn.Conv2d(3, 5, (4, 3), padding="same", dilation=(1, 2))),
    conv_case("padding-circular", lambda: nn.Conv2d(3, 5, 3, padding=1, padding_mode="circular")),
    conv_case("padding-reflect", lambda: nn.Conv2d(3, 5, 3, padding="same", padding_mode="reflect")),
    conv_case("many-channels-few-positions", lambda: nn.Conv2d(3, 40, 4, stride=4)),
    Case("conv1d-text", net.TextCNN, ids()),
    Case(
        "conv3d",
        lambda: nn.Sequential(nn.Conv3d(2, 4, 2, stride=(1, 2, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)),
        lambda: torch.randn(INPUTS, 2, 4, 4, 4, dtype=torch.double),
    ),
    conv_case("conv-transpose", lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1)),
    conv_case("conv-transpose-grouped", lambda: nn.ConvTranspose2d(3, 6, (2, 3), stride=(1, 2), groups=3, dilation=2)),
    Case("batch-norm", after_conv(lambda: nn.BatchNorm2d(6)), images()),
    Case("group-norm", after_conv(lambda: nn.GroupNorm(3, 6)), images()),
    Case("group-norm-after-channels-last", net.ChannelsLastNorms, images(4, 3)),
    Case("instance-norm", after_conv(lambda: nn.InstanceNorm2d(6, affine=True)), images()),
    Case(
        "instance-norm-running",
        after_conv(lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True)),
        images(),
    ),
    Case("instance-norm-channels-last", net.AroundInstanceNorm, images(4)),
    Case("layer-norm-image", after_conv(lambda: nn.LayerNorm([6, 6, 6])), images()),
    Case("batch-norm-1d", lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Flatten(), nn.Linear(30, 3)), sequences()),
    Case("layer-norm", lambda: nn.Sequential(nn.LayerNorm(6), nn.Flatten(), nn.Linear(30, 3)), sequences()),
    Case("rms-norm", lambda: nn.Sequential(nn.RMSNorm(6), nn.Flatten(), nn.Linear(30, 3)), sequences()),
    Case(
        "prelu",
        lambda: nn.Sequential(nn.PReLU(), nn.Conv2d(3, 5, 3), nn.PReLU(5), nn.Flatten(), nn.Linear(180, 3)),
        images(),
    ),
    Case("attention", net.CrossAttention, sequences()),
    Case("transformer-encoder", lambda: net.ViT(batch_first=True), images()),
    Case("transformer-batch-second", lambda: net.ViT(batch_first=False), images()),
    Case("windows-in-batch-axis", net.Windows, images()),
    Case("hugging-face-bert", hugging_face_bert, padded_text),
    Case("hugging-face-vit", hugging_face_vit, lambda: {"pixel_values": images()()}),
    Case("lstm", lambda: recurrent.Recurrent(nn.LSTM, batch_first=True), ids()),
    Case("gru-batch-second", lambda: recurrent.Recurrent(nn.GRU, batch_first=False), ids()),
    Case("rnn-without-biases", lambda: recurrent.FromStates(nn.RNN(6, 3, bias=False, batch_first=True)), sequences(3)),
    Case("relu-rnn", lambda: recurrent.FromStates(nn.RNN(6, 3, nonlinearity="relu", bidirectional=True)), sequences(3)),
    Case("lstm-learned-state", lambda: recurrent.FromStates(nn.LSTM(6, 3), "learned"), sequences(3)),
    Case(
        "lstm-state-of-the-input", lambda: recurrent.FromStates(nn.LSTM(6, 3, bias=False), "of the input"), sequences(3)
    ),
    Case("gru-learned-state", lambda: recurrent.FromStates(nn.GRU(6, 3, num_layers=2), "learned"), sequences(3)),
    Case("lstm-projected", lambda: recurrent.FromStates(nn.LSTM(6, 4, proj_size=3)), sequences(3), general=("layer",)),
    Case("recurrent-layers-tied", recurrent.TiedLayers, sequences(3, 4)),
    Case("recurrent-decoder", recurrent.Decoder, sequences(3)),
    Case("recurrent-cells", recurrent.Cells, sequences(3)),
    Case("recurrent-slope", recurrent.RecurrentSlope, sequences(3), general=None),
    Case("packed-sequences", recurrent.Packed, sequences(3), general=...),
    Case("sequences-in-batch-axis", recurrent.ParallelSequences, sequences(3)),
    Case("experts-in-one-parameter", scattered.MatrixExperts, sequences()),
    Case("experts-with-biases", lambda: scattered.MatrixExperts(bias=True), sequences(), general=...),
    Case("gated-words", scattered.GatedWords, sequences(), general=...),
    Case("multiple-choice", net.Choices, lambda: torch.randn(INPUTS, 3, 5, 6, dtype=torch.double)),
    Case("pixels-as-words", net.PixelsAsWords, lambda: torch.randn(INPUTS, 96, dtype=torch.double)),
    Case("masks-padding-where-there-is-any", scattered.MasksPadding, padded_text, general=...),
    Case("positions-by-length", scattered.CutsPositions, padded_text, general=...),
    Case("tied-weights", net.Tied, ids(9)),
    Case("tied-padding", net.TiedPadding, ids(6)),
    Case("module-used-twice", net.UsedTwice, images()),
    Case("module-of-two-names", net.two_names, sequences()),
    Case("module-of-two-names-by-differences", lambda: weight_norm_last(net.two_names()), sequences()),
    Case(
        "weight-norm",
        lambda: nn.Sequential(
            weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), weight_norm(nn.Linear(144, 3), dim=None)
        ),
        images(),
    ),
    Case(
        "weight-norm-by-hooks",
        lambda: nn.Sequential(old_weight_norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)),
        images(),
    ),
    Case("in-place-relu", after_conv(nn.Identity), images()),
    Case(
        "in-place-on-a-view",
        lambda: nn.Sequential(nn.Linear(6, 7), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(35, 3)),
        sequences(),
    ),
    Case("low-rank-adapter", net.LowRank, images(3, 4)),
    Case("bare-parameters", net.BareParameters, sequences(), general=("(model)",)),
    Case("transposed-linear", net.Conv1D, sequences()),
    Case("bilinear", net.Bilinear, lambda: (sequences(1)()[:, 0], sequences(1)()[:, 0]), general=("bilinear",)),
    Case("partly-frozen", partly_frozen, images(1, 12)),
    Case("wholly-frozen", lambda: net.ViT(batch_first=True).requires_grad_(False), images()),
    Case("compiled", compiled, images(1, 12)),
    Case("exported-pt2", exported, images()),
    Case("traced", traced, images(3, 4), general=None),
    Case("scripted", scripted, images(3, 4), general=None),
    Case("hidden-from-function-modes", evasive.Hidden, sequences(), general=None),
    Case("batch-mixing", evasive.Mixing, sequences(), general=None),
    Case("routed-by-input", scattered.Routed, sequences(), general=...),
    Case("scripted-activation", evasive.ScriptedActivation, innocent_first, general=...),
    Case("through-numpy", evasive.ThroughNumpy, innocent_first, general=...),
    Case("through-numbers", evasive.ThroughNumbers, innocent_first, general=...),
    Case("stale-view", evasive.StaleView, innocent_first, general=...),
    Case("sorts-its-inputs", evasive.SortsItsInputs, innocent_first, general=None),
    Case("unpads", scattered.Unpads, unpadded, general=...),
    Case("scales-by-the-batch", evasive.ScalesByTheBatch, innocent_first, general=None),
    Case("branches-on-the-batch", evasive.BranchesOnTheBatch, innocent_first, general=None),
    Case("silent-on-the-first-input", evasive.SilentOnTheFirstInput, innocent_first, general=None),
    Case("writes-into-a-token-copy", evasive.WritesIntoATokenCopy, innocent_first, general=...),
    Case("one-at-a-time", evasive.OneAtATime, innocent_first, general=None),
    Case("checkpointed", evasive.Checkpointed, innocent_first, general=...),
    Case("changes-its-input", evasive.ChangesItsInput, innocent_first),
    Case("caches-in-evaluation", evasive.CachesInEvaluation, innocent_first),
    Case("wide-head", wide.Wide, sequences()),
    Case("wide-head-without-bias", lambda: wide.Wide(bias=False), sequences()),
    Case("wide-head-confident", lambda: wide.Wide(bias=False, certain=20.0), sequences()),
    *(Case(f"wide-head-{form}", partial(wide.WideInOtherWays, form), sequences()) for form in FORMS),
    Case("wide-head-tied", wide.WideTied, ids(40)),
    Case(
        "wide-head-images",
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, groups=3),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 3, 3),
            nn.Flatten(2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(3, 30),
        ),
        images(),
    ),
    Case("matrix-dispatch", evasive.MatrixDispatch, innocent_first, general=None),
    Case("permutes-by-a-matrix", evasive.PermutesByAMatrix, innocent_first, general=None),
    Case("reorders-by-a-list", evasive.ReordersByAList, innocent_first, general=None),
    Case("sorts-by-length", evasive.SortsByLength, unpadded, general=None),
    Case("rounded-weight", evasive.RoundedWeight, innocent_first, general=None),
    Case("slope-inside", evasive.SlopeInside, innocent_first, general=None),
    Case("factor-from-numbers", evasive.FactorFromNumbers, innocent_first, general=...),
    Case("experts", scattered.Experts, innocent_first, general=...),
    Case("early-exit", scattered.EarlyExit, innocent_first, general=...),
    Case("negative-index", evasive.NegativeIndex, innocent_first),
    Case("faint-branch", evasive.FaintBranch, innocent_first, general=...),
    Case("longest-of-the-batch", evasive.LongestOfTheBatch, innocent_first, general=None),
    Case("union-of-the-batch", evasive.UnionOfTheBatch, innocent_first, general=None),
    Case("reads-other-rows", evasive.ReadsOtherRows, first_two_alike, general=None),
    Case("scaled-in-place", scattered.ScaledInPlace, unpadded, general=...),
    Case("embedding-bag", lambda: nn.Sequential(nn.EmbeddingBag(20, 5), nn.Linear(5, 3)), ids(), general=...),
    Case(
        "embedding-bag-sparse",
        lambda: nn.Sequential(nn.EmbeddingBag(20, 5, sparse=True), nn.Linear(5, 3)),
        ids(),
        general=...,
    ),
    Case(
        "embedding-sparse",
        lambda: nn.Sequential(nn.Embedding(20, 5, sparse=True), nn.Flatten(), nn.Linear(30, 3)),
        ids(),
    ),
]
