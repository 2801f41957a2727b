"""CIFAR's pickles: all that may be in them is read, and nothing else is run."""

import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qualms
from qualms.data import Images, load
from qualms.data.pickles import STAND_INS
from tests.helpers.layouts import COUNT, IMAGES, LABELS, cifar_dict, write_cifar10


def is_right(found: Images) -> bool:
    assert found.labels is not None
    return np.array_equal(found.pixels, IMAGES) and found.labels.tolist() == LABELS


def python2() -> bytes:
    """As Python 2 wrote the published files."""

    def string(s: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(s)) + s

    def numbers(*values: int) -> bytes:
        return b"".join(b"J" + struct.pack("<i", v) for v in values)

    kind = (
        b"cnumpy\ndtype\n("
        + string(b"u1")
        + numbers(0, 1)
        + b"tR("
        + numbers(3)
        + string(b"|")
        + b"NNN"
    )
    kind += numbers(-1, -1, 0) + b"tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n("
        + numbers(0)
        + b"t"
        + string(b"b")
        + b"tR"
    )
    array += (
        b"("
        + numbers(1)
        + b"("
        + numbers(COUNT, 3072)
        + b"t"
        + kind
        + b"\x89"
        + string(IMAGES.tobytes())
        + b"tb"
    )
    labels = b"](" + numbers(*LABELS) + b"e"
    name = b"](" + string(b"caf\xe9.png") + b"e"
    pairs = [(b"data", array), (b"labels", labels), (b"filenames", name)]
    return b"\x80\x02}" + b"".join(string(key) + value + b"s" for key, value in pairs) + b"."


def before_numpy_2(content: bytes) -> bytes:
    """The same pickle with the names that numpy 1 wrote."""
    if content[0] == 0x80 and content[1] >= 4:
        content = content[:2] + content[11:]  # without the frame, whose length would be wrong
    for module in (b"numpy.core.multiarray", b"numpy.core.numeric"):
        longer = module.replace(b"core", b"_core")
        content = content.replace(bytes([len(longer)]) + longer, bytes([len(module)]) + module)
        content = content.replace(b"c" + longer, b"c" + module)
    assert b"_core" not in content
    return content


def test_pickles_of_python_2(tmp_path: Path) -> None:
    write_cifar10(tmp_path, python2())
    assert is_right(load("cifar10", tmp_path))


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("keys", ["text", "bytes"])
@pytest.mark.parametrize("labels", ["list", "array", "scalars"])
@pytest.mark.parametrize("numpy", [1, 2])
def test_pickles_of_python_3(
    protocol: int, keys: str, labels: str, numpy: int, tmp_path: Path
) -> None:
    found = cifar_dict()
    found["labels"] = {
        "list": LABELS,
        "array": np.array(LABELS),
        "scalars": [np.int64(v) for v in LABELS],
    }[labels]
    written: dict[Any, Any] = (
        found if keys == "text" else {k.encode(): v for k, v in found.items()} | {b"empty": b""}
    )
    content = pickle.dumps(written, protocol)
    write_cifar10(tmp_path, before_numpy_2(content) if numpy == 1 else content)
    assert is_right(load("cifar10", tmp_path))


@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_in_any_order_in_memory(protocol: int, tmp_path: Path) -> None:
    for data in (
        np.asfortranarray(IMAGES.reshape(COUNT, -1)),
        IMAGES.reshape(COUNT, -1).repeat(2, 1)[:, ::2],
    ):
        write_cifar10(tmp_path, pickle.dumps(cifar_dict() | {"data": data}, protocol))
        assert is_right(load("cifar10", tmp_path))


def test_labels_of_the_other_byte_order(tmp_path: Path) -> None:
    write_cifar10(tmp_path, pickle.dumps(cifar_dict() | {"labels": np.array(LABELS, ">i4")}))
    assert is_right(load("cifar10", tmp_path))


