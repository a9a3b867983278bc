"""All engine processes of a run as one Sampler and WeightSink.

A restarted process first activates the version in service and only then gets requests; a request that finds
no engine waits for one. So a lost engine costs its sessions time, and nothing else.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping

from etude.controller.remote.engines import (
    NO_USAGE,
    EngineProcess,
    RemoteEngine,
    Usage,
    sum_usage,
)
from etude.controller.remote.patient import EngineEntry, EngineTable, PatientSampler
from etude.controller.supervision import FaultJournal, Spawn, SupervisedParts, Supervision, Supervisor
from etude.errors import ConfigError, InfrastructureError, PartLostError, StoreError, WeightUpdateError
from etude.inference import EngineCounters, ServiceTimes
from etude.inference.exchange import Build
from etude.kit.tasks import Changes
from etude.protocols import Handle, KvPolicy
from etude.records import PolicyVersion, WeightManifest
from etude.weights import check_staged


class EngineFleet(PatientSampler):
    """The engines of a run, supervised. Implements Sampler and WeightSink; for one event loop."""

    def __init__(
        self,
        spawns: Mapping[str, Spawn[EngineProcess]],
        build: Build,
        supervision: Supervision,
    ) -> None:
        """`spawns`: functions that start each engine's process, by name. `build`: of all processes."""
        super().__init__(supervision.settings.patience_s)
        self._build = build
        self._supervision, self._settings = supervision, supervision.settings
        self.serving: WeightManifest | None = None
        """Manifest of the version in service."""
        self._staged: WeightManifest | None = None
        self._staged_by: set[Handle[EngineProcess]] = set()
        self._ended_usage = NO_USAGE
        """Usage of ended processes, as last reported."""
        self.changes = Changes()
        """Notified when `table` changes."""
        self._supervised = SupervisedParts[EngineProcess](supervision)
        for name, spawn in spawns.items():
            self._supervised.add(self._supervisor(name, spawn))

    async def start(self) -> None:
        """Starts all engines. Raises what any of them raises."""
        await self._supervised.start()

    async def shutdown(self) -> None:
        """Stops all engines."""
        await self._supervised.close()

    async def join(self, name: str, spawn: Spawn[EngineProcess], journal: FaultJournal | None = None) -> None:
        """Adds an engine, of a new name or of one that has left; returns once it is ready. `journal`: of its
        faults, instead of the shared one. Raises what the engine raises, and PartLostError where every
        attempt to start its process fails."""
        supervisor = self._supervisor(name, spawn, journal)
        self._supervised.add(supervisor)
        try:
            await supervisor.start()
        except BaseException:
            await self.leave(name)
            raise

    async def leave(self, name: str) -> None:
        """Removes an engine and stops its process: its requests move to another engine, or wait for one. Does
        nothing where there is none of that name."""
        supervisor = self._supervised.remove(name)
        if supervisor is not None:
            self._on_engine_lost(self._engines[name], "it has left")
            await supervisor.close()

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage: on every engine that is up, and on one at least.

        Raises WeightUpdateError if the weights are faulty, StoreError if no engine reaches the store, and
        PartLostError where no engine survives it, `give_up_after` times in a row.
        """
        failure: InfrastructureError | None = None
        for _ in range(self._settings.give_up_after):
            await self._supervised.wait_any_ready()
            failure = await self._stage_on_those_up(manifest)
            if failure is None:
                return
        raise PartLostError(
            f"no engine could stage {manifest.version}, {self._settings.give_up_after} times in a row",
            received=str(failure),
            fix="find out what ends its process: two versions of the weights must fit into memory",
        ) from failure

    async def _stage_on_those_up(self, manifest: WeightManifest) -> InfrastructureError | None:
        """Stages on every engine that is up. Where at least one succeeds, the others are declared lost; where
        none does, returns an error of one. Raises as `stage`."""
        up = [engine for engine in self._engines.values() if engine.handle is not None]
        handles = {engine.name: engine.handle for engine in up if engine.handle is not None}
        results = await asyncio.gather(*(e.stage(manifest) for e in up), return_exceptions=True)
        failures: dict[str, InfrastructureError] = {}
        for engine, result in zip(up, results, strict=True):
            if isinstance(result, InfrastructureError):
                failures[engine.name] = result
            elif isinstance(result, BaseException):
                raise result
        staged = {handle for name, handle in handles.items() if name not in failures}
        if not staged:
            bad = [e for e in failures.values() if isinstance(e, (WeightUpdateError, StoreError))]
            if bad and len(bad) == len(up):
                raise bad[0]
            return next(iter(failures.values()), PartLostError("no engine was up"))
        self._staged, self._staged_by = manifest, staged
        for name, error in failures.items():
            self._supervised.declare_lost(handles[name], f"could not stage {manifest.version}: {error}")
        return None

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. Engines that did not stage the version, and those that are lost meanwhile,
        serve nothing until they have it."""
        manifest = check_staged(version, self._staged)
        staged_by, self._staged_by, self._staged = self._staged_by, set(), None
        self.serving = manifest
        engines = list(self._engines.values())
        await asyncio.gather(*(self._activate(engine, manifest, kv, staged_by) for engine in engines))
        await self._supervised.wait_any_ready()

    async def _activate(
        self,
        engine: RemoteEngine,
        manifest: WeightManifest,
        kv: KvPolicy,
        staged_by: set[Handle[EngineProcess]],
    ) -> None:
        handle = engine.handle
        if handle is None:
            return
        try:
            if handle not in staged_by:
                await engine.stage(manifest)
            await engine.activate(manifest.version, kv)
        except InfrastructureError as error:
            self._supervised.declare_lost(handle, f"could not serve {manifest.version}: {error}")
        else:
            if engine.handle is handle:
                self.engine_ready(engine.name, manifest.version)

    def current(self) -> PolicyVersion | None:
        return self.serving.version if self.serving is not None else None

    # ---- for metrics ----------------------------------------------------------------------------

    @property
    def counters(self) -> EngineCounters:
        """Sum over all engines, as of their last heartbeats or weight updates."""
        return self._usage().counters

    @property
    def times(self) -> ServiceTimes:
        """Sum of their wall times, likewise; concurrent engines add up."""
        return self._usage().times

    def _usage(self) -> Usage:
        return sum_usage([self._ended_usage, *(engine.usage for engine in self._engines.values())])

    # ---- for samplers in workers ------------------------------------------------------------------

    def table(self) -> EngineTable:
        """The engines that serve a version now, for a FollowingSampler."""
        return {
            name: EngineEntry(engine.handle, engine.process, version)
            for name, engine in self._engines.items()
            if engine.handle is not None and (version := engine.current()) is not None
        }

    async def end_client(self, client: str) -> None:
        """Ends an ended client's requests on all engines; an engine that fails at this is restarted."""
        handles = [engine.handle for engine in self._engines.values() if engine.handle is not None]
        calls = (handle.call(EngineProcess.forget, client) for handle in handles)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for handle, error in zip(handles, results, strict=True):
            if isinstance(error, Exception):
                self._supervised.declare_lost(handle, f"could not forget {client}: {error}")

    def engine_ready(self, name: str, version: PolicyVersion) -> None:
        super().engine_ready(name, version)
        self.changes.notify()

    def engine_away(self, name: str) -> None:
        super().engine_away(name)
        self.changes.notify()

    # ---- processes ------------------------------------------------------------------------------

    def _supervisor(
        self, name: str, spawn: Spawn[EngineProcess], journal: FaultJournal | None = None
    ) -> Supervisor[EngineProcess]:
        if name not in self._engines:
            self.add_engine(RemoteEngine(name, self._supervised.declare_lost))
        engine = self._engines[name]

        async def prepare(handle: Handle[EngineProcess]) -> None:
            check_build(await handle.call(EngineProcess.begin), self._build, name)
            served: PolicyVersion | None = None
            # Another version may come into service while this one is fetched.
            while (manifest := self.serving) is not None and manifest.version != served:
                await handle.call(EngineProcess.stage, manifest)
                await handle.call(EngineProcess.activate, manifest.version, "recompute")
                served = manifest.version
            engine.connect(handle, served)
            if served is not None:
                self.engine_ready(name, served)

        def on_pulse(usage: Usage) -> None:
            engine.usage = usage

        on_loss = functools.partial(self._on_engine_lost, engine)
        return Supervisor(name, spawn, prepare, self._supervision, on_loss, on_pulse, journal)

    def _on_engine_lost(self, engine: RemoteEngine, cause: str) -> None:
        """Cleans up after a process that has ended or is about to."""
        self._ended_usage, engine.usage = sum_usage([self._ended_usage, engine.usage]), NO_USAGE
        engine.disconnect(cause)
        self.engine_away(engine.name)


def check_build(found: Build, wanted: Build, name: str) -> None:
    """Raises ConfigError where a process has another build than the run's: it would compute other values, or
    could not load its weights."""
    pairs = [(name, mine, found.parts.get(name)) for name, mine in wanted.parts.items()]
    differing = [f"{name}: {mine} here, {theirs} there" for name, mine, theirs in pairs if mine != theirs]
    if not differing:
        return
    raise ConfigError(
        "runs other software or hardware than the run's own process",
        field=name,
        received=", ".join(differing),
        fix="install the same versions on machines of the same kind",
    )
