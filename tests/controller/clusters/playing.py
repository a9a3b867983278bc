"""A run's control API on loopback, clusters with scripted policies, and failures between them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs etude[serve]")

import httpx

from etude.config import ClustersConfig
from etude.controller.clusters.board import Clock
from etude.controller.clusters.client import ControlClient
from etude.controller.clusters.control import Control
from etude.controller.clusters.intake import Inbox
from etude.controller.clusters.runner import AnnouncingSink, ClusterRunner
from etude.controller.clusters.sampling import ClusterResources, SamplingCluster, Terms
from etude.controller.clusters.server import build_app
from etude.controller.clusters.wire import RunFingerprint
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.runners import EpisodeRequest, EpisodeRunner
from etude.errors import WeightUpdateError
from etude.observe.observer import RecordingObserver
from etude.protocols import KvPolicy, Sampler
from etude.records import PolicyVersion, SamplingParams, Trajectory, TrajectoryId, WeightManifest
from etude.serving.process import ServerThread
from etude.store.blobs import MemoryBlobs
from etude.weights.ending import EndMark
from etude.weights.folders import Folder, open_folder
from tests.environment.playing import SOLVES, TASK, new_environment, script_of
from tests.fakes.scripted import ScriptedSampler

FINGERPRINT = RunFingerprint({"model": "tiny", "tokenizer": "bytes"})
OFFER = {
    "name": "run",
    "config": "",
    "tokenizer": {},
    "vocab_size": 256,
    "fingerprint": {**FINGERPRINT.parts},
}
TOKEN = "a-token"
LEASE_S = 60.0
"""Of the run. Its clusters are told less, and beat more often than they must."""
_TOLD_LEASE_S = 4.0


def version_at(step: int) -> PolicyVersion:
    return PolicyVersion("run", step, f"digest-{step}")


def manifest_at(step: int) -> WeightManifest:
    return WeightManifest(version_at(step), (), f"weights:store#{step}")


class NoWeights:
    """A WeightSink, and the Subscriber that it fetches through, for policies that need none; can be told to
    fail."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        """So many stagings fail."""
        self.trouble = ""
        """See Subscriber.trouble."""
        self._current: PolicyVersion | None = None

    async def stage(self, manifest: WeightManifest) -> None:
        if self.failures:
            self.failures -= 1
            raise WeightUpdateError("the relay is away")

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        self._current = version

    def current(self) -> PolicyVersion | None:
        return self._current

    def close(self) -> None:
        """Nothing waits."""


class Link(httpx.AsyncBaseTransport):
    """The way from a cluster to the run: can be cut, lose answers, damage bodies."""

    def __init__(self) -> None:
        self.is_cut = False
        self.lose_answers: set[str] = set()
        """Parts of paths of which the next answer is lost, though the request has arrived."""
        self.damage: set[str] = set()
        """Parts of paths of which the next body has a flipped bit."""
        self.cut_bodies: set[str] = set()
        """Parts of paths of which the next body ends in its middle."""
        self.paths: list[str] = []
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_cut:
            raise httpx.ConnectError("the link is cut", request=request)
        path = request.url.path
        self.paths.append(path)
        for name, change in ((self.damage, _flipped), (self.cut_bodies, _halved)):
            if part := next((part for part in name if part in path), None):
                name.discard(part)
                content = change(await request.aread())
                headers = {k: v for k, v in request.headers.items() if k.lower() != "content-length"}
                request = httpx.Request(request.method, request.url, headers=headers, content=content)
        response = await self._inner.handle_async_request(request)
        if part := next((part for part in self.lose_answers if part in path), None):
            self.lose_answers.discard(part)
            await response.aclose()
            raise httpx.ReadError("the answer is lost", request=request)
        if self.is_cut:
            await response.aclose()
            raise httpx.ReadError("the link is cut", request=request)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


def _flipped(body: bytes) -> bytes:
    changed = bytearray(body)
    changed[len(changed) // 2] ^= 4
    return bytes(changed)


def _halved(body: bytes) -> bytes:
    return body[: len(body) // 2]


class World:
    """A run that waits for sessions, and clusters that come and go. For one event loop."""

    def __init__(self, directory: Path, clock: Clock = time.monotonic, **settings: Any) -> None:
        """`clock`: the run's, in seconds. `settings`: of the section `clusters`."""
        values = {"listen": "127.0.0.1:0", "lease_s": LEASE_S, "poll_s": 0.5, **settings}
        self.settings = ClustersConfig.model_validate(values)
        self.directory = directory
        self.inbox = Inbox(directory / "inbox", self.settings.max_result_bytes)
        self.lines: list[str] = []
        """What the run says of its clusters."""
        self.control = Control(self.settings, OFFER, self.inbox, self.lines.append, clock)
        self.blobs = MemoryBlobs()
        self.runner = ClusterRunner(
            new_environment(blobs=self.blobs),
            self.control,
            self.inbox,
            self.blobs.put,
            self.settings.local_sessions,
            max_staleness=2,
        )
        self.sink = AnnouncingSink(NoWeights(), self.control, self._announced)
        self.observer = RecordingObserver()
        self.server: ServerThread
        self.clusters: list[asyncio.Task[None]] = []

    def _announced(self, version: PolicyVersion) -> None:
        self.runner.serving = version

    @contextlib.asynccontextmanager
    async def open(self, step: int | None = 0) -> AsyncIterator[World]:
        """With a control API, and weights in service; clusters are ended at last."""
        with ServerThread(build_app(self.control, TOKEN)) as self.server:
            try:
                if step is not None:
                    await self.serve(step)
                yield self
            finally:
                for cluster in self.clusters:
                    cluster.cancel()
                await asyncio.gather(*self.clusters, return_exceptions=True)

    async def serve(self, step: int) -> None:
        await self.sink.stage(manifest_at(step))
        await self.sink.activate(version_at(step))

    def join(
        self,
        name: str = "a",
        link: Link | None = None,
        runner: EpisodeRunner | None = None,
        draining: asyncio.Event | None = None,
        fingerprint: RunFingerprint = FINGERPRINT,
        sampled_step: int = 0,
        sink: NoWeights | None = None,
        token: str | None = TOKEN,
        max_sessions: int = 4,
        drain_s: float = 5.0,
        patience_s: float = 60.0,
        mark: EndMark | None = None,
    ) -> tuple[SamplingCluster, asyncio.Task[None]]:
        """A cluster that has come, in a task of its own."""
        blobs = MemoryBlobs()
        sampler = ScriptedSampler(script_of(lambda _: SOLVES), version_at(sampled_step), route_shape=(2, 2))
        environment = new_environment(blobs=blobs)
        if isinstance(runner, SlowRunner):
            runner.inner = environment
        weights = sink or NoWeights()
        resources = ClusterResources(
            runner or environment,
            sampler,
            weights,
            blobs,
            fingerprint,
            max_sessions,
            "recompute",
            lambda: None,
            weights,
            "http://relay",
        )
        store: Folder | None = None
        if self.settings.trajectories_url:
            store = open_folder(self.settings.trajectories_url)
        is_usual = self.settings.lease_s == LEASE_S
        lease_s = _TOLD_LEASE_S if is_usual else self.settings.lease_s
        terms = Terms(lease_s, self.settings.poll_s, self.settings.max_result_bytes, store)
        client = ControlClient(self.server.url, token, link or Link())
        cluster = SamplingCluster(client, name, resources, terms, self.observer, patience_s, drain_s, mark)

        async def play() -> None:
            async with client:
                await cluster.play(draining or asyncio.Event())

        task = asyncio.create_task(play())
        self.clusters.append(task)
        return cluster, task

    async def session(self, number: int = 0, sampler: Any = None) -> Trajectory:
        """What comes of one session."""
        identity = TrajectoryId("run", TASK.id, 0, number, 0)
        async with asyncio.timeout(60):
            return await self.runner.run(TASK, identity, sampler, (7, number), SamplingParams(), True)

    async def until(self, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Waits for a condition."""
        async with asyncio.timeout(timeout_s):
            while not holds():  # noqa: ASYNC110 - what is waited for has no event
                await asyncio.sleep(0.01)


class SlowRunner(EpisodeRunner):
    """One that waits before each session until it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.began = 0
        self.cancelled = 0
        self.inner: EpisodeRunner | None = None
        """Its cluster's own."""

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        self.began += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        assert self.inner is not None
        return await self.inner.play(request, sampler)
