"""The guest image: kernel, initramfs and root file system, made of Debian packages, named by their digest.

    <state>/images/vm/<digest>/{kernel,initrd,root.img,manifest.json}
    <state>/images/vm/current          names the one that new sandboxes use

Built twice from the same package versions it is the same to the byte: one date, sorted entries, no caches,
no name of the building host. An image appears whole or not at all.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
import stat
import tarfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.kit.durable import DRAFTS, publish_directory, sync_tree, write_text
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.errors import TemplateError
from etude.sandbox.vm.cpio import DIRECTORY, FILE, PROGRAM, Entry, pack_cpio
from etude.sandbox.vm.erofs import Node, write_erofs
from etude.sandbox.vm.guest_boot import DIRECTORIES, MODULES, init_script
from etude.sandbox.vm.packages import (
    KERNEL_DIRECTORY,
    fetch_packages,
    host_codename,
    host_sources,
    unpack_package,
)

FORMAT = 1
FIX = "etude sandbox image build"
DEFAULT_PACKAGES = ("python3", "python3-pytest", "procps", "busybox-static", "e2fsprogs")
NEEDED_PACKAGES = ("python3", "busybox-static", "e2fsprogs")
KERNEL, INITRD, ROOT, MANIFEST, CURRENT = "kernel", "initrd", "root.img", "manifest.json", "current"
EPOCH_S = 1_700_000_000
"""The one date of all files."""
_UUID = uuid.UUID("65747564-6500-4000-8000-6775657374ff")
_DROPPED = ("boot", "dev", "var/cache", "var/log", "var/lib/apt", "var/lib/dpkg/info", "tmp", "run",
            "var/lib/systemd", KERNEL_DIRECTORY)  # fmt: skip
"""Directories whose contents stay out."""
_REPLACED: dict[str, bytes | str] = {
    "etc/hostname": b"etude\n",
    "etc/hosts": b"127.0.0.1 localhost\n::1 localhost\n",
    "etc/resolv.conf": b"",
    "etc/passwd": b"root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/workspace:/bin/bash\n"
    b"nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": b"root:x:0:\ntty:x:5:\nagent:x:1000:\nnogroup:x:65534:\n",
    "etc/shadow": b"root:*:19000::::::\nagent:*:19000::::::\n",
    "etc/machine-id": "../run/machine-id",
}
"""Files (bytes) and symbolic links (text) that do not come from packages."""
_NAME = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class VmImage:
    """A guest image on this host, checked when it was opened."""

    digest: str
    directory: Path
    manifest: dict[str, Any]

    @property
    def kernel(self) -> Path:
        return self.directory / KERNEL

    @property
    def initrd(self) -> Path:
        return self.directory / INITRD

    @property
    def root(self) -> Path:
        return self.directory / ROOT


def images_directory(state: Path) -> Path:
    """Where guest images lie."""
    return state / "images" / "vm"


async def build_image(
    state: Path,
    packages: Sequence[str] = DEFAULT_PACKAGES,
    codename: str | None = None,
    sources: Sequence[str] | None = None,
) -> VmImage:
    """Builds an image and makes it the current one. Takes a minute or so.

    `sources`: lines of a sources.list; None: this host's. Raises TemplateError.
    """
    return await asyncio.to_thread(_build_image, state, packages, codename, sources)


def _build_image(
    state: Path, packages: Sequence[str], codename: str | None, sources: Sequence[str] | None
) -> VmImage:
    missing = sorted(set(NEEDED_PACKAGES) - set(packages))
    if missing:
        raise TemplateError("packages that every guest needs are missing", field="packages", received=missing)
    codename = codename or host_codename()
    directory = images_directory(state)
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory, DRAFTS)
    with ScratchDirectory(directory, DRAFTS) as scratch:
        making = scratch / "image"
        making.mkdir(mode=0o700)
        archive = making / "root.tar"
        fetch_packages(packages, codename, sources or host_sources(codename), archive, EPOCH_S)
        manifest = _write_image(archive, making, codename, packages)
        digest = str(manifest["digest"])
        # A damaged one makes room: its error said to build it anew, which gives the same digest.
        publish_directory(making, directory / digest, keep=lambda: _is_whole(state, digest))
        write_text(directory / CURRENT, digest + "\n")
    return find_image(state)


def find_image(state: Path, digest: str | None = None) -> VmImage:
    """The current image, or the one of that digest, every file checked. Raises TemplateError."""
    directory = images_directory(state)
    try:
        digest = digest or (directory / CURRENT).read_text(encoding="ascii").strip()
        if not _NAME.fullmatch(digest):
            raise ValueError(digest)
        manifest = json.loads((directory / digest / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise TemplateError(
            "there is no guest image", field="image", received=digest, fix=f"build one: {FIX}"
        ) from error
    except (OSError, ValueError) as error:
        raise _damaged(digest, str(error)) from error
    if manifest.get("format") != FORMAT or manifest.get("digest") != digest:
        raise _damaged(digest, "its manifest is of another version")
    for name, expected in manifest["files"].items():
        path = directory / digest / name
        if not path.is_file() or _file_digest(path) != expected:
            raise _damaged(digest, f"{name} does not have its digest")
    return VmImage(digest, directory / digest, manifest)


def _is_whole(state: Path, digest: str) -> bool:
    try:
        find_image(state, digest)
    except TemplateError:
        return False
    return True


def _damaged(digest: str | None, reason: str) -> TemplateError:
    return TemplateError(
        f"the guest image is damaged: {reason}", field="image", received=digest, fix=f"build it anew: {FIX}"
    )


def _write_image(archive: Path, target: Path, codename: str, packages: Sequence[str]) -> dict[str, Any]:
    """Writes the four files of an image beside the archive, which is removed; returns the manifest."""
    with tarfile.open(archive) as tar:
        members = {_name(member): member for member in tar}
        kernel_package = target / "kernel.deb"
        for name, member in members.items():
            if name.startswith(f"{KERNEL_DIRECTORY}/") and member.isreg():
                kernel_package.write_bytes(_content(tar, member)())
        versions = _versions(_content(tar, members["var/lib/dpkg/status"])().decode())
        busybox = next(
            _content(tar, members[name])() for name in ("usr/bin/busybox", "bin/busybox") if name in members
        )
        tree = build_tree(tar, members)
        with (target / ROOT).open("wb") as file:
            write_erofs(tree, file, _UUID.bytes, EPOCH_S)
    release = _write_kernel(kernel_package, busybox, target)
    archive.unlink()
    files = {name: _file_digest(target / name) for name in (KERNEL, INITRD, ROOT)}
    digest = hashlib.blake2b("\n".join(files.values()).encode(), digest_size=20).hexdigest()
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "digest": digest,
        "files": files,
        "release": codename,
        "kernel": release,
        "asked_for": sorted(packages),
        "packages": versions,
    }
    text = json.dumps(manifest, indent=1, sort_keys=True)
    (target / MANIFEST).write_text(text, encoding="utf-8")
    sync_tree(target)
    return manifest


def build_tree(tar: tarfile.TarFile, members: dict[str, tarfile.TarInfo]) -> Node:
    """The root file system: what the archive holds, less caches and devices; no set-user-id programs."""
    root = Node(stat.S_IFDIR | 0o755)
    nodes = {"": root}
    for name, member in members.items():
        if not name or any(name.startswith(f"{folder}/") for folder in _DROPPED):
            continue
        permissions = member.mode & 0o1777
        if member.isdir():
            node = Node(stat.S_IFDIR | permissions)
        elif member.isreg():
            node = _file(permissions, name, member, _content(tar, member))
        elif member.issym():
            node = _link(member.linkname)
        elif member.islnk():
            node = nodes[_name_of(member.linkname)]
        else:
            continue
        nodes[name] = node
        folder, _, base = name.rpartition("/")
        nodes[folder].children[base] = node
    for name in (KERNEL_DIRECTORY, "boot"):
        root.children.pop(name, None)
    for name in DIRECTORIES:
        root.children.setdefault(name, Node(stat.S_IFDIR | 0o755))
    for name, content in _REPLACED.items():
        folder, _, base = name.rpartition("/")
        node = _link(content) if isinstance(content, str) else _plain(content)
        nodes[folder].children[base] = node
    return root


def _file(permissions: int, name: str, member: tarfile.TarInfo, read: Callable[[], bytes]) -> Node:
    if name.endswith(".pyc"):
        return Node(stat.S_IFREG | permissions, member.size, lambda: _always_valid(read()))
    return Node(stat.S_IFREG | permissions, member.size, read)


def _always_valid(data: bytes) -> bytes:
    """Compiled Python that is taken without a look at its source's time: all times become one here."""
    return data[:4] + (1).to_bytes(4, "little") + bytes(8) + data[16:]


