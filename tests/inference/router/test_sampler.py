"""Several samplers as one: sessions stay, and failures before the first chunk move them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

from etude.errors import PrefixMissError, SamplerError
from etude.inference.router import NoReplicaError, RoutedSampler
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams
from tests.fakes.scripted import ScriptedSampler

V1, V2 = PolicyVersion("run", 1), PolicyVersion("run", 2)


class Replica(ScriptedSampler):
    """A scripted sampler of named weights, which breaks when told to."""

    def __init__(self, version: PolicyVersion | None = V1) -> None:
        super().__init__(lambda _, context: np.arange(4, dtype=np.int32), chunk_tokens=1)
        self.version = version
        self.break_after: int | None = None

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        if self.break_after == 0:
            raise SamplerError("the engine has failed")
        given = 0
        async for chunk in super().stream(request):
            if self.break_after is not None and given >= self.break_after:
                raise SamplerError("the engine failed")
            given += 1
            yield chunk

    def current(self) -> PolicyVersion | None:
        return self.version


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60.0))


def request(session: str, number: int, digest: str | None = None, **options: Any) -> SampleRequest:
    return SampleRequest(
        id=f"{session}:{number}",
        session_id=session,
        suffix=np.arange(10, dtype=np.int32),
        params=SamplingParams(max_tokens=8),
        stop_tokens=frozenset(),
        rng_key=(number,),
        prefix_digest=digest,
        **options,
    )


async def ask(routed: RoutedSampler, one: SampleRequest) -> SampleChunk:
    """The last chunk."""
    last = None
    async for chunk in routed.stream(one):
        last = chunk
    assert last is not None
    return last


def home(replicas: dict[str, Replica], session: str) -> str:
    (name,) = [name for name, replica in replicas.items() if session in replica.open_sessions]
    return name


def three() -> tuple[dict[str, Replica], RoutedSampler]:
    replicas = {name: Replica() for name in "abc"}
    return replicas, RoutedSampler(replicas)


def test_sessions_are_spread_and_keep_their_prefix() -> None:
    async def body() -> None:
        replicas, routed = three()
        sessions = [f"s{n}" for n in range(9)]
        for session in sessions:
            routed.open(session)
        digests: dict[str, str | None] = dict.fromkeys(sessions)
        for turn in range(4):
            for session in sessions:
                digests[session] = (await ask(routed, request(session, turn, digests[session]))).prefix_digest
        homes = Counter(home(replicas, session) for session in sessions)
        assert set(homes.values()) == {3}
        for session in sessions:
            routed.close(session)
        assert not any(replica.open_sessions for replica in replicas.values())
        assert all(r.running == r.work == r.resident == 0 for r in routed.router.replicas.values())

    run(body())


def test_siblings_of_a_fork_are_opened_where_the_forked_session_is() -> None:
    class Noting(Replica):
        def __init__(self) -> None:
            super().__init__()
            self.sibling: list[tuple[str, str]] = []

        def open(self, session_id: str, sibling: str | None = None) -> None:
            if sibling is not None:
                self.sibling.append((session_id, sibling))
            super().open(session_id)

    async def body() -> None:
        replicas = {name: Noting() for name in "abc"}
        routed = RoutedSampler(replicas)
        routed.open("forked")
        await ask(routed, request("forked", 0))
        for sibling in ("s", "t"):
            routed.open(sibling, "forked")
        (at,) = [one for one in replicas.values() if "forked" in one.open_sessions]
        assert at.sibling == [("s", "forked"), ("t", "forked")]
        assert at.open_sessions == {"forked", "s", "t"}
        with pytest.raises(SamplerError, match="open already"):
            routed.open("s", "forked")
        routed.close("forked")
        routed.open("late", "forked")
        assert sum(len(one.sibling) for one in replicas.values()) == 2, "what is closed is nowhere"

    run(body())


def test_a_replica_that_fails_at_the_start_is_left_out() -> None:
    async def body() -> None:
        replicas, routed = three()
        routed.open("s")
        first = home(replicas, "s")
        replicas[first].break_after = 0
        assert (await ask(routed, request("s", 0))).finish == "stop"
        assert home(replicas, "s") != first
        assert not routed.router.replicas[first].ready

    run(body())


def test_a_failure_in_the_middle_is_told_and_the_next_request_goes_elsewhere() -> None:
    async def body() -> None:
        replicas, routed = three()
        routed.open("s")
        digest = (await ask(routed, request("s", 0))).prefix_digest
        first = home(replicas, "s")
        replicas[first].break_after = 2
        with pytest.raises(SamplerError, match="engine failed"):
            await ask(routed, request("s", 1, digest))
        with pytest.raises(PrefixMissError):
            await ask(routed, request("s", 2, digest))
        assert (await ask(routed, request("s", 3))).finish == "stop"
        assert home(replicas, "s") != first

    run(body())


def test_an_error_about_the_request_counts_against_nobody() -> None:
    async def body() -> None:
        replicas, routed = three()
        routed.open("s")
        with pytest.raises(PrefixMissError):
            await ask(routed, request("s", 0, "no such digest"))
        assert all(replica.ready for replica in routed.router.replicas.values())
        with pytest.raises(SamplerError, match="open already"):
            routed.open("s")
        assert home(replicas, "s")

    run(body())


def test_when_all_fail_the_last_cause_is_raised() -> None:
    async def body() -> None:
        replicas, routed = three()
        for replica in replicas.values():
            replica.break_after = 0
        routed.open("s")
        with pytest.raises(SamplerError, match="has failed"):
            await ask(routed, request("s", 0))

    run(body())


def test_versions_pin_requests() -> None:
    async def body() -> None:
        replicas = {"old": Replica(V1), "new": Replica(V2)}
        routed = RoutedSampler(replicas)
        for number, (options, expected) in enumerate(
            [
                ({"version": V1}, "old"),
                ({"version": V2}, "new"),
                ({"version": V2, "version_is_minimum": True}, "new"),
            ]
        ):
            session = f"s{number}"
            routed.open(session)
            await ask(routed, request(session, number, None, **options))
            assert home(replicas, session) == expected
        routed.open("last")
        with pytest.raises(NoReplicaError):
            await ask(routed, request("last", 9, version=PolicyVersion("run", 3)))

    run(body())


def test_a_session_that_is_closed_while_it_is_answered_leaves_nothing_behind() -> None:
    async def body() -> None:
        _, routed = three()
        routed.open("s")
        chunks = routed.stream(request("s", 0))
        await anext(chunks)
        routed.close("s")
        assert [chunk.finish async for chunk in chunks][-1] is not None
        assert routed._lengths == {}

    run(body())


def test_a_reader_that_stops_early_ends_the_replicas_stream() -> None:
    async def body() -> None:
        ended: list[str] = []

        class Watched(Replica):
            async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
                try:
                    async for chunk in super().stream(request):
                        yield chunk
                finally:
                    ended.append(request.id)

        routed = RoutedSampler({"a": Watched()})
        routed.open("s")
        chunks = routed.stream(request("s", 0))
        await anext(chunks)
        assert routed.router.replicas["a"].running == 1
        await chunks.aclose()  # type: ignore[attr-defined]
        assert ended == ["s:0"]
        assert routed.router.replicas["a"].running == 0

    run(body())


def test_a_replica_that_serves_nothing_gives_its_sessions_up_until_it_serves_again() -> None:
    async def body() -> None:
        replicas, routed = three()
        routed.open("s")
        digest = (await ask(routed, request("s", 0))).prefix_digest
        first = home(replicas, "s")
        routed.set_version(first, None)
        with pytest.raises(PrefixMissError):
            await ask(routed, request("s", 1, digest))
        assert (await ask(routed, request("s", 2))).finish == "stop"
        assert home(replicas, "s") != first
        for name in replicas:
            routed.set_version(name, V1 if name == first else None)
        with pytest.raises(PrefixMissError):
            await ask(routed, request("s", 3, digest))
        assert (await ask(routed, request("s", 4))).finish == "stop"
        assert home(replicas, "s") == first

    run(body())


def test_a_failed_replica_is_left_out_until_it_is_said_to_serve() -> None:
    async def body() -> None:
        replicas = {"a": Replica()}
        routed = RoutedSampler(replicas)
        replicas["a"].break_after = 0
        routed.open("s")
        with pytest.raises(SamplerError, match="has failed"):
            await ask(routed, request("s", 0))
        replicas["a"].break_after = None
        with pytest.raises(NoReplicaError):
            await ask(routed, request("s", 1))
        routed.set_version("a", V1)
        assert (await ask(routed, request("s", 2))).finish == "stop"

    run(body())
