"""Helpers of the routes: host, tenant and session of a request, its fields; and creating a session from a
request: its sources, and the paths of this host that it may name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from etude.environment.names import check_task_name, template_of
from etude.environment.origins import Origin, directory_template, repository_template, task_origin
from etude.environment.server.host import HostSession, SessionHost
from etude.environment.sessions import EnvironmentSession
from etude.environment.wire import task_of
from etude.errors import EtudeError, UserError
from etude.records import Task
from etude.sandbox.errors import SandboxMissingError
from etude.sandbox.inside.frames import Unpacker
from etude.sandbox.server.requests import check_numbers, long_answer, network_of, resources_of
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude.serving.access import AccessError, bearer_of, find_token
from etude.serving.application import read_request
from etude.serving.long_answers import LongAnswer, OutputBuffer, Work
from etude.serving.messages import FRAMES, Fields, check_fields, check_strings

_NONE = type(None)
LOCAL_TENANT = "local"
"""The tenant of all requests if no tokens are required."""
SOURCES = ("task", "files", "directory", "repository", "snapshot", "fork")
CREATE: Fields = {
    "task": (str, dict, _NONE),
    "files": (dict, _NONE),
    "directory": (str, _NONE),
    "repository": (str, _NONE),
    "commit": (str, _NONE),
    "snapshot": (str, _NONE),
    "fork": (dict, _NONE),
    "instruction": (str, _NONE),
    "test_paths": (list, _NONE),
    "resources": (dict, _NONE),
    "network": (dict, _NONE),
    "idle_s": (float, _NONE),
}
FORK_OF: Fields = {"session": (str,), "turn": (int, _NONE)}
TURN: Fields = {"calls": (list,), "turn": (int, _NONE), "known": (dict, _NONE)}
ARCHIVE: Fields = {"path": (str,), "text": (str,)}
SUBMIT: Fields = {"status": (str, _NONE), "cause": (str, _NONE)}
FORK: Fields = {"count": (int, _NONE), "turn": (int, _NONE)}
NOTHING: Fields = {}


# All three are coroutines: FastAPI runs plain functions in threads, which costs a millisecond and a race.


async def host_of(connection: HTTPConnection) -> SessionHost:
    """The host of the server that received the request."""
    return connection.app.state.host


async def tenant_of(connection: HTTPConnection) -> str:
    """The tenant of a request. Raises AccessError."""
    tokens: Mapping[str, str] = connection.app.state.tokens
    if not tokens:
        return LOCAL_TENANT
    given = bearer_of(connection.headers) or connection.path_params.get("token", "")
    found = find_token(tokens, given)
    if found is None:
        raise AccessError(
            "the token is missing or wrong", field="token", fix="send a token of the server as a bearer token"
        )
    return found


Host = Annotated[SessionHost, Depends(host_of)]
Tenant = Annotated[str, Depends(tenant_of)]


async def _owned_session(session_id: str, host: Host, tenant: Tenant) -> HostSession:
    return host.find(tenant, session_id)


PathSession = Annotated[HostSession, Depends(_owned_session)]
"""The session of the path."""


async def fields_of(request: Request, fields: Fields) -> dict[str, Any]:
    """The checked fields of a request, without null ones. Raises UserError."""
    limits = (await host_of(request)).limits
    raw, _ = await read_request(request, limits.body_bytes, Unpacker().feed)
    named = {name: value for name, value in check_fields(raw, fields).items() if value is not None}
    if "test_paths" in named:
        named["test_paths"] = tuple(check_strings(named["test_paths"], "test_paths"))
    check_numbers(named, "turn", "idle_s", "count")
    return named


def wants_frames(request: Request) -> bool:
    """Whether the client reads frames; others get JSON."""
    return FRAMES in request.headers.get("accept", "")


def long(request: Request, work: Work, output: OutputBuffer | None = None) -> LongAnswer:
    """The answer of a request that may take long. Its work is finished even if the client disconnects."""
    host: SessionHost = request.app.state.host
    plain = not wants_frames(request)
    return long_answer(work, output, host.in_background, plain=plain, on_error=host.note_error)


async def create_session(host: SessionHost, tenant: str, named: Mapping[str, Any]) -> HostSession:
    """Creates a session of the tenant, from one source. Raises UserError, CapacityError, SandboxError."""
    given = [name for name in SOURCES if name in named]
    if len(given) != 1:
        raise UserError(
            "a session needs exactly one source",
            field="body",
            received=given,
            fix="use one of " + ", ".join(SOURCES),
        )
    async with host.reserve(tenant):
        if given == ["fork"]:
            session = await _forked(host, tenant, named["fork"])
        else:
            session = await _opened(host, tenant, named)
        return host.register(tenant, session, named.get("idle_s"))


async def _opened(host: SessionHost, tenant: str, named: Mapping[str, Any]) -> EnvironmentSession:
    task = find_task(host, named["task"]) if "task" in named else None
    resources = resources_of(named.get("resources")) or Resources()
    network = network_of(named.get("network"))
    if task is not None:
        origin = task_origin(task, resources)
        origin = replace(origin, network=network or origin.network)
    elif "snapshot" in named:
        if host.snapshots.get(named["snapshot"]) != tenant:
            raise no_such_snapshot(named["snapshot"])
        origin = Origin(snapshot=named["snapshot"])
    else:
        origin = Origin(await _template(host, named), resources, network)
    return await EnvironmentSession.open(
        host.services, origin, task, named.get("instruction"), named.get("test_paths", ())
    )


async def _forked(host: SessionHost, tenant: str, raw: object) -> EnvironmentSession:
    fork = check_fields(raw, FORK_OF)
    owned = host.find(tenant, fork["session"])
    async with host.using(owned) as parent:
        (made,) = await parent.fork(1, fork.get("turn"))
    if isinstance(made, EtudeError):
        raise made
    return made


async def _template(host: SessionHost, named: Mapping[str, Any]) -> Template:
    if "files" in named:
        check_strings([*named["files"].values()], "files")
        return template_of(named["files"], "files")
    if "directory" in named:
        return await asyncio.to_thread(directory_template, _allowed(host, named["directory"], "directory"))
    return await repository_template(
        _allowed(host, named["repository"], "repository"), named.get("commit", "HEAD")
    )


def no_such_snapshot(snapshot: str) -> SandboxMissingError:
    """The error for a snapshot that the tenant does not own; it does not reveal those of others."""
    return SandboxMissingError(
        "this tenant has no such snapshot: it was deleted, or the server was restarted",
        field="snapshot",
        received=snapshot,
        fix="list the snapshots with GET /snapshots",
    )


def find_task(host: SessionHost, named: str | dict[str, Any]) -> Task:
    """A task of the server by its name, or the one in the request. Raises UserError."""
    if isinstance(named, dict):
        task = task_of(named)
        check_task_name(task.id, "task.id")
        if task.machine is not None or task.verifier is not None or task.steps:
            raise UserError(
                "a task with its own machine, test.sh or steps can only be named, not sent",
                field="task.machine",
                received=task.id,
                fix="start the server with --tasks and the task's directory",
            )
        for name in ("files", "hidden_files"):
            template_of(getattr(task, name), f"task.{name}")
        return task
    if check_task_name(named) not in host.tasks:
        raise UserError(
            "this server has no such task", field="task", received=named, fix="list its tasks with GET /tasks"
        )
    return host.tasks[named]


def _allowed(host: SessionHost, text: str, field: str) -> Path:
    """A path below one of the directories that clients may name. Raises UserError."""
    try:
        path = Path(text).resolve()
    except (ValueError, OSError, RuntimeError) as error:
        raise UserError(f"not a path: {error}", field=field, received=text, fix="name a directory") from error
    if not any(path.is_relative_to(root) for root in host.roots):
        raise UserError(
            "clients must not use this path",
            field=field,
            received=text,
            fix="start the server with --root DIRECTORY above it, or send the files themselves",
        )
    return path
