"""The route `POST .../call`, which makes a `Sandbox.call` and returns its answer.

Only the operations and fields of the table `CALLS` are accepted: the other operations of the program inside
are reserved for its owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from etude.errors import UserError
from etude.sandbox.commands import process_id
from etude.sandbox.inside.frames import Header, pack
from etude.sandbox.refusals import check_timeout
from etude.sandbox.server.requests import (
    Served,
    State,
    check_numbers,
    is_plain,
    long,
    long_answer,
    read_request,
)
from etude.serving.describing import BINARY, JSON, answering, object_schema
from etude.serving.long_answers import OutputBuffer
from etude.serving.messages import FRAMES, Encoded, Fields, check_fields, check_strings

_NONE = type(None)
_PID: Fields = {"pid": (int,)}
_RUN: Fields = {"paths": (list,), "timeout_s": (float, _NONE)}
CALLS: Mapping[str, Fields] = {
    "read": {
        "path": (str,),
        "limit_bytes": (int, _NONE),
        "offset": (int, _NONE),
        "more": (list, _NONE),
    },
    "write": {"files": (list,), "append": (bool, _NONE)},
    "list": {"path": (str, _NONE), "depth": (int, _NONE)},
    "remove": {"path": (str,)},
    "grep": {"pattern": (str,), "path": (str, _NONE), "limit": (int, _NONE)},
    "diff": {"kill_processes": (bool, _NONE), "without": (str, _NONE)},
    "changed": {"skip_tops": (list,), "skip_names": (list,), "skip_hidden": (bool,)},
    "kinds": {},
    "pack": {"below": (bool,), "exclude": (list,), "limit_bytes": (int,)},
    "command": {
        "cmd": (str,),
        "timeout_s": (float, _NONE),
        "env": (dict, _NONE),
        "cwd": (str, _NONE),
        "limit_bytes": (int, _NONE),
        "stream": (bool, _NONE),
        "stdin": (bool, _NONE),
        "background": (bool, _NONE),
    },
    "stdin": {**_PID, "close": (bool, _NONE)},
    "kill": _PID,
    "lookup": _PID,
    "wait": _PID,
    "processes": {},
    "tests": _RUN,
    "probes": _RUN,
}
"""Operation -> its fields."""
_DEFAULTS: dict[str, Any] = {
    "path": ".",
    "limit_bytes": 1 << 20,
    "depth": 1,
    "limit": 50,
    "kill_processes": False,
    "without": "",
    "timeout_s": 30.0,
    "env": {},
    "cwd": None,
    "close": False,
}
"""Defaults of fields that a client may omit and the program inside requires."""
router = APIRouter(prefix="/sandboxes/{sandbox_id}")


def check_call(raw: Any, payload: bytes) -> Header:
    """Validates a call; its header for `Sandbox.call`. Raises UserError that names the field."""
    operation = raw.get("op") if isinstance(raw, dict) else None
    if not isinstance(operation, str) or operation not in CALLS:
        raise UserError("unknown operation", field="op", received=operation, fix="one of " + ", ".join(CALLS))
    fields = CALLS[operation]
    given = {
        name: value
        for name, value in check_fields(raw, {"op": (str,), **fields}).items()
        if value is not None
    }
    header = {**{name: _DEFAULTS[name] for name in fields if name in _DEFAULTS}, **given}
    if header.get("background"):
        header["timeout_s"] = given.get("timeout_s")
    if "timeout_s" in given:
        check_timeout(given["timeout_s"])
    check_numbers(header, "limit_bytes", "offset", "depth", "limit")
    check_strings([*header.get("env", {}).values()], "env")
    for name in ("more", "paths", "exclude"):
        check_strings(header.get(name, []), name)
    if "files" in header:
        _check_sizes(header["files"], len(payload))
    return header


def _check_sizes(rows: list[Any], payload_bytes: int) -> None:
    """Raises UserError unless these are rows of path and size that add up to the payload."""
    for row in rows:
        if not isinstance(row, list) or len(row) != 2 or type(row[1]) is not int or row[1] < 0:
            raise UserError(
                "must be rows of [path, size]", field="files", received=row, fix="correct the request"
            )
        check_strings(row[:1], "files")
    wanted = sum(size for _, size in rows)
    if wanted != payload_bytes:
        raise UserError(
            "the payload does not have the size that `files` adds up to",
            field="files",
            received=payload_bytes,
            fix=f"send {wanted} bytes",
        )


_SCHEMAS = [
    object_schema({"op": (str,), **fields}, op={"const": operation}) for operation, fields in CALLS.items()
]
_BODY = {"content": {JSON: {"schema": {"oneOf": _SCHEMAS}}, FRAMES: {"schema": BINARY}}}


@router.post("/call", responses=answering(JSON, FRAMES), openapi_extra={"requestBody": _BODY})
async def call(request: Request, served: Served, state: State) -> Response:
    """One call of the program inside: files, commands, test runs, diffs. The answer is JSON, with the
    `payload` as text, if the client does not accept frames.

    A disconnect ends the command or test run, unless it runs in the background; with `stream` the output of
    one in the background is sent until it has been waited for.
    """
    raw, payload = await read_request(request, state.limits.body_bytes)
    header = check_call(raw, payload)
    output = OutputBuffer(pack) if header.get("stream") else None
    on_output = None if output is None else output.put
    if output is not None and header.get("background"):
        answer, _ = await served.sandbox.call(header, b"", on_output)
        first = pack({"event": "started", "value": answer})
        following = served.follow(process_id(answer, served.sandbox.id), output)
        return long_answer(following, output, first=first, on_error=state.count_error)

    async def work() -> Encoded:
        answer, data = await served.sandbox.call(header, payload, on_output)
        if header["op"] == "wait":
            served.finish_output(header["pid"])
        if is_plain(request, output):
            return {**answer, "payload": data.decode(errors="replace")}, b""
        return answer, data

    return long(request, state, work(), output)
