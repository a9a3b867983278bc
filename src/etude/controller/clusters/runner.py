"""Has sessions of a run played by other clusters: the run's own side.

collector ──play─> ClusterRunner ──submit─> Control <──HTTP── clusters
                        ^                      │
                        └──bundle, on disk─────┘      weights in service ──AnnouncingSink──> Control
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from etude.config import ClustersConfig, RunConfig
from etude.controller.clusters.board import PendingSession
from etude.controller.clusters.control import Control
from etude.controller.clusters.intake import Inbox
from etude.controller.clusters.wire import RunFingerprint, config_document
from etude.controller.engines import SampledModel
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.runners import EpisodeRequest, EpisodeRunner
from etude.errors import PartLostError, StoreError
from etude.kit.secrets import read_secret
from etude.observe import MetricSink, Observer
from etude.protocols import KvPolicy, Sampler, TokenProgress, WeightSink
from etude.records import (
    BlobRef,
    PolicyVersion,
    Status,
    Trajectory,
    TrajectoryId,
    WeightManifest,
)
from etude.store.bundles import Bundle
from etude.store.trajectories import TrajectoryLog
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.weights import check_staged
from etude.weights.ending import clear_over, mark_over
from etude.weights.folders import open_folder
from etude.weights.patience import PatientFolder

if TYPE_CHECKING:
    from etude.serving.process import ServerThread

KIND = "clusters"
"""Kind of the metric rows: one per version in service, and one when weights do not reach a cluster."""
INBOX = "inbox"

PutBlob = Callable[[NDArray[Any]], BlobRef]


class ClusterRunner(EpisodeRunner):
    """Plays sessions on whichever cluster claims them; forked sessions always by the run's own player.

    For one event loop.
    """

    def __init__(
        self,
        here: EpisodeRunner,
        control: Control,
        inbox: Inbox,
        put_blob: PutBlob,
        local_sessions: int,
        max_staleness: int,
    ) -> None:
        """`here`: the run's own player, for `local_sessions` at once. `put_blob`: stores expert routes.
        `max_staleness`: of sessions received before the run was resumed."""
        self.num_from_inbox = 0
        """Sessions used that were received before the run was resumed."""
        self.serving: PolicyVersion | None = None
        """The weights in service."""
        self._here = here
        self._control = control
        self._inbox = inbox
        self._put_blob = put_blob
        self._local_sessions = local_sessions
        self._max_staleness = max_staleness
        self._num_here = 0
        self._earlier = len(inbox) > 0

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        """See EpisodeRunner.play. Raises PartLostError when no cluster has been available for too long.

        A forked session is played here, however few `local_sessions` there are: its branches share its
        sandboxes and its engine.
        """
        kept = self._find_in_inbox(request.identity) if self._earlier and request.plan is None else None
        if kept is not None:
            self.num_from_inbox += 1
            return ForkedEpisode(kept)
        if request.plan is None and self._num_here >= self._local_sessions:
            return ForkedEpisode(await self._play_remotely(request, sampler))
        self._num_here += 1
        try:
            return await self._here.play(request, sampler)
        finally:
            self._num_here -= 1

    def _find_in_inbox(self, identity: TrajectoryId) -> Trajectory | None:
        """The session as received before the run was resumed, if the current weights may be trained on it."""
        bundle, serving = self._inbox.find(identity), self.serving
        if bundle is None or serving is None:
            return None
        for segment in bundle.trajectory.segments:
            for version in (span.version for span in segment.version_spans):
                if version.lineage != serving.lineage or version.step > serving.step:
                    return None  # sampled by steps that the resumed run repeats
                if version.step == serving.step and version.digest != serving.digest:
                    return None
                if version.step < serving.step - self._max_staleness:
                    return None
        return bundle.store_blobs(self._put_blob)

    async def _play_remotely(self, request: EpisodeRequest, sampler: Sampler) -> Trajectory:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Bundle | PartLostError | str] = loop.create_future()

        def set_outcome(result: Bundle | PartLostError | str) -> None:
            if not outcome.done():
                outcome.set_result(result)

        def tally(num_tokens: int) -> None:
            if isinstance(sampler, TokenProgress):
                sampler.report_tokens(num_tokens)

        session = PendingSession(
            request,
            on_ended=lambda result: _call(loop, set_outcome, result),
            on_progress=lambda num_tokens: _call(loop, tally, num_tokens),
        )
        self._control.submit(session)
        try:
            result = await outcome
        finally:
            self._control.withdraw(session)
        if isinstance(result, PartLostError):
            raise result
        if isinstance(result, Bundle):
            trajectory = result.store_blobs(self._put_blob)
            tally(trajectory.num_sampled_tokens)
            return trajectory
        return Trajectory(request.identity, (), (), Status.INFRASTRUCTURE, result)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], value: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the run's loop has ended: nothing waits for this
        loop.call_soon_threadsafe(function, value)


class AnnouncingSink:
    """Implements WeightSink: announces each activated version to the clusters."""

    def __init__(
        self, inner: WeightSink, control: Control, on_announced: Callable[[PolicyVersion], None]
    ) -> None:
        """`on_announced`: called with the announced version."""
        self._inner = inner
        self._control = control
        self._on_announced = on_announced
        self._staged: WeightManifest | None = None

    async def stage(self, manifest: WeightManifest) -> None:
        await self._inner.stage(manifest)
        self._staged = manifest

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        await self._inner.activate(version, kv)
        self._control.announce(check_staged(version, self._staged))
        self._on_announced(version)

    def current(self) -> PolicyVersion | None:
        return self._inner.current()


async def _announce_nothing() -> None:
    """For a run without clusters."""


@dataclass(frozen=True, slots=True)
class RunnerAndSink:
    """The player of a run's sessions and the sink of its weights."""

    runner: EpisodeRunner
    sink: WeightSink
    announce_end: Callable[[], Awaitable[None]] = _announce_nothing
    """Called after the last session: informs the clusters, including those that try to join later."""


