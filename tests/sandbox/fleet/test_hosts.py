"""A fleet over real servers, each in a network namespace of its own: placed, killed, cut off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.errors import InfrastructureError
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.template import Template
from etude.sandbox.types import Network as Reach
from tests.sandbox.fleet.namespaced import (
    PORT,
    RESOURCES,
    Network,
    ServerHost,
    command_line,
    fleet_config,
    fleet_over,
    network,
    obstacle,
)

NUM_SANDBOXES = 40
TEMPLATE = Template({"code.py": "print('hello')\n", "gone.txt": "x", "kept.txt": "y"})
CONNECT = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 60); "
    "s.sendall(b'GET /health HTTP/1.0\\r\\n\\r\\n'); print(s.recv(12))"
)
FETCH = """
import urllib.request, urllib.error
try:
    print("got", urllib.request.urlopen("{}", timeout=60).read())
except urllib.error.HTTPError as error:
    print("refused", error.code)
"""

_obstacle = obstacle()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.foreign,
    pytest.mark.skipif(_obstacle is not None, reason=_obstacle or "possible"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    with network() as made:
        yield made


def play(
    net: Network,
    scenario: Callable[[Fleet], Awaitable[None]],
    heartbeat_timeout_s: float = 30.0,
    heartbeat_s: float = 1.0,
) -> None:
    """Plays a scenario on fresh servers; then nothing of them may be left, on any host.

    A server that has been killed misses its heartbeats at once, whatever their time.
    """

    async def played() -> None:
        async with fleet_over(net.hosts, fleet_config(heartbeat_timeout_s, heartbeat_s)) as fleet:
            await scenario(fleet)

    net.run(played)
    for host in net.hosts:
        assert len(host.family) > 3, "the processes were looked for in the wrong place"
        assert host.survivors() == []
        assert host.groups() == []
        assert host.litter() == []
        host.clear()


async def make(fleet: Fleet, num: int = NUM_SANDBOXES) -> list[Any]:
    return await asyncio.gather(*(fleet.create(TEMPLATE, RESOURCES) for _ in range(num)))


async def take_on(fleet: Fleet, host: ServerHost) -> list[Any]:
    """Makes sandboxes until the host has some. Not at once: what one machine measures for all of its hosts
    differs by the moment of each report, and the emptiest goes by that.
    """
    async with asyncio.timeout(120):
        while True:
            boxes = await make(fleet, 12)
            if new := on(boxes, host):
                return new
            await asyncio.gather(*(box.kill() for box in boxes))
            await asyncio.sleep(0.2)


async def until(condition: Callable[[], object]) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


def status_of(fleet: Fleet, host: ServerHost) -> Any:
    return fleet.registry.scheduler.hosts[host.name]


def on(boxes: list[Any], host: ServerHost) -> list[Any]:
    return [box for box in boxes if box.host.name == host.name]


async def loss(call: Awaitable[object]) -> str:
    """What a call says whose sandbox is lost; anything else fails the test."""
    async with asyncio.timeout(60.0):
        with pytest.raises(SandboxLostError) as caught:
            await call
    return str(caught.value)


async def known_losses(boxes: list[Any]) -> None:
    """Every call fails, without a question to the host, which would wait for an answer."""
    async with asyncio.timeout(30.0):
        for box in boxes:
            assert f"host {box.host.name} died" in await loss(box.commands.run("true"))


def is_even(pressures: list[float]) -> bool:
    """What one machine measures for all of its hosts differs by the moment of each report."""
    return max(pressures) <= 2 * sum(pressures) / len(pressures)


def test_many_sandboxes_are_spread_and_work_and_their_copies_stay_at_home(hosts: Network):
    async def scenario(fleet: Fleet) -> None:
        boxes = await make(fleet)
        spread = Counter(box.host.name for box in boxes)
        assert set(spread) == {host.name for host in hosts.hosts}
        assert max(spread.values()) <= 2 * NUM_SANDBOXES / len(hosts.hosts)
        await until(lambda: is_even([max(row.measured) for row in fleet.registry.scheduler.hosts.values()]))

        texts = [f"sandbox {number}" for number in range(NUM_SANDBOXES)]
        await asyncio.gather(
            *(
                box.commands.run(f"echo '{text}' > name; python3 code.py")
                for box, text in zip(boxes, texts, strict=True)
            )
        )
        read = await asyncio.gather(*(box.files.read("name") for box in boxes))
        assert [data.decode().strip() for data in read] == texts
        for host in hosts.hosts:
            sandbox = on(boxes, host)[0]
            copies = await sandbox.fork(3)
            assert [copy.host.name for copy in copies] == [host.name] * 3
            await sandbox.files.write("name", "changed")
            results = await asyncio.gather(*(copy.commands.run("cat name gone.txt") for copy in copies))
            assert {result.stdout.strip()[:7] for result in results} == {"sandbox"}
        assert len(await fleet.list()) == NUM_SANDBOXES + 12

    play(hosts, scenario)


def test_no_sandbox_reaches_a_server(hosts: Network):
    def reaches(namespace: str, address: str) -> bool:
        command = [
            "nsenter",
            f"--net=/run/netns/{namespace}",
            sys.executable,
            "-c",
            CONNECT,
            address,
            str(PORT),
        ]
        return subprocess.run(command, capture_output=True, timeout=120).returncode == 0

    async def scenario(fleet: Fleet) -> None:
        # The hosts themselves reach each other: it is the sandboxes that do not.
        for host in hosts.hosts:
            for other in hosts.hosts:
                assert await asyncio.to_thread(reaches, host.namespace, other.address)
        boxes = await make(fleet, 8)
        assert {box.host.name for box in boxes} == {host.name for host in hosts.hosts}
        targets = [(host.address, PORT) for host in hosts.hosts]
        names = tuple(f"{address}:{port}" for address, port in targets)
        boxes.append(await fleet.create(TEMPLATE, RESOURCES, Reach(names)))
        for box in boxes:
            await box.files.write("connect.py", CONNECT)
            for address, port in targets:
                result = await box.commands.run(f"python3 connect.py {address} {port}")
                assert result.exit_code != 0
                assert "unreachable" in result.stderr or "PermissionError" in result.stderr, result
                assert not result.timed_out
        # Where a list names a server, the way out goes through the proxy, which serves no private address.
        for address, port in targets:
            fetch = FETCH.format(f"http://{address}:{port}/health")
            result = await boxes[-1].commands.run("python3 -", stdin=fetch)
            assert result.stdout.startswith("refused 403"), result

    play(hosts, scenario)


def test_a_killed_server_loses_its_sandboxes_at_once_and_starts_clean(hosts: Network):
    host = hosts.hosts[2]

    async def scenario(fleet: Fleet) -> None:
        boxes = await make(fleet)
        gone = on(boxes, host)
        in_flight = [asyncio.ensure_future(loss(box.commands.run("sleep 60", 90.0))) for box in gone[:1]]
        command = await gone[1].commands.start("sleep 60")
        in_flight.append(asyncio.ensure_future(loss(command.wait())))
        await asyncio.sleep(1.0)
        host.kill()
        await asyncio.gather(*in_flight)
        await loss(gone[2].commands.run("true"))
        assert status_of(fleet, host).alive, "these end before so many heartbeats are missed"
        # Reads are tried again for a while, or until the host counts as dead.
        await loss(gone[3].files.read("kept.txt"))
        assert on(await make(fleet, 12), host) == []

        await until(lambda: not status_of(fleet, host).alive)
        await known_losses(gone[4:])
        alive = [box for box in boxes if box not in gone]
        results = await asyncio.gather(*(box.commands.run("cat kept.txt") for box in alive))
        assert {result.stdout for result in results} == {"y"}
        # Its sandboxes end with it; their groups and directories are left to the next start.
        await until(lambda: host.survivors() == [])

        host.launch()
        await host.wait_until_ready()
        await until(lambda: status_of(fleet, host).alive)
        new = await take_on(fleet, host)
        assert len(await fleet.registry.hosts[host.name].backend.list()) == len(new)
        # What is left now belongs to the new server.
        assert all(group.name.startswith(f"etude-{host.tags[-1]}-") for group in host.groups())
        for box in gone:
            await loss(box.commands.run("true"))

    # Three of these, which a refused connection misses at once, take longer than calls on a busy machine.
    play(hosts, scenario, heartbeat_s=5.0)


def test_a_host_that_was_cut_off_is_dead_and_comes_back_empty(hosts: Network):
    host = hosts.hosts[3]

    async def scenario(fleet: Fleet) -> None:
        boxes = await make(fleet)
        gone = on(boxes, host)
        in_flight = asyncio.ensure_future(loss(gone[0].commands.run("sleep 60", 90.0)))
        await asyncio.sleep(1.0)
        host.remember()
        running = len(host.survivors())
        assert running > len(gone)
        host.cut()
        try:
            # Made while nobody knows: what went to the silent host is made again elsewhere.
            made = await make(fleet, 12)
            assert on(made, host) == []
            await in_flight
            await until(lambda: not status_of(fleet, host).alive)
            assert status_of(fleet, host).reservations == {}
            await known_losses(gone[1:])
            assert len(host.survivors()) > len(gone), "the host itself lives on"
            assert on(await make(fleet, 12), host) == []
        finally:
            host.mend()
        await until(lambda: status_of(fleet, host).alive)
        assert await fleet.registry.hosts[host.name].backend.list() == []
        new = await take_on(fleet, host)
        results = await asyncio.gather(*(box.commands.run("cat kept.txt") for box in new))
        assert {result.stdout for result in results} == {"y"}
        for box in gone:
            with pytest.raises(InfrastructureError):
                await box.commands.run("true")

    # Three of these tell that a host is cut off; a busy one answers before.
    play(hosts, scenario, heartbeat_timeout_s=3.0)


def test_what_a_killed_run_left_is_removed_by_the_next():
    child = (
        "import os, signal\n"
        "from tests.sandbox.fleet.namespaced import network\n"
        "with network(1) as net:\n"
        "    net.hosts[0].launch()\n"
        "    print(net.client, net.hosts[0].directory, net.hosts[0].process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", child], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -9, done.stderr
    client, directory, pid = done.stdout.split()
    assert Path("/run/netns", client).exists()
    assert Path("/proc", pid).exists()
    with network(1) as net:
        assert net.client != client
        assert not Path("/run/netns", client).exists()
        assert not Path(directory).exists()
        # A killed process takes a moment to be gone; a zombie's command line is empty.
        end_s = time.monotonic() + 60
        while command_line(int(pid)):
            assert time.monotonic() < end_s
            time.sleep(0.01)
