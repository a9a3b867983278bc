"""A Docker engine without containers: it speaks the real API and runs the programs as plain processes.

For tests of everything above the engine. Status codes, error bodies, ordering rules, stream framing and
the removal of containers are those of the real one; resource limits, users and capabilities are
recorded and not enforced (see `chamber`, which is what a container is here).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.fakes.docker.containers import FakeContainer, Refusal
from tests.fakes.docker.http import pack_head, read_body, read_head
from tests.fakes.docker.images import FakeImages
from tests.fakes.docker.routes import MIN_API_VERSION, Call, find_route

API_VERSION = "1.47"
_REASONS = {200: "OK", 201: "Created", 204: "No Content", 304: "Not Modified", 400: "Bad Request",
            404: "Not Found", 409: "Conflict", 500: "Internal Server Error"}  # fmt: skip


@dataclass
class Fault:
    """What goes wrong with requests whose `METHOD /path` matches."""

    pattern: str
    status: int | None = None
    """Answered instead of doing anything; None: the request is never answered."""
    message: str = "injected"
    times: int = 1_000_000
    after: bool = False
    """Whether the request is carried out before it fails."""
    seen: int = field(default=0, init=False)


class FakeEngine:
    """An engine at `directory/engine.sock`. `async with FakeEngine(directory) as engine:`"""

    def __init__(self, directory: Path, api_version: str = API_VERSION) -> None:
        """The image `python:3.11-slim` is there from the start: the host's programs."""
        self.directory = directory
        self.socket = directory / "engine.sock"
        self.api_version = api_version
        self.images = FakeImages(directory / "images")
        self.images.add("python:3.11-slim")
        self.registry: set[str] = set()
        """Images that could be pulled."""
        self.containers: dict[str, FakeContainer] = {}
        self.requests: list[str] = []
        """`METHOD /path` of every request, without the version."""
        self.faults: list[Fault] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FakeEngine:
        self._server = await asyncio.start_unix_server(self._accept, self.socket)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """The engine dies, and its containers with it."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.socket.unlink(missing_ok=True)
        for container in list(self.containers.values()):
            await container.kill()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self.directory / "containers", ignore_errors=True)

    # Serving

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError):
            try:
                while await self._serve_one(reader, writer):
                    pass
            finally:
                writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await read_head(reader)
        method, target, _ = head.first
        parts = urlsplit(target)
        path, version = _without_version(unquote(parts.path))
        hijacking = path.endswith("/attach")
        body = b"" if hijacking else b"".join([p async for p in read_body(reader, head, to_end=False)])
        self.requests.append(f"{method} {path}")
        fault = self._fault(f"{method} {path}")
        if fault is not None and fault.status is None and not fault.after:
            await asyncio.Event().wait()
        try:
            self._check_version(version)
            if fault is not None and fault.status is not None and not fault.after:
                raise Refusal(fault.status, fault.message)
            match, handler = find_route(method, path)
            call = Call(path, dict(parse_qsl(parts.query)), body, head, reader, writer, match)
            answer = await handler(self, call)
            if fault is not None and fault.after:
                if fault.status is None:
                    await asyncio.Event().wait()
                raise Refusal(fault.status or 500, fault.message)
        except Refusal as refusal:
            answer = refusal.status, {"message": refusal.message}
        if answer is None:
            return False
        self._answer(writer, *answer, bodiless=method == "HEAD")
        await writer.drain()
        return head.fields.get("connection", "").lower() != "close"

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: object, bodiless: bool) -> None:
        fields = {"Api-Version": self.api_version, "Server": "Docker/27.5.1 (linux)", "Ostype": "linux"}
        if isinstance(body, bytes):
            data, fields["Content-Type"] = body, "application/x-tar"
        elif isinstance(body, str):
            kind = "application/json" if body.startswith("{") else "text/plain; charset=utf-8"
            data, fields["Content-Type"] = body.encode(), kind
        else:
            data, fields["Content-Type"] = json.dumps(body).encode() + b"\n", "application/json"
        if status in (204, 304):
            data = b""
        else:
            fields["Content-Length"] = str(len(data))
        writer.write(pack_head(f"HTTP/1.1 {status} {_REASONS[status]}", fields))
        if not bodiless:
            writer.write(data)

    def _fault(self, line: str) -> Fault | None:
        for fault in self.faults:
            if re.search(fault.pattern, line) and fault.seen < fault.times:
                fault.seen += 1
                return fault
        return None

    def _check_version(self, version: str | None) -> None:
        if version is None:
            return
        asked = tuple(int(part) for part in version.split("."))
        if asked > tuple(int(part) for part in self.api_version.split(".")):
            raise Refusal(
                400,
                f"client version {version} is too new. Maximum supported API version is {self.api_version}",
            )
        if asked < tuple(int(part) for part in MIN_API_VERSION.split(".")):
            raise Refusal(
                400,
                f"client version {version} is too old. Minimum supported API version is {MIN_API_VERSION}",
            )

    # What the handlers need

    def find(self, reference: str) -> FakeContainer:
        """A container by id, beginning of an id, or name. Raises Refusal."""
        for container in self.containers.values():
            if container.name == reference.lstrip("/") or container.id.startswith(reference):
                return container
        raise Refusal(404, f"No such container: {reference}")

    def forget(self, container: FakeContainer) -> None:
        """Removes a container and its files."""
        self.containers.pop(container.id, None)
        shutil.rmtree(container.root, ignore_errors=True)
        container.removed.set()


def _without_version(path: str) -> tuple[str, str | None]:
    match = re.match(r"/v(\d+\.\d+)(/.*)", path)
    return (path, None) if match is None else (match[2], match[1])
