"""Attempts to make the kernel keep memory that belongs to no process."""

from __future__ import annotations

import dataclasses

from tests.adversary.escape.model import DEFAULT_RESOURCES, Attempt

_GROUPS = "control groups"
_MANY = dataclasses.replace(DEFAULT_RESOURCES, disk_bytes=8 << 20)

MEMORY = [
    Attempt(
        "fill kernel memory with page tables",
        "the memory control group, or the watchdog, which counts page tables",
        ("memory watchdog", _GROUPS),
        """
        import mmap
        space = mmap.mmap(-1, 200 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000,
                          prot=mmap.PROT_READ)
        for position in range(0, len(space), 2 << 20):
            space[position]
        outlast()
        row = next(line for line in open("/proc/self/status") if line.startswith("VmPTE"))
        if int(row.split()[1]) < 300 << 10:
            impossible("this machine has larger pages: " + row)
        escaped(row)
        """,
        reach="shared kernel",
    ),
    Attempt(
        "fill kernel memory with locks on files",
        "the watchdog, which counts them",
        ("memory watchdog",),
        """
        import fcntl
        lock = struct.Struct("hhqqi4x")
        ready, children = os.pipe(), []
        for child in range(7):
            children.append(os.fork())
            if children[-1] == 0:
                held = [open(f"/tmp/{child}-{number}", "wb") for number in range(200)]
                for file in held:
                    for position in range(2000, 0, -2):
                        fcntl.fcntl(file, fcntl.F_SETLK, lock.pack(fcntl.F_WRLCK, 0, position, 1, 0))
                os.write(ready[1], b"x")
                signal.pause()
        for _ in children:
            hear(ready[0], 1, children)
        outlast()
        time.sleep(3)
        if any(os.waitpid(pid, os.WNOHANG)[0] for pid in children):
            raise OSError(errno.ENOMEM, "some were killed")
        escaped("1,400,000 locks")
        """,
        reach="shared kernel",
    ),
    Attempt(
        "fill kernel memory with attributes of files",
        "the number of inodes of the sandbox's tmpfs bounds attributes as well",
        ("tmpfs inodes",),
        """
        held = 0
        for number in range(500):
            path = f"/tmp/{number}"
            open(path, "w").close()
            try:
                os.setxattr(path, "user.x", bytes(60 << 10))
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    impossible("this kernel's tmpfs has no attributes")
                raise
            held += 60 << 10
        escaped(f"{held >> 20} MiB of attributes beside the disk")
        """,
        reach="shared kernel",
        resources=_MANY,
    ),
]
