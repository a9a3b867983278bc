"""The boot of a guest: the init script of its initramfs, and the archive that a particular machine adds.

    image's initramfs       /init, busybox, the kernel modules for the machine's devices
    the machine's own one   /etude/guest.pyz, /etude/settings (arguments and limits)

The root is the image, read-only. The machine's own disk is formatted at the first start and contains the
workspace; `/tmp`, `/run` and `/dev/shm` are in memory. Then our program becomes process 1: when it ends, the
kernel panics, which ends QEMU.

When memory is used up the guest's kernel never kills process 1, but it panics when no other process is left
to kill. So all memory that outlives the agent's processes (files in memory, segments, messages, semaphores)
is bounded: the sum leaves room for our program.
"""

from __future__ import annotations

import shlex
import stat
from collections.abc import Iterable

from etude.sandbox.guest_program import guest_arguments, guest_program
from etude.sandbox.types import Resources

DIRECTORY = stat.S_IFDIR | 0o755
PROGRAM = stat.S_IFREG | 0o755
FILE = stat.S_IFREG | 0o644
_BLOCK_BYTES = 512

Entry = tuple[str, int, bytes]
"""Name without a leading slash, mode, content."""


def pack_cpio(entries: Iterable[Entry]) -> bytes:
    """A cpio archive; directories must come before their entries."""
    archive = bytearray()
    for number, (name, mode, data) in enumerate(entries, 1):
        archive += _record(number, name, mode, data)
    archive += _record(0, "TRAILER!!!", 0, b"")
    archive += bytes(-len(archive) % _BLOCK_BYTES)
    return bytes(archive)


def _record(number: int, name: str, mode: int, data: bytes) -> bytes:
    path = name.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % value for value in fields) + path
    head += bytes(-len(head) % 4)
    return head + data + bytes(-len(data) % 4)


UID = 1000
"""User of the agent's processes."""
_SERVER_FILES = 4096
"""Descriptors of our program: each forwarded connection takes one."""
MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "virtio_rng", "erofs")
"""Kernel modules that a guest needs, without their dependencies."""
_ROOM_BYTES = 35 << 20
"""Memory for our program and a few small others, besides that of the guest's kernel."""
_FLOOR_BYTES = 12 << 20
"""The agent's processes are killed when less is available: below, the kernel evicts programs in use."""
_FILE_BYTES = 1 << 10
"""Kernel memory of each file in memory, however small."""
_SEMAPHORE_BYTES, _QUEUE_BYTES, _PAGE_BYTES = 128, 16384, 4096
_FEWEST_FILES = 1024
_POSIX_QUEUES = 64
"""Number of queues; their bytes are bounded per user by RLIMIT_MSGQUEUE: 800 KiB."""
DIRECTORIES = ("workspace", "srv", "dev", "proc", "sys", "run", "tmp")
"""Directories that must exist in the image."""
_INIT = r"""#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
for m in @MODULES@; do $b insmod /modules/$m.ko; done
. /etude/settings
r=/root
$b mount -t erofs -o ro /dev/vda $r
for d in dev proc sys; do $b mount --move /$d $r/$d; done
$b mount -t tmpfs -o mode=755,size=4m,nosuid,nodev run $r/run
$b mount -t tmpfs -o mode=1777,size=$tmp_bytes,nosuid,nodev tmp $r/tmp
$b mkdir -p $r/dev/shm $r/dev/pts $r/dev/virtio-ports $r/run/etude
$b mount -t tmpfs -o mode=1777,size=$tmp_bytes,nosuid,nodev shm $r/dev/shm
$b mount -t devpts -o mode=620,ptmxmode=666 devpts $r/dev/pts
$b ln -s /proc/self/fd $r/dev/fd
for n in 0:stdin 1:stdout 2:stderr; do $b ln -s /proc/self/fd/${n%:*} $r/dev/${n#*:}; done
$b chroot $r /sbin/mke2fs -q -F -t ext4 -O ^has_journal -m 0 -E nodiscard,lazy_itable_init=1 /dev/vdb
$b mount -t ext4 -o nosuid,nodev,noatime,errors=continue $r/dev/vdb $r/srv
$b mkdir -p $r/srv/workspace $r/srv/base
$b mount --bind $r/srv/workspace $r/workspace
$b mount -o remount,bind,nosuid,nodev,noatime $r/workspace
$b cp /etude/guest.pyz $r/run/etude/
$b ip link set lo up
echo 0 > $r/proc/sys/user/max_user_namespaces
echo 1 > $r/proc/sys/kernel/dmesg_restrict
echo 2 > $r/proc/sys/kernel/kptr_restrict
echo 3 > $r/proc/sys/kernel/printk
$b chmod 600 $r/dev/rtc* $r/dev/hpet $r/dev/kmsg
n=0
until [ -e $r/dev/vport*p* ] || [ $n -ge 1000 ]; do $b usleep 10000; n=$((n+1)); done
for p in $r/dev/vport*p*; do $b ln -s ../${p##*/} $r/dev/virtio-ports/etude; done
limit
set -- /run/etude/guest.pyz --line /dev/virtio-ports/etude $arguments
exec $b switch_root $r /usr/bin/python3 -I -S -B "$@"
"""


