"""Overhead of a session on a Harbor task over its bare commands: on `local`, and with podman's command line.

A session is one sandbox from a warm image, three commands in it, and grading by `tests/test.sh` in a fresh
one. The bare command is the same text run by `sh` on this machine. Each round runs both sides one after the
other, so that other load affects both; figures are medians, and ratios are medians of the rounds' ratios.

    start_overhead_vs_podman    wall time of a session less its bare commands', podman's over ours
    test_sh_overhead_ms         wall time of grading by test.sh on `local` less that of the bare test.sh
    tool_call_overhead_ms       the same for one of the agent's tool calls
    ..._quiet_ms                the same in the quietest tenth of the sessions
    tasks_per_minute_local      throughput with two concurrent sessions; `..._podman`: the same with podman

Podman runs only the commands that a session needs, as in Harbor's own trials: `run`, `exec`, `cp`, and `rm`.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Figures, median_ratio

from etude.agent import registry_named
from etude.config import load_config
from etude.controller.backends import open_run_backend
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.task_images import TaskImages
from etude.environment.verdicts import Grader
from etude.records import Status, Task, ToolCall
from etude.tasks.harbor import read_harbor

IMAGE = "docker.io/library/python:3.11-slim"
_ROUNDS, _PAIRS, _CALLS = 5, 12, 3
_RATES, _AT_ONCE, _SESSIONS = 2, 2, 4
_TEST = """#!/bin/sh
if grep -qx hello greeting.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
_LIMITS = ("--ulimit=nofile=1024:4096", "--ulimit=nproc=1024:4096")
Times = dict[str, float]
"""Part of a session (start, call (each), grading, all) -> seconds."""


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of one round."""

    pairs: list[tuple[Times, Times]]
    """(bare commands, session on `local`): many, since one podman session takes as long."""
    podman: Times

    def local_over(self, part: str) -> float:
        """Median seconds of a part on `local` beyond the bare commands."""
        return statistics.median(local[part] - bare[part] for bare, local in self.pairs)

    def podman_over(self, part: str) -> float:
        """The same with podman."""
        return self.podman[part] - statistics.median(bare[part] for bare, _ in self.pairs)


async def measure_overhead() -> tuple[Figures, dict[str, Any]]:
    """(figures, the rounds)."""
    with tempfile.TemporaryDirectory() as folder:
        directory = write_task(Path(folder, "greeting"))
        task = await TaskImages("local").find(read_harbor(directory))
        async with AsyncExitStack() as stack:
            backend = open_run_backend(load_config(None, ["sandbox.backend=local"]).sandbox)
            stack.push_async_callback(backend.close)
            services = SessionServices(backend, Grader(backend), registry_named("full"))
            numbers, rounds = itertools.count(), list[Round]()
            for _ in range(_ROUNDS + 1):  # the first warms up
                pairs = [
                    (run_bare(Path(folder), next(numbers)), await run_local(services, task, next(numbers)))
                    for _ in range(_PAIRS)
                ]
                rounds.append(Round(pairs, await run_podman(directory, next(numbers))))
            rates = {"local": list[float](), "podman": list[float]()}
            for _ in range(_RATES):
                rates["local"].append(await _rate(lambda: run_local(services, task, next(numbers))))
                rates["podman"].append(await _rate(lambda: run_podman(directory, next(numbers))))
    figures = _figures(rounds[1:])
    for name, found in rates.items():
        figures[f"tasks_per_minute_{name}"] = statistics.median(found)
    return figures, {"rounds_s": [asdict(one) for one in rounds[1:]], "tasks_per_minute": rates}


def write_task(directory: Path) -> Path:
    """Writes a task from an image whose verifier only reads the agent's file."""
    for name in ("environment", "tests"):
        (directory / name).mkdir(parents=True)
    (directory / "instruction.md").write_text("Write hello into greeting.txt.\n")
    toml = f'schema_version = "1.4"\n[environment]\ndocker_image = "{IMAGE}"\nworkdir = "/srv"\n'
    (directory / "task.toml").write_text(toml)
    (directory / "tests/test.sh").write_text(_TEST)
    (directory / "tests/test.sh").chmod(0o755)
    return directory


def command_of(number: int, call: int) -> str:
    """The command of one call; it differs by session, since verdicts on equal files are cached."""
    return f"echo hello > greeting.txt; echo {number} > note-{call}.txt"


