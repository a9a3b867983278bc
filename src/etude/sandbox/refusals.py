"""Checks of requests to a backend (times, sizes, capabilities, moves), and their errors with fixes."""

from __future__ import annotations

import math
import os
from typing import Literal

from etude.errors import ConfigError, ResourceError
from etude.sandbox.errors import SandboxMissingError, Unsupported
from etude.sandbox.types import Capabilities, Resources, SnapshotKind

_ABLE: dict[str, str] = {"full": "vm or gvisor"} | dict.fromkeys(
    ("filesystem", "network", "images", "directory"), "local"
)
"""For each capability, the backends that have it."""
_KEPT: dict[SnapshotKind, str] = {
    "full": "the memory of processes and the files",
    "filesystem": "only the files",
}
_MOST, _MOST_PROCESSES, _MOST_FILES = (1 << 63) - 1, 4_000_000, 1 << 20
"""The largest limits that a kernel accepts: of bytes and seconds, of processes, of open files."""
_FLEET = "fleet"
"""A backend over others, which checks itself what it can import."""


def missing_sandbox(sandbox_id: str) -> SandboxMissingError:
    """The error for an id that no live sandbox has."""
    return SandboxMissingError(
        "no such sandbox: it was killed, or its time to live has expired",
        field="sandbox",
        received=sandbox_id,
        fix="list the sandboxes to see which are alive",
    )


def check_resources(resources: Resources) -> None:
    """Raises ResourceError for more than this host or its kernel has, and for values not above 0."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cores = os.cpu_count() or 1
    for field, received, most in (
        ("resources.memory_bytes", resources.memory_bytes, total_bytes),
        ("resources.disk_bytes", resources.disk_bytes, total_bytes),
        ("resources.cpus", resources.cpus, cores),
        ("resources.num_processes", resources.num_processes, _MOST_PROCESSES),
        ("resources.file_bytes", resources.file_bytes, _MOST),
        ("resources.cpu_s", resources.cpu_s, _MOST),
        ("resources.open_files", resources.open_files, _MOST_FILES),
    ):
        if not 0 < received <= most:
            raise ResourceError(
                f"this host has {most}", field=field, received=received, fix="ask for more than 0 and no more"
            )


def unsupported(backend: str, ability: str) -> Unsupported:
    """The error for a capability that a backend lacks."""
    return Unsupported(
        f"the {backend} backend cannot do this",
        field="sandbox.backend",
        received=ability,
        fix=f"use the {_ABLE.get(ability, 'vm')} backend",
    )


def unsupported_copy(
    able: Capabilities, call: Literal["pause", "create_snapshot"], wanted: SnapshotKind
) -> Unsupported:
    """The error for a kind of pause or snapshot that a backend lacks; its fix names the calls that work."""
    here = able.pause if call == "pause" else able.snapshots
    fixes = [f'{call}("{kind}") works here and keeps {_KEPT[kind]}' for kind in sorted(here)]
    first = _ABLE[wanted].partition(" ")[0]
    fixes.append(f'{call}("{wanted}") works on the {_ABLE[wanted]} backend: open_backend("{first}")')
    return Unsupported(
        f"the {able.backend} backend cannot keep {_KEPT[wanted]}",
        field="mode" if call == "pause" else "kind",
        received=wanted,
        fix="; ".join(fixes),
    )


def check_move(here: Capabilities, there: Capabilities) -> None:
    """Raises Unsupported for a move between incompatible backends, before the sandbox is paused."""
    files = "to move only files: files.download here, create(Template.from_directory(...)) there"
    if here.migrate is None:
        raise Unsupported(
            f"sandboxes of the {here.backend} backend cannot move to another host",
            field="sandbox.backend",
            received=here.backend,
            fix=f"{files}; pause and create_snapshot work here; the local, docker and vm backends can move",
        )
    if there.backend not in (here.backend, _FLEET):
        raise Unsupported(
            f"a sandbox moves only between backends of one kind: from {here.backend} to {here.backend}, "
            f"not to {there.backend}",
            field="target",
            received=there.backend,
            fix=f"name a {here.backend} backend of another host or state directory; {files}",
        )


def foreign_snapshot(theirs: str, ours: str) -> tuple[str, str]:
    """The message and the fix for a snapshot of another backend."""
    return (
        f"belongs to the {theirs} backend and cannot become a sandbox of the {ours} backend",
        f"use the {theirs} backend; to move only files: files.download from a sandbox here, "
        f"create(Template.from_directory(...)) there",
    )


MAX_TIMEOUT_S = 1e6
"""The longest timeout of a command (11 days): the program inside cannot sleep for longer at once."""


def check_timeout(timeout_s: float) -> None:
    """Raises ConfigError for a timeout of a command or test run that is negative, zero, NaN or endless."""
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise ConfigError(
            "is not a valid timeout in seconds",
            field="timeout_s",
            received=timeout_s,
            fix=f"give more than 0 and at most {MAX_TIMEOUT_S:.0f}; None in commands.start for no limit",
        )


def check_life(timeout_s: float | None) -> None:
    """Raises ConfigError for a time to live that is not positive and finite."""
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise ConfigError(
            "a time to live must be more than 0 seconds",
            field="timeout_s",
            received=timeout_s,
            fix="give more, or None for no limit",
        )


def check_count(count: int) -> None:
    """Raises ConfigError for a number of copies that is less than one."""
    if count < 1:
        raise ConfigError(
            "a fork must make at least one copy", field="count", received=count, fix="ask for 1 or more"
        )
