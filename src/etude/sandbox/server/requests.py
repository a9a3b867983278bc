"""What the routes share: the server's state, the sandbox of a path, the fields of each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request

from etude.errors import UserError
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.file_trees import TreeWriter
from etude.sandbox.interface import Sandbox
from etude.sandbox.server.state import Held, ServerState
from etude.sandbox.server.streams import frames_of, long_answer, query, read_request
from etude.sandbox.template import Template
from etude.sandbox.types import Network, Resources
from etude.sandbox.wire_types import encode
from etude.serving.application import pieces
from etude.serving.long_answers import LongAnswer, OutputBuffer, Work
from etude.serving.messages import FRAMES, Encoded, Fields, checked, strings

_NONE = type(None)
_MAX_DIGITS = 18
_MOST_RESOURCES = 1 << 62
"""Kernels count in 64 bits."""
_COMMAND: Fields = {
    "cmd": (str,),
    "env": (dict, _NONE),
    "cwd": (str, _NONE),
    "limit_bytes": (int, _NONE),
    "stream": (bool, _NONE),
}
CREATE: Fields = {
    "backend": (str, _NONE),
    "template": (str, dict, _NONE),
    "resources": (dict, _NONE),
    "network": (dict, _NONE),
    "timeout_s": (float, _NONE),
    "snapshot": (str, _NONE),
    "metadata": (dict, _NONE),
}
RUN: Fields = {**_COMMAND, "timeout_s": (float, _NONE), "stdin": (bool, _NONE)}
START: Fields = {**_COMMAND, "timeout_s": (float, _NONE)}
SESSION: Fields = {"cwd": (str, _NONE), "env": (dict, _NONE)}
SESSION_RUN: Fields = {"cmd": (str,), "timeout_s": (float, _NONE), "limit_bytes": (int, _NONE)}
TESTS: Fields = {"paths": (list,), "timeout_s": (float, _NONE)}
TIMEOUT: Fields = {"timeout_s": (float, _NONE)}
GREP: Fields = {"pattern": (str,), "path": (str, _NONE), "limit": (int, _NONE)}
PAUSE: Fields = {"mode": (str, _NONE)}
SNAPSHOT: Fields = {"kind": (str, _NONE), "name": (str, _NONE)}
FORK: Fields = {"count": (int, _NONE)}
MIGRATE: Fields = {"url": (str,), "token": (str, _NONE), "backend": (str, _NONE)}
_RESOURCES: Fields = {
    name: (float if name == "cpus" else int, _NONE) for name in Resources.__dataclass_fields__
}


class TornUploadError(SandboxLostError):
    """A stream of files whose end is missing: its sender has left, or sends something else."""


def state_of(request: Request) -> ServerState:
    """The state of the server that got the request."""
    return request.app.state.sandboxes


State = Annotated[ServerState, Depends(state_of)]


async def _held(sandbox_id: str, state: State) -> Held:
    return await state.find(sandbox_id)


Box = Annotated[Held, Depends(_held)]
"""The sandbox of the path. One that sleeps is not woken."""


async def fields_of(request: Request, state: ServerState, fields: Fields) -> tuple[dict[str, Any], bytes]:
    """The checked fields of a request, those that are null left out, and its payload."""
    raw, payload = await read_request(request, state.limits.body_bytes)
    named = {name: value for name, value in checked(raw, fields).items() if value is not None}
    for name in ("env", "metadata"):
        if name in named:
            strings([*named[name].values()], name)
    if "paths" in named:
        strings(named["paths"], "paths")
    for name in ("limit_bytes", "limit", "timeout_s", "count"):
        if named.get(name, 0) < 0:
            raise UserError(
                "must not be negative", field=name, received=named[name], fix="correct the request"
            )
    return named, payload


def one_of(named: dict[str, Any], name: str, *values: str) -> None:
    """Raises UserError if a field that is there has none of the values."""
    if name in named and named[name] not in values:
        raise UserError("unknown value", field=name, received=named[name], fix="one of " + ", ".join(values))


def number(request: Request, name: str, default: int) -> int:
    """A number in the query. Raises UserError."""
    text = query(request).get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > _MAX_DIGITS:
        raise UserError("must be a number", field=name, received=text, fix="correct the query")
    return int(text)


def path_of(request: Request, default: str | None = None) -> str:
    """The path in the query. Raises UserError if it is missing."""
    path = query(request).get("path", default)
    if path is None:
        raise UserError("is missing", field="path", fix="add ?path=")
    return path


def resources_of(raw: dict[str, Any] | None) -> Resources | None:
    """Resources as a request names them; what it leaves out has its default."""
    if raw is None:
        return None
    named = {name: value for name, value in checked(raw, _RESOURCES).items() if value is not None}
    for name, value in named.items():
        if not 0 < value < _MOST_RESOURCES:
            raise UserError(
                "must be above 0, and what a machine may have",
                field=f"resources.{name}",
                received=value,
                fix="correct the request",
            )
    return Resources(**named)


def network_of(raw: dict[str, Any] | None) -> Network | None:
    """A network as a request names it."""
    if raw is None:
        return None
    return Network(tuple(strings(checked(raw, {"allow": (list,)})["allow"], "network.allow")))


def split_files(rows: list[Any], payload: bytes) -> dict[str, str | bytes]:
    """The files of a request: `[path, size]` of each, and their contents one after the other."""
    files: dict[str, str | bytes] = {}
    start = 0
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or type(row[1]) is not int or row[1] < 0:
            raise UserError(
                "must be rows of [path, size]", field="files", received=row, fix="correct the request"
            )
        files[strings([row[0]], "files")[0]] = payload[start : start + row[1]]
        start += row[1]
    if start != len(payload):
        raise UserError(
            "sizes and contents differ", field="files", received=len(payload), fix=f"send {start} bytes"
        )
    return files


def inline_template(raw: dict[str, Any]) -> Template:
    """A template that is written in the request itself: a name and text files."""
    named = checked(raw, {"name": (str, _NONE), "files": (dict, _NONE)})
    files = named.get("files") or {}
    strings([*files.values()], "template.files")
    try:
        return Template(files, named.get("name") or "template")
    except UnicodeEncodeError as error:
        raise UserError(
            f"holds half a character: {error.reason}", field="template.files", fix="send UTF-8 text"
        ) from error


def long(
    request: Request,
    state: ServerState,
    work: Work,
    output: OutputBuffer | None = None,
    finish: Callable[[asyncio.Task[Encoded]], object] | None = None,
    cleanup: Callable[[], Awaitable[None]] | None = None,
) -> LongAnswer:
    """The answer of a call that may take long; as JSON if the client accepts no frames."""
    accept = request.headers.get("accept", "*/*")
    plain = FRAMES not in accept and output is None
    return long_answer(work, output, finish, plain=plain, cleanup=cleanup, on_error=state.note_error)


async def encoded(call: Any) -> Encoded:
    """The encoded result of a call."""
    return encode(await call)


async def info_of(sandbox: Sandbox) -> Encoded:
    """The encoded description of a sandbox."""
    return encode(await sandbox.get_info())


async def receive_tree(request: Request, state: ServerState, target: Path, single: bool = False) -> int:
    """Writes the file frames of a request to `target`; the bytes written.

    Raises TornUploadError for a stream without an end: then nothing of it may be used.
    """
    with TreeWriter(target, single) as writer:
        async for header, piece in frames_of(pieces(request, state.limits.upload_bytes)):
            await asyncio.to_thread(writer.take, header, piece)
    if not writer.is_whole:
        raise TornUploadError(
            "the upload ended in its middle", field="body", received=writer.num_bytes, fix="send it again"
        )
    if not writer.num_files:
        await asyncio.to_thread(target.mkdir)
    return writer.num_bytes
