"""The OpenEnv interface of environments: `reset`, `step`, `state`; one episode per WebSocket, as OpenEnv's
clients expect, and the same by HTTP with an episode's id.

An action is one turn: `{"calls": [{"name", "arguments"}]}`, or `{"message": text}` with calls in our grammar.
The observation has the results of the tools; when the agent has finished, or has used up its turns, the
episode is graded, and the last observation has the reward. Infrastructure failures are protocol errors, never
a reward. OpenEnv's client cannot send headers, so a token may be part of the path:
`ws://host/openenv/TOKEN/ws`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response

from etude.agent.admission import admit
from etude.environment.running import ignore_event
from etude.environment.server.host import HostSession, SessionHost
from etude.environment.server.requests import Host, Tenant, create_session, fields_of, host_of, tenant_of
from etude.environment.sessions import EnvironmentSession
from etude.environment.wire import calls_of
from etude.errors import AgentError, EtudeError, UserError
from etude.kit.tasks import off_loop
from etude.records import Status, ToolCall, ToolResult
from etude.sandbox.errors import CapacityError
from etude.serving.application import Json
from etude.serving.describing import described, object_schema
from etude.serving.errors import shorten
from etude.serving.json_bodies import parse_json
from etude.serving.messages import Fields, check_fields
from etude.tokens.grammar import ToolSchema, XmlGrammar, parse_calls

router = APIRouter()

MAX_TURNS = 50
MAX_CALLS = 16
MAX_MESSAGE_CHARACTERS = 16 << 20
_HTTP_EPISODES = 1024
_NONE = type(None)
RESET: Fields = {
    "seed": (int, _NONE),
    "episode_id": (str, _NONE),
    "task": (str, dict, _NONE),
    "max_turns": (int, _NONE),
}
_STEP: Fields = {
    "action": (dict,),
    "episode_id": (str,),
    "timeout_s": (float, _NONE),
    "request_id": (str, _NONE),
}
_ACTION: Fields = {"calls": (list, _NONE), "message": (str, _NONE), "metadata": (dict, _NONE)}
_OBSERVATION: Fields = {
    "episode_id": (str, _NONE), "text": (str,), "results": (list,), "errors": (list, _NONE),
    "instruction": (str, _NONE), "tools": (list, _NONE), "status": (str, _NONE), "cause": (str, _NONE),
    "passed": (bool, _NONE),
}  # fmt: skip
_STATE: Fields = {
    "episode_id": (str, _NONE), "step_count": (int,), "session": (str, _NONE), "task": (str, _NONE),
    "done": (bool, _NONE), "reward": (float, _NONE), "facts": (dict, _NONE),
}  # fmt: skip


class Episode:
    """One client's episodes, one after the other. `close` must be called at the end."""

    def __init__(self, host: SessionHost, tenant: str) -> None:
        """`tenant`: owner of the sessions."""
        self._host, self._tenant = host, tenant
        self._owned: HostSession | None = None
        self._max_turns = MAX_TURNS
        self._done = False
        self._reward: float | None = None
        self.episode_id: str | None = None

    async def reset(self, data: object) -> dict[str, Any]:
        """Ends the episode and begins a new one. Raises UserError, SandboxError."""
        named = {name: value for name, value in check_fields(data, RESET).items() if value is not None}
        await self.close()
        self._max_turns = named.get("max_turns", MAX_TURNS)
        task = named["task"] if "task" in named else self._choose_task(named.get("seed", 0))
        self._owned = await create_session(self._host, self._tenant, {"task": task})
        session, self._done, self._reward = self._owned.session, False, None
        self.episode_id = named.get("episode_id") or secrets.token_hex(8)
        tools = [schema.function_schema() for schema in session.services.tools.schemas]
        return self._answer({"instruction": session.instruction, "tools": tools, "results": [], "text": ""})

    async def step(self, action: object) -> dict[str, Any]:
        """Runs one turn. Raises UserError for an invalid action, SandboxError for infrastructure failures."""
        session = self._running()
        message = action.get("message") if isinstance(action, dict) else None
        size = len(message) if isinstance(message, str) else 0
        calls = await off_loop(size, _calls, action, session.services.tools.schemas)
        try:
            async with self._host.turn(self._host.find(self._tenant, session.id), calls):
                results = await session.run_calls(calls, {}, ignore_event, ignore_event)
        except AgentError as error:
            return await self._finish(session, Status.AGENT_ERROR, error.message, [])
        if session.finished:
            return await self._finish(session, Status.DONE, "", results)
        if session.num_turns >= self._max_turns:
            return await self._finish(session, Status.LIMIT, "turns", results)
        return self._answer(_observed(results))

    def state(self) -> dict[str, Any]:
        """The state of the episode."""
        if self._owned is None:
            return {"episode_id": None, "step_count": 0}
        session = self._owned.session
        return {
            "episode_id": self.episode_id,
            "step_count": session.num_turns,
            "session": session.id,
            "task": session.task.id if session.task else None,
            "done": self._done,
            "reward": self._reward,
            "facts": session.facts.to_dict(),
        }

    async def close(self) -> None:
        """Ends the episode's session. Idempotent."""
        owned, self._owned = self._owned, None
        if owned is not None:
            await self._host.end(owned)

    def _choose_task(self, seed: int) -> str:
        names = sorted(self._host.tasks)
        if not names:
            raise UserError("this server has no tasks", field="task", fix="start it with --tasks DIRECTORY")
        return names[seed % len(names)]

    async def _finish(
        self, session: EnvironmentSession, status: Status, cause: str, results: Sequence[ToolResult]
    ) -> dict[str, Any]:
        outcome = await session.submit(status, cause)
        self._done, self._reward = True, outcome.reward.total
        more = {"status": status.value, "cause": cause, "passed": outcome.verdict.passed}
        return self._answer({**_observed(results), **more})

    def _answer(self, observation: dict[str, Any]) -> dict[str, Any]:
        return {"observation": observation, "reward": self._reward, "done": self._done}

    def _running(self) -> EnvironmentSession:
        if self._owned is None or self._done:
            raise UserError(
                "no running episode", field="step", received="done" if self._done else None, fix="reset first"
            )
        return self._owned.session


