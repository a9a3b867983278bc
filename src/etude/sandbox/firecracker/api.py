"""Firecracker's REST API over its Unix socket. Written against the API description of 1.13 (to 1.17-dev).

Order matters there: everything but `/vm` and `/snapshot/create` belongs before the start, `/snapshot/load`
before anything else, `/snapshot/create` while paused. What Firecracker refuses comes back as
`FirecrackerError` with its `fault_message`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from etude.sandbox.docker.http import ApiError, UnixHttp

CALL_S = 60.0
SNAPSHOT_S = 300.0
"""Writing or mapping the whole of a guest's memory."""

State = Literal["Not started", "Running", "Paused"]
SnapshotType = Literal["Full", "Diff"]
MemoryBackend = Literal["File", "Uffd"]


class FirecrackerError(ApiError):
    """Firecracker refused a request."""


class FirecrackerApi:
    """The API of one Firecracker process. Every call has a deadline; paths are as that process sees them."""

    def __init__(self, socket: Path) -> None:
        self._http = UnixHttp(socket, "firecracker")

    async def describe(self) -> dict[str, Any]:
        """`id`, `state`, `vmm_version` and `app_name`."""
        return await self._get("/")

    async def version(self) -> str:
        """Such as `1.13.1`."""
        return str((await self._get("/version"))["firecracker_version"])

    async def put_machine(self, num_cpus: int, memory_mib: int, track_dirty_pages: bool) -> None:
        """Processors and memory. `track_dirty_pages`: so that diff snapshots hold no more than needed."""
        body = {
            "vcpu_count": num_cpus,
            "mem_size_mib": memory_mib,
            "smt": False,
            "track_dirty_pages": track_dirty_pages,
        }
        await self._change("PUT", "/machine-config", body)

    async def put_boot_source(self, kernel: str, boot_args: str, initrd: str | None = None) -> None:
        """What boots."""
        body = {"kernel_image_path": kernel, "boot_args": boot_args}
        await self._change("PUT", "/boot-source", body if initrd is None else body | {"initrd_path": initrd})

    async def put_drive(self, name: str, path: str, *, root: bool, read_only: bool) -> None:
        """A disk. Writes reach the host's file with the guest's own flushes only."""
        body = {
            "drive_id": name,
            "path_on_host": path,
            "is_root_device": root,
            "is_read_only": read_only,
            "cache_type": "Unsafe",
        }
        await self._change("PUT", f"/drives/{name}", body)

    async def put_vsock(self, cid: int, socket: str) -> None:
        """The one line into the guest."""
        await self._change("PUT", "/vsock", {"guest_cid": cid, "uds_path": socket})

    async def put_entropy(self) -> None:
        """A source of random numbers: copies of one guest need fresh ones."""
        await self._change("PUT", "/entropy", {})

    async def start(self) -> None:
        """Boots the guest."""
        await self._change("PUT", "/actions", {"action_type": "InstanceStart"})

    async def pause(self) -> None:
        """Its processors stand still. One that stands still already stays so."""
        await self._change("PATCH", "/vm", {"state": "Paused"})

    async def resume(self) -> None:
        """They go on."""
        await self._change("PATCH", "/vm", {"state": "Resumed"})

    async def create_snapshot(self, kind: SnapshotType, state: str, memory: str) -> None:
        """Writes device state and memory; with `Diff` only what changed since the last snapshot."""
        body = {"snapshot_type": kind, "snapshot_path": state, "mem_file_path": memory}
        await self._change("PUT", "/snapshot/create", body, SNAPSHOT_S)

    async def load_snapshot(
        self,
        state: str,
        backend: MemoryBackend,
        path: str,
        *,
        resume: bool,
        track_dirty_pages: bool,
        tracking_field: str = "track_dirty_pages",
    ) -> None:
        """Goes on where a snapshot was taken. `path`: the memory file, or the page-fault handler's socket.

        `tracking_field`: `enable_diff_snapshots` before 1.13. A process whose load failed is useless.
        """
        body = {
            "snapshot_path": state,
            "mem_backend": {"backend_type": backend, "backend_path": path},
            "resume_vm": resume,
            tracking_field: track_dirty_pages,
        }
        await self._change("PUT", "/snapshot/load", body, SNAPSHOT_S)

    async def _get(self, target: str) -> dict[str, Any]:
        answer = await self._http.request("GET", target, deadline_s=CALL_S)
        if answer.status != 200:
            raise _refusal("GET", target, answer.status, answer.message())
        return answer.json()

    async def _change(
        self, method: str, target: str, body: Mapping[str, Any], deadline_s: float = CALL_S
    ) -> None:
        answer = await self._http.request(method, target, body, deadline_s=deadline_s)
        if answer.status != 204:
            raise _refusal(method, target, answer.status, answer.message())


def _refusal(method: str, target: str, status: int, message: str) -> FirecrackerError:
    return FirecrackerError(message, field=f"firecracker {method} {target}", received=status, status=status)
