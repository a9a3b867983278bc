"""A router that lends real engines to a run: which requests each serves before, during and after the loan."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.config.routing import HealthCheckConfig, RouterConfig
from etude.controller.remote.engines import EngineProcess
from etude.inference.headers import SESSION_HEADER
from etude.inference.loan_client import LoanEndedError, LoanHandle
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from etude.inference.router.server.app import REPLICA_HEADER
from tests.fakes.replica import running_server
from tests.inference.server.lending import HOME, RunStore, lendable
from tests.inference.server.serving import ADMIN, Served


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Served]]:
    with lendable() as one, lendable() as other:
        yield [one, other]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    one = RunStore(tmp_path / "weights")
    yield one
    one.close()


@dataclass
class Routing:
    proxy: Proxy
    http: httpx.AsyncClient
    names: list[str]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(60.0):
            while not holds():  # noqa: ASYNC110 (nobody tells of it)
                await asyncio.sleep(0.01)

    async def check_in(self, **options: Any) -> list[dict[str, Any]]:
        body = {"pool": "rollout", "wanted": 1, "lease_s": 60.0, **options}
        answer = await self.http.put("/router/borrowers/run", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["loans"]

    async def until_lent(self, **options: Any) -> list[dict[str, Any]]:
        async with asyncio.timeout(60.0):
            while not (loans := await self.check_in(**options)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return loans

    async def user(self, number: int) -> httpx.Response:
        body = {"prompt": "def ", "max_tokens": 3}
        return await self.http.post("/v1/completions", json=body, headers={SESSION_HEADER: f"u{number}"})

    def ready(self) -> int:
        return sum(replica.ready for replica in self.proxy.router.replicas.values())


@contextlib.asynccontextmanager
async def routed(
    replicas: list[Served], token: str = ADMIN, pool: str | None = None
) -> AsyncIterator[Routing]:
    proxy = Proxy(RouterConfig(health=HealthCheckConfig(interval_s=0.1, timeout_s=30.0)), token)
    addresses = [ReplicaAddress(served.url, pool) for served in replicas]
    async with (
        running_server(build_app(proxy, addresses)) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as http,
    ):
        routing = Routing(proxy, http, [one.name for one in addresses])
        await routing.until(lambda: routing.ready() == len(replicas))
        yield routing


def test_a_replica_is_lent_by_hand_sampled_from_and_recalled(replicas: list[Served], store: RunStore) -> None:
    async def run() -> None:
        async with routed(replicas) as routing:
            assert await routing.check_in() == [], "nothing works for its pool yet"
            name = routing.names[0]
            answer = await routing.http.post(f"/router/replicas/{name}/lend", json={"pool": "rollout"})
            assert answer.json()["by_hand"]
            (loan,) = await routing.until_lent()
            assert loan["replica"] == name
            assert await routing.check_in() == [loan], "the same each time"
            handle = LoanHandle(loan["url"], loan["token"], store.url)
            await handle.call(EngineProcess.begin)
            manifest = store.publish(1)
            await handle.call(EngineProcess.stage, manifest)
            await handle.call(EngineProcess.activate, manifest.version, "recompute")
            users = [await routing.user(number) for number in range(6)]
            assert {one.headers[REPLICA_HEADER] for one in users} == {routing.names[1]}
            assert {one.json()["system_fingerprint"] for one in users} == {HOME}
            row = (await routing.http.get("/router/borrowers")).json()["borrowers"][0]
            assert row["replicas"] == [name]

            answer = await routing.http.post(f"/router/replicas/{name}/recall")
            assert (answer.json()["state"], answer.json()["version"]) == ("ready", HOME)
            with pytest.raises(LoanEndedError):
                await handle.call(EngineProcess.pulse)
            assert await routing.check_in() == []
            users = [await routing.user(number) for number in range(100, 108)]
            assert name in {one.headers[REPLICA_HEADER] for one in users}
            assert {one.json()["system_fingerprint"] for one in users} == {HOME}
            await handle.stop()

    asyncio.run(run())


def test_a_run_that_leaves_or_falls_silent_leaves_its_replica_to_the_pool(replicas: list[Served]) -> None:
    async def run() -> None:
        async with routed(replicas) as routing:
            name = routing.names[0]
            await routing.http.post(f"/router/replicas/{name}/lend", json={"pool": "rollout"})
            for silent in (False, True):
                await routing.until_lent(lease_s=60.0)
                assert routing.ready() == 1
                if silent:
                    await routing.check_in(lease_s=0.2)
                else:
                    await routing.http.delete("/router/borrowers/run")
                await routing.until(lambda: routing.ready() == 2)
            await routing.http.post(f"/router/replicas/{name}/recall")

    asyncio.run(run())


def test_a_replica_that_refuses_the_loan_goes_on_serving(replicas: list[Served]) -> None:
    async def run() -> None:
        async with routed(replicas, "another token") as routing:
            name = routing.names[0]
            await routing.http.post(f"/router/replicas/{name}/lend", json={"pool": "rollout"})
            assert await routing.check_in() == []
            await routing.until(lambda: routing.proxy.router.replicas[name].cause)
            assert "403" in routing.proxy.router.replicas[name].cause
            await routing.until(lambda: routing.ready() == 2)

    asyncio.run(run())


def test_a_replica_that_dies_while_it_is_lent_is_no_loan_any_more(replicas: list[Served]) -> None:
    async def run() -> None:
        with lendable() as mortal:
            async with routed([mortal, replicas[1]]) as routing:
                name = routing.names[0]
                await routing.http.post(f"/router/replicas/{name}/lend", json={"pool": "rollout"})
                await routing.until_lent()
                mortal.server.should_exit = True
                await routing.until(lambda: routing.proxy.router.replicas[name].state == "ejected")
                await routing.http.post(f"/router/replicas/{name}/recall")
                assert await routing.check_in() == []
                assert (await routing.user(1)).status_code == 200

    asyncio.run(run())


def test_a_replica_of_the_runs_own_pool_is_borrowed_without_being_lent(replicas: list[Served]) -> None:
    async def run() -> None:
        async with routed(replicas[:1], pool="rollout") as routing:
            name = routing.names[0]
            await routing.until_lent()
            answer = await routing.http.post(f"/router/replicas/{name}/recall")
            assert answer.json()["borrower"] == "run", "it is where it belongs"
            await routing.http.delete("/router/borrowers/run")
            await routing.until(lambda: routing.ready() == 1)

    asyncio.run(run())


def test_bad_check_ins_are_refused(replicas: list[Served]) -> None:
    async def run() -> None:
        async with routed(replicas) as routing:
            for body in ({}, {"pool": "rollout", "wanted": -1}, {"pool": "rollout", "refused": [1]}):
                answer = await routing.http.put("/router/borrowers/run", json=body)
                assert answer.status_code == 400, body
            assert (await routing.http.delete("/router/borrowers/other")).json()["known"] is False
        async with routed(replicas, "") as routing:
            answer = await routing.http.put("/router/borrowers/run", json={"pool": "rollout"})
            assert answer.status_code == 400
            assert "replica-token-file" in answer.text

    asyncio.run(run())


def test_a_borrowers_token_opens_borrowing_alone(replicas: list[Served]) -> None:
    async def run() -> None:
        app = build_app(Proxy(replica_token=ADMIN), [], "admin", "borrower")
        async with (
            running_server(app) as url,
            httpx.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as http,
        ):
            for token, borrowing, owning in (("borrower", 200, 401), ("admin", 200, 200), ("x", 401, 401)):
                headers = {"authorization": f"Bearer {token}"}
                body = {"pool": "rollout", "wanted": 1}
                answer = await http.put("/router/borrowers/run", json=body, headers=headers)
                assert answer.status_code == borrowing
                assert (await http.get("/router/replicas", headers=headers)).status_code == owning

    asyncio.run(run())
