"""What the guest image is made of: the tree, its file system, initramfs archives."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import re
import shutil
import stat
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.errors import TemplateError
from etude.sandbox.types import Resources
from etude.sandbox.vm.guest_boot import (
    DIRECTORY,
    FILE,
    init_script,
    machine_archive,
    pack_cpio,
)
from etude.sandbox.vm.image import (
    FIX,
    VmImage,
    build_image,
    find_image,
    images_directory,
    make_root,
    unpack_root,
)

needs_mkfs = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="erofs-utils is not installed")


def read_erofs(image: bytes) -> dict[str, tuple[int, bytes]]:
    """{path: (mode, content)} by a reading of the format that shares nothing with the writer."""
    magic, _, _, block_bits, _, root = struct.unpack_from("<IIIBBH", image, 1024)
    assert (magic, block_bits) == (0xE0F5E1E2, 12)
    found: dict[str, tuple[int, bytes]] = {}

    def content(number: int) -> tuple[int, bytes]:
        offset = number * 32
        layout, _, mode, _, size, _, block = struct.unpack_from("<HHHHIII", image, offset)
        assert layout & 1 == 0
        if layout >> 1 == 0:
            return mode, image[block * 4096 : block * 4096 + size]
        whole = size // 4096 * 4096
        tail = image[offset + 32 : offset + 32 + size - whole]
        assert (offset + 32) // 4096 == (offset + 32 + max(0, len(tail) - 1)) // 4096
        return mode, image[block * 4096 : block * 4096 + whole] + tail

    def walk(number: int, prefix: str) -> None:
        mode, data = content(number)
        found[prefix or "/"] = mode, b"" if stat.S_ISDIR(mode) else data
        if not stat.S_ISDIR(mode):
            return
        names: list[bytes] = []
        for start in range(0, len(data), 4096):
            block = data[start : start + 4096]
            count = struct.unpack_from("<QH", block)[1] // 12
            rows = [struct.unpack_from("<QHB", block, 12 * index) for index in range(count)]
            for index, (child, begin, _) in enumerate(rows):
                end = rows[index + 1][1] if index + 1 < count else len(block)
                name = block[begin:end].rstrip(b"\0")
                names.append(name)
                if name not in (b".", b".."):
                    walk(child, f"{prefix}/{name.decode()}")
        assert names == sorted(names)

    walk(root, "")
    return found


@pytest.mark.foreign
@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")
def test_an_archive_is_read_by_cpio() -> None:
    archive = pack_cpio([("d", DIRECTORY, b""), ("d/file", FILE, b"12345")])
    listed = subprocess.run(["cpio", "-t", "--quiet"], input=archive, capture_output=True, check=True)
    assert listed.stdout.split() == [b"d", b"d/file"]
    content = subprocess.run(
        ["cpio", "-i", "--quiet", "--to-stdout", "d/file"], input=archive, capture_output=True, check=True
    )
    assert content.stdout == b"12345"


def test_limits_reach_the_guest_in_its_own_archive() -> None:
    archive = machine_archive(Resources(num_processes=77, open_files=99, file_bytes=1 << 20, cpu_s=5))
    for line in (b"ulimit -u 77", b"--open-files 99", b"ulimit -f 2048", b"--cpu-s 5", b"--uid 1000"):
        assert line in archive
    assert archive == machine_archive(Resources(num_processes=77, open_files=99, file_bytes=1 << 20, cpu_s=5))


def settings_of(resources: Resources) -> str:
    """The script with a machine's limits."""
    archive = machine_archive(resources)
    return (archive[archive.index(b"tmp_bytes=") :].partition(b"\n}\n")[0] + b"\n}\n").decode()


