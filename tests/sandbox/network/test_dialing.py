"""One resolution, every address checked, and the checked one connected to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from benchmarks.simulation.virtual_time import run_virtual

from etude.sandbox.network.messages import Refusal, Target
from etude.sandbox.network.proxy import Connect, Dialer, Resolve, resolve_name
from tests.fakes.network import FakeResolver, MemoryStream, memory_streams
from tests.sandbox.network.builders import PUBLIC

OTHER = "198.41.0.4"
TARGET = Target("example.org", 443)


class Connections:
    """Connects to nothing: remembers what was asked for; fails for the addresses it is told."""

    def __init__(self, fails: dict[str, OSError] | None = None) -> None:
        self.asked: list[tuple[str, int]] = []
        self._fails = fails or {}

    async def __call__(self, address: str, port: int) -> MemoryStream:
        self.asked.append((address, port))
        if address in self._fails:
            raise self._fails[address]
        return memory_streams()[0]


async def never(*_: object) -> Sequence[str]:
    await asyncio.sleep(60)
    raise AssertionError("nobody waits that long")


def dial(
    resolve: Resolve,
    connect: Connect,
    target: Target = TARGET,
    private: frozenset[tuple[str, int]] = frozenset(),
) -> str:
    """The address that was connected to."""

    async def run() -> str:
        address, stream = await Dialer(resolve, connect, private, 0.3, 2).dial(target)
        stream.close()
        return address

    return run_virtual(run())


def refusal(resolve: Resolve, connect: Connect, target: Target = TARGET) -> Refusal:
    with pytest.raises(Refusal) as caught:
        dial(resolve, connect, target)
    return caught.value


def test_a_name_is_resolved_once_and_its_address_connected_to() -> None:
    names, connections = FakeResolver({"example.org": [[PUBLIC], ["127.0.0.1"]]}), Connections()
    assert dial(names, connections) == PUBLIC
    assert names.queries == ["example.org"]
    assert connections.asked == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "fe80::1%lo"]
)
def test_a_name_that_leads_inside_is_refused(address: str) -> None:
    connections = Connections()
    got = refusal(FakeResolver({"example.org": [[address]]}), connections)
    assert got.status == 403 and got.reason.startswith("address_")
    assert address not in got.message
    assert connections.asked == []


def test_one_forbidden_address_among_many_refuses_the_name() -> None:
    connections = Connections()
    many = [f"93.184.216.{n}" for n in range(30)]
    assert refusal(FakeResolver({"example.org": [[*many, "127.0.0.1"]]}), connections).status == 403
    assert connections.asked == []


@pytest.mark.parametrize("name", ["localhost", "a.localhost", "localhost.localdomain", "ip6-localhost"])
def test_names_of_the_loopback_are_not_even_resolved(name: str) -> None:
    names = FakeResolver({name: [[PUBLIC]]})
    assert refusal(names, Connections(), Target(name, 80)).reason == "address_loopback"
    assert names.queries == []


def test_an_address_is_checked_without_resolving() -> None:
    names = FakeResolver({})
    assert refusal(names, Connections(), Target("127.0.0.1", 80)).reason == "address_loopback"
    assert dial(names, Connections(), Target(PUBLIC, 80)) == PUBLIC
    assert names.queries == []


def test_an_exception_holds_for_one_address_and_port() -> None:
    names = FakeResolver({"example.org": [["127.0.0.1"]]})
    private = frozenset({("127.0.0.1", 443)})
    assert dial(names, Connections(), private=private) == "127.0.0.1"
    with pytest.raises(Refusal):
        dial(names, Connections(), Target("example.org", 80), private)


def test_the_next_address_is_tried_when_one_fails() -> None:
    connections = Connections({PUBLIC: ConnectionRefusedError(111, "refused")})
    assert dial(FakeResolver({"example.org": [[PUBLIC, OTHER]]}), connections) == OTHER


def test_an_address_that_hangs_leaves_time_for_the_next() -> None:
    async def connect(address: str, port: int) -> MemoryStream:
        return await Connections()(address, port) if address == OTHER else await never()  # type: ignore[return-value]

    assert dial(FakeResolver({"example.org": [[PUBLIC, OTHER]]}), connect) == OTHER


def test_failures_have_their_status() -> None:
    names = FakeResolver(
        {"example.org": [[PUBLIC]], "empty.example": [[]], "odd.example": [["not an address"]]}
    )
    broken = Connections({PUBLIC: ConnectionRefusedError(111, "refused")})
    assert refusal(names, broken).status == 502
    assert refusal(names, broken).reason == "connect_failed ECONNREFUSED"
    for name in ("missing.example", "empty.example", "odd.example"):
        got = refusal(names, Connections(), Target(name, 80))
        assert (got.status, got.reason) == (502, "resolve_failed")
    assert refusal(never, Connections()).reason == "resolve_timeout"
    assert refusal(names, never).status == 504  # type: ignore[arg-type]


def test_slow_names_wait_for_one_another_within_the_deadline() -> None:
    running = most = 0

    async def slow(name: str) -> Sequence[str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return [PUBLIC]

    async def run() -> None:
        dialer = Dialer(slow, Connections(), frozenset(), 5.0, 2)
        await asyncio.gather(*(dialer.dial(Target(f"{n}.example.org", 80)) for n in range(8)))

    run_virtual(run())
    assert most == 2


def test_the_machines_resolver_answers_with_addresses() -> None:
    try:
        found = asyncio.run(resolve_name("localhost"))
    except OSError:
        pytest.skip("this machine does not know localhost")
    assert set(found) <= {"127.0.0.1", "::1"} and found
