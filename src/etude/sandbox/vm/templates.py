"""Warmed templates: guests that were booted once and saved; every new sandbox is a copy of one.

    <state>/vm-templates/<key>/{ram,disk,devices,manifest.json}

The key is a digest of everything that such a state depends on: image, the program inside, hardware, limits,
QEMU's version and, under KVM, processor and kernel. So an incompatible template is never found; one that is
found is verified to the byte once in each process. Templates are published atomically; of several processes
that warm the same one the first wins.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from blake3 import blake3

from etude.errors import SandboxError
from etude.kit.durable import DRAFTS, publish_directory, read_record, write_json
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.kit.tasks import finish_in_thread
from etude.sandbox.channel import READY, Channel
from etude.sandbox.snapshots import this_machine
from etude.sandbox.types import Resources
from etude.sandbox.vm.guest_boot import kernel_arguments, machine_archive
from etude.sandbox.vm.image import VmImage
from etude.sandbox.vm.qemu import Boot, Hardware, Qemu, command_line, qemu_version
from etude.sandbox.vm.state import DEVICES, DISK, RAM, Machine, make_sparse

FORMAT = 1
MANIFEST = "manifest.json"
BOOT_S = 120.0
WARM_S = 60.0
_CONSOLE_BYTES = 2000
_WARM_UP: tuple[Mapping[str, Any], ...] = (
    {"op": "command", "cmd": "python3 -c 'import json, pathlib, subprocess, unittest'; ls -l / >/dev/null"},
    {"op": "command", "cmd": "true"},
)
"""Requests run once, so that files which most commands need are in the guest's memory."""


class WarmTemplates:
    """The warmed templates below one state directory."""

    def __init__(self, state: Path) -> None:
        self._root = state / "vm-templates"
        self._ready: set[str] = set()
        self._warming: dict[str, asyncio.Lock] = {}

    async def get(self, image: VmImage, resources: Resources, hardware: Hardware) -> Path:
        """Directory of the state for such sandboxes, warmed now if there is none. Raises SandboxError."""
        key = template_key(image, resources, hardware)
        directory = self._root / key
        async with self._warming.setdefault(key, asyncio.Lock()):
            if key not in self._ready or not directory.is_dir():
                if not await asyncio.to_thread(_is_whole, directory):
                    await self._warm(key, image, resources, hardware)
                self._ready.add(key)
        return directory

    async def _warm(self, key: str, image: VmImage, resources: Resources, hardware: Hardware) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        sweep(self._root, DRAFTS)
        with ScratchDirectory(self._root, DRAFTS) as scratch:
            making = scratch / key
            making.mkdir(mode=0o700)
            with tempfile.TemporaryDirectory(prefix="boot-", dir=making) as working:
                name = f"template-{key[:8]}"
                qemu, channel = await boot_guest(name, image, resources, hardware, Path(working))
                try:
                    await _run_warm_up(channel)
                    await channel.request({"op": "hold"}, b"", WARM_S)
                    await qemu.execute("stop")
                    await Machine(key, qemu, hardware, image, Path(working)).write_state(making)
                finally:
                    channel.close("the template is warmed")
                    await asyncio.shield(qemu.kill())
            await finish_in_thread(_write_manifest, making, key)
            await finish_in_thread(_publish, making, self._root / key)


async def boot_guest(
    name: str,
    image: VmImage,
    resources: Resources,
    hardware: Hardware,
    directory: Path,
    deadline_s: float = BOOT_S,
) -> tuple[Qemu, Channel]:
    """Boots a guest with its files in `directory`, until its program is ready. Raises SandboxError."""
    initrd, console = directory / "initrd", directory / "console"
    await finish_in_thread(_concatenate, image.initrd, machine_archive(resources), initrd)
    make_sparse(directory / RAM, hardware.memory_bytes)
    make_sparse(directory / DISK, hardware.disk_bytes)
    boot = Boot(image.kernel, initrd, kernel_arguments(hardware.accelerator), console)
    qemu = await Qemu.spawn(name, hardware, image.root, directory / DISK, directory / RAM, boot)
    channel = Channel(qemu.detach_line(), name)
    try:
        await channel.answer(READY, deadline_s)
    except BaseException as error:
        channel.close("the guest does not start")
        await asyncio.shield(qemu.kill())
        if isinstance(error, SandboxError):
            log = console.read_bytes()[-_CONSOLE_BYTES:].decode(errors="replace") if console.exists() else ""
            raise SandboxError(
                f"the guest does not start ({error.message}): {log.strip()}", field="sandbox", received=name
            ) from error
        raise
    return qemu, channel


