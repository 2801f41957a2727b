"""Readers of networks, and of what runs leave: weights, configurations, scores, thresholds, rows;
as those of data.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qualms.data import Images, Normalization
from tests.helpers.mutations import (
    damaged,
    damaged_json,
    damaged_lines,
    damaged_pickle,
    either,
    in_safetensors,
    in_zip,
)
from tests.helpers.reader import PAGES, Reader, content, one

# of readers that take a tenth of a second: transformers builds a network, torch an exported one
SLOW = 5_000


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).eval()


def _zipped(folder: Path) -> list[Path]:
    model = _small()
    torch.save({"epoch": 7, "state_dict": model.state_dict()}, folder / "a.pt")
    halves = {
        f"module.{name}": t.half() if t.is_floating_point() else t
        for name, t in model.state_dict().items()
    }
    torch.save(halves, folder / "b.pth")
    return [folder / "a.pt", folder / "b.pth"]


def _legacy(folder: Path) -> Path:
    torch.save(_small().state_dict(), folder / "a.th", _use_new_zipfile_serialization=False)
    return folder / "a.th"


def _safetensors(folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file(_small().state_dict(), folder / "a.safetensors")
    return folder / "a.safetensors"


def _weights(folder: Path, path: Path) -> None:
    from qualms.models.checkpoint import fit_state, read_state

    state = read_state(path)
    for tensor in state.values():
        str(tensor.flatten()[:3]), tensor.is_floating_point() and tensor.double().sum()
    model = _small()
    fit_state(model, state, file=path)
    with torch.no_grad():
        assert model(torch.zeros(1, 1, 4, 4)).shape == (1, 3)


@cache
def _squares() -> Images:
    return Images("squares", torch.zeros(40, 1, 4, 4, dtype=torch.uint8), torch.arange(40) % 3)


def _training(folder: Path, path: Path) -> None:
    from qualms.training import Recipe, fit, trained_with

    fit(
        _small(),
        _squares(),
        Recipe(epochs=2, rate=0.1, batch=64),
        Normalization((0.5,), (0.5,)),
        checkpoint=path,
    )
    trained_with(path)


def _half_trained(folder: Path) -> list[Path]:
    from qualms.training import Recipe, fit

    class Killed(Exception):
        pass

    def kill(what: str, done: int, of: int) -> None:
        raise Killed

    recipe, half = Recipe(epochs=2, rate=0.1, batch=64), Normalization((0.5,), (0.5,))
    fit(_small(), _squares(), recipe, half, checkpoint=folder / "whole.pt")
    with suppress(Killed):
        fit(_small(), _squares(), recipe, half, checkpoint=folder / "half.pt", progress=kill)
    return [folder / "whole.pt", folder / "half.pt"]


def _exported(folder: Path) -> Path:
    torch.export.save(torch.export.export(_small(), (torch.zeros(1, 1, 4, 4),)), folder / "a.pt2")
    return folder / "a.pt2"


def _run_exported(folder: Path, path: Path) -> None:
    from qualms.models import load_model, preprocessing_of

    preprocessing_of(str(path), load_model(str(path)))


def _classifier(*names: str) -> Callable[[Path], list[Path]]:
    """A folder of Hugging Face's, of which these files are made wrong."""

    def make(folder: Path) -> list[Path]:
        import transformers

        config = transformers.ViTConfig(
            image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
            num_labels=3, id2label={0: "cat", 1: "dog", 2: "cow"},
        )  # fmt: skip
        transformers.ViTForImageClassification(config).save_pretrained(folder)
        settings = {
            "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": 8, "width": 8},
            "do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2,
            "do_center_crop": True, "crop_size": {"height": 8, "width": 8}, "do_rescale": True, "crop_pct": 0.9,
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return [folder / name for name in names]

    return make


def _classify(folder: Path, path: Path) -> None:
    from qualms.models import load_model, preprocessing_of

    model = load_model(f"hf:{folder}")
    _fits(preprocessing_of(f"hf:{folder}", model))


@cache
def _configured() -> Any:
    import transformers

    return nn.Module(), transformers.ViTConfig(image_size=8, num_labels=3)


def _preprocess(folder: Path, path: Path) -> None:
    from qualms.models import preprocessing_of

    model, config = _configured()
    model.config = config
    _fits(preprocessing_of(f"hf:{folder}", model))


