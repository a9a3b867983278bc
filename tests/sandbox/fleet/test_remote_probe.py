"""The pressure of a server's host, over HTTP."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ResourceError, SandboxError
from etude.kit.retry import Backoff
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.fleet.hosts import Pressure
from etude.sandbox.fleet.probe import NoProbe
from etude.sandbox.wire_types import encode
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.serving import TOKEN, build_app, served  # skips where the server's libraries are missing

from etude.sandbox.fleet.servers import PRESSURE, RemoteProbe  # isort: skip
from etude.sandbox.remote import RemoteBackend  # isort: skip

part = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


class Reading:
    """A probe that says what it is told to."""

    def __init__(self, reading: Pressure | Exception) -> None:
        self.reading = reading

    async def pressure(self) -> Pressure | None:
        if isinstance(self.reading, Exception):
            raise self.reading
        return self.reading


def test_a_server_tells_how_loaded_its_host_is():
    async def scenario() -> None:
        async with served(build_app({"memory": MemoryBackend()}, TOKEN)) as url:
            backend = RemoteBackend(url, TOKEN)
            found = await RemoteProbe(backend).pressure()
            await backend.disconnect()
        assert found is not None
        assert 0 < found.memory < 1
        assert 0 < found.disk <= 1
        assert found.cpu >= 0

    asyncio.run(scenario())


def test_pressure_needs_the_token():
    async def scenario() -> None:
        async with served(build_app({"memory": MemoryBackend()}, TOKEN)) as url:
            backend = RemoteBackend(url, "wrong")
            with pytest.raises(Exception, match="token"):
                await RemoteProbe(backend).pressure()
            await backend.disconnect()

    asyncio.run(scenario())


def test_a_server_that_measures_nothing_or_cannot_measure_says_so():
    async def scenario() -> None:
        app = build_app({"memory": MemoryBackend()}, TOKEN)
        async with served(app) as url:
            backend = RemoteBackend(url, TOKEN)
            app.state.sandboxes.probe = NoProbe()
            assert await RemoteProbe(backend).pressure() is None
            app.state.sandboxes.probe = Reading(ResourceError("cannot measure this machine", field="probe"))
            with pytest.raises(ResourceError, match="cannot measure"):
                await RemoteProbe(backend).pressure()
            await backend.disconnect()

    asyncio.run(scenario())


def test_a_server_that_is_gone_fails_the_heartbeat_at_the_first_try():
    async def scenario() -> None:
        async with served(build_app({"memory": MemoryBackend()}, TOKEN)) as url:
            pass
        # A second try would come after an hour.
        backend = RemoteBackend(url, TOKEN, backoff=Backoff(3600.0, attempts=2))
        async with asyncio.timeout(60):
            with pytest.raises(SandboxLostError):
                await RemoteProbe(backend).pressure()
        await backend.disconnect()

    asyncio.run(scenario())


@given(st.builds(Pressure, part, part, part))
def test_a_pressure_survives_the_wire(pressure: Pressure):
    assert PRESSURE.validate_python(encode(pressure)) == pressure


@pytest.mark.parametrize(
    "raw",
    [
        [],
        {"cpu": 0.5},
        {"cpu": 0.1, "memory": math.nan, "disk": 0.1},
        {"cpu": -1, "memory": 0, "disk": 0},
        "1",
    ],
)
def test_what_is_no_pressure_is_refused(raw: object):
    with pytest.raises(ValueError):
        PRESSURE.validate_python(raw)


def test_an_answer_that_is_no_pressure_is_no_heartbeat():
    async def scenario() -> None:
        app = build_app({"memory": MemoryBackend()}, TOKEN)
        async with served(app) as url:
            backend = RemoteBackend(url, TOKEN)
            app.state.sandboxes.probe = Reading(Pressure(math.inf, 0.1, 0.1))
            with pytest.raises(SandboxError, match="cannot be read"):
                await RemoteProbe(backend).pressure()
            await backend.disconnect()

    asyncio.run(scenario())
