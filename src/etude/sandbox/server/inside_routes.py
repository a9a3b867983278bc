"""Routes into one sandbox: files, commands, shell sessions, test runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from etude.sandbox.file_trees import pack_tree
from etude.sandbox.inside.frames import pack
from etude.sandbox.interface import Command
from etude.sandbox.server import requests
from etude.sandbox.server.requests import (
    Box,
    State,
    encoded,
    fields_of,
    long,
    number,
    path_of,
    receive_tree,
    split_files,
)
from etude.sandbox.server.state import Held, ServerState
from etude.sandbox.server.streams import long_answer, query
from etude.sandbox.wire_types import encode, encode_diff
from etude.serving.application import Binary, Json, read_body
from etude.serving.describing import BYTES, answering, described
from etude.serving.long_answers import LongAnswer, OutputBuffer
from etude.serving.messages import FRAMES, Encoded, Fields

NONE = type(None)
PATH: Fields = {"path": (str,)}
LONG = answering("application/json", FRAMES)
router = APIRouter(prefix="/sandboxes/{sandbox_id}")

# Files


@router.get(
    "/files", response_class=Binary, openapi_extra=described(query=PATH | {"limit_bytes": (int, NONE)})
)
async def read_file(request: Request, held: Box) -> Response:
    """The bytes of a file: `?path=&limit_bytes=`."""
    data = await held.sandbox.files.read(path_of(request), number(request, "limit_bytes", 1 << 20))
    return Binary(data)


@router.put("/files", status_code=204, openapi_extra=described(body=BYTES, query=PATH))
async def write_file(request: Request, held: Box, state: State) -> Response:
    """Writes the body to a file: `?path=`."""
    path = path_of(request)
    await held.sandbox.files.write(path, await read_body(request, state.limits.body_bytes))
    return Response(status_code=204)


@router.post("/files", status_code=204, openapi_extra=described(body=FRAMES))
async def write_files(request: Request, held: Box, state: State) -> Response:
    """Writes several files: a frame with `{"files": [[path, size], ...]}` and their contents."""
    named, payload = await fields_of(request, state, {"files": (list,)})
    files = split_files(named["files"], payload)
    await held.sandbox.files.write_many(files)
    return Response(status_code=204)


@router.delete("/files", status_code=204, openapi_extra=described(query=PATH))
async def remove_file(request: Request, held: Box) -> Response:
    """Removes a file or a directory: `?path=`."""
    await held.sandbox.files.remove(path_of(request))
    return Response(status_code=204)


@router.get("/files/list", openapi_extra=described(query={"path": (str, NONE), "depth": (int, NONE)}))
async def list_files(request: Request, held: Box) -> Response:
    """Entries below a directory: `?path=&depth=`."""
    entries = await held.sandbox.files.list(path_of(request, "."), number(request, "depth", 1))
    return Json(encode(entries)[0])


@router.post("/files/grep", openapi_extra=described(requests.GREP))
async def grep_files(request: Request, held: Box, state: State) -> Response:
    """Lines that a regular expression matches."""
    named, _ = await fields_of(request, state, requests.GREP)
    return Json(encode(await held.sandbox.files.grep(**named))[0])


@router.put("/files/tree", responses=LONG, openapi_extra=described(body=FRAMES, query=PATH))
async def upload_tree(request: Request, held: Box, state: State) -> Response:
    """Writes the streamed file, or directory, of the body to `?path=`."""
    spool = state.spool_directory()
    try:
        tree = Path(spool.name, "tree")
        await receive_tree(request, state, tree)
    except BaseException:
        await asyncio.to_thread(spool.cleanup)
        raise

    async def work() -> Encoded:
        return await held.sandbox.files.upload(tree, path_of(request)), b""

    return long(request, state, work(), cleanup=lambda: asyncio.to_thread(spool.cleanup))


@router.get("/files/tree", responses=LONG, openapi_extra=described(query=PATH))
async def download_tree(request: Request, held: Box, state: State) -> Response:
    """Streams the file or directory at `?path=`."""
    spool = state.spool_directory()
    tree = Path(spool.name, "tree")

    async def work() -> Encoded:
        num_bytes = await held.sandbox.files.download(path_of(request), tree)
        return {"num_bytes": num_bytes, "directory": await asyncio.to_thread(tree.is_dir)}, b""

    return long_answer(
        work(),
        tail=pack_tree(tree),
        cleanup=lambda: asyncio.to_thread(spool.cleanup),
        on_error=state.note_error,
    )


# Commands


@router.post("/commands/run", responses=LONG, openapi_extra=described(requests.RUN))
async def run_command(request: Request, held: Box, state: State) -> Response:
    """Runs a command to its end; `stream`: its output comes as it is printed. Who leaves, ends it."""
    named, payload = await fields_of(request, state, requests.RUN)
    output = OutputBuffer(pack) if named.pop("stream", False) else None
    if named.pop("stdin", False):
        named["stdin"] = payload
    if output is not None:
        named["on_output"] = output.put
    return long(request, state, encoded(held.sandbox.commands.run(**named)), output)


@router.post("/commands", responses=LONG, openapi_extra=described(requests.START))
async def start_command(request: Request, held: Box, state: State) -> Response:
    """Starts a command in the background; `stream`: its output comes until somebody has waited for it."""
    named, _ = await fields_of(request, state, requests.START)
    if not named.pop("stream", False):
        command = await held.sandbox.commands.start(**named)
        held.keep(command)
        return Json({"pid": command.pid})
    output = OutputBuffer(pack)
    command = await held.sandbox.commands.start(**named, on_output=output.put)
    held.keep(command, output)

    async def work() -> Encoded:
        await output.finished.wait()
        return None, b""

    first = pack({"event": "started", "pid": command.pid})
    return long_answer(work(), output, first=first, on_error=state.note_error)


@router.get("/commands")
async def list_commands(held: Box) -> Response:
    """The background commands."""
    return Json(encode(await held.sandbox.commands.list())[0])


@router.get("/commands/{pid}")
async def find_command(pid: int, held: Box) -> Response:
    """Whether there is a background command of that process id."""
    return Json({"pid": (await _command(held, pid)).pid})


@router.post("/commands/{pid}/wait", responses=LONG, openapi_extra=described(requests.TIMEOUT))
async def wait_for_command(pid: int, request: Request, held: Box, state: State) -> Response:
    """The result of a background command once it has ended. Who leaves, leaves it running."""
    named, _ = await fields_of(request, state, requests.TIMEOUT)

    async def work() -> Encoded:
        result = await (await _command(held, pid)).wait(**named)
        held.finish_output(pid)
        return encode(result)

    return long(request, state, work())


@router.post("/commands/{pid}/stdin", status_code=204, openapi_extra=described(body=BYTES))
async def send_stdin(pid: int, request: Request, held: Box, state: State) -> Response:
    """Writes the body to a command's input; `?close=1` ends the input after it."""
    data = await read_body(request, state.limits.body_bytes)
    await (await _command(held, pid)).send_stdin(data, query(request).get("close") == "1")
    return Response(status_code=204)


