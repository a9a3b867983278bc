"""All engine processes as one Sampler and WeightSink, whichever of them are up at the time.

A process that comes back is first brought to the version in service and only then given requests; who finds
none of them up waits for one. So a lost engine costs its sessions time, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from etude.controller.remote.engines import NO_USAGE, EngineProcess, RemoteEngine, Usage, bring_to, sum_usage
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
        """`spawns`: how to start the process of each engine, by name. `build`: what they must all be."""
        super().__init__(supervision.settings.patience_s)
        self._build = build
        self._supervision, self._settings = supervision, supervision.settings
        self._serving: WeightManifest | None = None
        self._staged: WeightManifest | None = None
        self._staged_by: set[Handle[EngineProcess]] = set()
        self._past = NO_USAGE
        """What lost processes had done when they last said so."""
        self.changes = Changes()
        """Of `table`."""
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
        """Adds an engine, of a new name or of one that has left; returns once it is ready. `journal`: where
        its faults are noted, if not with the others'. Raises what the engine raises, and PartLostError where
        its process does not come up however often it is started."""
        supervisor = self._supervisor(name, spawn, journal)
        self._supervised.add(supervisor)
        try:
            await supervisor.start()
        except BaseException:
            await self.leave(name)
            raise

    async def leave(self, name: str) -> None:
        """Takes an engine out and stops its process: what it was answering goes to another, or waits for one.
        Does nothing where there is none of that name."""
        supervisor = self._supervised.remove(name)
        if supervisor is not None:
            self._part_from(self._engines[name], "it has left")
            await supervisor.close()

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage: on every engine that is up, and on one at least.

        Raises WeightUpdateError if the weights are what is wrong, StoreError if no engine reaches the store,
        and PartLostError where none outlives it, `give_up_after` times in a row.
        """
        failure: InfrastructureError | None = None
        for _ in range(self._settings.give_up_after):
            await self._supervised.any_ready()
            failure = await self._stage_on_those_up(manifest)
            if failure is None:
                return
        raise PartLostError(
            f"no engine could stage {manifest.version}, {self._settings.give_up_after} times in a row",
            received=str(failure),
            fix="see what ends its process: two versions must fit beside each other",
        ) from failure

    async def _stage_on_those_up(self, manifest: WeightManifest) -> InfrastructureError | None:
        """Stages on every engine that is up, and gives up those that cannot, if one can; what went wrong
        where none can. Raises as `stage`."""
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
            self._lose(handles[name], f"could not stage {manifest.version}: {error}")
        return None

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. Engines that did not stage the version, and those that are lost meanwhile,
        serve nothing until they have it."""
        manifest = check_staged(version, self._staged)
        staged_by, self._staged_by, self._staged = self._staged_by, set(), None
        self._serving = manifest
        engines = list(self._engines.values())
        await asyncio.gather(*(self._activate(one, manifest, kv, staged_by) for one in engines))
        await self._supervised.any_ready()

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
            self._lose(handle, f"could not serve {manifest.version}: {error}")
        else:
            if engine.handle is handle:
                self.engine_ready(engine.name, manifest.version)

    def current(self) -> PolicyVersion | None:
        return self._serving.version if self._serving is not None else None

    @property
    def serving(self) -> WeightManifest | None:
        """What was activated last: how to fetch the version in service."""
        return self._serving

    # ---- for metrics ----------------------------------------------------------------------------

    @property
    def counters(self) -> EngineCounters:
        """What all engines have done together, as of their last heartbeats or weight updates."""
        return self._usage().counters

    @property
    def times(self) -> ServiceTimes:
        """Where their wall time went, likewise; engines that run at once add up."""
        return self._usage().times

    def _usage(self) -> Usage:
        return sum_usage([self._past, *(engine.usage for engine in self._engines.values())])

    # ---- for who samples elsewhere ----------------------------------------------------------------

    def table(self) -> EngineTable:
        """The engines that serve something now, for a FollowingSampler."""
        return {
            name: EngineEntry(engine.handle, engine.process, version)
            for name, engine in self._engines.items()
            if engine.handle is not None and (version := engine.current()) is not None
        }

    async def forget(self, client: str) -> None:
        """A worker's process of that name is gone: engines end what it had asked of them. One that cannot
        is started again."""
        handles = [engine.handle for engine in self._engines.values() if engine.handle is not None]
        calls = (handle.call(EngineProcess.forget, client) for handle in handles)
        results = await asyncio.gather(*calls, return_exceptions=True)
        for handle, error in zip(handles, results, strict=True):
            if isinstance(error, Exception):
                self._lose(handle, f"could not forget {client}: {error}")

    def engine_ready(self, name: str, version: PolicyVersion) -> None:
        super().engine_ready(name, version)
        self.changes.tell()

    def engine_away(self, name: str) -> None:
        super().engine_away(name)
        self.changes.tell()

    # ---- processes ------------------------------------------------------------------------------

    def _supervisor(
        self, name: str, spawn: Spawn[EngineProcess], journal: FaultJournal | None = None
    ) -> Supervisor[EngineProcess]:
        if name not in self._engines:
            self.add_engine(RemoteEngine(name, self._lose))
        engine = self._engines[name]

        async def prepare(handle: Handle[EngineProcess]) -> None:
            check_build(await handle.call(EngineProcess.begin), self._build, name)
            served: PolicyVersion | None = None
            # Another version may come into service while this one is fetched.
            while (manifest := self._serving) is not None and manifest.version != served:
                await bring_to(handle, manifest)
                served = manifest.version
            engine.connect(handle, served)
            if served is not None:
                self.engine_ready(name, served)

        def leave(cause: str) -> None:
            self._part_from(engine, cause)

        def hear(usage: Usage) -> None:
            engine.usage = usage

        return Supervisor(name, spawn, prepare, self._supervision, leave, hear, journal)

    def _part_from(self, engine: RemoteEngine, cause: str) -> None:
        """Its process is gone, or about to be."""
        self._past, engine.usage = sum_usage([self._past, engine.usage]), NO_USAGE
        engine.disconnect(cause)
        self.engine_away(engine.name)

    def _lose(self, handle: Handle[EngineProcess], cause: str) -> None:
        """Another process takes the place of this one, if it has not already."""
        self._supervised.lose(handle, cause)


def check_build(found: Build, wanted: Build, name: str) -> None:
    """Raises ConfigError where an engine's process is not what the trainer's is: it would compute other
    values, or could not take its weights."""
    pairs = [(name, mine, found.parts.get(name)) for name, mine in wanted.parts.items()]
    differing = [f"{name}: {mine} here, {theirs} there" for name, mine, theirs in pairs if mine != theirs]
    if not differing:
        return
    raise ConfigError(
        "is built otherwise than the run's own process",
        field=name,
        received=", ".join(differing),
        fix="install the same versions on machines of the same kind",
    )
