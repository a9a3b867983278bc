"""Fake control groups: they limit nothing, and a test decides when processes enter them."""

from __future__ import annotations

import threading

from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.types import Resources


class FakeGroups(ControlGroups):
    """Records which process was moved to which group. Needs no rights, on any machine."""

    def __init__(self) -> None:
        super().__init__({})
        self.may_enter = threading.Event()
        """While it is not set, `enter` blocks, as on a busy machine."""
        self.may_enter.set()
        self.error: OSError | None = None
        """Error of every `enter`; None: it succeeds."""
        self.asked: list[str] = []
        """Groups of all calls of `enter`, finished or not."""
        self.entered: dict[str, int] = {}
        """Group -> the process in it."""
        self.limited: list[str] = []
        """Groups whose limits were set."""

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