def template_key(image: VmImage, resources: Resources, hardware: Hardware) -> str:
    """Digest of everything that a warmed state depends on."""
    places = (Path("root"), Path("disk"), Path("ram"))
    rows: list[str] = [
        str(FORMAT),
        image.digest,
        hashlib.blake2b(machine_archive(resources)).hexdigest(),
        qemu_version(),
        json.dumps(dataclasses.asdict(resources), sort_keys=True),
        kernel_arguments(hardware.accelerator),
        json.dumps(_WARM_UP),
        *command_line(hardware, *places, line=0, control=1),
    ]
    if hardware.accelerator == "kvm":
        rows.append(json.dumps(this_machine(), sort_keys=True))
    return hashlib.blake2b("\0".join(rows).encode(), digest_size=20).hexdigest()


async def _run_warm_up(channel: Channel) -> None:
    common: dict[str, Any] = {"env": {}, "cwd": ".", "limit_bytes": 1 << 16, "timeout_s": WARM_S}
    for step in _WARM_UP:
        await channel.request({**common, **step}, b"", WARM_S)
    await channel.request({"op": "tests", "paths": [], "timeout_s": WARM_S}, b"", WARM_S)
    await channel.request({"op": "install", "files": []}, b"", WARM_S)


def _concatenate(image: Path, own: bytes, target: Path) -> None:
    with target.open("wb") as file:
        file.write(image.read_bytes())
        file.write(own)


def _write_manifest(directory: Path, key: str) -> None:
    files = {name: _digest(directory / name) for name in (RAM, DISK, DEVICES)}
    text = json.dumps({"format": FORMAT, "key": key, "files": files}, indent=1)
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def _publish(directory: Path, target: Path) -> None:
    """Publishes a finished template. A whole one of another process is kept: it is equivalent, and machines
    may be starting from it, which need all three files of one guest."""
    publish_directory(directory, target, keep=lambda: _is_whole(target))


def _is_whole(directory: Path) -> bool:
    """Whether a template exists, complete and undamaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return bool(
            manifest["format"] == FORMAT
            and manifest["key"] == directory.name
            and all(_digest(directory / name) == digest for name, digest in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _digest(path: Path) -> str:
    state = blake3(max_threads=blake3.AUTO)
    state.update_mmap(path)
    return state.hexdigest()


KVM_BOOT_S = 20.0
"""Deadline of the probe; with KVM a guest boots in a second or two."""
_DEVICE = Path("/dev/kvm")
_FILE = "vm-accelerator.json"


async def choose_accelerator(
    state: Path, image: VmImage, device: Path = _DEVICE, deadline_s: float = KVM_BOOT_S
) -> str:
    """`kvm` if a guest boots under it within the deadline, else `tcg` (emulation); remembered per machine."""
    if not os.access(device, os.R_OK | os.W_OK):
        return "tcg"
    here = {**this_machine(), "qemu": qemu_version(), "image": image.digest}
    known = read_record(state / _FILE)
    if known.get("here") == here and known.get("accelerator") in ("kvm", "tcg"):
        return known["accelerator"]
    accelerator = "kvm" if await _boots_under_kvm(state, image, deadline_s) else "tcg"
    write_json(state / _FILE, {"here": here, "accelerator": accelerator})
    return accelerator


async def _boots_under_kvm(state: Path, image: VmImage, deadline_s: float) -> bool:
    resources = Resources()
    hardware = Hardware.for_resources(resources, "kvm")
    with tempfile.TemporaryDirectory(prefix="probe-", dir=state) as directory:
        try:
            qemu, channel = await boot_guest("probe", image, resources, hardware, Path(directory), deadline_s)
        except SandboxError:
            # This host cannot run guests under KVM.
            return False
        channel.close("the probe is over")
        await qemu.kill()
        return True
