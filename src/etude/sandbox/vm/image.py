"""Guest images: kernel, initramfs and root file system, built from Debian packages by `mmdebstrap` and
`mkfs.erofs`, and named by their digest.

    <state>/images/vm/<digest>/{kernel,initrd,root.img,manifest.json}
    <state>/images/vm/current          digest of the image for new sandboxes

Builds are reproducible to the byte for the same package versions: one date, sorted entries, no caches, no
name of the building host. Images are published atomically.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.kit.durable import DRAFTS, publish_directory, sync_tree, write_text
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.errors import TemplateError
from etude.sandbox.images.debootstrap import write_archive
from etude.sandbox.vm.guest_boot import (
    DIRECTORIES,
    DIRECTORY,
    FILE,
    MODULES,
    PROGRAM,
    Entry,
    init_script,
    pack_cpio,
)

FORMAT = 1
FIX = "etude sandbox image build"
DEFAULT_PACKAGES = ("python3", "python3-pytest", "procps", "busybox-static", "e2fsprogs")
NEEDED_PACKAGES = ("python3", "busybox-static", "e2fsprogs")
KERNEL, INITRD, ROOT, MANIFEST, CURRENT = "kernel", "initrd", "root.img", "manifest.json", "current"
EPOCH_S = 1_700_000_000
"""Modification time of all files."""
BUILD_S = 1800.0
_KERNEL = "linux-image-cloud-amd64"
_KERNEL_DIRECTORY = "etude-kernel"
"""Directory of the kernel's package in the output of mmdebstrap."""
_FETCH_KERNEL = (
    f'mkdir "$1/{_KERNEL_DIRECTORY}" && cd "$1/{_KERNEL_DIRECTORY}" '
    '&& export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" '
    f"&& apt-get -q download $(apt-cache depends {_KERNEL} "
    "| sed -n 's/.*Depends: \\(linux-image-[^ ]*\\)$/\\1/p')"
)
_LEFT_OUT = tuple(f"/usr/share/{name}/*" for name in ("doc", "man", "locale", "info"))
_MAKE_ROOT = ("mkfs.erofs", "--quiet", "-x-1", f"-T{EPOCH_S}", "-U65747564-6500-4000-8000-6775657374ff",
              "--all-root", "-Eforce-inode-compact")  # fmt: skip
_TOOLS = {"mmdebstrap": "mmdebstrap", "mkfs.erofs": "erofs-utils", "dpkg-deb": "dpkg"}
"""Program of a build -> its package."""
_DROPPED = ("boot", "dev", "var/cache", "var/log", "var/lib/apt", "var/lib/dpkg/info", "tmp", "run",
            "var/lib/systemd")  # fmt: skip
"""Directories whose contents are left out."""
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
    """A guest image on this host, verified when it was opened."""

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
    """Directory of the guest images."""
    return state / "images" / "vm"


async def build_image(
    state: Path, packages: Sequence[str] = DEFAULT_PACKAGES, codename: str | None = None
) -> VmImage:
    """Builds an image of this host's Debian release (or another one's: `codename`) and makes it the current
    one. Takes minutes. Raises TemplateError, ResourceError."""
    missing = sorted(set(NEEDED_PACKAGES) - set(packages))
    if missing:
        raise TemplateError("packages that every guest needs are missing", field="packages", received=missing)
    for program in _TOOLS:
        if shutil.which(program) is None:
            raise _not_installed(program)
    codename = codename or _host_codename()
    directory = images_directory(state)
    directory.mkdir(parents=True, exist_ok=True)
    sweep(directory, DRAFTS)
    options = ["--variant=essential", f"--include={','.join(packages)}"]
    options += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    options.append(f"--customize-hook={_FETCH_KERNEL}")
    with ScratchDirectory(directory, DRAFTS) as scratch:
        archive, making = scratch / "root.tar", scratch / "image"
        await write_archive(codename, archive, options, EPOCH_S, BUILD_S, field="image")
        making.mkdir(mode=0o700)
        manifest = await asyncio.to_thread(_write_image, archive, making, codename, packages)
        digest = str(manifest["digest"])
        # A damaged image of the same digest is replaced: its error asks for a new build.
        publish_directory(making, directory / digest, keep=lambda: _is_whole(state, digest))
        write_text(directory / CURRENT, digest + "\n")
    return find_image(state)


