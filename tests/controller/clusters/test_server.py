"""Requests that the control API refuses: unauthorised and malformed ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import RunConfig, load_config
from etude.controller.clusters.control import Control
from etude.controller.clusters.intake import Inbox
from etude.controller.clusters.runner import sampling_command
from etude.controller.clusters.server import build_app
from etude.controller.clusters.wire import API, RunFingerprint, config_document, order_document, order_of
from etude.environment.runners import EpisodeRequest
from etude.records import SamplingParams, TrajectoryId
from tests.controller.clusters.playing import FINGERPRINT, OFFER, TOKEN
from tests.environment.playing import TASK, renderer

SETTINGS = RunConfig().clusters.model_copy(update={"poll_s": 0.0, "max_result_bytes": 1 << 16})
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def asking(
    directory: Path,
    scenario: Callable[[httpx.AsyncClient, Control], Coroutine[Any, Any, None]],
    token: str | None = TOKEN,
    host: str = "run",
) -> None:
    """Runs a scenario against the application itself."""

    async def go() -> None:
        inbox = Inbox(directory / "inbox", SETTINGS.max_result_bytes)
        control = Control(SETTINGS, OFFER, inbox)
        await control.begin()
        transport = httpx.ASGITransport(build_app(control, token))
        try:
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
                await scenario(client, control)
        finally:
            await control.close()

    asyncio.run(go())


ROUTES = (
    ("GET", "/v1/run"),
    ("GET", "/v1/manifest"),
    ("POST", "/v1/join"),
    ("POST", "/v1/beat"),
    ("POST", "/v1/claim"),
    ("POST", "/v1/leave"),
    ("PUT", "/v1/leases/x/session?member=y"),
    ("POST", "/v1/leases/x/failure"),
    ("GET", "/metrics"),
)


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_nobody_is_let_in_without_the_token(tmp_path: Path, method: str, path: str) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        for headers in ({}, {"authorization": "Bearer another"}, {"authorization": f"Basic {TOKEN}"}):
            answer = await client.request(method, path, headers=headers, json={})
            assert answer.status_code == 401, answer.text
            assert TOKEN not in answer.text

    asking(tmp_path, scenario)


def test_without_a_token_only_loopback_names_are_let_in(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        assert (await client.get("/v1/run")).status_code == 200
        assert (await client.get("/v1/run", headers={"host": "evil.example:80"})).status_code == 401

    asking(tmp_path, scenario, token=None, host="127.0.0.1")


def test_health_needs_no_token_and_metrics_count(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        assert (await client.get("/health")).json() == {"status": "healthy"}
        text = (await client.get("/metrics", headers=HEADERS)).text
        assert "etude_clusters_kept 0" in text

    asking(tmp_path, scenario)


VERSION: dict[str, Any] = {
    "lineage": "run",
    "step": 0,
    "digest": "",
    "format": "float32",
    "adapter": None,
}
MALFORMED: tuple[tuple[str, Any], ...] = (
    ("/v1/join", []),
    ("/v1/join", {"name": 5, "api": 1, "fingerprint": {}}),
    ("/v1/join", {"name": "a", "api": 1}),
    ("/v1/join", {"name": "a", "api": 1, "fingerprint": {}, "more": 1}),
    ("/v1/beat", {"member": "a", "version": 3, "running": {}, "trouble": ""}),
    ("/v1/beat", {"member": "a", "version": {"no": "version"}, "running": {}, "trouble": ""}),
    ("/v1/beat", {"member": "a", "version": VERSION | {"lineage": []}, "running": {}, "trouble": ""}),
    ("/v1/beat", {"member": "a", "version": VERSION | {"step": -1}, "running": {}, "trouble": ""}),
    ("/v1/beat", {"member": "a", "version": None, "running": {"lease": "much"}, "trouble": ""}),
    ("/v1/beat", {"member": "a", "version": None, "running": {"lease": -1}, "trouble": ""}),
    ("/v1/beat", {"member": "a", "version": None, "running": {}}),
    ("/v1/beat", {"member": "a", "version": None, "running": {}, "trouble": 3}),
    ("/v1/claim", {"member": "a", "version": None, "most": 0}),
    ("/v1/claim", {"member": "a", "version": None, "most": 10**9}),
    ("/v1/leave", {}),
)


@pytest.mark.parametrize(("path", "body"), MALFORMED)
def test_malformed_requests_are_refused_as_such(tmp_path: Path, path: str, body: Any) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        answer = await client.post(path, json=body, headers=HEADERS)
        assert answer.status_code == 400, answer.text
        assert "message" in answer.json()["error"]

    asking(tmp_path, scenario)


def test_names_that_are_none_versions_of_others_and_other_makings_are_refused(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        right = {"name": "a", "api": API, "fingerprint": dict(FINGERPRINT.parts)}
        for change in ({"name": "a/b"}, {"api": 7}, {"fingerprint": {"model": "another"}}):
            answer = await client.post("/v1/join", json=right | change, headers=HEADERS)
            assert answer.status_code == 409, answer.text
        assert control.num_refused == 3
        assert (await client.post("/v1/join", json=right, headers=HEADERS)).status_code == 200

    asking(tmp_path, scenario)


def test_who_has_not_joined_is_told_to(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        for path, more in (("beat", {"running": {}, "trouble": ""}), ("claim", {"most": 1})):
            body = {"member": "nobody", "version": None, **more}
            assert (await client.post(f"/v1/{path}", json=body, headers=HEADERS)).status_code == 410
        answer = await client.put("/v1/leases/x/session?member=nobody", content=b"x", headers=HEADERS)
        assert answer.status_code == 410

    asking(tmp_path, scenario)


def test_bodies_beyond_the_limit_are_refused_before_they_are_held(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        async def endless() -> Any:
            for _ in range(1_000):
                yield b"x" * 4096

        path = "/v1/leases/x/session?member=nobody"
        for content in (b"x" * ((1 << 16) + 1), endless()):
            answer = await client.put(path, content=content, headers=HEADERS)
            assert answer.status_code == 400
            assert "too large" in answer.text
        answer = await client.post("/v1/join", content=b"[" * (1 << 21), headers=HEADERS)
        assert answer.status_code == 400

    asking(tmp_path, scenario)


@given(
    body=st.binary(max_size=60), path=st.sampled_from([path for method, path in ROUTES if method != "GET"])
)
def test_no_body_makes_the_server_fail(
    tmp_path_factory: pytest.TempPathFactory, body: bytes, path: str
) -> None:
    async def scenario(client: httpx.AsyncClient, control: Control) -> None:
        method = "PUT" if "session" in path else "POST"
        answer = await client.request(method, path, content=body, headers=HEADERS)
        assert 400 <= answer.status_code < 500

    asking(tmp_path_factory.mktemp("run"), scenario)


# What travels


def test_an_order_comes_back_equal() -> None:
    request = EpisodeRequest(
        TASK, TrajectoryId("run", "t", 1, 2, 3), (1, 2**40, 3), SamplingParams(temperature=0.7), True
    )
    assert order_of(order_document(request)) == request


@pytest.mark.parametrize("raw", [{}, {"task": 1}])
def test_what_is_no_order_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(Exception):  # noqa: B017 - of the task's own kind, or ours
        order_of(raw)


def test_a_cluster_gets_the_runs_configuration_without_what_is_the_runs_own(tmp_path: Path) -> None:
    tree = {
        "weights": {"url": "/somewhere", "token": "env:SECRET"},
        "clusters": {"listen": "127.0.0.1:1", "token": "env:SECRET"},
        "agent": {"max_turns": 7},
        "engine": {"num_slots": 5},
    }
    text = config_document(RunConfig.model_validate(tree))
    assert "SECRET" not in text
    assert "/somewhere" not in text
    file = tmp_path / "run.toml"
    file.write_text(text)
    found = load_config(file, ["weights.read_url=http://relay:1", "engine.num_slots=9"])
    assert (found.agent.max_turns, found.engine.num_slots, found.clusters.listen) == (7, 9, "")


def test_makings_tell_apart_what_plays_differently() -> None:
    config = RunConfig()
    own = RunFingerprint.of(config, renderer())
    own.check(RunFingerprint.of(config, renderer()).parts, "a")
    elsewhere = config.model_copy(update={"agent": config.agent.model_copy(update={"max_turns": 3})})
    with pytest.raises(Exception, match="agent"):
        own.check(RunFingerprint.of(elsewhere, renderer()).parts, "a")
    sandbox = config.sandbox.model_copy(update={"backend": "gvisor"})
    own.check(RunFingerprint.of(config.model_copy(update={"sandbox": sandbox}), renderer()).parts, "a")


def test_the_run_says_all_that_a_cluster_has_to_name() -> None:
    settings = RunConfig().clusters
    assert (
        sampling_command("http://h:1", settings)
        == "etude sample --control http://h:1 --relay http://RELAY:PORT"
    )
    named = settings.model_copy(update={"token": "env:SECRET"})
    assert " --token env:SECRET --relay " in sampling_command("http://h:1", named)
