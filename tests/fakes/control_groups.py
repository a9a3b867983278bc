"""Control groups that bound nothing, and that are entered when a test says so."""

from __future__ import annotations

import threading

from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.types import Resources


class FakeGroups(ControlGroups):
    """Keeps in mind who was moved where. Of use to any user, on any machine."""

    def __init__(self) -> None:
        super().__init__({})
        self.may_enter = threading.Event()
        """While it is not set, whoever moves a process waits, as on a machine that is busy."""
        self.may_enter.set()
        self.error: OSError | None = None
        """What every move fails with."""
        self.asked: list[str] = []
        """Groups that a process was, or is being, moved to."""
        self.entered: dict[str, int] = {}
        """Group -> the process that is in it."""
        self.limited: list[str] = []
        """Groups that have their limits."""

    def admit_fork_server(self, pid: int) -> None:
        """See ControlGroups.admit_fork_server."""

    def enter(self, name: str, pid: int) -> None:
        """See ControlGroups.enter."""
        self.asked.append(name)
        self.may_enter.wait()
        if self.error is not None:
            raise self.error
        self.entered[name] = pid

    def limit(self, name: str, resources: Resources) -> None:
        """See ControlGroups.limit."""
        self.limited.append(name)
