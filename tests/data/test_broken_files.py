"""Whatever happens to a file, reading it gives images or one clear error."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qualms
from qualms.data import Images, load
from tests.data import layouts

FORMATS: dict[str, tuple[layouts.Writer, str]] = {
    "idx, gzipped": (layouts.write_mnist, "mnist"),
    "idx": (layouts.write_plain_mnist, "mnist"),
    "pickle": (layouts.write_cifar10, "cifar10"),
    "mat": (layouts.write_svhn, "svhn"),
    "image in a folder": (layouts.write_folder, "things"),
    "image of omniglot": (layouts.write_omniglot, "omniglot"),
    "npz": (layouts.write_npz, "things.npz"),
    "parquet": (layouts.write_parquet, "things.parquet"),
}


@pytest.fixture(scope="module", params=FORMATS)
def written(request: pytest.FixtureRequest) -> Iterator[tuple[Path, Path, bytes, str]]:
    write, name = FORMATS[request.param]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        yield Path(folder), path, path.read_bytes(), name


def read(root: Path, path: Path, content: bytes, name: str) -> Images | None:
    path.write_bytes(content)
    try:
        return load(name, root)
    except qualms.QualmsError as error:
        message = str(error)
    assert path.name in message or str(root) in message
    return None


def whole(written: tuple[Path, Path, bytes, str]) -> str:
    found = read(*written)
    assert found is not None
    return found.fingerprint()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_cut_file(written: tuple[Path, Path, bytes, str], data: st.DataObject) -> None:
    root, path, content, name = written
    right = whole(written)
    length = data.draw(st.integers(0, len(content) - 1))
    found = read(root, path, content[:length], name)
    # What is left may still hold all the images, such as a file that ends with notes; never half of them.
    assert found is None or found.fingerprint() == right


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_flipped_bytes(written: tuple[Path, Path, bytes, str], data: st.DataObject) -> None:
    root, path, content, name = written
    last = len(content) - 1
    # Headers are at the start and at the end; pixels, where a flip is only another image, in between.
    where = st.one_of(st.integers(0, min(last, 300)), st.integers(max(0, last - 300), last), st.integers(0, last))
    broken = bytearray(content)
    for at, byte in data.draw(st.lists(st.tuples(where, st.integers(0, 255)), min_size=1, max_size=3)):
        broken[at] = byte
    found = read(root, path, bytes(broken), name)
    assert found is None or len(found) > 0


@settings(max_examples=15, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all(written: tuple[Path, Path, bytes, str], content: bytes) -> None:
    root, path, _, name = written
    assert read(root, path, content, name) is None