def _host_codename() -> str:
    """Codename of this host's Debian release, such as `bookworm`. Raises TemplateError on other systems."""
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    if release.get("ID") != "debian" or "VERSION_CODENAME" not in release:
        raise TemplateError(
            "guest images are built from the host's Debian sources",
            field="image",
            received=release.get("PRETTY_NAME"),
            fix="build on Debian",
        )
    return release["VERSION_CODENAME"]


def find_image(state: Path, digest: str | None = None) -> VmImage:
    """The current image, or the one with the digest, after verifying every file. Raises TemplateError."""
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
        f"the guest image is damaged: {reason}", field="image", received=digest, fix=f"rebuild it: {FIX}"
    )


def _write_image(archive: Path, target: Path, codename: str, packages: Sequence[str]) -> dict[str, Any]:
    """Writes the four files of an image into `target`; returns the manifest. Raises TemplateError."""
    tree = archive.with_name("tree")
    unpack_root(archive, tree)
    versions = _versions((tree / "var/lib/dpkg/status").read_text(encoding="utf-8"))
    busybox = next(path for path in (tree / "usr/bin/busybox", tree / "bin/busybox") if path.exists())
    found = list((tree / _KERNEL_DIRECTORY).glob("*.deb"))
    if len(found) != 1:
        raise TemplateError(
            "the kernel's package was not found",
            field="image",
            received=[path.name for path in found],
            fix=f"check that `apt-cache depends {_KERNEL}` names one image with the sources of the build",
        )
    release = _write_kernel(found[0], busybox.read_bytes(), target)
    shutil.rmtree(tree / _KERNEL_DIRECTORY)
    make_root(tree, target / ROOT)
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


def unpack_root(archive: Path, tree: Path) -> None:
    """Unpacks the root file system from an archive, without caches, devices and set-user-id bits."""
    with tarfile.open(archive) as tar:
        tar.extractall(tree, filter=_select)
    shutil.rmtree(tree / "boot", ignore_errors=True)
    for name in DIRECTORIES:
        (tree / name).mkdir(exist_ok=True)
        (tree / name).chmod(0o755)
    for name, content in _REPLACED.items():
        path = tree / name
        path.unlink(missing_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
            path.chmod(0o644)
    for folder, _, names in os.walk(tree):
        for path in (Path(folder, name) for name in names if name.endswith(".pyc")):
            data = path.read_bytes()
            # An unchecked hash-based .pyc, which does not contain the time of its source.
            path.write_bytes(data[:4] + (1).to_bytes(4, "little") + bytes(8) + data[16:])


def _select(member: tarfile.TarInfo, place: str) -> tarfile.TarInfo | None:
    name = member.name.removeprefix("./").strip("/")
    is_kept = member.isdir() or member.isreg() or member.issym() or member.islnk()
    if not is_kept or any(name.startswith(f"{folder}/") for folder in _DROPPED):
        return None
    plain = member.replace(mode=member.mode & 0o1777, uid=os.getuid(), gid=os.getgid(), uname="", gname="")
    return tarfile.tar_filter(plain, place)


def make_root(tree: Path, target: Path) -> None:
    """Writes the file system, all owned by root; equal trees give equal bytes. Raises TemplateError."""
    run_tool(*_MAKE_ROOT, target, tree)


def run_tool(program: str, *arguments: str | Path) -> None:
    """Runs a program of a Debian package until it ends. Raises TemplateError."""
    try:
        subprocess.run([program, *arguments], check=True, capture_output=True, timeout=BUILD_S)
    except FileNotFoundError as error:
        raise _not_installed(program) from error
    except subprocess.SubprocessError as error:
        output = getattr(error, "stderr", None) or b""
        raise TemplateError(
            f"{program} failed: {output.decode(errors='replace').strip()[-1500:] or error}", field="image"
        ) from error


def _not_installed(program: str) -> TemplateError:
    fix = f"apt-get install {_TOOLS[program]}"
    return TemplateError("is not installed", field="image", received=program, fix=fix)


def _write_kernel(package: Path, busybox: bytes, target: Path) -> str:
    """Writes kernel and initramfs from the kernel's package; returns the kernel's release."""
    unpacked = package.with_name("unpacked")
    run_tool("dpkg-deb", "-x", package, unpacked)
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
    return kernel.name.removeprefix("vmlinuz-")


def _modules(available: dict[str, Path]) -> list[tuple[str, bytes]]:
    """`MODULES` and their dependencies, in loading order; built-in ones have no file and are left out."""
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
