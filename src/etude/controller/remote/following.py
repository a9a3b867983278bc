"""The engines of a run as a rollout worker sees them: which are up, what they serve, and how to reach them.

    run's process                                   worker
    EngineFleet ──EngineTable, whenever it changes──> FollowingSampler <── sessions
                                                          │
    engine processes <──────────exchange, poll────────────┘

The whole table travels each time, so that it matters neither how many changes it stands for nor whether one
was missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etude.controller.remote.engines import RemoteEngine
from etude.controller.remote.patient import PatientSampler
from etude.protocols import Handle
from etude.records import PolicyVersion


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine that serves a version."""

    handle: Handle[Any]
    process: int
    """Tells one process of this engine from the next."""
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class EngineTable:
    """The engines that serve something, by name."""

    number: int
    """Higher than that of any earlier table."""
    engines: Mapping[str, EngineEntry]


class FollowingSampler(PatientSampler):
    """Samples with whichever engines the newest table names. For one event loop."""

    def __init__(self, client: str, patience_s: float) -> None:
        """`client`: names this process to the engines, unlike any other's name. `patience_s`: how long a
        request waits for an engine."""
        super().__init__(patience_s)
        self._client = client
        self._table = EngineTable(-1, {})
        self._processes: dict[str, int] = {}
        """Engine -> which of its processes it was last connected to."""

    def follow(self, table: EngineTable) -> None:
        """Goes on with the engines of `table`, unless a newer one has come before it."""
        if table.number > self._table.number:
            self._table = table
            self.reconnect()

    def reconnect(self) -> None:
        """Brings what is connected in line with the table; engines that only this process lost are tried
        again."""
        for name, engine in self._engines.items():
            entry = self._table.engines.get(name)
            if entry is None or entry.process != self._processes.get(name):
                engine.disconnect("it has left")
                self.engine_away(name)
        for name, entry in self._table.engines.items():
            if name not in self._engines:
                self.add_engine(RemoteEngine(name, self._lost, self._client))
            engine = self._engines[name]
            if engine.handle is None:
                engine.connect(entry.handle, entry.version)
                self._processes[name] = entry.process
            engine.serves(entry.version)
            self.engine_ready(name, entry.version)

    def disconnect(self) -> None:
        """Leaves all engines."""
        for engine in self._engines.values():
            engine.disconnect("the worker ends")

    def _lost(self, handle: Handle[Any], cause: str) -> None:
        """An engine does not answer: sessions go elsewhere, until it does or a table names its next one."""
        for name, engine in self._engines.items():
            if engine.handle is None:
                self.engine_away(name)
