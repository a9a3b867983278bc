"""Memory files: sparse copies, diffs over bases, hard links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.sandbox.errors import SnapshotError
from etude.sandbox.firecracker.fake_memory import PAGE_BYTES, read_archive, to_pages, write_memory
from etude.sandbox.firecracker.memory import copy_sparse, data_ranges, link_or_copy, merge_diff

NUM_PAGES = 16


def sparse(path: Path, pages: dict[int, bytes], num_pages: int = NUM_PAGES) -> bytes:
    """Writes a file with the given pages and holes between them; returns its content."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.truncate(num_pages * PAGE_BYTES)
        for index, page in pages.items():
            file.seek(index * PAGE_BYTES)
            file.write(page)
    return path.read_bytes()


pages = st.dictionaries(
    st.integers(0, NUM_PAGES - 1), st.sampled_from([bytes([n]) * PAGE_BYTES for n in range(4)])
)


@settings(max_examples=40, deadline=None)
@given(base=pages, diff=pages)
def test_a_diff_over_its_base_is_the_present_memory(
    tmp_path_factory: pytest.TempPathFactory, base: dict[int, bytes], diff: dict[int, bytes]
) -> None:
    directory = tmp_path_factory.mktemp("merge")
    sparse(directory / "base", base)
    sparse(directory / "diff", diff)
    merge_diff(directory / "base", directory / "diff")
    assert (directory / "base").read_bytes() == sparse(directory / "expected", base | diff)


def test_pages_that_became_zero_are_laid_too(tmp_path: Path) -> None:
    sparse(tmp_path / "base", {3: b"\1" * PAGE_BYTES})
    sparse(tmp_path / "diff", {3: bytes(PAGE_BYTES)})
    assert merge_diff(tmp_path / "base", tmp_path / "diff") == PAGE_BYTES
    assert not any((tmp_path / "base").read_bytes())


def test_a_diff_of_another_size_is_refused(tmp_path: Path) -> None:
    before = sparse(tmp_path / "base", {0: b"\1" * PAGE_BYTES})
    sparse(tmp_path / "diff", {}, NUM_PAGES + 1)
    with pytest.raises(SnapshotError, match="does not fit"):
        merge_diff(tmp_path / "base", tmp_path / "diff")
    assert (tmp_path / "base").read_bytes() == before


def test_copies_keep_their_holes(tmp_path: Path) -> None:
    content = sparse(tmp_path / "source", {100: b"\1" * PAGE_BYTES}, 4096)
    copied = copy_sparse(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == content
    assert copied <= PAGE_BYTES
    assert (tmp_path / "target").stat().st_blocks <= 64
    descriptor = os.open(tmp_path / "target", os.O_RDONLY)
    assert list(data_ranges(descriptor)) == [(100 * PAGE_BYTES, 101 * PAGE_BYTES)]
    os.close(descriptor)


def test_a_copy_never_replaces_a_file(tmp_path: Path) -> None:
    for name in ("source", "target"):
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError):
        copy_sparse(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "target"


def test_links_are_copies_on_another_file_system(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    if not os.access(elsewhere, os.W_OK) or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no second file system")
    (tmp_path / "source").write_bytes(b"x" * 9000)
    link_or_copy(tmp_path / "source", tmp_path / "same")
    assert (tmp_path / "same").stat().st_ino == (tmp_path / "source").stat().st_ino
    target = elsewhere / f"etude-test-{os.getpid()}"
    try:
        link_or_copy(tmp_path / "source", target)
        assert target.read_bytes() == b"x" * 9000
    finally:
        target.unlink(missing_ok=True)


@settings(max_examples=25, deadline=None)
@given(first=st.binary(max_size=30_000), second=st.binary(max_size=30_000))
def test_the_fake_s_diffs_give_back_its_archive(
    tmp_path_factory: pytest.TempPathFactory, first: bytes, second: bytes
) -> None:
    directory = tmp_path_factory.mktemp("fake")
    size = NUM_PAGES * PAGE_BYTES
    write_memory(directory / "base", to_pages(first), None, size)
    write_memory(directory / "diff", to_pages(second), to_pages(first), size)
    merge_diff(directory / "base", directory / "diff")
    assert read_archive((directory / "base").read_bytes()) == second
