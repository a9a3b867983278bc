"""What a guest's root file system needs of us: put these files into it, or build it around them."""

from __future__ import annotations

from pathlib import Path

from etude.sandbox.guest_program import guest_program
from etude.sandbox.types import Resources

VSOCK_PORT = 52
COMMAND_UID = 1000
DIRECTORY = "/opt/etude"
BASE = "/var/lib/etude/base"
_INIT = """#!/bin/sh
# First process of the guest: mounts what it needs and becomes the relay.
# Arguments: the place to listen at, then those of the program inside.
mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mount -t devtmpfs -o nosuid dev /dev 2>/dev/null
mkdir -p /dev/shm && mount -t tmpfs -o nosuid,nodev,mode=1777 shm /dev/shm
mount -t tmpfs -o nosuid,nodev,mode=755 run /run
mount -o nosuid,nodev /dev/vdb /var/lib/etude || exit 1
mkdir -p /var/lib/etude/upper /var/lib/etude/work /run/root
layers=lowerdir=/,upperdir=/var/lib/etude/upper,workdir=/var/lib/etude/work
mount -t overlay -o "$layers" root /run/root || exit 1
for part in proc sys dev dev/shm run var/lib/etude; do
    mkdir -p "/run/root/$part"
    mount --rbind "/$part" "/run/root/$part"
done
mkdir -p /run/root/tmp && chmod 1777 /run/root/tmp
ip link set lo up 2>/dev/null
export PATH=/usr/local/bin:/usr/bin:/bin
place=$1; shift
exec chroot /run/root /usr/bin/python3 -I -S {directory}/relay.py "$place" \\
    /usr/bin/python3 -I -S {directory}/guest.pyz "$@"
"""


def guest_files() -> dict[str, tuple[int, bytes]]:
    """Absolute path in the guest -> (mode, content)."""
    relay = Path(__file__).with_name("relay.py").read_bytes()
    return {
        f"{DIRECTORY}/init": (0o755, _INIT.format(directory=DIRECTORY).encode()),
        f"{DIRECTORY}/relay.py": (0o444, relay),
        f"{DIRECTORY}/guest.pyz": (0o444, guest_program()),
    }


def program_arguments(workspace: str, resources: Resources, command_uid: int | None) -> list[str]:
    """Arguments of the program inside."""
    arguments = ["--line", "stdio", "--workspace", workspace, "--base", BASE]
    arguments += ["--memory-bytes", str(resources.memory_bytes), "--cpu-s", str(resources.cpu_s)]
    return arguments if command_uid is None else [*arguments, "--uid", str(command_uid)]


def boot_arguments(workspace: str, resources: Resources, command_uid: int | None, extra: str) -> str:
    """The kernel's command line; what follows `--` it hands to the first process."""
    words = ["console=ttyS0", "reboot=k", "panic=1", "quiet", "loglevel=3", "random.trust_cpu=on"]
    words += [*extra.split(), f"init={DIRECTORY}/init", "--", f"vsock:{VSOCK_PORT}"]
    return " ".join([*words, *program_arguments(workspace, resources, command_uid)])
