"""Backends for tests: opened, used in one event loop and closed; `local` is skipped where it cannot run."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from etude.errors import ResourceError
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend

Result = TypeVar("Result")


OPTIONAL = ("gvisor", "vm")
"""Backends that need programs from elsewhere; their doctors say what is missing."""


def with_backend(name: str, scenario: Callable[[SandboxBackend], Awaitable[Result]]) -> Result:
    """Runs a scenario on a new backend and closes it."""

    async def run() -> Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            backend = MemoryBackend() if name == "memory" else open_backend(name)
        if name in OPTIONAL and (problems := backend.doctor()):
            pytest.skip("; ".join(problems))
        try:
            return await scenario(backend)
        except ResourceError as error:
            if not find_problems():
                raise
            pytest.skip(f"no namespaces here: {error}")
        finally:
            await backend.close()

    return asyncio.run(run())


def with_sandbox(
    name: str, files: dict[str, bytes | str], scenario: Callable[[Sandbox], Awaitable[Result]]
) -> Result:
    """Runs a scenario in one new sandbox."""

    async def run(backend: SandboxBackend) -> Result:
        return await scenario(await backend.create(Template(files)))

    return with_backend(name, run)
