"""OpenEnv: reset, step, state; by its own client where that is installed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etude.agent.inputs import call_document
from etude.errors import SandboxError
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import FINISH, MEND, READ, SPOIL
from tests.environment.server.serving import TOKEN, TOKENS, asking, new_host, new_services, served
from tests.environment.server.test_server import Socket
from tests.fakes.faulty_sandbox import FaultyBackend


def action(*calls: Any) -> dict[str, Any]:
    return {"calls": [call_document(call) for call in calls]}


async def say(socket: Socket, kind: str, data: Any = None) -> dict[str, Any]:
    await socket.send({"type": kind} if data is None else {"type": kind, "data": data})
    return await socket.receive()


def talk(scenario: Any, host: Any = None, path: str = "/openenv/ws") -> None:
    host = host or new_host()

    async def run() -> None:
        async with asking(host) as client:
            socket = Socket(client.app, path)  # type: ignore[attr-defined]
            await scenario(socket)
            await socket.leave()
            assert not host.list("one")

    asyncio.run(run())


def test_an_episode_ends_with_its_reward() -> None:
    async def scenario(socket: Socket) -> None:
        first = await say(socket, "reset", {"seed": 3, "episode_id": "e"})
        assert first["type"] == "observation"
        assert first["data"]["observation"]["instruction"] == "test_tally fails"
        assert (first["data"]["reward"], first["data"]["done"]) == (None, False)
        step = (await say(socket, "step", action(READ, MEND)))["data"]
        assert step["observation"]["results"][1] == "ok"
        assert step["observation"]["text"].endswith("<result>ok</result>")
        text = "I am done. <finish></finish>"
        last = (await say(socket, "step", {"message": text}))["data"]
        assert (last["reward"], last["done"]) == (1.0, True)
        state = (await say(socket, "state"))["data"]
        assert (state["episode_id"], state["step_count"], state["reward"]) == ("e", 2, 1.0)
        refused = await say(socket, "step", action(READ))
        assert refused["data"]["code"] == "VALIDATION_ERROR"
        again = await say(socket, "reset")
        assert again["data"]["done"] is False
        assert (await say(socket, "state"))["data"]["step_count"] == 0

    talk(scenario, path=f"/openenv/{TOKEN}/ws")


def test_a_used_up_episode_is_graded_with_its_limit() -> None:
    async def scenario(socket: Socket) -> None:
        await say(socket, "reset", {"task": "tally", "max_turns": 1})
        last = (await say(socket, "step", action(SPOIL)))["data"]
        assert last["done"] is True
        assert last["reward"] < 0
        assert last["observation"]["status"] == "limit"

    talk(scenario)


def test_malformed_calls_are_answers_and_nonsense_is_an_error() -> None:
    async def scenario(socket: Socket) -> None:
        assert (await say(socket, "step", action(READ)))["data"]["code"] == "VALIDATION_ERROR"
        for wrong in ({"task": "absent"}, 7, [1], "no object"):
            assert (await say(socket, "reset", wrong))["data"]["code"] == "VALIDATION_ERROR"
        await say(socket, "reset", {})
        step = (await say(socket, "step", {"message": "<read_file><path>a"}))["data"]
        assert step["observation"]["errors"] == ["malformed"]
        for wrong in ({}, {"calls": [], "message": ""}, {"calls": [1]}, {"calls": 1}, 7):
            assert (await say(socket, "step", wrong))["data"]["code"] == "VALIDATION_ERROR"
        assert (await say(socket, "dance"))["data"]["code"] == "UNKNOWN_TYPE"
        await socket.sent.put({"type": "websocket.receive", "text": "{"})
        assert (await socket.receive())["data"]["code"] == "INVALID_JSON"

    talk(scenario)


def test_an_infrastructure_failure_is_an_error_and_no_reward() -> None:
    async def scenario(socket: Socket) -> None:
        await say(socket, "reset", {})
        failed = await say(socket, "step", action(READ))
        assert (failed["type"], failed["data"]["code"]) == ("error", "EXECUTION_ERROR")
        assert failed["data"]["kind"] == SandboxError.__name__
        assert (await say(socket, "state"))["data"]["reward"] is None

    talk(scenario, new_host(new_services(FaultyBackend(MemoryBackend(), {"read": 1}))))


def test_a_wrong_token_in_the_path_is_refused() -> None:
    async def scenario() -> None:
        async with asking(new_host()) as client:
            socket = Socket(client.app, "/openenv/wrong/ws", token=None)  # type: ignore[attr-defined]
            assert (await socket.receive())["data"]["code"] == "SESSION_ERROR"

    asyncio.run(scenario())


def test_the_same_by_plain_http() -> None:
    async def scenario() -> None:
        async with asking(new_host()) as client:
            first = (await client.post("/openenv/reset", json={"task": "tally"})).json()
            episode = first["observation"]["episode_id"]
            step = {"action": action(MEND, FINISH), "episode_id": episode}
            last = (await client.post("/openenv/step", json=step)).json()
            assert (last["reward"], last["done"]) == (1.0, True)
            state = (await client.get("/openenv/state", params={"episode_id": episode})).json()
            assert state["step_count"] == 1
            step["episode_id"] = "absent"
            assert (await client.post("/openenv/step", json=step)).status_code == 400
            assert set((await client.get("/openenv/schema")).json()) == {"action", "observation", "state"}
            assert (await client.get("/openenv/health")).json() == {"status": "healthy"}

    asyncio.run(scenario())


def test_openenvs_own_client_plays_an_episode() -> None:
    pytest.importorskip("websockets", reason="uvicorn needs websockets to serve them")
    pytest.importorskip("fastmcp", reason="openenv-core imports its server with its client")
    core = pytest.importorskip("openenv.core", reason="needs openenv-core")

    async def scenario() -> None:
        async with (
            served(new_host(), TOKENS) as url,
            core.GenericEnvClient(base_url=f"{url}/openenv/{TOKEN}") as env,
        ):
            first = await env.reset(task="tally", seed=1)
            assert first.observation["instruction"] == "test_tally fails"
            assert not first.done
            step = await env.step(action(READ, MEND))
            assert step.reward is None
            last = await env.step(core.GenericAction(message="<finish></finish>"))
            assert (last.reward, last.done) == (1.0, True)
            assert (await env.state())["step_count"] == 2
            with pytest.raises(RuntimeError, match="no running episode"):
                await env.step(action(READ))

    asyncio.run(scenario())
