"""Runs attempts and their controls on a backend, and judges them from outside."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from etude.errors import AgentError, SandboxError, UserError
from etude.sandbox.errors import Unsupported
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.template import Template
from tests.adversary.escape.model import UNDECIDED_S, Attempt, Outcome, User, Verdict
from tests.adversary.escape.prelude import whole_program
from tests.adversary.escape.scene import Scene
from tests.adversary.escape.weakened import WeakenedBackend, owner_without

_BREAKING = ("escaped", "lost", "broken")
PATIENCE_S = 300.0
SERVER_ENDED = "its server ended"
"""Longest wait for one attempt beyond its own time."""
_ASK = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(100))"
_NEIGHBOUR = """
import os, signal, socket, sys, time
secret, port = open("secret.txt").read(), int(sys.argv[2])
def note(number, frame):
    open("hit", "w").write("hit")
signal.signal(signal.SIGUSR1, note)
tcp = socket.create_server(("127.0.0.1", port))
abstract = socket.socket(socket.AF_UNIX)
abstract.bind("\\0" + sys.argv[1])
abstract.listen()
open("ready", "w").write(str(os.getpid()))
import select
while True:
    for listener in select.select([tcp, abstract], [], [])[0]:
        connection, _ = listener.accept()
        connection.sendall(secret.encode())
        connection.close()
"""
BackendFactory = Callable[[Path], SandboxBackend]


@dataclass
class Field:
    """Where an attempt through the owner's calls takes place."""

    backend: SandboxBackend
    sandbox: Sandbox
    scene: Scene
    directory: Path
    """An empty directory of the host."""
    neighbour: Sandbox | None = None

    async def python(self, body: str, timeout_s: float = UNDECIDED_S, sandbox: Sandbox | None = None) -> str:
        """What a program prints inside."""
        inside = sandbox or self.sandbox
        result = await inside.commands.run("python3 -S -", stdin=whole_program(body), timeout_s=timeout_s)
        return result.stdout + result.stderr


async def until(holds: Callable[[], Awaitable[bool]], what: str) -> None:
    """Waits for something that an attempt is about. Raises AssertionError: without it nothing is decided."""
    end_s = time.monotonic() + UNDECIDED_S
    while not await holds():
        assert time.monotonic() < end_s, f"{what} took longer than {UNDECIDED_S:g} s"
        await asyncio.sleep(0.01)


async def make_neighbour(backend: SandboxBackend, scene: Scene) -> Sandbox:
    """A second sandbox with a secret in its template, in its memory and behind its listeners."""
    files = {"secret.txt": scene.neighbour_secret, "neighbour.py": _NEIGHBOUR}
    sandbox = await backend.create(Template(dict(files)))
    facts = scene.facts()
    word, port = facts["neighbour"], facts["neighbour_port"]
    await sandbox.commands.run(f"python3 -S neighbour.py {word} {port} >log 2>&1 &")

    async def is_ready() -> bool:
        return any(entry.path == "ready" for entry in await sandbox.files.list())

    await until(is_ready, "the neighbour")
    return sandbox


@asynccontextmanager
async def open_field(backend: SandboxBackend, attempt: Attempt, scene: Scene) -> AsyncIterator[Field]:
    """New sandboxes for an attempt and those that are made after it."""
    with tempfile.TemporaryDirectory(prefix="etude-escape-") as directory:
        sandbox = await backend.create(Template({"a.txt": "a"}), attempt.resources)
        field = Field(backend, sandbox, scene, Path(directory))
        try:
            if attempt.neighbour:
                field.neighbour = await make_neighbour(backend, scene)
            yield field
        finally:
            for living in (sandbox, field.neighbour):
                if living is not None:
                    await living.kill()


async def _judged(field: Field, attempt: Attempt) -> Outcome:
    output, lost = await _act(field, attempt)
    damage = field.scene.damage(output)
    if field.neighbour is not None:
        try:
            # Whoever answers has dealt with the signals that came before.
            port = field.scene.facts()["neighbour_port"]
            await field.neighbour.commands.run(f'python3 -S -c "{_ASK}" {port}', timeout_s=UNDECIDED_S)
            if any(entry.path == "hit" for entry in await field.neighbour.files.list()):
                damage.append("the neighbour's process was reached")
        except SandboxError as error:
            damage.append(f"the neighbour was lost: {error.message[:200]}")
    line = output.strip().rpartition("\n")[2][:200]
    if damage or "ESCAPED" in output:
        said = next((row for row in output.splitlines() if "ESCAPED" in row), line)
        return Outcome("escaped", "; ".join([*damage, said[:200]]))
    if "IMPOSSIBLE" in output:
        return Outcome("impossible", line.partition("IMPOSSIBLE ")[2])
    return Outcome("lost", lost) if lost else Outcome("held", line)


