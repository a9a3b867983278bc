"""Machines that are expected here: a target's tickets, from the preparation to the takeover or the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from etude.errors import SandboxError
from etude.sandbox.snapshots import this_machine
from etude.sandbox.vm.migration import PREPARED_S, Incoming, Offer, Ticket
from etude.sandbox.vm.qemu import qemu_version
from etude.sandbox.vm.state import Machine


class Arrivals:
    """The open tickets of one backend. A machine that nobody takes over in time is given up."""

    def __init__(self, host: str | None, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """`host`: the address to listen at; None: private sockets of this host. `spawn` does work beside."""
        self._host = host
        self._spawn = spawn
        self._incoming: dict[str, Incoming] = {}
        self._deadlines: dict[str, asyncio.TimerHandle] = {}

    @property
    def tickets(self) -> list[str]:
        """Ids of the open tickets."""
        return list(self._incoming)

    @property
    def machines(self) -> list[Machine]:
        """The machines that wait."""
        return [incoming.machine for incoming in self._incoming.values()]

    async def expect(self, machine: Machine) -> Ticket:
        """Opens a ticket for an empty machine, which belongs to it. Raises SandboxError, and it is gone."""
        incoming = Incoming(machine, self._host)
        try:
            ticket = await incoming.open()
        except BaseException:
            await asyncio.shield(incoming.close())
            raise
        self._incoming[ticket.id] = incoming
        self._deadlines[ticket.id] = asyncio.get_running_loop().call_later(
            PREPARED_S, lambda: self._spawn(self.abandon(ticket.id))
        )
        return ticket

    async def take(self, ticket_id: str) -> Machine:
        """The machine of a ticket, once all of it is here; it stands still. The ticket is used up.

        Raises SandboxError, and then the machine is gone.
        """
        incoming = self._incoming.pop(ticket_id, None)
        if incoming is None:
            raise SandboxError(
                "no machine is expected under this ticket", field="ticket", received=ticket_id,
                fix="prepare the target again",
            )  # fmt: skip
        self._deadlines.pop(ticket_id).cancel()
        try:
            await incoming.finish()
        except BaseException:
            await asyncio.shield(incoming.close())
            raise
        return incoming.machine

    async def abandon(self, ticket_id: str) -> None:
        """Gives up a machine that was expected. Idempotent."""
        timer = self._deadlines.pop(ticket_id, None)
        if timer is not None:
            timer.cancel()
        incoming = self._incoming.pop(ticket_id, None)
        if incoming is not None:
            await incoming.close()


def check_offer(offer: Offer, accelerator: str) -> None:
    """Raises SandboxError if a machine like the offered one cannot go on here."""
    version = qemu_version()
    same = offer.version == version and offer.hardware.accelerator == accelerator
    if not same or (accelerator == "kvm" and dict(offer.machine) != this_machine()):
        raise SandboxError(
            "the machine cannot run here: QEMU, accelerator or processor differ",
            field="target",
            received=f"QEMU {offer.version}, {offer.hardware.accelerator}",
            fix=f"move it to a host like its own; here are QEMU {version}, {accelerator}",
        )