def _fits(said: Any) -> None:
    pixels = torch.zeros(1, 3, 5, 4, dtype=torch.uint8)
    if said.transform is not None:
        assert all(isinstance(side, int) for side in said.transform.size)
        resize = said.transform.resize or 0
        sides = (*said.transform.size, *((resize,) if isinstance(resize, int) else resize))
        if max(sides) <= 64:
            pixels = said.transform.apply(Images("one", pixels, None)).pixels
    if said.normalization is not None and pixels.shape[1] == len(said.normalization.mean):
        assert said.normalization.apply(pixels).isfinite().all()


def _language(*names: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        from tests.helpers.tiny_llama import write_language_model

        write_language_model(folder)
        return [folder / name for name in names]

    return make


def _speak(folder: Path, path: Path) -> None:
    from qualms.data.texts import Document
    from qualms.models.language import load_language_model
    from qualms.texts.encoding import encode

    encode(load_language_model(f"hf:{folder}"), Document("story", "Once upon a time."))


@cache
def _scoring() -> Any:
    import qualms
    from qualms.stream.image_scorer import ImageScorer
    from qualms.stream.network import Network

    network = Network("small", _small(), Normalization((0.5,), (0.5,)))
    scorer = qualms.Scorer(
        network.model, "entropy", threshold=qualms.Threshold(1.0, 3, "coverage 1")
    )
    return ImageScorer(network, scorer).score


def _shard(folder: Path, path: Path) -> None:
    from qualms.scale.cluster import filter_rejections, require_once
    from qualms.scale.shard_folder import shards_in
    from qualms.scale.shards import score_shards
    from qualms.stream.source import open_source

    scores = folder / "scores"
    score_shards(_scoring(), open_source(str(folder / "x.npz"), None, None), scores, {"seed": 0}, 2)
    assert len(shards_in(scores)) == 2
    filter_rejections([], scores)
    require_once(scores)


def _shards(folder: Path) -> list[Path]:
    np.savez(folder / "x.npz", x=np.zeros((3, 4, 4), np.uint8))
    _shard(folder, folder)
    return [folder / "scores" / "shard-00000.parquet"]


def _manifest(folder: Path) -> Path:
    from qualms.scale.shard_folder import Done, arrow, finish, write

    write(folder / "shard-00000.parquet", arrow().table({"id": ["a"]}))
    about = {
        "network": "n",
        "methods": {"regrad": "regrad"},
        "seed": 0,
        "classes": ["a", "b"],
        "threshold": None,
    }
    done = finish(folder, about, [folder / "shard-00000.parquet"], [])
    assert done == Done(1, 0, None)
    return folder / "manifest.json"


def _begin(folder: Path, path: Path) -> None:
    from qualms.scale.shard_folder import open_shard_folder

    about = {
        "network": "n",
        "methods": {"regrad": "regrad"},
        "seed": 0,
        "classes": ["a", "b"],
        "threshold": None,
    }
    with open_shard_folder(folder, about) as done:
        if done is not None:
            numbers = (done.scored, done.rejected, 0 if done.accepted is None else done.accepted)
            assert all(type(number) is int and number >= 0 for number in numbers)


def _listed(folder: Path) -> Path:
    from qualms.data import Rejected
    from qualms.scale.shard_folder import write_rejections

    (folder / "list").mkdir()
    write_rejections(
        folder / "list" / "a.parquet", [Rejected("a", "cut"), Rejected("b", "no image")]
    )
    return folder / "list" / "a.parquet"


def _list(folder: Path, path: Path) -> None:
    from qualms.scale.batch import rejected_in

    for left_out in rejected_in(path.parent):
        assert isinstance(left_out.id, str)
        assert isinstance(left_out.reason, str)


def _threshold(folder: Path) -> Path:
    from qualms.threshold import Provenance, Threshold

    provenance = Provenance(
        "regrad+layers(0.2)", "0123456789abcdef", "exact", "used", "l2", None, None, 0
    )
    Threshold.from_scores([0.1, 0.2, 0.35], 0.9, provenance=provenance).save(folder / "t.json")
    return folder / "t.json"


def _accept(folder: Path, path: Path) -> None:
    from qualms.cli.threshold_command import _describe_guarantee, _to_json_values
    from qualms.threshold import Threshold

    found = Threshold.load(path)
    assert not np.isnan(found.value)
    assert type(found.samples) is int
    found.accept([0.1])
    found.fingerprint()
    if found.reference:
        assert 0 <= float(found.percentile([0.2])[0]) <= 100
    _describe_guarantee(found)
    json.dumps(_to_json_values(found), allow_nan=False)


def _journal(folder: Path) -> Path:
    from qualms.tasks.journal import Journal

    with Journal(folder / "a.jsonl", {"task": "active"}) as journal:
        about: Any = {"data": "d", "seed": 0, "from": "abc"}
        for cycle, method in ((0, "start"), (1, "regrad"), (1, "entropy")):
            row = {
                "row": "cycle",
                "method": method,
                "cycle": cycle,
                "labeled": 10 * cycle,
                "seconds": 0.5,
                **about,
            }
            journal.add(row | {"accuracy": 0.5, "nll": 1.25, "nll_softmax_twice": 2.0})
        ood: Any = {
            "row": "ood",
            "in": "a",
            "out": "b",
            "method": "m",
            "exactly": "m",
            "seed": 0,
            "engine": "exact",
        }
        measures = dict.fromkeys(
            ("auroc", "auroc_low", "auroc_high", "aupr_out", "aupr_in", "fpr95"), 0.5
        )
        journal.add(ood | {"n_in": 3, "n_out": 4, "images": "ab"} | measures)
    return folder / "a.jsonl"


def _rows(folder: Path, path: Path) -> None:
    from qualms.report.numbers import learning_curves
    from qualms.report.tables import ood_table
    from qualms.tasks.journal import Journal, read

    found = read(path)
    learning_curves([row for row in found if row.get("row") == "cycle"], "accuracy")
    ood_table([row for row in found if row.get("row") == "ood"])
    with Journal(path, {"task": "active"}) as journal:
        journal.where(row="ood", method="m")


def _class_file(folder: Path, path: Path) -> None:
    from qualms.cli.options import parse_class_names

    count, names = parse_class_names(str(path))
    assert count == len(names) >= 2
    "".join(names).encode()


READERS_OF_RUNS: dict[str, Reader] = {
    "checkpoint": Reader(
        _zipped,
        _weights,
        either(damaged, in_zip({"data.pkl": either(damaged, damaged_pickle), "": damaged})),
    ),
    "legacy checkpoint": Reader(one(_legacy), _weights, either(damaged, damaged_pickle)),
    "safetensors": Reader(one(_safetensors), _weights, either(damaged, in_safetensors)),
    "training": Reader(
        _half_trained,
        _training,
        either(damaged, in_zip({"data.pkl": either(damaged, damaged_pickle), "": damaged})),
    ),
    "exported": Reader(
        one(_exported),
        _run_exported,
        either(damaged, in_zip({".json": either(damaged, damaged_json), "": damaged})),
        few=20,
        trusted=True,
    ),
    "hugging face": Reader(
        _classifier("config.json"),
        _classify,
        either(damaged, damaged_json, damaged_json),
        few=10,
        many=SLOW,
    ),
    "hugging face weights": Reader(
        _classifier("model.safetensors"),
        _classify,
        either(damaged, in_safetensors),
        few=10,
        many=SLOW,
    ),
    "preprocessing": Reader(
        _classifier("preprocessor_config.json"), _preprocess, either(damaged, damaged_json)
    ),
    "language model": Reader(
        _language("config.json", "generation_config.json"), _speak, damaged_json, few=8, many=SLOW
    ),
    "tokenizer": Reader(
        _language("tokenizer.json", "tokenizer_config.json"),
        _speak,
        either(damaged, damaged_json),
        few=8,
        many=SLOW,
    ),
    "shard": Reader(_shards, _shard, damaged, bound=PAGES),
    "manifest": Reader(one(_manifest), _begin, either(damaged, damaged_json)),
    "rejected": Reader(one(_listed), _list, damaged, bound=PAGES),
    "threshold": Reader(one(_threshold), _accept, either(damaged, damaged_json)),
    "rows": Reader(one(_journal), _rows, either(damaged, damaged_lines)),
    "class names": Reader(content("names.txt", "cat\ndog\nKuh ä\n".encode()), _class_file, damaged),
}
