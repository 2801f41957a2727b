"""Every reader of files that come from others: a small valid file, how it is made wrong, and how it is read.

What a reader returns is looked at, since memory that is not the file's shows only then.
"""

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qualms.data import Images, Normalisation, load
from tests.data import layouts
from tests.data.mutations import (
    Mutation,
    damaged,
    damaged_json,
    damaged_lines,
    damaged_pickle,
    either,
    in_gzip,
    in_mat,
    in_png,
    in_safetensors,
    in_tar,
    in_zip,
)

ALL = 100_000
MIB = 2**20
BOUND = 256 * MIB  # that reading a file of a few kilobytes may take, whatever its headers say
IMAGE = 768 * MIB  # 16 million pixels, or 10,000 for each byte of the file, and copies of them in other modes
PAGES = 5 * 2**10 * MIB  # pyarrow reserves, and does not touch, what the header of a page says, up to 2 GiB a column


@dataclass(frozen=True)
class Reader:
    """How a kind of file is made and read.

    Args:
        make: writes valid files below a folder, and gives the paths of those that are made wrong, one at a time.
        read: reads the file, given the folder and the path; what is wrong is a `QualmsError`.
        mutate: makes the content wrong.
        few: mutations in CI.
        many: mutations with QUALMS_FUZZ=1.
        bound: bytes of address space that one reading may take.
        trusted: whether code in the file is allowed to run, as the documentation says.
    """

    make: Callable[[Path], list[Path]]
    read: Callable[[Path, Path], object]
    mutate: Mutation
    few: int = 300
    many: int = ALL
    bound: int = BOUND
    trusted: bool = False


def _looked_at(images: Images) -> None:
    assert images.pixels.dtype == torch.uint8
    assert len(images) > 0
    assert images.pixels.ndim == 4
    assert images.pixels.shape[1] in (1, 3)
    images.fingerprint()
    if images.labels is not None:
        assert int(images.labels.min()) >= 0
        assert not images.classes or int(images.labels.max()) < len(images.classes)


def _dataset(name: str) -> Callable[[Path, Path], None]:
    return lambda folder, path: _looked_at(load(name, folder))


def _at(folder: Path, path: Path) -> None:
    _looked_at(load(path))


def _in_parts(folder: Path, path: Path) -> None:
    from qualms.scale.source import open_source

    source = open_source(str(path), None, None)
    for part in source.parts(1, 8):
        assert len(part.images) + len(part.rejected) == part.count
    _looked_at(source.first())


def _one(write: Callable[[Path], Path]) -> Callable[[Path], list[Path]]:
    return lambda folder: [write(folder)]


def _content(name: str, content: bytes) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        (folder / name).write_bytes(content)
        return [folder / name]

    return make


def _cifar10(folder: Path) -> Path:
    """As Python 2 wrote the published files: names as bytes, protocol 2."""
    return layouts.write_cifar10(folder, pickle.dumps(layouts.cifar_dict(), 2))


def _cifar100(folder: Path) -> Path:
    (folder / "cifar-100-python").mkdir()
    path = folder / "cifar-100-python" / "test"
    path.write_bytes(pickle.dumps(layouts.cifar_dict("fine_labels"), 5))
    return path


def _plain_svhn(folder: Path) -> Path:
    from scipy.io import savemat

    labels = np.array([3, 10, 9], np.uint8)[:, None]
    savemat(folder / "test_32x32.mat", {"X": layouts.IMAGES.transpose(2, 3, 1, 0), "y": labels})
    return folder / "test_32x32.mat"


def _pictures(*kinds: tuple[str, str, dict[str, Any]]) -> Callable[[Path], list[Path]]:
    """An image in colour or another mode, in files of these endings, written with these options."""

    def make(folder: Path) -> list[Path]:
        from PIL import Image

        paths = []
        colour = Image.fromarray(layouts.IMAGES[1].transpose(1, 2, 0))
        for i, (ending, mode, options) in enumerate(kinds):
            path = folder / f"{i}.{ending}"
            image = Image.fromarray(layouts.GREY[1].astype(np.uint16) * 257) if mode == "I;16" else colour.convert(mode)
            image.save(path, **options)
            paths.append(path)
        return paths

    return make


def _other_pictures(folder: Path) -> list[Path]:
    """All that Pillow both reads and writes, beside the formats that have a row of their own."""
    from PIL import Image

    from qualms.data.folder import endings

    own = {"PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PDF"}
    paths = []
    for ending, kind in Image.registered_extensions().items():
        if ending not in endings() or kind in own or kind not in Image.SAVE or kind == "EPS":
            continue
        for mode in ("RGB", "L", "1"):
            try:
                Image.fromarray(layouts.IMAGES[1].transpose(1, 2, 0)).convert(mode).save(folder / f"a{mode}{ending}")
                load(folder / f"a{mode}{ending}")
            except (OSError, ValueError, KeyError):
                continue
            paths.append(folder / f"a{mode}{ending}")
            break
    return paths


