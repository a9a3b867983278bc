"""One vLLM server and the weights in it.

    stage ─> activate:  worker loads between two steps ─> progress ─> label ─> probe ─> in service
                          └───────────────────────── refused ────────────┴─> back to the old snapshot
    server gone ─> start again from the snapshot that was served ─> probe ─> in service

Each activation has a label, which vLLM puts on the tokens that it samples. Tokens of a label are handed out
only when the probe has shown that its weights are right. While the server is away nothing is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.errors import EtudeError, ResourceError, SamplerError, WeightUpdateError
from etude.inference.vllm.activations import Activation, History
from etude.inference.vllm.answers import Part
from etude.inference.vllm.client import Abilities, VllmClient, prepare_workers, score_tokens
from etude.inference.vllm.probes import check_probe
from etude.inference.vllm.publishing import FetchedSnapshots
from etude.inference.vllm.servers import VllmServer
from etude.inference.vllm.snapshots import Snapshot, check_same_shapes, open_snapshot
from etude.kit.tasks import to_the_end
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, WeightManifest
from etude.weights.manifest import check_staged

MOST_RESTARTS = 3
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class UpdateTimes:
    """Where one update's time went."""

    pause_s: float = 0.0
    """Between the last step with the old weights and the first with the new; 0 where none was running."""
    load_s: float = 0.0
    """Of that, while vLLM loaded."""
    step_s: float = 0.0
    """From one step to the next before that, on median."""
    probe_s: float = 0.0
    """Until the probe agreed; meanwhile vLLM samples, and what it samples is held back."""


