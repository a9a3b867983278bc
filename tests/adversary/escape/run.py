"""Runs attempts and controls as the current user, and prints one JSON line for each.

python -m tests.adversary.escape.run BACKEND {attempts,controls} NAME ...
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from etude.errors import UserError
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Resources
from tests.adversary.escape.attempts import ATTEMPTS
from tests.adversary.escape.attempts_bombs import BOMBS
from tests.adversary.escape.model import DEFAULT_RESOURCES, Attempt, Outcome
from tests.adversary.escape.trial import (
    BackendFactory,
    has_control_groups,
    lifts_of,
    needs_root,
    present_user,
    run_attempts,
    run_controls,
)

_CONSUMING = {attempt.name for attempt in BOMBS}
"""What uses up a sandbox leaves none for others."""


def factory(name: str) -> BackendFactory:
    """What makes a backend of that name, with its state in a directory.

    A guest image takes minutes to build: `vm` looks for it, and leaves its snapshots, in the usual place.
    """

    def make(state: Path) -> SandboxBackend:
        return open_backend(name, None if name == "vm" else state)

    return make


def names_for(backend: str) -> list[str]:
    """The attempts that mean something on a backend: those on the kernel's surface where it is the host's."""
    shared = backend in ("local", "docker", "podman")
    return [name for name, attempt in ATTEMPTS.items() if shared or attempt.reach == "everywhere"]


def groups_for(backend: str, names: Sequence[str]) -> list[list[Attempt]]:
    """Attempts that share sandboxes: all programs that leave nothing behind, where sandboxes are guests,
    which take long to start."""
    attempts = [ATTEMPTS[name] for name in names]
    if backend not in ("gvisor", "vm"):
        return [[attempt] for attempt in attempts]
    if backend == "vm":
        # A guest with another size would be booted anew; its kernel's memory is no process's limit.
        memory_bytes = DEFAULT_RESOURCES.memory_bytes
        attempts = [
            replace(one, resources=replace(one.resources, memory_bytes=memory_bytes)) for one in attempts
        ]
    groups: dict[tuple[Resources, bool] | str, list[Attempt]] = {}
    for attempt in attempts:
        alone = attempt.kind == "calls" or attempt.name in _CONSUMING
        key = attempt.name if alone else (attempt.resources, attempt.neighbour)
        groups.setdefault(key, []).append(attempt)
    return list(groups.values())


def try_all(backend: str, names: Sequence[str], note: Callable[[str, Outcome], None]) -> None:
    """Runs the named attempts."""
    asyncio.run(run_attempts(factory(backend), groups_for(backend, names), note))


def control_all(names: Sequence[str], note: Callable[[str, Outcome], None]) -> None:
    """Runs the named controls: without an attempt's protections, then with each of them put back.

    The outcome is `escaped` only if the first succeeds and none of the others does. The second part is
    root's alone: a plain user's protections are the same ones.
    """
    wanted: list[tuple[Attempt, frozenset[str]]] = []
    for name in names:
        attempt, lifts = ATTEMPTS[name], lifts_of(ATTEMPTS[name])
        if needs_root(attempt) and present_user() != "root":
            note(name, Outcome("impossible", "a plain user cannot do without a user namespace"))
        elif attempt.outside or attempt.control is not None:
            wanted.append((attempt, frozenset()))
        elif not lifts:
            reason = attempt.no_control or "without control groups nothing stops it: see the holes"
            note(name, Outcome("impossible", reason))
        else:
            wanted.append((attempt, frozenset(lifts)))
            if len(lifts) > 1 and present_user() == "root":
                wanted += [(attempt, frozenset(lifts) - {kept}) for kept in lifts]
    found: dict[str, dict[frozenset[str], Outcome]] = {}
    asyncio.run(
        run_controls(wanted, lambda a, lifts, outcome: found.setdefault(a.name, {}).update({lifts: outcome}))
    )
    for name, outcomes in found.items():
        note(name, _conclude(frozenset(lifts_of(ATTEMPTS[name])), outcomes))


def _conclude(lifts: frozenset[str], outcomes: dict[frozenset[str], Outcome]) -> Outcome:
    whole = outcomes[lifts]
    if whole.verdict == "lost":
        # A sandbox whose first process could be ended is what some attempts are after.
        return Outcome("escaped", whole.detail)
    if whole.verdict != "escaped":
        return whole
    for fewer, outcome in outcomes.items():
        if fewer != lifts and outcome.verdict == "escaped":
            (kept,) = lifts - fewer
            return Outcome("held", f"{kept!r} need not be taken away: {outcome.detail}")
    return whole


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    warnings.simplefilter("ignore")
    backend, what, *names = arguments

    def note(name: str, outcome: Outcome) -> None:
        print(json.dumps([what, name, outcome.verdict, outcome.detail]), flush=True)

    note("", Outcome("held" if has_control_groups() else "impossible", "control groups"))
    try:
        if what == "attempts":
            try_all(backend, names or names_for(backend), note)
        else:
            control_all(names or list(ATTEMPTS), note)
    except UserError as error:
        # Programs or an image are missing: whoever reads this skips what is left.
        note("unavailable", Outcome("impossible", str(error)))


if __name__ == "__main__":
    main(sys.argv[1:])
