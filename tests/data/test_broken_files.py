"""Whatever happens to a file, reading it gives images or one clear error."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import qualms
from qualms.data import Images, load
from tests.helpers import layouts

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


@dataclass(frozen=True)
class Written:
    root: Path
    name: str
    path: Path  # the file to break
    content: bytes
    right: str  # the fingerprint of what is read from it whole

    def read(self, content: bytes) -> Images | None:
        self.path.write_bytes(content)
        try:
            return load(self.name, self.root)
        except qualms.QualmsError as error:
            message = str(error)
        assert self.path.name in message or str(self.root) in message
        return None


@pytest.fixture(scope="module", params=FORMATS)
def written(request: pytest.FixtureRequest) -> Iterator[Written]:
    write, name = FORMATS[request.param]
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        yield Written(Path(folder), name, path, path.read_bytes(), load(name, folder).fingerprint())


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_cut_file(written: Written, data: st.DataObject) -> None:
    found = written.read(written.content[: data.draw(st.integers(0, len(written.content) - 1))])
    # What is left may still hold all the images, such as a file that ends with notes; never half of
    # them.
    assert found is None or found.fingerprint() == written.right


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_flipped_bytes(written: Written, data: st.DataObject) -> None:
    last = len(written.content) - 1
    # Headers are at the start and at the end; pixels, where a flip is only another image, in
    # between.
    where = st.one_of(
        st.integers(0, min(last, 300)), st.integers(max(0, last - 300), last), st.integers(0, last)
    )
    broken = bytearray(written.content)
    for at, byte in data.draw(
        st.lists(st.tuples(where, st.integers(0, 255)), min_size=1, max_size=3)
    ):
        broken[at] = byte
    found = written.read(bytes(broken))
    assert found is None or len(found) > 0


@settings(max_examples=15, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_at_all(written: Written, content: bytes) -> None:
    assert written.read(content) is None