def schemas() -> dict[str, Any]:
    """JSON Schemas of action, observation and state."""
    call = object_schema({"name": (str,), "arguments": (dict, _NONE), "error": (str, _NONE)})
    texts = {"type": "array", "items": {"type": "string"}}
    errors = {"type": "array", "items": {"type": ["string", "null"]}}
    return {
        "action": object_schema(_ACTION, calls={"type": ["array", "null"], "items": call}),
        "observation": object_schema(_OBSERVATION, results=texts, errors=errors),
        "state": object_schema(_STATE),
    }


def _calls(action: object, tools: tuple[ToolSchema, ...]) -> Sequence[ToolCall]:
    """The turn's calls; those that may not run have the reason as `error`, as in our own sessions."""
    named = check_fields(action, _ACTION)
    message, calls = named.get("message"), named.get("calls")
    if (message is None) == (calls is None):
        raise UserError(
            "an action must be either calls or a message",
            field="action",
            received=sorted(named),
            fix="give one",
        )
    if calls is not None:
        return admit(calls_of(calls), MAX_CALLS)
    if len(str(message)) > MAX_MESSAGE_CHARACTERS:
        raise UserError(
            "is too long",
            field="action.message",
            received=len(str(message)),
            fix=f"send {MAX_MESSAGE_CHARACTERS} characters at most",
        )
    return admit(parse_calls(XmlGrammar(tools).parser(text_mode=True), [str(message)]), MAX_CALLS)


def _observed(results: Sequence[ToolResult]) -> dict[str, Any]:
    outputs = [result.output for result in results]
    return {
        "results": outputs,
        "errors": [result.error.value if result.error else None for result in results],
        "text": "".join(f"<result>{output}</result>" for output in outputs),
    }


@router.websocket("/openenv/ws")
@router.websocket("/openenv/{token}/ws")
async def talk(socket: WebSocket) -> None:
    """Messages `reset`, `step`, `state`, `close`; answers `observation`, `state`, `error`."""
    await socket.accept()
    host = await host_of(socket)
    try:
        episode = Episode(host, await tenant_of(socket))
    except EtudeError as error:
        await socket.send_text(json.dumps(_error(str(error), "SESSION_ERROR")))
        await socket.close()
        return
    try:
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            answer = await _answer(host, episode, message.get("text"))
            if answer is None:
                await socket.close()
                return
            await socket.send_text(json.dumps(answer))
    except (WebSocketDisconnect, RuntimeError):
        # The client has disconnected, which ends its episode.
        return
    finally:
        await episode.close()


