"""Files are opened below a directory only, on kernels with openat2 and on those without."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from etude.sandbox.inside import kernel

OPENERS: dict[str, Callable[..., int]] = {
    "by the kernel": kernel.open_beneath,
    "name by name": kernel.open_without_links,
}


@pytest.fixture(params=list(OPENERS))
def opener(request: pytest.FixtureRequest) -> Callable[..., int]:
    return OPENERS[request.param]


@pytest.fixture
def below(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "outside").write_text("outside")
    root = tmp_path / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_text("mine")
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def content(descriptor: int) -> bytes:
    with open(descriptor, "rb") as file:
        return file.read()


def test_a_file_below_is_opened(opener: Callable[..., int], below: int) -> None:
    assert content(opener(below, "a/b/file", os.O_RDONLY)) == b"mine"


def test_a_file_is_made_with_its_mode(opener: Callable[..., int], below: int, tmp_path: Path) -> None:
    os.close(opener(below, "a/new", os.O_WRONLY | os.O_CREAT, 0o600))
    assert (tmp_path / "root" / "a" / "new").stat().st_mode & 0o777 == 0o600


def test_the_directory_itself_can_be_opened(opener: Callable[..., int], below: int) -> None:
    os.close(opener(below, ".", os.O_RDONLY | os.O_DIRECTORY))


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "up/outside", "link", "a/b/absolute"])
def test_what_leads_out_is_refused(opener: Callable[..., int], below: int, tmp_path: Path, path: str) -> None:
    (tmp_path / "root" / "up").symlink_to("..")
    (tmp_path / "root" / "link").symlink_to("../outside")
    (tmp_path / "root" / "a" / "b" / "absolute").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError) as refused:
        opener(below, path, os.O_RDONLY)
    assert refused.value.errno == errno.EXDEV


@pytest.mark.parametrize(("path", "code"), [("a/none", errno.ENOENT), ("a/b/file/x", errno.ENOTDIR)])
def test_other_errors_are_the_kernels(opener: Callable[..., int], below: int, path: str, code: int) -> None:
    with pytest.raises(OSError) as refused:
        opener(below, path, os.O_RDONLY)
    assert refused.value.errno == code


def test_no_descriptor_is_left_behind(opener: Callable[..., int], below: int) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    os.close(opener(below, "a/b/file", os.O_RDONLY))
    with pytest.raises(FileNotFoundError):
        opener(below, "a/b/none", os.O_RDONLY)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_directory_that_turns_into_a_link_leads_nowhere(
    opener: Callable[..., int], below: int, tmp_path: Path
) -> None:
    root, stop = tmp_path / "root", threading.Event()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("outside")
    (root / "a" / "out").symlink_to("../../other")

    def swap() -> None:
        while not stop.is_set():
            (root / "a" / "b").rename(root / "a" / "kept")
            (root / "a" / "out").rename(root / "a" / "b")
            (root / "a" / "b").rename(root / "a" / "out")
            (root / "a" / "kept").rename(root / "a" / "b")

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        seen: set[bytes] = set()
        for _ in range(5_000):
            try:
                seen.add(content(opener(below, "a/b/file", os.O_RDONLY)))
            except OSError:
                continue
    finally:
        stop.set()
        swapper.join()
    assert seen <= {b"mine"}