async def _act(field: Field, attempt: Attempt) -> tuple[str, str]:
    """(all that came out, why the sandbox is lost without being the agent's doing)."""
    output = ""
    try:
        if attempt.scenario is not None:
            output = await attempt.scenario(field)
        else:
            await field.sandbox.files.write("attempt.py", whole_program(attempt.program))
            facts = json.dumps(
                {**field.scene.facts(), "server_looks": isinstance(field.backend, LocalBackend)}
            )
            result = await field.sandbox.commands.run(
                "python3 -S attempt.py", timeout_s=attempt.timeout_s, env={"FACTS": facts}
            )
            output = result.stdout + result.stderr
            assert not result.timed_out, f"not decided within {attempt.timeout_s:g} s: {output[-200:]}"
        await field.sandbox.commands.run("true")
    except Unsupported as error:
        return f"IMPOSSIBLE {error.message}: {error.received}", ""
    except AgentError as error:
        said = f"{type(error).__name__}: {error.message}"
        # Whose doing it is says nothing of what it broke: the program that guards the sandbox is gone.
        return (output, said) if SERVER_ENDED in error.message else (f"{output}\n{said}", "")
    except SandboxError as error:
        return output, f"{type(error).__name__}: {error.message[:300]}"
    return output, ""


@contextmanager
def _state() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="etude-escape-state-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


async def run_attempts(
    factory: BackendFactory, groups: Iterable[Sequence[Attempt]], note: Callable[[str, Outcome], None]
) -> None:
    """Every attempt on one backend, one after the other, those of a group in the same sandboxes; `note` is
    called with each outcome."""
    with Scene() as scene, _state() as state:
        backend = factory(state)
        try:
            for group in groups:
                rest = list(group)
                while rest:
                    outcomes = await _guarded(backend, rest, scene)
                    for outcome in outcomes:
                        note(rest.pop(0).name, outcome)
                    if outcomes[-1].verdict in _BREAKING:
                        # Whatever it broke must not count for the next one.
                        await backend.close()
                        backend = factory(state)
        finally:
            await backend.close()


async def run_controls(
    wanted: Iterable[tuple[Attempt, frozenset[str]]],
    note: Callable[[Attempt, frozenset[str], Outcome], None],
) -> None:
    """Attempts on the local backend without the named protections; one backend for each set of them."""
    by_lifts: dict[frozenset[str], list[Attempt]] = {}
    for attempt, lifts in wanted:
        by_lifts.setdefault(lifts, []).append(attempt)
    with Scene(is_control=True) as scene:
        for lifts, attempts in by_lifts.items():
            with _state() as state, owner_without(lifts):
                backend = WeakenedBackend(state, lifts)
                try:
                    for attempt in attempts:
                        if attempt.outside:
                            note(attempt, lifts, try_outside(attempt, scene))
                            continue
                        if attempt.control is not None:
                            attempt = replace(attempt, scenario=attempt.control)
                        note(attempt, lifts, (await _guarded(backend, [attempt], scene))[0])
                finally:
                    # How a weakened fork server ends is not what is tried.
                    with suppress(subprocess.TimeoutExpired):
                        await backend.close()


def try_outside(attempt: Attempt, scene: Scene) -> Outcome:
    """A control on the host: its program as an ordinary process, with a descriptor too many."""
    with tempfile.TemporaryDirectory(prefix="etude-outside-") as directory, Path(os.devnull).open() as more:
        ran = subprocess.run(
            [sys.executable, "-S", "-c", whole_program(attempt.outside)],
            capture_output=True,
            text=True,
            cwd=directory,
            env={**os.environ, "FACTS": json.dumps(scene.facts())},
            pass_fds=(more.fileno(),),
            timeout=UNDECIDED_S,
            check=False,
        )
    return Outcome("escaped" if "ESCAPED" in ran.stdout else "held", (ran.stdout + ran.stderr)[-300:])


async def _guarded(backend: SandboxBackend, attempts: Sequence[Attempt], scene: Scene) -> list[Outcome]:
    """Outcomes of attempts in the same sandboxes, up to the first that breaks something: one at least."""
    outcomes: list[Outcome] = []
    last = 0
    verdict: Verdict = "broken"
    try:
        async with open_field(backend, attempts[0], scene) as field:
            verdict = "lost"  # before that, nothing was tried
            for attempt in attempts:
                last = len(outcomes)
                async with asyncio.timeout(attempt.timeout_s + PATIENCE_S):
                    outcomes.append(await _judged(field, attempt))
                if outcomes[-1].verdict in _BREAKING:
                    break
    except (SandboxError, AgentError) as error:
        outcomes[last:] = [Outcome(verdict, f"{type(error).__name__}: {str(error)[:300]}")]
    except UserError:
        # This backend cannot be had here, and no other attempt can be made either.
        raise
    except Exception:
        # One broken attempt must not take the others' outcomes along; its own test fails with this text.
        outcomes[last:] = [Outcome("broken", traceback.format_exc()[-1000:])]
    return outcomes


def present_user() -> User:
    """Who this process is."""
    return "root" if os.geteuid() == 0 else "plain"


@cache
def has_control_groups() -> bool:
    """Whether this user may make control groups."""
    groups = ControlGroups.open()
    if groups is not None:
        groups.close()
    return groups is not None


def lifts_of(attempt: Attempt) -> tuple[str, ...]:
    """What an attempt's control takes away, of what this user has."""
    if has_control_groups():
        return attempt.lifts
    return (*(name for name in attempt.lifts if name != "control groups"), *attempt.lifts_without_groups)


def needs_root(attempt: Attempt) -> bool:
    """Whether only root can make a sandbox without the attempt's protections."""
    return any(name.startswith("user namespace") for name in attempt.lifts)