@router.delete("/commands/{pid}")
async def kill_command(pid: int, held: Box) -> Response:
    """Ends a background command."""
    return Json({"killed": await held.sandbox.commands.kill(pid)})


async def _command(held: Held, pid: int) -> Command:
    command = held.commands.get(pid)
    if command is None:
        command = await held.sandbox.commands.connect(pid)
        held.keep(command)
    return command


# Sessions and test runs


@router.post("/sessions", openapi_extra=described(requests.SESSION))
async def create_session(request: Request, held: Box, state: State) -> Response:
    """Starts a shell session."""
    named, _ = await fields_of(request, state, requests.SESSION)
    return Json({"session": await held.sandbox.create_session(**named)})


@router.post("/sessions/{session}/run", responses=LONG, openapi_extra=described(requests.SESSION_RUN))
async def run_in_session(session: str, request: Request, held: Box, state: State) -> Response:
    """Runs a command in a session. Who leaves, ends the command."""
    named, _ = await fields_of(request, state, requests.SESSION_RUN)
    return long(request, state, encoded(held.sandbox.run_in_session(session, **named)))


@router.delete("/sessions/{session}", status_code=204)
async def close_session(session: str, held: Box) -> Response:
    """Ends a session."""
    await held.sandbox.close_session(session)
    return Response(status_code=204)


@router.post("/tests", responses=LONG, openapi_extra=described(requests.TESTS))
async def run_tests(request: Request, held: Box, state: State) -> Response:
    """Runs the tests of the named files."""
    named, _ = await fields_of(request, state, requests.TESTS)
    return long(request, state, encoded(held.sandbox.run_tests(**named)))


@router.post("/probes", responses=LONG, openapi_extra=described(requests.TESTS))
async def run_probes(request: Request, held: Box, state: State) -> Response:
    """Runs the named probe files."""
    named, _ = await fields_of(request, state, requests.TESTS)
    return long(request, state, encoded(held.sandbox.run_probes(**named)))


@router.get("/diff", responses=LONG)
async def diff(held: Box, state: State) -> Response:
    """What differs from the template."""
    return _diff(held, state, final=False)


@router.post("/final_diff", responses=LONG)
async def final_diff(held: Box, state: State) -> Response:
    """Ends every process, then as `diff`."""
    return _diff(held, state, final=True)


def _diff(held: Held, state: ServerState, final: bool) -> LongAnswer:
    async def work() -> Encoded:
        return encode_diff(await (held.sandbox.final_diff() if final else held.sandbox.diff()))

    return long_answer(work(), on_error=state.note_error)
