"""How a sandbox's container is made, and what is copied into it before it starts."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from etude.sandbox.guest_program import guest_arguments, guest_program
from etude.sandbox.types import Resources

PROGRAM = "/var/lib/etude/guest.pyz"
BASE = "/var/lib/etude/base"
IMAGE = "python:3.11-slim"
"""Of sandboxes whose template names none. An image must hold Python 3.9 or newer, and a shell."""
COMMAND_UID = 1000
OWNER_LABEL = "etude.owner"
HOST_LABEL = "etude.host"
SERVER_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What the server needs to run commands as another user and to look after that user's files and processes.
Commands themselves have none, and get none back: no-new-privileges."""
_SERVER_PROCESSES, _SERVER_FILES = 8, 256
_SHARED_MEMORY_BYTES = 64 << 20
_PROCESSES_OF_A_USER = 4096
"""The kernel counts them over all containers, so that `num_processes` is kept by the pids limit. An engine
that may not raise its own limit fails on the one that it would set by itself."""


def create_arguments(
    hostname: str,
    image: str,
    command_uid: int | None,
    workspace: str,
    resources: Resources,
    labels: Mapping[str, str],
) -> list[str]:
    """The words of `create`: a container without network or mounts, with limits, that is removed when it
    ends. `command_uid`: user id that commands run as; None: root's, with the server's capabilities."""
    limits = {"nofile": resources.open_files + _SERVER_FILES, "fsize": max(resources.file_bytes, 1 << 20)}
    limits |= {"core": 0, "nproc": _PROCESSES_OF_A_USER}
    pids = resources.num_processes + _SERVER_PROCESSES
    words = ["--hostname", hostname, "--interactive", "--rm", "--pull=never", "--network=none"]
    words += ["--workdir=/", "--no-healthcheck", "--ipc=private", "--cgroupns=private"]
    words += ["--log-driver=none", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    words += [f"--cap-add={one}" for one in SERVER_CAPABILITIES]
    words += [f"--memory={resources.memory_bytes}", f"--memory-swap={resources.memory_bytes}"]
    words += [f"--cpus={resources.cpus:g}", f"--pids-limit={pids}"]
    words += [f"--shm-size={min(resources.disk_bytes, _SHARED_MEMORY_BYTES)}"]
    words += [f"--ulimit={limit}={value}:{value}" for limit, value in limits.items()]
    words += [f"--label={key}={value}" for key, value in labels.items()]
    words += ["--env=PYTHONHASHSEED=0", "--env=LANG=C.UTF-8", "--user=0:0"]
    words += ["--entrypoint=python3", image, "-I", "-S", "-B", PROGRAM]
    user = {} if command_uid is None else {"uid": command_uid}
    return words + guest_arguments(resources, line="stdio", workspace=workspace, base=BASE, **user)


def pack_upload(workspace: str, command_uid: int | None) -> bytes:
    """The tar archive that is unpacked at `/` before the start: the program, and its directories."""
    owner, buffer = command_uid or 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, mode, user, content in (
            ("var/lib/etude", 0o755, 0, None),
            (PROGRAM, 0o444, 0, guest_program()),
            (BASE, 0o755, 0, None),
            (workspace, 0o755, owner, None),
        ):
            row = tarfile.TarInfo(name.strip("/"))
            row.mode, row.uid, row.gid = mode, user, user
            row.type, row.size = (tarfile.DIRTYPE, 0) if content is None else (tarfile.REGTYPE, len(content))
            archive.addfile(row, None if content is None else io.BytesIO(content))
        size = archive.offset
    # Without the padding: podman stops reading at the end mark, and then fails to write what follows it.
    return buffer.getvalue()[:size] + bytes(2 * tarfile.BLOCKSIZE)
