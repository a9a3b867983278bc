import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from etude.errors import StoreError
from etude.records import BlobRef
from etude.store import BlobStore, FileBlobs, MemoryBlobs

arrays = arrays_of.arrays(
    st.sampled_from([np.uint8, np.int32, np.float32, np.float16, np.bool_, np.dtype(">i4"), np.complex64]),
    arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


def check_round_trip(store: BlobStore, array: np.ndarray) -> None:
    back = store.get(store.put(array))
    assert back.dtype.name == array.dtype.name
    assert back.shape == array.shape
    assert back.tobytes() == array.astype(array.dtype.newbyteorder("<")).tobytes()


@given(arrays, st.booleans())
def test_memory_blobs_come_back_equal(array: np.ndarray, transposed: bool) -> None:
    check_round_trip(MemoryBlobs(), array.T if transposed else array)


@given(arrays, st.booleans())
def test_file_blobs_come_back_equal(array: np.ndarray, transposed: bool) -> None:
    with TemporaryDirectory() as directory:
        check_round_trip(FileBlobs(Path(directory)), array.T if transposed else array)


def test_memory_blobs_are_copies_and_can_be_discarded() -> None:
    blobs = MemoryBlobs()
    routes = np.arange(12, dtype=np.uint8).reshape(2, 3, 2)
    ref = blobs.put(routes)
    routes[:] = 0
    assert blobs.get(ref)[1, 2, 1] == 11
    with pytest.raises(ValueError, match="read-only"):
        blobs.get(ref)[0] = 1
    blobs.discard(ref)
    blobs.discard(ref)
    assert len(blobs) == 0
    with pytest.raises(StoreError, match="no such blob"):
        blobs.get(ref)


def test_equal_arrays_are_discarded_one_by_one() -> None:
    blobs = MemoryBlobs()
    first, second = blobs.put(np.zeros(3)), blobs.put(np.zeros(3))
    blobs.discard(first)
    assert blobs.get(second).shape == (3,)


def test_a_reference_to_something_else_is_refused() -> None:
    blobs = MemoryBlobs()
    ref = blobs.put(np.zeros((2, 3), np.uint8))
    for changed in ({"digest": "0" * 32}, {"shape": (3, 2)}, {"dtype": "int8"}):
        with pytest.raises(StoreError, match="does not match"):
            blobs.get(dataclasses.replace(ref, **changed))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    ref = blobs.put(np.arange(8, dtype=np.uint8))
    path = tmp_path / ref.url.removeprefix("file:")
    path.write_bytes(b"\x09" + path.read_bytes()[1:])
    with pytest.raises(StoreError, match="digest"):
        blobs.get(ref)
    path.write_bytes(b"\x09")
    with pytest.raises(StoreError, match="does not match"):
        blobs.get(ref)
    path.unlink()
    with pytest.raises(StoreError, match="no such blob"):
        blobs.get(ref)


def test_a_moved_directory_keeps_its_blobs(tmp_path: Path) -> None:
    ref = FileBlobs(tmp_path / "old").put(np.arange(3))
    (tmp_path / "old").rename(tmp_path / "new")
    assert FileBlobs(tmp_path / "new").get(ref).tolist() == [0, 1, 2]


@pytest.mark.parametrize("url", ["file:../../etc/passwd", "memory:0", "file:/etc/passwd"])
def test_urls_of_other_places_are_refused(tmp_path: Path, url: str) -> None:
    blobs = FileBlobs(tmp_path)
    with pytest.raises(StoreError, match="not a blob of this store"):
        blobs.get(dataclasses.replace(blobs.put(np.zeros(1)), url=url))


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(StoreError, match="numbers"):
        MemoryBlobs().put(np.array(["text"]))


def test_one_array_may_be_put_by_many_threads_at_once(tmp_path: Path) -> None:
    arrays_of_all = [np.full(20_000, number, np.int32) for number in range(20)]
    together = threading.Barrier(4)
    store = FileBlobs(tmp_path)

    def put_all(_: int) -> list[BlobRef]:
        refs: list[BlobRef] = []
        for array in arrays_of_all:
            together.wait(30.0)
            refs.append(store.put(array))
        return refs

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(put_all, range(4))
    assert all(refs == first for refs in others)
    assert [store.get(ref)[0] for ref in first] == list(range(20))
    assert not list(tmp_path.rglob(".*")), "nothing temporary stays"