def _link(target: str) -> Node:
    data = target.encode()
    return Node(stat.S_IFLNK | 0o777, len(data), lambda: data)


def _plain(data: bytes) -> Node:
    return Node(stat.S_IFREG | 0o644, len(data), lambda: data)


def _name_of(path: str) -> str:
    return os.path.normpath(path).lstrip("./") if path.startswith(".") else path.strip("/")


def _name(member: tarfile.TarInfo) -> str:
    name = member.name.removeprefix("./").strip("/")
    return "" if name == "." else name


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Callable[[], bytes]:
    def read() -> bytes:
        file = tar.extractfile(member)
        assert file is not None, "only regular files are read"
        return file.read()

    return read


def _write_kernel(package: Path, busybox: bytes, target: Path) -> str:
    """Writes kernel and initramfs out of the kernel's package; returns the kernel's release."""
    unpacked = target / "unpacked"
    if not package.exists():
        raise TemplateError("the kernel's package was not found", field="image", received=str(package.name))
    unpack_package(package, unpacked)
    (kernel,) = unpacked.glob("boot/vmlinuz-*")
    shutil.copyfile(kernel, target / KERNEL)
    modules = _modules({path.stem.replace("-", "_"): path for path in unpacked.rglob("*.ko")})
    entries: list[Entry] = [
        (name, DIRECTORY, b"") for name in ("bin", "dev", "proc", "sys", "root", "modules")
    ]
    entries += [
        ("bin/busybox", PROGRAM, busybox),
        ("init", PROGRAM, init_script([name for name, _ in modules]).encode()),
    ]
    entries += [(f"modules/{name}.ko", FILE, data) for name, data in modules]
    (target / INITRD).write_bytes(pack_cpio(entries))
    shutil.rmtree(unpacked)
    package.unlink()
    return kernel.name.removeprefix("vmlinuz-")


def _modules(available: dict[str, Path]) -> list[tuple[str, bytes]]:
    """The wanted modules in an order in which each finds those that it needs. What is built in has none."""
    found: dict[str, bytes] = {}

    def add(name: str) -> None:
        if name in found or name not in available:
            return
        data = available[name].read_bytes()
        needed = re.search(rb"\0depends=([^\0]*)", data)
        for other in needed[1].decode().split(",") if needed else []:
            add(other.replace("-", "_"))
        found[name] = data

    for name in MODULES:
        add(name)
    return list(found.items())


def _versions(status: str) -> dict[str, str]:
    """Installed packages and their versions."""
    rows = re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)$", status, re.MULTILINE)
    return dict(sorted(rows))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
