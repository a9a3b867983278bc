"""Copies of a fleet's sandbox: made where it lives, and moved on where that host is full."""

from __future__ import annotations

import asyncio

from etude.errors import InfrastructureError, SandboxError
from etude.sandbox.arguments import check_count
from etude.sandbox.copies import gather_copies
from etude.sandbox.errors import CapacityError, SandboxMissingError
from etude.sandbox.fleet.host import kill
from etude.sandbox.fleet.hosts import Placement
from etude.sandbox.fleet.registry import Registry
from etude.sandbox.fleet.sandbox import FleetSandbox
from etude.sandbox.interface import Sandbox


async def fork_sandbox(registry: Registry, sandbox: FleetSandbox, count: int) -> list[Sandbox | SandboxError]:
    """`count` results: a sandbox, or the error that prevented it. Unused places are given back."""
    check_count(count)
    places = registry.scheduler.place_fork(sandbox.id, count, registry.clock())
    can_move = sandbox.host.backend.capabilities().migrate is not None
    for number, place in enumerate(places):
        if place is not None and place.host != sandbox.host.name and not can_move:
            registry.scheduler.cancel(place.ticket)
            places[number] = None
    used = [place for place in places if place is not None]
    try:
        copies = await sandbox.attempt(lambda s: s.fork(len(used)), _kill_all) if used else []
    except BaseException:
        for place in used:
            registry.scheduler.cancel(place.ticket)
        raise
    settling = [_settle(registry, sandbox, place, copy) for place, copy in zip(used, copies, strict=True)]
    settled = iter(await gather_copies(settling))
    return [_no_room(sandbox.id) if place is None else next(settled) for place in places]


async def _settle(
    registry: Registry, source: FleetSandbox, place: Placement, copy: Sandbox | SandboxError
) -> Sandbox:
    """A copy on the host for which it was planned. Raises SandboxError."""
    if isinstance(copy, SandboxError):
        registry.scheduler.cancel(place.ticket)
        raise copy
    host = source.host
    try:
        if place.host != source.host.name:
            copy = await _move(source, copy, registry, place)
        host = registry.placed(place)
        registry.scheduler.confirm(place.ticket, host.id_of(copy.id), registry.clock())
    except SandboxMissingError as error:
        # The target died in between, and took its reservations along.
        raise host.lost() from error
    except InfrastructureError as error:
        registry.scheduler.cancel(place.ticket)
        if isinstance(error, SandboxError):
            raise
        raise SandboxError(str(error), field="sandbox", received=source.id) from error
    except BaseException:
        registry.scheduler.cancel(place.ticket)
        raise
    return registry.wrap(host, copy)


async def _move(source: FleetSandbox, copy: Sandbox, registry: Registry, place: Placement) -> Sandbox:
    try:
        target = registry.placed(place)
        return await source.host.call(copy.migrate(target.backend), kill)
    except BaseException:
        if not source.host.is_dead:
            await asyncio.shield(copy.kill())
        raise


def _no_room(sandbox_id: str) -> CapacityError:
    return CapacityError(
        "no host has room for another copy, or none to which it can move",
        field="sandbox",
        received=sandbox_id,
        fix="fork fewer, or add hosts",
    )


async def _kill_all(copies: list[Sandbox | SandboxError]) -> None:
    for copy in copies:
        if not isinstance(copy, SandboxError):
            await copy.kill()
