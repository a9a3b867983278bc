"""RUN instructions in local sandboxes: as isolated as an agent, with root's changes of owner emulated."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from etude.kit.tasks import to_the_end
from etude.sandbox.images.runner import RunResult
from etude.sandbox.inside.namespaces import ROOT_ENVIRONMENT
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.template import Image, Template
from etude.sandbox.types import NO_NETWORK, Network, Resources

BUILD_RESOURCES = Resources(
    memory_bytes=2 << 30,
    num_processes=512,
    disk_bytes=2 << 30,
    file_bytes=1 << 30,
    cpu_s=3600,
    open_files=4096,
)
"""What a RUN may use unless told otherwise. Its files lie in memory until it has ended."""
_OUTPUT_BYTES = 256 << 10


class SandboxRunner:
    """`images.runner.LayerRunner` over a local backend. Each RUN has a sandbox of its own."""

    def __init__(
        self,
        backend: LocalBackend,
        resources: Resources = BUILD_RESOURCES,
        network: Network = NO_NETWORK,
        scratch: Path | None = None,
    ) -> None:
        """`network`: what RUN may fetch, through the egress proxy. `scratch`: where layers are packed."""
        self._backend = backend
        self._resources = resources
        self._network = network
        self._scratch = scratch

    async def run(
        self,
        image: Image,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        user: str,
        timeout_s: float,
    ) -> RunResult:
        """See LayerRunner.run."""
        template = Template({}, image.name, replace(image, user=user or "root"))
        sandbox = await self._backend.create(template, self._resources, self._network)
        try:
            answer, data = await sandbox.job(
                {
                    "op": "command",
                    "argv": list(argv),
                    "env": {**ROOT_ENVIRONMENT, **sandbox.environment, **env},
                    "exact_env": True,
                    "cwd": cwd,
                    "timeout_s": timeout_s,
                    "limit_bytes": _OUTPUT_BYTES,
                }
            )
            output = data.decode(errors="replace")
            if answer["timed_out"] or answer["exit_code"] != 0:
                return RunResult(answer["exit_code"], output, None, answer["timed_out"])
            return RunResult(0, output, await self._save(sandbox.id))
        finally:
            await sandbox.kill()

    async def _save(self, sandbox_id: str) -> Path:
        descriptor, name = tempfile.mkstemp(suffix=".tar", prefix="etude-layer-", dir=self._scratch)
        os.close(descriptor)
        path = Path(name)
        await asyncio.to_thread(path.unlink)
        sandbox = await self._backend.connect(sandbox_id)
        try:
            # To the end: else it is written, of whatever size, when its caller has long removed it.
            await to_the_end(self._backend.save_root(sandbox, path))
        except BaseException:
            await asyncio.to_thread(path.unlink, missing_ok=True)
            raise
        return path
