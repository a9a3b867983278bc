"""The last step before runsc: a user and a mount namespace of its own. Standard library only.

    main([plan as JSON])

runsc then believes itself root, and is a plain user to the host: the real root gives itself up for nobody
before it makes the user namespace, so that id 0 of the host is never mapped. (`runsc --rootless` does
something like it, and knows no `restore`.) What runsc needs is bound below `HALL`, a tmpfs that hides
the host's own: the paths there are the same in every call, whatever the host's directories are called and
the user who may enter them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NoReturn

from etude.sandbox.inside import kernel
from etude.sandbox.inside.rights import enter_own_namespaces

HALL = "/tmp"
WORK, ROOTFS, IMAGE, PREFIX, RUNSC = (
    f"{HALL}/{name}" for name in ("work", "rootfs", "image", "prefix", "runsc")
)
"""One sandbox's directory, the root file system that all share, a checkpoint, the interpreter, runsc."""


def main(arguments: list[str]) -> NoReturn:
    """`{"binds": {path below HALL: host path}, "control": [cgroup.procs files], "argv": [...]}`."""
    plan = json.loads(arguments[0])
    for path in plan["control"]:
        Path(path).write_text(str(os.getpid()), encoding="ascii")
    enter_own_namespaces(lambda: _furnish(plan["binds"]))
    # Changing ids also made the kernel forget it.
    kernel.die_with_parent()
    os.chdir("/")
    os.execv(plan["argv"][0], plan["argv"])


def _furnish(binds: dict[str, str]) -> None:
    kernel.mount("", "/", flags=kernel.MS_PRIVATE | kernel.MS_REC)
    # Opened first: what lies below HALL itself would be hidden.
    sources = {Path(target): os.open(source, os.O_PATH) for target, source in binds.items()}
    kernel.mount("hall", HALL, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    for target, descriptor in sources.items():
        source = Path(f"/proc/self/fd/{descriptor}")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            target.mkdir(exist_ok=True)
        else:
            target.touch()
        kernel.mount(str(source), str(target), flags=kernel.MS_BIND | kernel.MS_REC)
        os.close(descriptor)