async def _answer(host: SessionHost, episode: Episode, text: str | None) -> dict[str, Any] | None:
    """The answer to one message; None to `close`. `text` None: the message is binary."""
    if text is None:
        return _error("Invalid JSON: the message is binary, not text", "INVALID_JSON")
    try:
        data = text.encode()
        message = await off_loop(len(data), parse_json, data)
        kind, data = message.get("type"), message.get("data", {})
    except (UserError, ValueError, AttributeError) as error:
        return _error(f"Invalid JSON: {error}", "INVALID_JSON")
    try:
        match kind:
            case "reset":
                return {"type": "observation", "data": await episode.reset(data)}
            case "step":
                return {"type": "observation", "data": await episode.step(data)}
            case "state":
                return {"type": "state", "data": episode.state()}
            case "close":
                return None
            case _:
                return _error(f"Unknown message type: {shorten(str(kind))}", "UNKNOWN_TYPE")
    except CapacityError as error:
        return _error(str(error), "CAPACITY_REACHED")
    except UserError as error:
        return _error(str(error), "VALIDATION_ERROR")
    except EtudeError as error:
        host.note_error(error)
        return _error(str(error), "EXECUTION_ERROR", type(error).__name__)


def _error(message: str, code: str, kind: str | None = None) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, "kind": kind}}


@router.post("/openenv/reset", openapi_extra=described(RESET))
async def reset(request: Request, host: Host, tenant: Tenant) -> Response:
    """Begins an episode; `observation.episode_id` names it in further requests."""
    named = await fields_of(request, RESET)
    episodes = _episodes(request)
    if len(episodes) >= _HTTP_EPISODES:
        await _drop_ended(host, episodes)
    episode = episodes.pop((tenant, named.get("episode_id", "")), None) or Episode(host, tenant)
    answer = await episode.reset(named)
    assert episode.episode_id is not None, "it was just reset"
    episodes[tenant, episode.episode_id] = episode
    answer["observation"]["episode_id"] = episode.episode_id
    return Json(answer)


@router.post("/openenv/step", openapi_extra=described(_STEP))
async def step(request: Request, tenant: Tenant) -> Response:
    """One turn of an episode."""
    named = await fields_of(request, _STEP)
    return Json(await _find(request, tenant, named["episode_id"]).step(named["action"]))


@router.get("/openenv/state")
async def state(request: Request, tenant: Tenant, episode_id: str) -> Response:
    """The state of an episode."""
    return Json(_find(request, tenant, episode_id).state())


@router.get("/openenv/schema")
async def schema() -> Response:
    """JSON Schemas of action, observation and state."""
    return Json(schemas())


@router.get("/openenv/metadata")
async def metadata() -> Response:
    """Name and description of the environment."""
    return Json({"name": "etude", "description": "Software tasks in sandboxes, graded by hidden tests."})


@router.get("/openenv/health")
async def health() -> Response:
    """Whether the process answers."""
    return Json({"status": "healthy"})


def _episodes(request: Request) -> dict[tuple[str, str], Episode]:
    return request.app.state.episodes


def _find(request: Request, tenant: str, episode_id: str) -> Episode:
    episode = _episodes(request).get((tenant, episode_id))
    if episode is None:
        raise UserError("no such episode", field="episode_id", received=episode_id, fix="reset first")
    return episode


async def _drop_ended(host: SessionHost, episodes: dict[tuple[str, str], Episode]) -> None:
    """Removes episodes whose sessions have ended. Raises CapacityError if none has."""
    for (tenant, name), episode in list(episodes.items()):
        live = {owned.session.id for owned in host.list(tenant)}
        if episode.state().get("session") not in live:
            del episodes[tenant, name]
    if len(episodes) >= _HTTP_EPISODES:
        raise CapacityError("too many episodes", field="episode_id", received=len(episodes), fix="end one")
