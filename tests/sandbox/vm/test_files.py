"""What the guest image is made of: EROFS, initramfs archives, sources of packages, the tree."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import shutil
import stat
import struct
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.errors import TemplateError
from etude.sandbox.types import Resources
from etude.sandbox.vm.cpio import DIRECTORY, FILE, pack_cpio
from etude.sandbox.vm.erofs import BLOCK_BYTES, Node, write_erofs
from etude.sandbox.vm.guest_boot import init_script, lasting_bounds, machine_archive
from etude.sandbox.vm.image import FIX, VmImage, build_image, build_tree, find_image, images_directory
from etude.sandbox.vm.packages import host_sources

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40)
SIZES = st.sampled_from([0, 1, 2048, 2049, 4095, 4096, 4097, 6144, 6145, 8192, 20000])
TREES = st.recursive(
    st.tuples(st.sampled_from(["file", "link"]), SIZES, st.integers(0, 255)),
    lambda children: st.dictionaries(NAMES.filter(lambda n: n not in (".", "..")), children, max_size=6),
    max_leaves=25,
)


def make_node(tree: Any) -> Node:
    if isinstance(tree, dict):
        return Node(stat.S_IFDIR | 0o755, children={name: make_node(child) for name, child in tree.items()})
    kind, size, seed = tree
    data = bytes((seed + index) % 251 + 1 for index in range(min(size, 3000) if kind == "link" else size))
    mode = stat.S_IFLNK | 0o777 if kind == "link" else stat.S_IFREG | 0o644
    return Node(mode, len(data), lambda: data)


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


def expected(tree: Any, prefix: str = "") -> dict[str, tuple[int, bytes]]:
    node = make_node(tree)
    rows = {prefix or "/": (node.mode, b"" if node.is_directory else node.read())}
    for name, child in tree.items() if isinstance(tree, dict) else ():
        rows |= expected(child, f"{prefix}/{name}")
    return rows


def written(root: Node) -> bytes:
    with tempfile.TemporaryFile() as file:
        size = write_erofs(root, file, bytes(16), 1)
        file.seek(0)
        image = file.read()
    assert size == len(image)
    assert size % BLOCK_BYTES == 0
    return image


@given(st.dictionaries(st.sampled_from(["a", "b", "ä", "z.txt"]), TREES))
def test_a_written_tree_reads_back_whole_and_the_same_each_time(tree: dict[str, Any]) -> None:
    image = written(make_node(tree))
    assert read_erofs(image) == expected(tree)
    assert image == written(make_node(tree))


def test_a_directory_of_a_thousand_names_spans_blocks() -> None:
    tree = {f"name-{number:04d}-{'x' * (number % 50)}": ("file", 1, number % 200) for number in range(1000)}
    assert read_erofs(written(make_node(tree))) == expected(tree)


def test_hard_links_are_one_file() -> None:
    node = make_node(("file", 5000, 1))
    root = Node(stat.S_IFDIR | 0o755, children={"a": node, "b": node})
    found = read_erofs(written(root))
    assert found["/a"] == found["/b"]
    # The superblock and the inodes, and the one whole block of the one file.
    assert len(written(root)) == 2 * BLOCK_BYTES
    assert node.num_links == 2


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


@given(st.integers(32, 1 << 16))
def test_what_outlives_the_agents_processes_leaves_room_for_ours(memory_mib: int) -> None:
    bounds = lasting_bounds(memory_mib << 20)
    sysctl = {name: str(value) for name, value in bounds.sysctl.items()}
    semaphores = int(sysctl["kernel/sem"].split()[1])
    messages = int(sysctl["kernel/msgmni"]) * int(sysctl["kernel/msgmnb"])
    files = (bounds.tmp_files + bounds.shared_files) << 10
    shared = int(sysctl["kernel/shmall"]) * 4096 + bounds.shared_bytes
    lasting = bounds.tmp_bytes + shared + messages + semaphores * 128 + files
    assert lasting <= max((memory_mib - 32) << 20, memory_mib << 19)
    assert int(sysctl["kernel/msgmax"]) <= int(sysctl["kernel/msgmnb"])
    assert min(bounds.tmp_files, bounds.shared_files, semaphores, int(sysctl["kernel/msgmni"])) > 0


def test_settings_of_a_machine_are_a_valid_shell_script() -> None:
    archive = machine_archive(Resources(memory_bytes=96 << 20))
    script = archive[archive.index(b"tmp_bytes=") :].partition(b"\n}\n")[0] + b"\n}\n"
    subprocess.run(["sh", "-n"], input=script, check=True)
    assert b"> $r/proc/sys/kernel/msgmni" in script
    assert b"--floor-bytes" in script


def test_the_first_program_is_a_valid_shell_script() -> None:
    subprocess.run(["sh", "-n"], input=init_script(["a", "b"]).encode(), check=True)


def test_sources_of_one_release_are_found_in_both_formats(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (tmp_path / "sources.list").write_text(
        "# deb http://example.org/old bookworm main\n"
        "deb [arch=amd64] http://example.org/debian bookworm main contrib # comment\n"
        "deb http://example.org/debian bookworm-backports main\n"
        "deb-src http://example.org/debian bookworm main\n"
    )
    (parts / "debian.sources").write_text(
        "Types: deb deb-src\nURIs: http://example.org/a\n http://example.org/b\n"
        "Suites: bookworm-security trixie\nComponents: main\nSigned-By: /usr/share/keyrings/x.gpg\n\n"
        "Types: deb\nEnabled: no\nURIs: http://example.org/c\nSuites: bookworm\nComponents: main\n\n"
        "Types: deb\nURIs: http://example.org/other\nSuites: other-bookworm\nComponents: main\n"
    )
    assert host_sources("bookworm", tmp_path) == [
        "deb [arch=amd64] http://example.org/debian bookworm main contrib",
        "deb [signed-by=/usr/share/keyrings/x.gpg] http://example.org/a bookworm-security main",
        "deb [signed-by=/usr/share/keyrings/x.gpg] http://example.org/b bookworm-security main",
    ]
    with pytest.raises(TemplateError, match="no source"):
        host_sources("forky", tmp_path)


def archive_of(entries: list[tuple[str, bytes, int, bytes]]) -> tarfile.TarFile:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, mode, data in entries:
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if kind == tarfile.REGTYPE:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            else:
                info.linkname = data.decode()
                tar.addfile(info)
    buffer.seek(0)
    return tarfile.open(fileobj=buffer)


def test_the_tree_has_no_devices_caches_or_set_user_id_programs() -> None:
    tar = archive_of(
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
        ]
    )  # fmt: skip
    root = build_tree(tar, {m.name.removeprefix("./").strip("."): m for m in tar})
    found = read_erofs(written(root))
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

    monkeypatch.setattr("etude.sandbox.vm.image.fetch_packages", lambda *given: None)
    monkeypatch.setattr("etude.sandbox.vm.image._write_image", write)

    def build() -> VmImage:
        return asyncio.run(build_image(tmp_path, codename="bookworm", sources=["deb http://d bookworm main"]))

    image = build()
    kept = image.directory.stat().st_ino
    assert build().directory.stat().st_ino == kept
    image.kernel.write_bytes(b"kernal")
    with pytest.raises(TemplateError, match="build it anew"):
        find_image(tmp_path)
    assert build().kernel.read_bytes() == b"kernel"
    assert sorted(path.name for path in image.directory.parent.iterdir()) == [digest, "current"]