def init_script(modules: list[str]) -> str:
    """The script `/init`; `modules` in loading order."""
    return _INIT.replace("@MODULES@", " ".join(modules))


def _lasting_bounds(room_bytes: int) -> list[str]:
    """Script lines that bound the memory that may outlive the agent's processes to `room_bytes` in all."""
    sysctl = {
        "kernel/shmall": room_bytes // 8 // _PAGE_BYTES,
        "kernel/shmmax": room_bytes // 8,
        "kernel/shmmni": _FEWEST_FILES,
        "kernel/msgmax": _QUEUE_BYTES // 2,
        "kernel/msgmnb": _QUEUE_BYTES,
        "kernel/msgmni": max(1, room_bytes // 32 // _QUEUE_BYTES),
        # Semaphores in a set; in all sets; operations in one call; sets.
        "kernel/sem": f"250 {room_bytes // 64 // _SEMAPHORE_BYTES} 100 {_FEWEST_FILES}",
        "fs/mqueue/queues_max": _POSIX_QUEUES,
    }
    return [
        _remount("tmp", room_bytes // 2, max(_FEWEST_FILES, room_bytes // 16 // _FILE_BYTES)),
        _remount("dev/shm", room_bytes // 4, _FEWEST_FILES),
        *(f"echo {value} > $r/proc/sys/{name}" for name, value in sysctl.items()),
    ]


def machine_archive(resources: Resources) -> bytes:
    """The part of the initramfs that depends on Étude and the sandbox's limits, not on the image."""
    arguments = guest_arguments(resources, uid=UID, base="/srv/base", floor_bytes=_FLOOR_BYTES)
    room_bytes = max(resources.memory_bytes - _ROOM_BYTES, resources.memory_bytes // 4)
    settings = "\n".join(
        (
            f"tmp_bytes={room_bytes // 2}",
            f"arguments={shlex.quote(shlex.join(arguments))}",
            "limit() {",
            *_lasting_bounds(room_bytes),
            f"ulimit -u {resources.num_processes}",
            f"ulimit -n {_SERVER_FILES}",
            f"ulimit -f {-(-resources.file_bytes // 512)}",
            "ulimit -c 0",
            "}",
            "",
        )
    )
    return pack_cpio(
        [
            ("etude", DIRECTORY, b""),
            ("etude/guest.pyz", FILE, guest_program()),
            ("etude/settings", FILE, settings.encode()),
        ]
    )


def _remount(path: str, size_bytes: int, files: int) -> str:
    options = f"remount,mode=1777,nosuid,nodev,size={size_bytes},nr_inodes={files}"
    return f"$b mount -t tmpfs -o {options} {path.rpartition('/')[2]} $r/{path}"


def kernel_arguments(accelerator: str) -> str:
    """The kernel's command line. An emulated processor does not speculate, so it needs no mitigations."""
    words = ["console=ttyS0", "panic=-1", "loglevel=3", "random.trust_cpu=on", "no_timer_check"]
    if accelerator == "tcg":
        words += ["mitigations=off", "tsc=reliable"]
    return " ".join(words)
