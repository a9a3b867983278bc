"""Files of a sandbox on a server."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.errors import AgentError
from etude.sandbox.file_trees import TreeWriter, pack_bytes, pack_tree
from etude.sandbox.files import batches, name_bytes, read_each
from etude.sandbox.inside.frames import Header, pack
from etude.sandbox.remote.connection import Connection
from etude.sandbox.types import FileInfo, GrepMatch
from etude.sandbox.wire_types import decode_rows
from etude.serving.messages import FRAMES, Encoded


class RemoteFiles:
    """`Files` over a connection."""

    def __init__(self, line: Connection, base: str) -> None:
        """`base`: the sandbox's path on the server."""
        self._line = line
        self._base = base

    async def read(self, path: str, limit_bytes: int = 1 << 20) -> bytes:
        """See Files.read."""
        params = {"path": path, "limit_bytes": limit_bytes}
        return await self._line.fetch("GET", f"{self._base}/files", params, again=True)

    async def read_many(
        self, paths: Sequence[str], limit_bytes: int = 1 << 20
    ) -> builtins.list[bytes | AgentError]:
        """See Files.read_many."""
        return await read_each(self.read, paths, limit_bytes)

    async def write(self, path: str, data: str | bytes) -> None:
        """See Files.write."""
        content = data.encode() if isinstance(data, str) else data
        if len(content) > self._line.batch_bytes:
            await self._send_tree(pack_bytes(content), path)
            return
        await self._line.fetch("PUT", f"{self._base}/files", {"path": path}, body=content)

    async def write_many(self, files: Mapping[str, str | bytes]) -> None:
        """See Files.write_many. More than a request carries goes in several."""
        contents = [data.encode() if isinstance(data, str) else data for data in files.values()]
        pairs = list(zip(files, contents, strict=True))
        sizes = [len(data) + name_bytes(path) for path, data in zip(files, contents, strict=True)]
        for part in batches(sizes, self._line.batch_bytes):
            batch = pairs[part]
            if len(batch) == 1:
                await self.write(*batch[0])
                continue
            rows = [[path, len(data)] for path, data in batch]
            body = pack({"files": rows}, b"".join(data for _, data in batch))
            await self._line.fetch("POST", f"{self._base}/files", body=body, kind=FRAMES)

    async def list(self, path: str = ".", depth: int = 1) -> list[FileInfo]:
        """See Files.list."""
        params = {"path": path, "depth": depth}
        rows = await self._line.call("GET", f"{self._base}/files/list", params, again=True)
        return self._line.decoded(lambda raw: decode_rows(FileInfo, raw), rows)

    async def remove(self, path: str) -> None:
        """See Files.remove."""
        await self._line.call("DELETE", f"{self._base}/files", {"path": path})

    async def grep(self, pattern: str, path: str = ".", limit: int = 50) -> list[GrepMatch]:
        """See Files.grep."""
        header = {"pattern": pattern, "path": path, "limit": limit}
        rows = await self._line.call("POST", f"{self._base}/files/grep", header=header, again=True)
        return self._line.decoded(lambda raw: decode_rows(GrepMatch, raw), rows)

    async def upload(self, source: Path, path: str) -> int:
        """See Files.upload. Nothing is written in the sandbox before all of it has arrived at the server."""
        return int(await self._send_tree(pack_tree(source), path))

    async def download(self, path: str, target: Path) -> int:
        """See Files.download."""
        value, _ = await receive_tree(self._line, f"{self._base}/files/tree", {"path": path}, target)
        if value["directory"]:
            await asyncio.to_thread(target.mkdir, parents=True, exist_ok=True)
        return int(value["num_bytes"])

    async def _send_tree(self, tree: AsyncGenerator[bytes, None], path: str) -> Any:
        return (await send_tree(self._line, "PUT", f"{self._base}/files/tree", {"path": path}, tree))[0]


async def send_tree(
    line: Connection, method: str, path: str, params: Mapping[str, object], tree: AsyncGenerator[bytes, None]
) -> Encoded:
    """Streams a tree's frames; the server's result."""
    try:
        return await line.long(method, path, params, payload=tree)
    finally:
        await tree.aclose()


async def receive_tree(
    line: Connection,
    path: str,
    params: Mapping[str, object] | None,
    target: Path,
    single: bool = False,
) -> Encoded:
    """Writes the file or tree that the server streams to `target`; the result that follows it.

    Raises SandboxLostError for a stream that breaks off; the file in its middle is removed.
    """
    with TreeWriter(target, single) as writer:

        async def take(header: Header, piece: bytes) -> None:
            await asyncio.to_thread(writer.take, header, piece)

        result = await line.long("GET", path, params, on_frame=take)
        if not writer.is_whole:
            raise line.lost("the stream of files is not whole")
        return result
