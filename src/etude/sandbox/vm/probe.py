"""Whether guests run under KVM here: shown by booting one, never by opening the device.

`/dev/kvm` may open, and create machines, where no kernel ever comes up under it (nested virtualisation): it
hangs, or QEMU stops over a register that it may not set. The answer is kept in the state directory, for this
machine, kernel, QEMU and image.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from etude.errors import SandboxError
from etude.kit.durable import write_json
from etude.sandbox.snapshots import this_machine
from etude.sandbox.types import Resources
from etude.sandbox.vm.image import VmImage
from etude.sandbox.vm.qemu import Hardware, qemu_version
from etude.sandbox.vm.templates import boot_guest

KVM_BOOT_S = 20.0
"""With KVM a guest is up in a second or two."""
_DEVICE = Path("/dev/kvm")
_FILE = "vm-accelerator.json"


async def choose_accelerator(
    state: Path, image: VmImage, device: Path = _DEVICE, deadline_s: float = KVM_BOOT_S
) -> str:
    """`kvm` if a guest came up under it within the deadline, here, once; else `tcg` (emulation)."""
    if not os.access(device, os.R_OK | os.W_OK):
        return "tcg"
    here = {**this_machine(), "qemu": qemu_version(), "image": image.digest}
    known = _recall(state / _FILE)
    if known is not None and known.get("here") == here and known.get("accelerator") in ("kvm", "tcg"):
        return str(known["accelerator"])
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
            # That is the answer: this host cannot run guests under KVM.
            return False
        channel.close("the probe is over")
        await qemu.kill()
        return True


def _recall(path: Path) -> dict[str, object] | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return known if isinstance(known, dict) else None