def run_bare(folder: Path, number: int) -> Times:
    """Runs the bare commands in a shell of this machine."""
    here = folder / "bare"
    (here / "logs/verifier").mkdir(parents=True, exist_ok=True)
    test = here / "test.sh"
    test.write_text(_TEST.replace("/logs", str(here / "logs")))
    call = _timed(lambda: subprocess.run(["sh", "-c", command_of(number, 0)], cwd=here, check=True))
    grading = _timed(lambda: subprocess.run(["sh", test], cwd=here, check=True))
    return {"start": 0.0, "call": call, "grading": grading, "all": _CALLS * call + grading}


async def run_local(services: SessionServices, task: Task, number: int) -> Times:
    """Runs a session on `local`, with the agent's command tool."""
    began = time.perf_counter()
    session = EnvironmentSession.begin(services, task)
    calls: list[float] = []
    for call in range(_CALLS):
        started = time.perf_counter()
        tool = ToolCall("run_command", {"command": command_of(number, call)})
        await session.run_calls([tool], {}, lambda *_: None, lambda *_: None)
        calls.append(time.perf_counter() - started)
    started = time.perf_counter()
    outcome = await session.submit(Status.DONE, "")
    ended = time.perf_counter()
    assert outcome.verdict.reward == 1.0, outcome.verdict
    await session.close()
    return _times(began, calls, ended - started)


async def run_podman(directory: Path, number: int) -> Times:
    """Runs the same session with podman's command line."""
    began = time.perf_counter()
    box = await _start()
    calls: list[float] = []
    for call in range(_CALLS):
        started = time.perf_counter()
        await _exec(box, command_of(number, call))
        calls.append(time.perf_counter() - started)
    started = time.perf_counter()
    fresh = await _start()
    with tempfile.TemporaryDirectory() as folder:
        await _podman("cp", f"{box}:/srv/.", folder)
        await _podman("cp", f"{folder}/.", f"{fresh}:/srv")
    await _podman("cp", f"{directory}/tests/.", f"{fresh}:/tests")
    await _exec(fresh, "mkdir -p /logs/verifier; /tests/test.sh")
    assert (await _exec(fresh, "cat /logs/verifier/reward.txt")).strip() == "1"
    grading_s = time.perf_counter() - started
    for one in (box, fresh):
        await _podman("rm", "--force", "--time=0", one)
    return _times(began, calls, grading_s)


def _times(began: float, calls: list[float], grading_s: float) -> Times:
    all_s = time.perf_counter() - began
    call_s = statistics.median(calls)
    return {"start": all_s - sum(calls) - grading_s, "call": call_s, "grading": grading_s, "all": all_s}


async def _start() -> str:
    words = ("run", "--detach", "--runtime=runc", *_LIMITS, "--network=none", "--workdir=/srv", IMAGE)
    return (await _podman(*words, "sleep", "infinity")).strip()


async def _exec(box: str, command: str) -> str:
    return await _podman("exec", "--workdir=/srv", box, "sh", "-c", command)


async def _podman(*words: str) -> str:
    process = await asyncio.create_subprocess_exec("podman", *words, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"podman {' '.join(words)} ended with {process.returncode}")
    return output.decode()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


async def _rate(run: Callable[[], Awaitable[Times]]) -> float:
    """Sessions per minute, several at once."""
    places, began = asyncio.Semaphore(_AT_ONCE), time.perf_counter()

    async def one() -> None:
        async with places:
            await run()

    await asyncio.gather(*(one() for _ in range(_SESSIONS)))
    return 60 * _SESSIONS / (time.perf_counter() - began)


def _figures(rounds: list[Round]) -> Figures:
    figures: Figures = {}
    for name, part in (("session", "all"), ("tool_call", "call"), ("test_sh", "grading")):
        ours = [one.local_over(part) for one in rounds]
        theirs = [one.podman_over(part) for one in rounds]
        if part != "call":  # ours takes about as long as the bare command: a ratio would be noise
            ratio = "start_overhead" if part == "all" else f"{name}_overhead"
            figures[f"{ratio}_vs_podman"] = median_ratio(theirs, ours)
        every = [local[part] - bare[part] for one in rounds for bare, local in one.pairs]
        figures[f"{name}_overhead_ms"] = 1e3 * statistics.median(every)
        figures[f"{name}_overhead_quiet_ms"] = 1e3 * statistics.quantiles(every, n=10)[0]
        figures[f"{name}_overhead_podman_ms"] = 1e3 * statistics.median(theirs)
    alone = [bare["grading"] for one in rounds for bare, _ in one.pairs]
    figures["test_sh_bare_ms"] = 1e3 * statistics.median(alone)
    return figures
