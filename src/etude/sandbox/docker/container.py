"""What a sandbox's container looks like to the engine, and what is copied into it before it starts."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.sandbox.guest_program import guest_program
from etude.sandbox.types import Resources

PROGRAM = "/var/lib/etude/guest.pyz"
BASE = "/var/lib/etude/base"
COMMAND_UID = 1000
OWNER_LABEL = "etude.owner"
HOST_LABEL = "etude.host"
SERVER_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What the server needs to run commands as another user and to look after that user's files and processes.
Commands themselves have none, and get none back: no-new-privileges."""
_SERVER_PROCESSES = 8


@dataclass(frozen=True)
class Setup:
    """How containers are made on one engine."""

    image: str = "python:3.11-slim"
    """Of sandboxes whose template names none. Must hold Python 3.9 or newer, and a shell."""
    interpreter: str = "python3"
    command_uid: int | None = COMMAND_UID
    """Whom commands run as. None: as the server, for images that are run without root."""
    runtime: str | None = None
    """Of the engine: `runsc` for gVisor, `kata` for a microVM; None: its default."""
    storage_quota: bool = False
    """Whether the engine's storage driver can bound a container's disk (overlay2 on xfs with pquota)."""
    pull: bool = False
    """Whether an image that is not there may be pulled."""


def container_config(
    setup: Setup, image: str, workspace: str, resources: Resources, labels: Mapping[str, str]
) -> dict[str, Any]:
    """The body of `POST /containers/create`."""
    return {
        "Image": image,
        "Entrypoint": [setup.interpreter, "-I", "-S", "-B"],
        "Cmd": [PROGRAM, *program_arguments(setup.command_uid, workspace, resources)],
        "User": "0:0" if setup.command_uid is not None else "",
        "WorkingDir": "/",
        "Env": ["PYTHONHASHSEED=0", "LANG=C.UTF-8"],
        "Labels": dict(labels),
        "Hostname": "sandbox",
        "Tty": False,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(setup, resources),
    }


def _host_config(setup: Setup, resources: Resources) -> dict[str, Any]:
    config: dict[str, Any] = {
        "NetworkMode": "none",
        "ReadonlyRootfs": False,
        "Privileged": False,
        "AutoRemove": True,
        "CapDrop": ["ALL"],
        "CapAdd": list(SERVER_CAPABILITIES) if setup.command_uid is not None else [],
        "SecurityOpt": ["no-new-privileges"],
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Memory": resources.memory_bytes,
        "MemorySwap": resources.memory_bytes,
        "NanoCpus": math.ceil(resources.cpus * 1e9),
        "PidsLimit": resources.num_processes + _SERVER_PROCESSES,
        "ShmSize": min(resources.disk_bytes, 64 << 20),
        "Ulimits": [
            {"Name": name, "Soft": value, "Hard": value}
            for name, value in (
                ("nofile", resources.open_files),
                ("fsize", max(resources.file_bytes, 1 << 20)),
                ("core", 0),
            )
        ],
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
    }
    if setup.runtime is not None:
        config["Runtime"] = setup.runtime
    if setup.storage_quota:
        config["StorageOpt"] = {"size": str(resources.disk_bytes)}
    return config


def program_arguments(command_uid: int | None, workspace: str, resources: Resources) -> list[str]:
    """Arguments of the program inside."""
    arguments = ["--line", "stdio", "--workspace", workspace, "--base", BASE]
    arguments += ["--memory-bytes", str(resources.memory_bytes), "--cpu-s", str(resources.cpu_s)]
    return arguments if command_uid is None else [*arguments, "--uid", str(command_uid)]


def upload(workspace: str, command_uid: int | None) -> bytes:
    """The tar archive that is unpacked at `/` before the start: the program, and its directories."""
    owner = command_uid or 0
    entries: list[tuple[str, int, int, bytes | None]] = [
        ("var/lib/etude", 0o755, 0, None),
        (PROGRAM.lstrip("/"), 0o444, 0, guest_program()),
        (BASE.lstrip("/"), 0o755, 0, None),
        (workspace.strip("/"), 0o755, owner, None),
    ]
    return pack_tar(entries)


def pack_tar(entries: Sequence[tuple[str, int, int, bytes | None]]) -> bytes:
    """An archive of (name, mode, user and group, content or None for a directory)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, mode, owner, content in entries:
            row = tarfile.TarInfo(name)
            row.mode, row.uid, row.gid = mode, owner, owner
            if content is None:
                row.type = tarfile.DIRTYPE
                archive.addfile(row)
            else:
                row.size = len(content)
                archive.addfile(row, io.BytesIO(content))
    return buffer.getvalue()