@given(st.integers(32, 1 << 16))
def test_what_outlives_the_agents_processes_leaves_room_for_ours(memory_mib: int) -> None:
    script = settings_of(Resources(memory_bytes=memory_mib << 20))
    sysctl = {name: value for value, name in re.findall(r"echo (.+) > \$r/proc/sys/(\S+)", script)}
    sizes = [(int(size), int(files)) for size, files in re.findall(r"size=(\d+),nr_inodes=(\d+)", script)]
    semaphores = int(sysctl["kernel/sem"].split()[1])
    messages = int(sysctl["kernel/msgmni"]) * int(sysctl["kernel/msgmnb"])
    mounted = sum(size + (files << 10) for size, files in sizes)
    lasting = mounted + int(sysctl["kernel/shmall"]) * 4096 + messages + semaphores * 128
    assert script.startswith(f"tmp_bytes={sizes[0][0]}\n") and len(sizes) == 2
    assert lasting <= max((memory_mib - 32) << 20, memory_mib << 19)
    assert int(sysctl["kernel/msgmax"]) <= int(sysctl["kernel/msgmnb"])
    assert min(*(files for _, files in sizes), semaphores, int(sysctl["kernel/msgmni"])) > 0


def test_settings_of_a_machine_are_a_valid_shell_script() -> None:
    script = settings_of(Resources(memory_bytes=96 << 20))
    subprocess.run(["sh", "-n"], input=script.encode(), check=True)
    assert "> $r/proc/sys/kernel/msgmni" in script
    assert "--floor-bytes" in script


def test_the_first_program_is_a_valid_shell_script() -> None:
    subprocess.run(["sh", "-n"], input=init_script(["a", "b"]).encode(), check=True)


def write_archive(path: Path, entries: list[tuple[str, bytes, int, bytes]]) -> Path:
    with tarfile.open(path, mode="w") as tar:
        for name, kind, mode, data in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if kind == tarfile.REGTYPE:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            else:
                info.linkname = data.decode()
                tar.addfile(info)
    return path


@pytest.mark.foreign
@needs_mkfs
def test_the_tree_has_no_devices_caches_or_set_user_id_programs(tmp_path: Path) -> None:
    archive = write_archive(
        tmp_path / "root.tar",
        [
            (".", tarfile.DIRTYPE, 0o755, b""),
            ("./etc", tarfile.DIRTYPE, 0o755, b""),
            ("./etc/hostname", tarfile.REGTYPE, 0o644, b"builder\n"),
            ("./dev", tarfile.DIRTYPE, 0o755, b""),
            ("./dev/null", tarfile.CHRTYPE, 0o666, b""),
            ("./var", tarfile.DIRTYPE, 0o755, b""),
            ("./var/cache", tarfile.DIRTYPE, 0o755, b""),
            ("./var/cache/x", tarfile.REGTYPE, 0o644, b"x"),
            ("./usr", tarfile.DIRTYPE, 0o755, b""),
            ("./usr/su", tarfile.REGTYPE, 0o4755, b"su"),
            ("./usr/hard", tarfile.LNKTYPE, 0o755, b"./usr/su"),
            ("./usr/m.pyc", tarfile.REGTYPE, 0o644, b"MAGI" + bytes(4) + b"TIMESIZE" + b"code"),
            ("./bin", tarfile.SYMTYPE, 0o777, b"usr/bin"),
            ("./etude-kernel", tarfile.DIRTYPE, 0o755, b""),
            ("./boot", tarfile.DIRTYPE, 0o755, b""),
            ("./boot/x", tarfile.REGTYPE, 0o644, b"x"),
        ],
    )  # fmt: skip
    images: list[bytes] = []
    for name in ("one", "two"):
        unpack_root(archive, tmp_path / name)
        make_root(tmp_path / name, tmp_path / f"{name}.img")
        images.append((tmp_path / f"{name}.img").read_bytes())
    assert images[0] == images[1], "equal trees give equal bytes"
    found = read_erofs(images[0])
    assert "/boot" not in found
    assert "/dev/null" not in found
    assert "/var/cache/x" not in found
    assert found["/usr/su"] == (stat.S_IFREG | 0o755, b"su")
    assert found["/usr/hard"] == found["/usr/su"]
    assert found["/usr/m.pyc"][1] == b"MAGI\1\0\0\0" + bytes(8) + b"code"
    assert found["/bin"][1] == b"usr/bin"
    assert found["/etc/hostname"][1] == b"etude\n"
    assert found["/etc/machine-id"] == (stat.S_IFLNK | 0o777, b"../run/machine-id")
    assert stat.S_ISDIR(found["/workspace"][0])