def test_the_red_pixel_stays_in_its_place(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    assert load("cifar10", tmp_path).pixels[0].nonzero().tolist() == [[0, 1, 5]]


def test_training_images_come_from_five_files_in_order(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path).parent
    for i in range(5):
        batch = {"data": np.full((2, 3072), i, np.uint8), "labels": [i, i + 1]}
        (folder / f"data_batch_{i + 1}").write_bytes(pickle.dumps(batch))
    found = load("cifar10", tmp_path, "train")
    assert found.pixels[:, 0, 0, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    (folder / "data_batch_4").unlink()
    with pytest.raises(
        qualms.QualmsError,
        match=r"there is no data_batch_4 in .*cifar-10-batches-py; get .*toronto",
    ):
        load("cifar10", tmp_path, "train")


def test_cifar100_has_its_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "test").write_bytes(
        pickle.dumps(cifar_dict("fine_labels") | {"coarse_labels": [1, 1, 1]})
    )
    found = load("cifar100", tmp_path)
    assert is_right(found)
    assert len(set(found.classes)) == 100
    assert list(found.classes) == sorted(found.classes)


class Calls:
    """Pickled, it is a call that reading the pickle makes."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def scalar(kind: Any, content: Any) -> Calls:
    return Calls(np.arange(2).sum().__reduce__()[0], kind, content)


def reconstruct(kind: Any) -> Calls:
    return Calls(np.zeros(2).__reduce__()[0], kind, (0,), b"b")


def attacks(marker: Path) -> dict[str, tuple[Any, str]]:
    command = f"touch {marker}"
    evil = Calls(os.system, command)
    return {
        "os.system": (evil, r"\.system"),
        "eval": (Calls(eval, f"open({str(marker)!r}, 'w')"), "builtin.*eval"),
        "nested": (cifar_dict() | {"labels": [1, [2, {"a": evil}]]}, "system"),
        "as a key": ({("a", evil): 1}, "system"),
        "getattr": (Calls(getattr, "a", "join"), "getattr"),
        "numpy.load": (Calls(np.load, str(marker), None, True), "numpy.*load"),
        "an array of objects": (
            cifar_dict() | {"data": np.array([evil, None], object)},
            "type 'O8'",
        ),
        "an array of harmless objects": (
            cifar_dict() | {"data": np.array([None, "a"], object)},
            "type 'O8'",
        ),
        "an array with fields": (np.zeros(2, [("a", "u1"), ("b", "O")]), "type 'V"),
        "an array of dates": (np.zeros(2, "M8[s]"), "type 'M8'"),
        "an array of text": (np.array(["a"]), "type 'U1'"),
        "a scalar of objects": (scalar(np.dtype(object), pickle.dumps(evil)), "type 'O8'"),
        "a scalar without a type": (scalar("u1", b"a"), "other than numbers"),
        "an array of another class": (reconstruct(np.dtype), "custom class"),
        "an array of a class that runs": (reconstruct(np.memmap), "numpy.*memmap"),
        "an array of a called class": (reconstruct(evil), "system"),
        "other codecs": (
            Calls(__import__("_codecs").encode, "abc", "rot13"),
            "encodes something other",
        ),
        "decoding": (Calls(__import__("_codecs").decode, b"abc", "zip"), "_codecs.decode"),
    }


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("attack", attacks(Path()))
def test_a_pickle_that_asks_for_more_is_refused_by_name(
    attack: str, protocol: int, tmp_path: Path
) -> None:
    marker = tmp_path / "it-ran"
    content, name = attacks(marker)[attack]
    path = write_cifar10(tmp_path, pickle.dumps(content, protocol))
    with pytest.raises(qualms.QualmsError, match=rf"{path} is refused: it .*{name}"):
        load("cifar10", tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("opcode", [b"c%b\n%b\n", b"\x8c%b"])
@pytest.mark.parametrize(
    "change", [b"}U\x08__call__K\x00sb", b"N}U\x09__class__K\x00s\x86b", b")b", b"]e", b"]a"]
)
def test_a_pickle_cannot_change_what_it_is_given(
    opcode: bytes, change: bytes, tmp_path: Path
) -> None:
    for name in (
        "_codecs.encode",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.core.multiarray._reconstruct",
    ):
        module, _, last = name.encode().rpartition(b".")
        if opcode.startswith(b"c"):
            found = opcode % (module, last)
        else:
            found = (
                b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, last)) + b"\x93"
            )
        write_cifar10(tmp_path, b"\x80\x04" + found + change + b".")
        with pytest.raises(qualms.QualmsError):
            load("cifar10", tmp_path)
    write_cifar10(tmp_path)
    assert is_right(load("cifar10", tmp_path))
    assert not any(
        isinstance(given, type) or hasattr(given, "__dict__") for given in STAND_INS.values()
    )


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02Nr\xff\xff\xff\xff.",  # the 4294967295th object to remember
        b"\x80\x05\x96\x00\x00\x00\x00\x04\x00\x00\x00.",  # 16 GiB of bytes
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",  # a frame of 8 EiB
    ],
)
def test_a_pickle_that_promises_the_world_costs_nothing(content: bytes, tmp_path: Path) -> None:
    path = write_cifar10(tmp_path, content)
    with pytest.raises(qualms.QualmsError, match=rf"{path} is (truncated|refused)"):
        load("cifar10", tmp_path)


def test_what_is_not_cifar_is_named(tmp_path: Path) -> None:
    def message(found: Any) -> str:
        path = write_cifar10(tmp_path, found if isinstance(found, bytes) else pickle.dumps(found))
        with pytest.raises(qualms.QualmsError) as error:
            load("cifar10", tmp_path)
        assert str(path) in str(error.value)
        return str(error.value)

    rows = IMAGES.reshape(COUNT, -1)
    assert "truncated or not a pickle" in message(pickle.dumps(cifar_dict())[:-30])
    assert "truncated or not a pickle" in message(b"")
    assert "truncated or not a pickle" in message(b"hello")
    assert "does not contain a dictionary" in message([1])
    assert "no uint8 array of shape (n, 3072)" in message(cifar_dict() | {"data": rows[:, 1:]})
    assert "no uint8 array of shape (n, 3072)" in message(
        cifar_dict() | {"data": rows.astype(float)}
    )
    assert "no uint8 array of shape (n, 3072)" in message({"labels": LABELS})
    assert "under 'labels'" in message({"data": rows})
    assert "under 'labels'" in message(cifar_dict() | {"labels": ["a", "b", "c"]})
    assert "under 'labels'" in message(cifar_dict() | {"labels": [2**70, 1, 1]})
    assert "float64 of shape (3,)" in message(cifar_dict() | {"labels": np.array([0.0, 1.0, 2.0])})
    assert "3 images but 2 labels" in message(cifar_dict() | {"labels": [1, 2]})
    assert "from 0 to 10, but classes are numbered 0 to 9" in message(
        cifar_dict() | {"labels": [0, 10, 1]}
    )
    assert "from -1 to 2" in message(cifar_dict() | {"labels": [0, -1, 2]})
