"""Uploads and downloads: of any size and any name, and never outside of what was named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ToolArgumentError
from etude.sandbox.errors import DiskFullError, PathKindError, PathMissingError, PathOutsideError
from etude.sandbox.files import PIECE_BYTES, below, name_below
from etude.sandbox.interface import Sandbox
from etude.sandbox.types import Resources
from tests.sandbox.scenes import in_sandbox

ROOMY = Resources(disk_bytes=64 << 20, file_bytes=64 << 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES, 17_000_003]
)
def test_files_of_any_size_cross_both_ways(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)

    async def scenario(s: Sandbox) -> None:
        assert await s.files.upload(tmp_path / "source", "deep/er/file") == size
        # Replaced, not lengthened.
        assert await s.files.upload(tmp_path / "source", "deep/er/file") == size
        assert await s.files.download("deep/er/file", tmp_path / "new/target") == size
        assert await s.files.download("deep/er/file", tmp_path / "new/target") == size

    in_sandbox(tmp_path / "state", scenario, resources=ROOMY)
    assert (tmp_path / "new/target").read_bytes() == data
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["target"]


def test_directories_cross_with_every_odd_name(tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = ["a", ".a.part", "..a.part.part", "d/e/f", "sp ace", "new\nline", "ü", "x" * 250, "-rf", "\udcff"]
    for name in names:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(os.fsencode(name))
    (source / "link").symlink_to("/etc/passwd")
    (source / "dirlink").symlink_to("d")
    os.mkfifo(source / "fifo")

    async def scenario(s: Sandbox) -> None:
        total = sum(len(os.fsencode(name)) for name in names)
        assert await s.files.upload(source, "up") == total
        await s.commands.run("cd up; ln -s /etc/passwd link; mkfifo fifo; mkdir empty; ln -s d loop")
        assert await s.files.download("up", tmp_path / "target") == total
        assert await s.files.download("up/d", tmp_path / "part") == 5
        assert await s.files.download(".", tmp_path / "all") == total

    in_sandbox(tmp_path / "state", scenario, resources=ROOMY)
    for top in (tmp_path / "target", tmp_path / "all/up"):
        found = {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}
        assert found == {name: os.fsencode(name) for name in names}
    assert (tmp_path / "part/e/f").read_bytes() == b"d/e/f"


def test_what_is_not_there_or_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")

    async def scenario(s: Sandbox) -> None:
        with pytest.raises(ToolArgumentError) as raised:
            await s.files.upload(tmp_path / "none", "x")
        assert raised.value.field == "source"
        with pytest.raises(PathMissingError):
            await s.files.download("none", tmp_path / "target")
        with pytest.raises(PathKindError):
            await s.files.upload(tmp_path / "f", "d")
        for path in ("../x", "/etc/x"):
            with pytest.raises(PathOutsideError):
                await s.files.upload(tmp_path / "f", path)
            with pytest.raises(PathOutsideError):
                await s.files.download(path, tmp_path / "target")
        await s.commands.run("mkfifo fifo; ln -s /etc/passwd out")
        with pytest.raises(PathKindError):
            await s.files.download("fifo", tmp_path / "target")
        with pytest.raises(PathOutsideError):
            await s.files.download("out", tmp_path / "target")

    in_sandbox(tmp_path / "state", scenario, {"d/f": ""})
    assert not (tmp_path / "target").exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_upload_that_does_not_fit_is_the_disks_fault(tmp_path: Path) -> None:
    with (tmp_path / "big").open("wb") as file:
        file.truncate(20 << 20)

    async def scenario(s: Sandbox) -> None:
        with pytest.raises(DiskFullError):
            await s.files.upload(tmp_path / "big", "big")
        assert (await s.commands.run("rm big; echo on > f; cat f")).stdout == "on\n"

    in_sandbox(tmp_path / "state", scenario, resources=Resources(disk_bytes=8 << 20))


def test_a_download_replaces_a_link_and_follows_none(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "outside").mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / "f").symlink_to(tmp_path / "secret")
    (target / "d").symlink_to(tmp_path / "outside")

    async def scenario(s: Sandbox) -> None:
        await s.files.write("f", "new")
        await s.files.download("f", target / "f")
        await s.files.write("d/f", "new")
        with pytest.raises(PathOutsideError, match="link"):
            await s.files.download(".", target)

    in_sandbox(tmp_path / "state", scenario)
    assert ((tmp_path / "secret").read_text(), (target / "f").read_text()) == ("secret", "new")
    assert list((tmp_path / "outside").iterdir()) == []


@given(st.text("a./\0b", max_size=10), st.sampled_from(["", "d/"]))
def test_names_of_a_listing_never_lead_out(name: str, prefix: str) -> None:
    target = Path("/nowhere/target")
    try:
        path = below(target, name_below(prefix + name, prefix.rstrip("/") or "."))
    except PathOutsideError:
        return
    assert path == target / name
    assert os.path.normpath(path) == str(path)
    assert str(path).startswith("/nowhere/target/")