def _npz(folder: Path) -> list[Path]:
    images = layouts.IMAGES.astype(np.float32) / 255
    np.savez_compressed(folder / "floats.npz", images=images, labels=np.array(layouts.LABELS))
    return [layouts.write_npz(folder), folder / "floats.npz"]


def _parquets(folder: Path) -> list[Path]:
    import pyarrow
    from pyarrow import parquet

    plain = pyarrow.table({"img": [layouts.png(image.transpose(1, 2, 0)) for image in layouts.IMAGES]})
    features = {"label": {"names": list("abcdefghij"), "_type": "ClassLabel"}}
    told = json.dumps({"info": {"features": features}}).encode()
    named = plain.append_column("label", pyarrow.array(layouts.LABELS)).replace_schema_metadata({b"huggingface": told})
    paths = [layouts.write_parquet(folder)]
    for compression in ("none", "gzip", "zstd"):
        paths.append(folder / f"{compression}.parquet")
        parquet.write_table(named, paths[-1], compression=compression, row_group_size=2)
    return paths


def _tar(folder: Path) -> Path:
    import tarfile

    with tarfile.open(folder / "things.tar", "w") as file:
        for i, image in enumerate(layouts.GREY):
            for ending, content in (("cls", b"3"), ("png", layouts.png(image))):
                entry = tarfile.TarInfo(f"{i:03d}.{ending}")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    return folder / "things.tar"


LINES = b"".join(
    json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(("One.", "Zwei ä.", "三"))
)


def _text_parquet(folder: Path) -> Path:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"text": ["One.", "Zwei ä.", "三"], "id": [1, 2, 3], "more": [[1], [2, 3], []]})
    parquet.write_table(table, folder / "texts.parquet")
    return folder / "texts.parquet"


def _texts(folder: Path, path: Path) -> None:
    from qualms.data.texts import read_texts

    for strict in (True, False):
        found = read_texts(path, strict=strict)
        assert found.documents
        for one in found.documents:
            assert one.text.strip()
            one.text.encode()
            one.name.encode()


def _small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)).eval()


def _zipped(folder: Path) -> list[Path]:
    model = _small()
    torch.save({"epoch": 7, "state_dict": model.state_dict()}, folder / "a.pt")
    halves = {f"module.{name}": t.half() if t.is_floating_point() else t for name, t in model.state_dict().items()}
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

    fit(_small(), _squares(), Recipe(epochs=2, rate=0.1, batch=64), Normalisation((0.5,), (0.5,)), checkpoint=path)
    trained_with(path)


def _half_trained(folder: Path) -> list[Path]:
    from qualms.training import Recipe, fit

    class Killed(Exception):
        pass

    def kill(what: str, done: int, of: int) -> None:
        raise Killed

    recipe, half = Recipe(epochs=2, rate=0.1, batch=64), Normalisation((0.5,), (0.5,))
    fit(_small(), _squares(), recipe, half, checkpoint=folder / "whole.pt")
    try:
        fit(_small(), _squares(), recipe, half, checkpoint=folder / "half.pt", tell=kill)
    except Killed:
        pass
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
    if said.fit is not None:
        assert all(isinstance(side, int) for side in said.fit.size)
        if max(said.fit.size) <= 64 and max(said.fit._before or (0,)) <= 64:
            pixels = said.fit.apply(Images("one", pixels, None)).pixels
    if said.normalisation is not None and pixels.shape[1] == len(said.normalisation.mean):
        assert said.normalisation.apply(pixels).isfinite().all()


def _language(*names: str) -> Callable[[Path], list[Path]]:
    def make(folder: Path) -> list[Path]:
        from tests.tiny_llama import write_language_model

        write_language_model(folder)
        return [folder / name for name in names]

    return make


def _speak(folder: Path, path: Path) -> None:
    from qualms.data.texts import Document
    from qualms.models.language import load_language_model
    from qualms.texts.encoding import encoded

    encoded(load_language_model(f"hf:{folder}"), Document("story", "Once upon a time."))


@cache
def _scoring() -> Any:
    import qualms
    from qualms.tasks.network import Network
    from qualms.tasks.scoring import scored_images

    network = Network("small", _small(), Normalisation((0.5,), (0.5,)))
    scorer = qualms.Scorer(network.model, "entropy", threshold=qualms.Threshold(1.0, 3, "coverage 1"))
    return lambda images, first: scored_images(network, scorer, images, first)


