"""Base images: which packages, from where; once for real, where mmdebstrap is."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path

import pytest

from etude.errors import ResourceError
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.base_sources import BASES, Base, find_in_store, make_base
from etude.sandbox.images.debootstrap import parse_sources
from etude.sandbox.images.image_store import ImageStore
from tests.sandbox.images.image_builders import file_member, leftovers, read_image, tar_bytes

LISTING = """bookworm-backports|main|http://example.org/debian/
bookworm|main|http://example.org/debian/
bookworm|contrib|http://example.org/debian/
bookworm-security|main|http://example.org/security/
bookworm-updates|main|http://example.org/debian/
nodistro|main|https://example.org/other
"""


def test_the_hosts_sources_of_the_suite_are_taken() -> None:
    assert parse_sources(LISTING, "bookworm").splitlines() == [
        "deb http://example.org/debian/ bookworm main",
        "deb http://example.org/debian/ bookworm-updates main",
        "deb http://example.org/security/ bookworm-security main",
    ]


def test_without_the_suite_itself_nothing_is_taken() -> None:
    assert parse_sources(LISTING, "trixie") == ""
    assert parse_sources("bookworm-updates|main|http://example.org/", "bookworm") == ""
    assert parse_sources("garbage\n||\n", "bookworm") == ""


def test_passwords_never_reach_an_image() -> None:
    with pytest.raises(TemplateError, match="password"):
        parse_sources("bookworm|main|https://me:secret@example.org/debian", "bookworm")


def fake_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """An `mmdebstrap` on the path that does what the shell script says; its target is `$target`."""
    tool = folder / "bin" / "mmdebstrap"
    tool.parent.mkdir(exist_ok=True)
    head = '#!/bin/sh\nfor word in "$@"; do case "$word" in *.tar) target="$word";; esac; done\n'
    tool.write_text(head + script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    return tool


@pytest.mark.slow
def test_a_base_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ready.base").write_bytes(tar_bytes(file_member("etc/debian_version", b"12")))
    log = tmp_path / "log"
    fake_tool(
        tmp_path, monkeypatch, f'echo "$SOURCE_DATE_EPOCH $@" >>{log}\ncp {tmp_path}/ready.base "$target"'
    )
    store = ImageStore(tmp_path / "store")
    images = [asyncio.run(find_in_store("debian:bookworm-slim", store)) for _ in range(2)]
    assert images[0] == images[1]
    with pytest.raises(TemplateError, match="no such base image"):
        asyncio.run(find_in_store("debian:potato", store))
    assert read_image(store, store.load("debian:bookworm-slim"), "/etc/debian_version") == b"12"
    (line,) = log.read_text().splitlines()
    assert line.startswith("946684800 --format=tar --quiet --variant=minbase")
    assert " bookworm " in line
    assert leftovers(store.layers) == []


def test_an_unknown_base_names_the_bases_and_a_few_images_of_a_full_store(tmp_path: Path) -> None:
    class FullStore(ImageStore):
        def list(self) -> list[str]:
            return ["harbor/task", *(f"mine-{number:03}" for number in range(300))]

    with pytest.raises(TemplateError, match="no such base image") as caught:
        asyncio.run(find_in_store("debian:potato", FullStore(tmp_path / "store")))
    fix = caught.value.fix or ""
    assert "mine-011, 288 more of the store, debian:12" in fix and "mine-012" not in fix
    assert "harbor/task" not in fix, "what was built for a task is nobody's base"


@pytest.mark.slow
def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, monkeypatch, 'echo half >"$target"\necho "E: no mirror" >&2\nexit 25')
    store = ImageStore(tmp_path / "store")
    with pytest.raises(ResourceError, match="exit code 25: E: no mirror"):
        asyncio.run(make_base("debian:bookworm", store))
    assert store.list() == []
    assert leftovers(store.layers) == []


@pytest.mark.slow
def test_a_hanging_build_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    child.touch()
    fake_tool(tmp_path, monkeypatch, f"sleep 600 & echo $! >{child}\nwait")
    store = ImageStore(tmp_path / "store")
    limits_s = iter((1.0, 10.0, 60.0))
    while not child.read_text():  # a busy machine may not come to it within a second
        with pytest.raises(ResourceError, match="longer than"):
            asyncio.run(make_base("debian:bookworm", store, next(limits_s)))
    assert ends_soon(child.read_text().strip())
    assert leftovers(store.layers) == []


def ends_soon(pid: str) -> bool:
    """Whether a process that was sent its signal is gone, or a zombie, within a minute."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_without_mmdebstrap_the_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ResourceError, match="not installed"):
        asyncio.run(make_base("debian:bookworm", ImageStore(tmp_path / "store")))


@pytest.mark.slow
@pytest.mark.foreign
def test_a_real_base_is_reproducible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BASES, "small", Base("bookworm", ("python3-minimal",)))
    if shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    if os.geteuid() != 0 and shutil.which("newuidmap") is None:
        pytest.skip("mmdebstrap needs root, or uidmap")
    digests: list[str] = []
    for name in ("one", "two"):
        store = ImageStore(tmp_path / name)
        for attempts_left in (2, 1, 0):
            try:
                (digest,) = asyncio.run(make_base("small", store)).layers
                break
            except ResourceError as error:
                if attempts_left == 0:
                    pytest.skip(f"no package mirror here: {error}")
        digests.append(digest)
        root = store.layers.path(digest)
        assert (root / "usr/bin/python3").exists()
        assert (root / "etc/machine-id").read_bytes() == b""
        lists = [path for path in (root / "var/lib/apt/lists").rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in lists) == 0
        assert leftovers(store.layers) == []
    assert digests[0] == digests[1]