class Replica:
    """See the module. One of stage, activate and restart runs at a time."""

    def __init__(
        self,
        server: VllmServer,
        *,
        capture_routes: bool = True,
        tolerance: float = 0.0,
        load_timeout_s: float = 600.0,
        most_restarts: int = MOST_RESTARTS,
        fetched: FetchedSnapshots | None = None,
    ) -> None:
        """`most_restarts`: in a row, of a server that is gone or took wrong weights; 0 where somebody else
        starts all of it again. `fetched`: brings weights here that are published elsewhere, and is closed at
        the end; else manifests name directories that this machine sees."""
        self._server = server
        self._capture = capture_routes
        self._tolerance = tolerance
        self._load_timeout_s = load_timeout_s
        self._most_restarts = most_restarts
        self._fetched = fetched
        self._lock = asyncio.Lock()
        self._client: VllmClient | None = None
        self._staged: Snapshot | None = None
        self._loaded: Snapshot | None = None
        """What the running server has, verified or not."""
        self._served: Snapshot | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._failure: EtudeError | None = None
        self.requests: set[str] = set()
        """Names of the requests in flight: how far they are when weights change is asked for."""
        self.history = History()
        """Which weights there were when."""
        self.abilities: Abilities | None = None
        self.times = UpdateTimes()
        """Of the last update."""
        self.restarts = 0

    # ---- weights --------------------------------------------------------------------------------

    def current(self) -> PolicyVersion | None:
        """The version in service; None while there is none."""
        is_up = self._client is not None and self._serving.is_set()
        return self._served.version if is_up and self._served is not None else None

    @property
    def failure(self) -> EtudeError | None:
        """Why nothing will be served any more."""
        return self._failure

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage: checks every byte, and starts the server if need be.
        Cancelled, it goes on to its end: half an update would be worse than a late one.

        Raises ResourceError where it does not start.
        """
        await to_the_end(self._stage(manifest))

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. Raises WeightUpdateError; then the old version is in service again."""
        await to_the_end(self._activate(version, kv))

    async def close(self) -> None:
        """Ends everything."""
        self._failure = self._failure or SamplerError("vLLM was stopped")
        watcher = self._watcher
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        try:
            await self._shut_down("vLLM was stopped")
            await self._server.stop()
            self._serving.set()  # wakes those who wait, who then find the failure
        finally:
            if self._fetched is not None:
                self._fetched.close()

    # ---- for requests ---------------------------------------------------------------------------

    async def client(self) -> VllmClient:
        """The server, once something is served. Raises SamplerError if nothing will be."""
        while self._client is None or not self._serving.is_set():
            if self._failure is not None:
                raise SamplerError("vLLM is down", received=str(self._failure)) from self._failure
            if self._served is None:
                raise SamplerError("no weights yet", field="version", fix="stage and activate some")
            await self._serving.wait()
        return self._client

    async def wait_until_settled(self, client: VllmClient) -> None:
        """Waits while weights are exchanged: how far requests were is known afterwards.

        Raises SamplerError if the server behind `client` has meanwhile been taken down: what it sampled last
        may have come from a mixture of weights.
        """
        await self._settled.wait()
        if self._client is not client:
            raise SamplerError("vLLM went down while it sampled", fix="sample again")

    async def score(self, client: VllmClient, tokens: NDArray[np.int32], name: str = "") -> Part:
        """See `score_tokens`."""
        assert self.abilities is not None
        return await score_tokens(client, tokens, name, self.abilities.adapters, self._load_timeout_s)

    # ---- inside ---------------------------------------------------------------------------------

    async def _stage(self, manifest: WeightManifest) -> None:
        async with self._lock:
            self._staged = None
            open_it = open_snapshot if self._fetched is None else self._fetched.open
            snapshot = await asyncio.to_thread(open_it, manifest)
            if self._served is not None:
                check_same_shapes(self._served.manifest, snapshot.manifest)
            if self._client is None and self._failure is None:
                await self._start_first(snapshot)
            self._staged = snapshot

    async def _activate(self, version: PolicyVersion, kv: KvPolicy) -> None:
        async with self._lock:
            staged = check_staged(version, self._staged)
            error = await self._try_activate(staged, kv)
            if isinstance(error, SamplerError) and self._client is not None:
                # The server failed, not the weights: it has begun again with the old ones.
                error = await self._try_activate(staged, kv)
            if error is not None:
                raise WeightUpdateError(
                    f"the update failed; in service is {self.current()}",
                    field="version",
                    received=str(version),
                    fix=str(error),
                ) from error
            self._staged = None

    async def _try_activate(self, staged: Snapshot, kv: KvPolicy) -> EtudeError | None:
        """One attempt; what failed, after which the old version is in service again, if there was one."""
        if self._client is None:
            return WeightUpdateError("vLLM is down", field="vllm", received=str(self._failure))
        activation = self.history.create(staged.version, kv)
        try:
            if self._loaded is not staged or self._served is not None:
                await self._swap_weights(self._client, staged, activation)
            else:
                await self._client.set_weight_version(activation.label)
            await self._verify(self._client, staged, activation)
        except EtudeError as error:
            self.history.refuse_pending()
            with contextlib.suppress(EtudeError):  # kept in _failure, for those who ask
                await self._roll_back(f"the update failed: {error}")
            return error
        self._put_into_service(staged, activation)
        return None

    async def _swap_weights(self, client: VllmClient, snapshot: Snapshot, activation: Activation) -> None:
        """Loads weights between two steps. If it fails, what the server holds is unknown.

        The worker is asked once, and steps again as soon as it has loaded.
        """
        self._settled.clear()  # until it is done, or the server is taken down
        held, self._loaded = self._loaded, None
        activation.progress = await self._load(
            client, snapshot, held, recomputing=activation.kv == "recompute"
        )
        # Before any further request is sent: vLLM may name new weights late, and old ones never.
        await client.set_weight_version(activation.label)
        self.history.record(activation)
        self._settled.set()

    async def _load(
        self, client: VllmClient, snapshot: Snapshot, held: Snapshot | None = None, *, recomputing: bool
    ) -> dict[str, int]:
        """Returns how far each request was. `held`: what the server has, if that is known: weights of another
        digest must change its parameters, however little. `recomputing`: running requests must compute their
        keys again, and vLLM is paused meanwhile: no step may come between the two. Raises WeightUpdateError
        and SamplerError."""
        directory, timeout_s = str(snapshot.directory), self._load_timeout_s
        if recomputing:
            await client.pause()
        requests = sorted(self.requests)
        answer = await client.call_workers("etude_load", directory, *requests, timeout_s=timeout_s)
        if not isinstance(answer, dict) or answer.get("loaded") != directory:
            raise WeightUpdateError("vLLM cannot load the weights", field="vllm", received=answer)
        if held is not None and answer.get("changed") is False and self._must_change(held, snapshot):
            raise WeightUpdateError(
                "vLLM reports success, and its parameters are those of before",
                field="vllm",
                received=f"{held.version.digest} in service, {snapshot.version.digest} loaded",
            )
        self._loaded = snapshot
        self.times = UpdateTimes(load_s=float(answer["load_s"]))
        if recomputing:
            await client.reset_prefix_cache()
            await client.resume()
        progress = {str(name): int(count) for name, count in answer["progress"].items()}
        return {name: count for name, count in progress.items() if name in self.requests}

    def _must_change(self, held: Snapshot, snapshot: Snapshot) -> bool:
        """Whether two snapshots differ in the number format in which vLLM holds them."""
        formats = {entry.dtype for entry in snapshot.manifest.tensors}
        is_exact = self.abilities is not None and formats == {self.abilities.dtype}
        return is_exact and held.version.digest != snapshot.version.digest

    async def _verify(self, client: VllmClient, snapshot: Snapshot, activation: Activation) -> None:
        """Raises WeightUpdateError unless vLLM computes what a freshly loaded model does."""
        assert self.abilities is not None
        began = time.perf_counter()
        part = await self.score(client, snapshot.probe.tokens)
        self.times.probe_s = time.perf_counter() - began
        if self.requests:
            gap = await client.call_workers("etude_gap") or {}
            self.times.pause_s = float(gap.get("gap_s") or 0.0)
            self.times.step_s = float(gap.get("step_s") or 0.0)
        if part.spans and {span.label for span in part.spans} != {activation.label}:
            raise WeightUpdateError("vLLM names other weights", field="probe", received=part.spans)
        assert part.prompt_logprobs is not None
        previous = self._served.probe if self._served is not None else None
        same = self._served is not None and self._served.version == snapshot.version
        check_probe(
            part.prompt_logprobs,
            snapshot.probe,
            None if same else previous,
            self.abilities.dtype,
            self._tolerance,
        )

    def _put_into_service(self, snapshot: Snapshot, activation: Activation) -> None:
        self.history.record(activation)
        self._served, self._loaded = snapshot, snapshot
        activation.verdict.set_result(True)
        self._serving.set()

    # ---- the server's life ----------------------------------------------------------------------

    async def _start_first(self, snapshot: Snapshot) -> None:
        """A server that never came up is for its user to repair. Raises ResourceError."""
        try:
            await self._start(snapshot)
        except SamplerError as error:
            raise ResourceError(
                error.message, field=error.field or "engine.vllm", received=error.received, fix=error.fix
            ) from error

    async def _start(self, snapshot: Snapshot) -> None:
        """Starts the server with a snapshot's weights; nothing is served yet. Raises SamplerError."""
        url = await self._server.start(snapshot.directory)
        client = VllmClient(url, self._server.key)
        try:
            self.abilities = await prepare_workers(client, capture_routes=self._capture)
            if not self._server.loads_at_start:
                await self._load(client, snapshot, recomputing=True)
            if self._failure is not None:
                raise SamplerError("vLLM was stopped while it started")
        except BaseException:
            await client.close()
            await self._server.stop()
            raise
        self._client, self._loaded = client, snapshot
        self._watcher = asyncio.create_task(self._watch())

    async def _roll_back(self, reason: str) -> None:
        """After a refused update: the server begins again with what was served before."""
        await self._shut_down(reason)
        if self._served is not None and self._failure is None:  # else it was closed meanwhile
            await self._restart(self._served, reason)

    async def _shut_down(self, reason: str) -> None:
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            self._watcher.cancel()
            self._watcher = None
        self._serving.clear()
        self._settled.set()
        client, self._client, self._loaded = self._client, None, None
        if client is not None:
            _LOG.log(logging.INFO if self._failure else logging.WARNING, "vLLM goes down: %s", reason)
            await client.close()
        self.history.refuse_pending()

    async def _restart(self, snapshot: Snapshot, reason: str) -> None:
        """Raises what failed last when it failed too often; then nothing will be served."""
        failure: EtudeError = SamplerError("vLLM went down", received=reason)
        for _ in range(self._most_restarts):
            if self._failure is not None:  # it was closed meanwhile
                break
            self.restarts += 1
            try:
                await self._start(snapshot)
                assert self._client is not None
                activation = self.history.create(snapshot.version, "recompute")
                await self._client.set_weight_version(activation.label)
                await self._verify(self._client, snapshot, activation)
                self._put_into_service(snapshot, activation)
                return
            except EtudeError as error:
                await self._shut_down(str(error))
                failure = error
        self._failure = self._failure or failure
        self._serving.set()  # wakes those who wait, who then find the failure
        raise failure

    async def _watch(self) -> None:
        try:
            await self._restart_when_ended()
        except Exception as error:  # whatever it is: nobody may wait for ever
            failure = SamplerError("vLLM cannot be watched over", received=repr(error))
            self._failure = self._failure or failure
            await self._shut_down(str(failure))
            self._serving.set()  # wakes those who wait, who then find the failure

    async def _restart_when_ended(self) -> None:
        """Begins again when the server has gone by itself."""
        client = self._client
        reason = await self._server.wait_for_end()
        if client is not None:
            # Callers that wait for an answer wait no longer: an update, for one, which has the lock.
            self._serving.clear()
            await client.close()
        async with self._lock:
            if self._client is None or self._client is not client:
                return
            await self._shut_down(reason)
            if self._served is not None:
                with contextlib.suppress(EtudeError):  # kept in _failure, for those who ask
                    await self._restart(self._served, reason)