def _shard(folder: Path, path: Path) -> None:
    from qualms.scale.cluster import not_scored, require_once
    from qualms.scale.folder import shards_in
    from qualms.scale.shards import score_shards
    from qualms.scale.source import open_source

    scores = folder / "scores"
    score_shards(_scoring(), open_source(str(folder / "x.npz"), None, None), scores, {"seed": 0}, 2)
    assert len(shards_in(scores)) == 2
    not_scored([], scores)
    require_once(scores)


def _shards(folder: Path) -> list[Path]:
    np.savez(folder / "x.npz", x=np.zeros((3, 4, 4), np.uint8))
    _shard(folder, folder)
    return [folder / "scores" / "shard-00000.parquet"]


def _manifest(folder: Path) -> Path:
    from qualms.scale.folder import Done, arrow, finish, write

    write(folder / "shard-00000.parquet", arrow().table({"id": ["a"]}))
    about = {"network": "n", "methods": {"regrad": "regrad"}, "seed": 0, "classes": ["a", "b"], "threshold": None}
    done = finish(folder, about, [folder / "shard-00000.parquet"], [])
    assert done == Done(1, 0, None)
    return folder / "manifest.json"


def _begin(folder: Path, path: Path) -> None:
    from qualms.scale.folder import begun

    about = {"network": "n", "methods": {"regrad": "regrad"}, "seed": 0, "classes": ["a", "b"], "threshold": None}
    with begun(folder, about) as done:
        if done is not None:
            numbers = (done.scored, done.rejected, 0 if done.accepted is None else done.accepted)
            assert all(type(number) is int and number >= 0 for number in numbers)


def _listed(folder: Path) -> Path:
    from qualms.data import Rejected
    from qualms.scale.folder import write_rejected

    (folder / "list").mkdir()
    write_rejected(folder / "list" / "a.parquet", [Rejected("a", "cut"), Rejected("b", "no image")])
    return folder / "list" / "a.parquet"


def _list(folder: Path, path: Path) -> None:
    from qualms.scale.batch import rejected_in

    for one in rejected_in(path.parent):
        assert isinstance(one.id, str)
        assert isinstance(one.reason, str)


def _threshold(folder: Path) -> Path:
    from qualms.threshold import MadeBy, Threshold

    made_by = MadeBy("regrad+layers(0.2)", "0123456789abcdef", "exact", "used", "l2", None, None, 0)
    Threshold.from_scores([0.1, 0.2, 0.35], 0.9, made_by=made_by).save(folder / "t.json")
    return folder / "t.json"


def _accept(folder: Path, path: Path) -> None:
    from qualms.cli.threshold import _content, _promise
    from qualms.threshold import Threshold

    found = Threshold.load(path)
    assert not np.isnan(found.value)
    assert type(found.samples) is int
    found.accept([0.1])
    found.fingerprint()
    if found.reference:
        assert 0 <= float(found.percentile([0.2])[0]) <= 100
    _promise(found)
    json.dumps(_content(found), allow_nan=False)


def _journal(folder: Path) -> Path:
    from qualms.tasks.journal import Journal

    with Journal(folder / "a.jsonl", {"task": "active"}) as journal:
        about: Any = {"data": "d", "seed": 0, "from": "abc"}
        for cycle, method in ((0, "start"), (1, "regrad"), (1, "entropy")):
            row = {"row": "cycle", "method": method, "cycle": cycle, "labelled": 10 * cycle, "seconds": 0.5, **about}
            journal.add(row | {"accuracy": 0.5, "nll": 1.25, "nll_softmax_twice": 2.0})
        ood: Any = {"row": "ood", "in": "a", "out": "b", "method": "m", "exactly": "m", "seed": 0, "engine": "exact"}
        measures = dict.fromkeys(("auroc", "auroc_low", "auroc_high", "aupr_out", "aupr_in", "fpr95"), 0.5)
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
    from qualms.cli.own_images import class_names

    count, names = class_names(str(path))
    assert count == len(names) >= 2
    "".join(names).encode()