def test_a_missing_image_says_how_to_build_one(tmp_path: Path) -> None:
    with pytest.raises(TemplateError) as caught:
        find_image(tmp_path)
    assert FIX in str(caught.value)


def test_packages_that_every_guest_needs_cannot_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(TemplateError, match="busybox-static"):
        asyncio.run(build_image(tmp_path, packages=["python3"]))


def test_programs_that_a_build_needs_are_missed_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mmdebstrap").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "mmdebstrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TemplateError, match=r"mkfs\.erofs.*apt-get install erofs-utils"):
        asyncio.run(build_image(tmp_path, codename="bookworm"))
    assert not images_directory(tmp_path).exists()


def test_a_build_whose_sources_have_no_kernel_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(codename: str, target: Path, *given: Any, **named: Any) -> None:
        write_archive(
            target,
            [
                ("./etc", tarfile.DIRTYPE, 0o755, b""),
                ("./usr/bin/busybox", tarfile.REGTYPE, 0o755, b"busybox"),
                ("./var/lib/dpkg/status", tarfile.REGTYPE, 0o644, b"Package: x\nVersion: 1\n"),
                ("./etude-kernel", tarfile.DIRTYPE, 0o755, b""),
            ],
        )

    monkeypatch.setattr("etude.sandbox.vm.image._TOOLS", {})
    monkeypatch.setattr("etude.sandbox.vm.image.write_archive", write)
    with pytest.raises(TemplateError, match="the kernel's package was not found"):
        asyncio.run(build_image(tmp_path, codename="bookworm"))


def test_a_damaged_image_is_refused(tmp_path: Path) -> None:
    digest = "ab" * 20
    directory = images_directory(tmp_path) / digest
    directory.mkdir(parents=True)
    (directory.parent / "current").write_text(digest + "\n")
    (directory / "kernel").write_bytes(b"kernel")
    empty = "0" * 40
    manifest = {"format": 1, "digest": digest, "files": {"kernel": empty}}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(TemplateError, match="kernel does not have its digest"):
        find_image(tmp_path)
    (directory.parent / "current").write_text("../../etc\n")
    with pytest.raises(TemplateError, match="damaged"):
        find_image(tmp_path)


def test_building_a_damaged_image_anew_mends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built is the same to the byte, and so has the same name."""
    digest = "ab" * 20

    def write(archive: Path, target: Path, codename: str, packages: Sequence[str]) -> dict[str, Any]:
        (target / "kernel").write_bytes(b"kernel")
        files = {"kernel": hashlib.blake2b(b"kernel", digest_size=20).hexdigest()}
        manifest = {"format": 1, "digest": digest, "files": files}
        (target / "manifest.json").write_text(json.dumps(manifest))
        return manifest

    async def write_nothing(*given: Any, **named: Any) -> None:
        return None

    monkeypatch.setattr("etude.sandbox.vm.image._TOOLS", {})
    monkeypatch.setattr("etude.sandbox.vm.image.write_archive", write_nothing)
    monkeypatch.setattr("etude.sandbox.vm.image._write_image", write)

    def build() -> VmImage:
        return asyncio.run(build_image(tmp_path, codename="bookworm"))

    image = build()
    kept = image.directory.stat().st_ino
    assert build().directory.stat().st_ino == kept
    image.kernel.write_bytes(b"kernal")
    with pytest.raises(TemplateError, match="rebuild it"):
        find_image(tmp_path)
    assert build().kernel.read_bytes() == b"kernel"
    assert sorted(path.name for path in image.directory.parent.iterdir()) == [digest, "current"]
