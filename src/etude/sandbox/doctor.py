"""Which backends work on this machine, shown by making a sandbox with each, and why others do not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from etude.errors import EtudeError
from etude.sandbox.backends import open_backend

CHECKED = ("local", "gvisor", "vm", "docker", "podman")
TRIAL_S = 180.0
"""Longest trial: a guest under emulation boots for a while the first time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of one backend here."""

    backend: str
    works: bool
    start_s: float | None
    """Time of start + first command of the trial."""
    isolation: str
    problems: tuple[str, ...]
    """Each with its fix."""


async def examine_backends(state: Path | None = None, names: tuple[str, ...] = CHECKED) -> list[Finding]:
    """Tries each backend for real: start, a command, kill. One after the other."""
    return [await _examine(name, state) for name in names]


async def _examine(name: str, state: Path | None) -> Finding:
    try:
        backend = open_backend(name, state)
    except EtudeError as error:
        return Finding(name, False, None, "", (str(error),))
    isolation = backend.capabilities().isolation
    try:
        problems = tuple(await asyncio.to_thread(backend.doctor))
        if problems:
            return Finding(name, False, None, isolation, problems)
        async with asyncio.timeout(TRIAL_S):
            start_s = time.perf_counter()
            sandbox = await backend.create()
            result = await sandbox.commands.run("echo works", timeout_s=TRIAL_S)
            took_s = time.perf_counter() - start_s
        works = result.stdout == "works\n"
        trouble = () if works else (f"a command answered {result!r}",)
        return Finding(name, works, took_s if works else None, isolation, trouble)
    except TimeoutError:
        return Finding(name, False, None, isolation, (f"no sandbox within {TRIAL_S:.0f} s",))
    except EtudeError as error:
        return Finding(name, False, None, isolation, (str(error),))
    finally:
        await backend.close()