READERS: dict[str, Reader] = {
    "idx": Reader(_one(layouts.write_plain_mnist), _dataset("mnist"), damaged),
    "idx.gz": Reader(_one(layouts.write_mnist), _dataset("mnist"), either(damaged, in_gzip(damaged))),
    "cifar10": Reader(_one(_cifar10), _dataset("cifar10"), either(damaged, damaged_pickle)),
    "cifar100": Reader(_one(_cifar100), _dataset("cifar100"), either(damaged, damaged_pickle)),
    "svhn": Reader(_one(_plain_svhn), _dataset("svhn"), damaged),
    "svhn-compressed": Reader(_one(layouts.write_svhn), _dataset("svhn"), either(damaged, in_mat, in_mat)),
    "omniglot": Reader(_one(layouts.write_omniglot), _dataset("omniglot"), either(damaged, in_png), bound=IMAGE),
    "folder": Reader(_one(layouts.write_folder), _dataset("things"), either(damaged, in_png), bound=IMAGE),
    "png": Reader(
        _pictures(("png", "RGB", {}), ("png", "P", {}), ("png", "1", {}), ("png", "RGBA", {}), ("png", "I;16", {})),
        _at,
        either(damaged, in_png, in_png),
        bound=IMAGE,
    ),
    "jpeg": Reader(
        _pictures(("jpg", "RGB", {}), ("jpg", "L", {"progressive": True}), ("jpg", "CMYK", {"quality": 90})),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "gif": Reader(_pictures(("gif", "P", {}), ("gif", "L", {"interlace": False}), ("gif", "1", {})), _at, damaged, bound=IMAGE),
    "bmp": Reader(_pictures(("bmp", "RGB", {}), ("bmp", "P", {}), ("bmp", "1", {}), ("dib", "L", {})), _at, damaged, bound=IMAGE),
    "webp": Reader(
        _pictures(("webp", "RGB", {}), ("webp", "RGBA", {"lossless": True}), ("webp", "RGB", {"quality": 10})),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "tiff": Reader(
        _pictures(
            ("tif", "RGB", {}),
            ("tif", "L", {"compression": "tiff_lzw"}),
            ("tif", "RGB", {"compression": "tiff_adobe_deflate"}),
            ("tif", "RGB", {"compression": "jpeg"}),
            ("tif", "1", {"compression": "group4"}),
            ("tif", "RGBA", {"compression": "packbits"}),
            ("tif", "I;16", {}),
        ),
        _at,
        damaged,
        bound=IMAGE,
    ),
    "other images": Reader(_other_pictures, _at, damaged, bound=IMAGE),
    "npz": Reader(_npz, _at, either(damaged, in_zip(damaged), in_zip(damaged))),
    "npz in parts": Reader(_npz, _in_parts, either(damaged, in_zip(damaged), in_zip(damaged))),
    "parquet": Reader(_parquets, _at, damaged, bound=PAGES),
    "parquet in parts": Reader(_parquets, _in_parts, damaged, bound=PAGES),
    "tar": Reader(_one(_tar), _in_parts, either(damaged, in_tar(either(damaged, in_png))), bound=IMAGE),
    "txt": Reader(_content("a.txt", "Once upon a time. Zwölf.\r\n三".encode()), _texts, damaged),
    "jsonl": Reader(_content("a.jsonl", LINES), _texts, either(damaged, damaged_lines)),
    "text parquet": Reader(_one(_text_parquet), _texts, damaged, bound=PAGES),
    "checkpoint": Reader(
        _zipped, _weights, either(damaged, in_zip({"data.pkl": either(damaged, damaged_pickle), "": damaged}))
    ),
    "legacy checkpoint": Reader(_one(_legacy), _weights, either(damaged, damaged_pickle)),
    "safetensors": Reader(_one(_safetensors), _weights, either(damaged, in_safetensors)),
    "training": Reader(
        _half_trained, _training, either(damaged, in_zip({"data.pkl": either(damaged, damaged_pickle), "": damaged}))
    ),
    "exported": Reader(
        _one(_exported),
        _run_exported,
        either(damaged, in_zip({".json": either(damaged, damaged_json), "": damaged})),
        few=20,
        many=5_000,  # reading one takes some 20 ms
        trusted=True,
    ),
    "hugging face": Reader(
        _classifier("config.json"), _classify, either(damaged, damaged_json, damaged_json), few=40, many=10_000
    ),
    "hugging face weights": Reader(
        _classifier("model.safetensors"), _classify, either(damaged, in_safetensors), few=40, many=10_000
    ),
    "preprocessing": Reader(_classifier("preprocessor_config.json"), _preprocess, either(damaged, damaged_json)),
    "language model": Reader(_language("config.json", "generation_config.json"), _speak, damaged_json, few=30, many=5_000),
    "tokenizer": Reader(
        _language("tokenizer.json", "tokenizer_config.json"), _speak, either(damaged, damaged_json), few=30, many=5_000
    ),
    "shard": Reader(_shards, _shard, damaged, bound=PAGES),
    "manifest": Reader(_one(_manifest), _begin, either(damaged, damaged_json)),
    "rejected": Reader(_one(_listed), _list, damaged, bound=PAGES),
    "threshold": Reader(_one(_threshold), _accept, either(damaged, damaged_json)),
    "rows": Reader(_one(_journal), _rows, either(damaged, damaged_lines)),
    "class names": Reader(_content("names.txt", "cat\ndog\nKuh ä\n".encode()), _class_file, damaged),
}
