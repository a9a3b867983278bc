"""Errors of the server: one format on every route, correct attribution of faults."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from etude.environment.names import check_run_name, check_task_name, template_of
from etude.environment.sessions import EnvironmentSession
from etude.errors import UserError
from etude.records import Status
from etude.sandbox.errors import CapacityError, SandboxMissingError
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import TASK
from tests.environment.server.serving import begin, httpx, new_host, new_services, remote
from tests.environment.server.test_server import ask, create
from tests.fakes.faulty_sandbox import FaultyBackend

from etude.environment.server.host import is_our_fault  # isort: skip
from etude.environment.wire import task_document  # isort: skip

FAILURES = "etude_environment_background_failures_total"
SHAPE = {"kind", "message", "field", "received", "fix"}


async def failures(client: httpx.AsyncClient) -> int:
    text = (await client.get("/metrics")).text
    return next(int(float(line.split()[1])) for line in text.splitlines() if line.startswith(f"{FAILURES} "))


def test_a_clients_mistake_is_no_failure_of_the_server() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        assert await failures(client) == 0
        session = (await create(client))["id"]
        for body in ({"task": "absent"}, {"fork": {"session": "absent"}}, {"snapshot": "absent"}):
            assert (await client.post("/sessions", json=body)).status_code in (400, 404)
        assert (await client.post(f"/sessions/{session}/fork", json={"turn": 9})).status_code == 400
        assert await failures(client) == 0

    ask(scenario)


def test_a_failure_of_ours_is_counted() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        assert (await client.post("/sessions", json={"task": "tally"})).status_code == 502
        assert await failures(client) == 1

    ask(scenario, new_host(new_services(FaultyBackend(MemoryBackend(), {"create": 1}))))


def test_the_same_kind_of_error_is_ours_where_it_comes_from_behind() -> None:
    assert not is_our_fault(CapacityError("full", field="sessions"))
    assert is_our_fault(CapacityError("no place became free", field="sandbox"))
    assert not is_our_fault(SandboxMissingError("no such session", field="session"))
    assert is_our_fault(SandboxMissingError("gone", field="sandbox"))
    assert is_our_fault(KeyError("a defect"))


@pytest.mark.parametrize(
    ("files", "path"),
    [
        ({"a": "1", "a/b": "2"}, "a"),
        ({"x/./y/z": "1", "x/y": "2"}, "x/y"),
        ({"lib/a": "1", "lib//a": "2"}, "lib/a"),
        ({"": "1"}, "."),
        ({"a\0b": "1"}, "a\0b"),
        ({"../a": "1"}, "../a"),
        ({"n" * 256: "1"}, "n" * 120),
    ],
)
def test_files_that_cannot_be_are_the_clients_mistake(files: dict[str, str], path: str) -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        document = task_document(TASK)
        for body, field in (
            ({"files": files}, "files"),
            ({"task": {**document, "files": files}}, "task.files"),
            ({"task": {**document, "hidden_files": files}}, "task.hidden_files"),
        ):
            answer = await client.post("/sessions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["field"]) == (400, field)
            assert error["received"].startswith(path)
            assert error["fix"]
        assert await failures(client) == 0
        assert (await client.get("/sessions")).json() == []

    ask(scenario)


def test_files_that_can_be_are_taken_as_they_are() -> None:
    files = {"a": "1", "ab/c": "2", "ab/d": "", "A/b": "ü"}
    assert template_of(files, "files").contents == {path: text.encode() for path, text in files.items()}
    for name, text in (("a", "\ud800"), ("\ud800", "")):
        with pytest.raises(UserError):
            template_of({name: text}, "files")


def test_every_route_answers_errors_in_one_shape() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        for method, path, status, field in (
            ("GET", "/absent", 404, "path"),
            ("GET", "/openenv/absent", 404, "path"),
            ("GET", "/openenv/reset", 405, "method"),
            ("PUT", "/sessions", 405, "method"),
            ("GET", "/openenv/state", 400, "episode_id"),
            ("GET", "/openenv/state?episode_id=absent", 400, "episode_id"),
            ("POST", "/openenv/step", 400, "action"),
            ("POST", "/openenv/reset", 400, "body"),
        ):
            content = b"{" if path.endswith("reset") else b"{}"
            answer = await client.request(method, path, content=content if method == "POST" else None)
            assert answer.status_code == status, path
            assert set(answer.json()) == {"error"} and set(answer.json()["error"]) == SHAPE, path
            assert answer.json()["error"]["field"] == field
            assert answer.json()["error"]["fix"], path
        assert (await client.get("/openenv/reset")).headers["allow"] == "POST"

    ask(scenario)


@pytest.mark.parametrize("name", ["../..", "", "/a", "a/", "a//b", ".hidden", "a b", "a\n", "ä", "a" * 201])
def test_what_is_no_name_of_a_task_is_refused_by_every_request(name: str) -> None:
    with pytest.raises(UserError, match="is not a valid name"):
        check_task_name(name)

    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        for task, field in ((name, "task"), ({**task_document(TASK), "id": name}, "task.id")):
            answer = await client.post("/sessions", json={"task": task})
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)
        answer = await client.post("/openenv/reset", json={"task": name})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "task")

    ask(scenario)


def test_names_of_tasks_and_runs_are_those_of_other_systems_too() -> None:
    for name in ("tally", "org/fix-1", "django__django-11099", "a/b/c", "functions:7@0.4", "0"):
        assert check_task_name(name) == name
    assert check_run_name("r.1+fork2") == "r.1+fork2"
    with pytest.raises(UserError, match="is not a valid name"):
        check_run_name("a/b")


def test_a_session_that_we_failed_cannot_be_submitted() -> None:
    async def refused(session: Any) -> None:
        with pytest.raises(UserError, match="never graded"):
            await session.submit(Status.INFRASTRUCTURE)

    async def scenario() -> None:
        session: EnvironmentSession = begin()
        await refused(session)
        assert session.state == "open"
        await session.close()
        async with remote() as server:
            far = await server.create("tally")
            await refused(far)
            assert (await far.describe())["state"] == "open"
            assert (await far.submit(Status.DONE, "")).reward.total <= 0
            with pytest.raises(UserError, match="not a session id"):
                await server.connect("../tasks")

    asyncio.run(scenario())
