"""Where a run's sandboxes are created: in this process, or on an available server that authorises it."""

from __future__ import annotations

import asyncio
import time

import pytest

from etude.config import SandboxConfig
from etude.controller.backends import open_run_backend
from etude.errors import ConfigError
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.local.unisolated import UnisolatedBackend
from etude.sandbox.remote import RemoteBackend
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.serving import TOKEN, build_app, served

VARIABLE = "ETUDE_TEST_SANDBOX_TOKEN"


async def _open(settings: SandboxConfig) -> SandboxBackend:
    """In a thread: the server is in this one."""
    return await asyncio.to_thread(open_run_backend, settings, "run")


def test_without_a_server_sandboxes_are_made_here() -> None:
    with pytest.warns(UserWarning, match="isolates nothing"):
        backend = open_run_backend(SandboxConfig(backend="unisolated"))
    assert isinstance(backend, UnisolatedBackend)
    asyncio.run(backend.close())


def test_private_addresses_are_the_operator_s_choice_and_exact() -> None:
    with pytest.warns(UserWarning, match="isolates nothing"):
        backend = open_run_backend(SandboxConfig(backend="unisolated", allow_private=["10.1.2.3:443"]))
    assert isinstance(backend, UnisolatedBackend)
    assert backend.allow_private == ("10.1.2.3:443",)
    asyncio.run(backend.close())
    with pytest.raises(ValueError, match="give it to each server"):
        SandboxConfig(server="http://127.0.0.1:1", allow_private=["10.1.2.3:443"])
    with pytest.raises(ConfigError, match="port is missing"):
        open_run_backend(SandboxConfig(backend="local", allow_private=["10.1.2.3"]))


def test_a_server_that_does_not_answer_is_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.server: .*connection .* failed.*etude sandbox serve"):
        open_run_backend(SandboxConfig(server="http://127.0.0.1:9"))


def test_a_server_s_address_and_token_go_together() -> None:
    with pytest.raises(ValueError, match=r"server\n.*must begin with http"):
        SandboxConfig(server="127.0.0.1:8642")
    with pytest.raises(ValueError, match="server: must be named with token"):
        SandboxConfig(token=f"env:{VARIABLE}")


def test_a_run_waits_for_its_server_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)

    async def scene() -> None:
        async with served(build_app({"local": MemoryBackend()}, TOKEN)) as url:
            settings = SandboxConfig(server=url, token=f"env:{VARIABLE}", patience_s=0.3)
            backend = await _open(settings)
            assert isinstance(backend, RemoteBackend)
            sandbox = await backend.create()
            assert (await sandbox.get_info()).metadata == {"owner": "run"}
            await backend.close()
            with pytest.raises(ConfigError, match=r"sandbox\.server: .*token.*sandbox\.token"):
                await _open(settings.model_copy(update={"token": ""}))
        began = time.monotonic()
        with pytest.raises(SandboxLostError):
            await backend.create()
        assert 0.3 <= time.monotonic() - began < 30.0
        await backend.disconnect()

    asyncio.run(scene())
