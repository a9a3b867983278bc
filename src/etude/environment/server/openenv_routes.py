"""OpenEnv: an episode for each WebSocket, as its clients want it, and the same by HTTP with an episode's id.

OpenEnv's client can send no headers, so a token may stand in the path: `ws://host/openenv/TOKEN/ws`.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import Response

from etude.environment.server.host import SessionHost
from etude.environment.server.openenv import RESET, Episode, schemas
from etude.environment.server.requests import Host, Tenant, fields_of, host_of, tenant_of
from etude.errors import EtudeError, UserError
from etude.sandbox.errors import CapacityError
from etude.serving.application import Json
from etude.serving.describing import described
from etude.serving.errors import shorten
from etude.serving.json_bodies import off_the_loop, parse_json
from etude.serving.messages import Fields

router = APIRouter()

_NONE = type(None)
_STEP: Fields = {
    "action": (dict,),
    "episode_id": (str,),
    "timeout_s": (float, _NONE),
    "request_id": (str, _NONE),
}
_HTTP_EPISODES = 1024


@router.websocket("/openenv/ws")
@router.websocket("/openenv/{token}/ws")
async def talk(socket: WebSocket) -> None:
    """Messages `reset`, `step`, `state`, `close`; answers `observation`, `state`, `error`."""
    await socket.accept()
    host = host_of(socket)
    try:
        episode = Episode(host, tenant_of(socket))
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
        # The client has left; its episode ends with it.
        return
    finally:
        await episode.close()


async def _answer(host: SessionHost, episode: Episode, text: str | None) -> dict[str, Any] | None:
    """The answer to one message; None to the last. `text` None: the message is no text."""
    if text is None:
        return _error("Invalid JSON: the message is binary, not text", "INVALID_JSON")
    try:
        data = text.encode()
        message = await off_the_loop(lambda: parse_json(data), len(data))
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
        await _forget(host, episodes)
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
    """Where an episode stands."""
    return Json(_find(request, tenant, episode_id).state())


@router.get("/openenv/schema")
async def schema() -> Response:
    """JSON Schemas of action, observation and state."""
    return Json(schemas())


@router.get("/openenv/metadata")
async def metadata() -> Response:
    """What this environment is."""
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


async def _forget(host: SessionHost, episodes: dict[tuple[str, str], Episode]) -> None:
    """Forgets episodes whose sessions have ended. Raises CapacityError if all of them live."""
    for (tenant, name), episode in list(episodes.items()):
        live = {held.session.id for held in host.list(tenant)}
        if episode.state().get("session") not in live:
            del episodes[tenant, name]
    if len(episodes) >= _HTTP_EPISODES:
        raise CapacityError("too many episodes", field="episode_id", received=len(episodes), fix="end some")
