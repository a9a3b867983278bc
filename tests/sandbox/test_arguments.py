"""What makes no sense is refused before anything is sent to a sandbox, on every backend."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, UserError
from etude.sandbox.channel import Channel
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.refusals import MAX_TIMEOUT_S, check_count, check_life, check_timeout
from etude.sandbox.snapshots import Spec
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.backends import with_backend
from tests.sandbox.serving import remote

NO_TIMES = (-1, -1.0, 0, 0.0, math.nan, -math.inf, math.inf, 1e300)
CALLS: dict[str, Callable[[Sandbox, float], Awaitable[object]]] = {
    "run": lambda s, timeout_s: s.commands.run("true", timeout_s),
    "start": lambda s, timeout_s: s.commands.start("true", timeout_s),
    "tests": lambda s, timeout_s: s.run_tests(["test_x.py"], timeout_s),
    "probes": lambda s, timeout_s: s.run_probes(["test_x.py"], timeout_s),
}


async def check_refusals(
    sandbox: Sandbox, kind: type[UserError] = ConfigError, *, is_remote: bool = False
) -> None:
    """Every call with every time that is none, and copies that are none: an error of this kind."""
    for call in CALLS.values():
        for timeout_s in NO_TIMES:
            with pytest.raises(kind) as caught:
                await call(sandbox, timeout_s)
            assert caught.value.fix
            if is_remote and not math.isfinite(timeout_s):  # no number of JSON's
                assert caught.value.field in ("body", "timeout_s")
                continue
            assert caught.value.field == "timeout_s"
            assert caught.value.received == timeout_s or math.isnan(timeout_s)
    for count in (0, -1):
        with pytest.raises(kind) as caught:
            await sandbox.fork(count)
        assert (caught.value.field, caught.value.received) == ("count", count)
    for timeout_s in (-1.0, 0.0):
        with pytest.raises(kind) as caught:
            await sandbox.set_timeout(timeout_s)
        assert caught.value.field == "timeout_s"


@pytest.mark.parametrize(
    "name",
    [
        "memory",
        "unisolated",
        "local",
        pytest.param("gvisor", marks=pytest.mark.foreign),
        pytest.param("vm", marks=[pytest.mark.slow, pytest.mark.foreign]),
    ],
)
def test_what_is_no_time_and_no_count_is_refused(name: str) -> None:
    async def scenario(backend: SandboxBackend) -> None:
        sandbox = await backend.create(Template({"a": "x"}))
        await check_refusals(sandbox)
        assert await sandbox.files.read("a") == b"x"
        assert (await sandbox.get_info()).expires_s is None
        with pytest.raises(ConfigError):
            await backend.create(timeout_s=-1.0)
        assert len(await backend.list()) == 1

    with_backend(name, scenario)


def test_it_is_refused_over_the_network_too() -> None:
    async def run() -> None:
        async with remote(MemoryBackend()) as backend:
            sandbox = await backend.create(Template({"a": "x"}))
            await check_refusals(sandbox, UserError, is_remote=True)

    asyncio.run(run())


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_sent_that_makes_no_sense(name: str) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        owner: Any = None
        sandbox = MachineSandbox(owner, "one", Spec(Template()))
        channel = Channel(ours, "one")
        sandbox.attach(channel)
        channel.on_close = lambda reason: None
        with theirs:
            with pytest.raises(ConfigError):
                await CALLS[name](sandbox, -1.0)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
        channel.close("done")

    asyncio.run(run())


@given(st.floats() | st.integers())
def test_a_timeout_passes_if_it_is_a_time(timeout_s: float) -> None:
    if 0 < timeout_s <= MAX_TIMEOUT_S:
        check_timeout(timeout_s)
        check_life(timeout_s)
        return
    with pytest.raises(ConfigError):
        check_timeout(timeout_s)


@given(st.integers())
def test_a_count_passes_if_it_is_one_or_more(count: int) -> None:
    if count >= 1:
        check_count(count)
        return
    with pytest.raises(ConfigError):
        check_count(count)
