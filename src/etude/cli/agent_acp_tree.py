"""The repository as seen by an editor: files are read and written through it, to include unsaved buffers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from acp import Client, RequestError
from acp.schema import FileSystemCapabilities

from etude.controller.agent.changes import text_of
from etude.controller.agent.trees import DirectoryTree
from etude.errors import UserError

EDITOR_S = 30.0
"""Time limit of the editor's answer about one file."""


class EditorTree(DirectoryTree):
    """Uses the disk for binary files, and for operations that the editor does not support.

    An editor does not report which buffers are unsaved. So a file is requested from it once the agent uses it
    by name, and from then on; searches use the other files on disk.
    """

    def __init__(
        self, root: Path, client: Client, session_id: str, offered: FileSystemCapabilities | None
    ) -> None:
        """Raises ConfigError as DirectoryTree."""
        super().__init__(root)
        self._client = client
        self._session_id = session_id
        self._reads = bool(offered and offered.read_text_file)
        self._writes = bool(offered and offered.write_text_file)
        self._buffers: set[str] = set()
        """Files whose text in the editor differed from that on disk."""

    async def scan(self) -> dict[str, bytes]:
        files = await super().scan()
        for path in sorted(self._buffers):
            data = await self._in_editor(path, files.get(path))
            if data is not None:
                files[path] = data
        return files

    async def read(self, path: str) -> bytes | None:
        return await self._in_editor(path, await super().read(path))

    async def write(self, path: str, data: bytes) -> None:
        content = text_of(data)
        if not self._writes or content is None:
            await super().write(path, data)
            return
        place = await asyncio.to_thread(self.writable, path)
        await asyncio.to_thread(place.parent.mkdir, parents=True, exist_ok=True)
        try:
            async with asyncio.timeout(EDITOR_S):
                await self._client.write_text_file(
                    session_id=self._session_id, path=str(place), content=content
                )
        except (RequestError, ConnectionError, TimeoutError) as error:
            raise UserError("the editor did not write it", field=path, received=str(error)) from error
        self._buffers.add(path)

    async def remove(self, path: str) -> None:
        """See DirectoryTree. The protocol has no request for it: the file is removed on disk."""
        self._buffers.discard(path)
        await super().remove(path)

    async def _in_editor(self, path: str, on_disk: bytes | None) -> bytes | None:
        """The file's content in the editor, or that on disk if the editor does not return it."""
        if not self._reads or on_disk is None or text_of(on_disk) is None:
            return on_disk
        try:
            async with asyncio.timeout(EDITOR_S):
                answer = await self._client.read_text_file(
                    session_id=self._session_id, path=str(self.root / path)
                )
        except (RequestError, ConnectionError, TimeoutError):
            return on_disk  # not open there, or refused: use the content on disk
        data = answer.content.encode("utf-8", "replace")
        if data == on_disk:
            self._buffers.discard(path)
        else:
            self._buffers.add(path)
        return data