@contextlib.asynccontextmanager
async def open_clusters(
    config: RunConfig,
    renderer: Renderer,
    here: RunnerAndSink,
    put_blob: PutBlob,
    log: TrajectoryLog,
    directory: Path,
    metrics: MetricSink,
    observer: Observer,
) -> AsyncIterator[RunnerAndSink]:
    """Serves the control API and yields players that use it; `here` itself where no clusters are configured.

    `directory`: of the run. Keep the context open until the run ends: clusters send requests until then.
    Raises ConfigError, also for an address or a certificate that cannot be used, and StoreError for a weight
    store that cannot be written.
    """
    settings = config.clusters
    if not settings.listen:
        yield here
        return
    inbox = Inbox(directory / INBOX, settings.max_result_bytes)
    inbox.sweep(log.contains)
    loop = asyncio.get_running_loop()
    store = PatientFolder(open_folder(config.weights.url), config.weights.patience_s)
    await asyncio.to_thread(clear_over, store)

    def write_counts() -> None:
        step = runner.serving.step if runner.serving is not None else 0
        metrics.write(KIND, step, {**control.figures(), "from_inbox": float(runner.num_from_inbox)})

    def on_announced(version: PolicyVersion) -> None:
        runner.serving = version
        inbox.sweep(log.contains)
        write_counts()

    def notify(line: str) -> None:
        observer.say(line)
        write_counts()

    control = Control(settings, describe_run(config, renderer), inbox, lambda line: _call(loop, notify, line))
    runner = ClusterRunner(
        here.runner, control, inbox, put_blob, settings.local_sessions, config.rl.max_staleness
    )

    async def announce_end() -> None:
        control.finish()
        try:
            await asyncio.to_thread(mark_over, store, config.name)
        except StoreError as error:
            observer.say(
                f"the run's end cannot be recorded; clusters that start later will wait for it: {error}"
            )

    with _serve(control, settings) as server:
        command = sampling_command(server.url, settings)
        observer.say(f"control API at {server.url}: start clusters with `{command}`")
        try:
            yield RunnerAndSink(runner, AnnouncingSink(here.sink, control, on_announced), announce_end)
        finally:
            inbox.sweep(log.contains)
            write_counts()
            control.finish()
            await asyncio.sleep(min(_FAREWELL_S, settings.lease_s / 4))


def _serve(control: Control, settings: ClustersConfig) -> ServerThread:
    """The control API's server; it listens while its context is open."""
    from etude.controller.clusters.server import build_app
    from etude.serving.process import ServerThread

    app, (host, port) = build_app(control, read_secret(settings.token, "clusters.token")), settings.address
    files = _path(settings.certificate), _path(settings.certificate_key)
    return ServerThread(app, host, port, *files, settings.allowed_hosts)


def sampling_command(url: str, settings: ClustersConfig) -> str:
    """The command that another cluster runs to play sessions of the run at `url`."""
    token = f" --token {settings.token}" if settings.token else ""
    return f"etude sample --control {url}{token} --relay http://RELAY:PORT"


_FAREWELL_S = 2.0
"""Time in which waiting clusters receive the news that the run has ended."""


def check_clusters(settings: ClustersConfig) -> None:
    """Raises ConfigError where the control API could not start: an address that is in use or that is public
    without a token, a token or a certificate that cannot be read."""
    if not settings.listen:
        return
    from starlette.applications import Starlette

    from etude.serving.listening import check_token, open_listeners
    from etude.serving.process import configure

    check_token(settings.address[0], read_secret(settings.token, "clusters.token") is not None)
    for listener in open_listeners(*settings.address):
        listener.close()
    configure(Starlette(), _path(settings.certificate), _path(settings.certificate_key))


def describe_run(config: RunConfig, renderer: Renderer) -> dict[str, Any]:
    """The description of a run with this resolved configuration that clusters receive."""
    return {
        "name": config.name,
        "config": config_document(config),
        "tokenizer": _tokenizer_files(renderer.tokenizer),
        "vocab_size": SampledModel.configured(config, renderer.tokenizer).vocab_size,
        "fingerprint": dict(RunFingerprint.of(config, renderer).parts),
    }


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, str]:
    with tempfile.TemporaryDirectory(prefix="etude-tokenizer-") as directory:
        tokenizer.save(Path(directory))
        return {path.name: path.read_text(encoding="utf-8") for path in Path(directory).iterdir()}


def _path(text: str) -> Path | None:
    return Path(text) if text else None
