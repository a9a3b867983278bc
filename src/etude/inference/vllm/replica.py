"""One vLLM server: weight updates with verification, and restarts.

    stage ─> activate:  worker loads between two steps ─> progress ─> label ─> probe ─> in service
                          └───────────────────────── refused ────────────┴─> roll back to the old snapshot
    server ended ─> restart with the snapshot that was served ─> probe ─> in service

Each activation has a label, which vLLM puts on the tokens that it samples. Tokens of a label are delivered
only once the probe has verified its weights. While the server is down nothing is served.
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
from etude.kit.tasks import finish_despite_cancel
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, WeightManifest
from etude.weights.manifest import check_staged

MOST_RESTARTS = 3
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class UpdateTimes:
    """Times of one weight update, in seconds."""

    pause_s: float = 0.0
    """From the last step with the old weights to the first with the new ones; 0 without running requests."""
    load_s: float = 0.0
    """Part of `pause_s` in which vLLM loaded the weights."""
    step_s: float = 0.0
    """Median time of a step before the update."""
    probe_s: float = 0.0
    """Duration of the probe; meanwhile vLLM samples, but its tokens are held back."""


class Replica:
    """See the module docstring. Only one of stage, activate and restart runs at a time."""

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
        """`most_restarts`: consecutive restarts of a server that has ended or refused weights; 0 if a
        supervisor restarts the whole replica. `fetched`: fetches published weights to this machine, and is
        closed at the end; else manifests must name local directories."""
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
        """The snapshot in the running server, verified or not; None if unknown."""
        self._served: Snapshot | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._serving = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self.failure: EtudeError | None = None
        """The error that has permanently stopped the replica, if any."""
        self.requests: set[str] = set()
        """Ids of the requests in flight, whose progress is queried at each weight swap."""
        self.history = History()
        """The activations so far."""
        self.abilities: Abilities | None = None
        self.times = UpdateTimes()
        """Times of the last update."""
        self.restarts = 0

    # ---- weights --------------------------------------------------------------------------------

    def current(self) -> PolicyVersion | None:
        """The version in service, or None."""
        is_up = self._client is not None and self._serving.is_set()
        return self._served.version if is_up and self._served is not None else None

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage: checks every byte, and starts the server if needed. If cancelled, it still
        runs to its end: half an update would be worse than a late one.

        Raises ResourceError if the server does not start.
        """
        await finish_despite_cancel(self._stage(manifest))

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate. Raises WeightUpdateError; then the old version is in service again."""
        await finish_despite_cancel(self._activate(version, kv))

    async def close(self) -> None:
        """Stops the server and everything that belongs to it."""
        self.failure = self.failure or SamplerError("vLLM was stopped")
        watcher = self._watcher
        if watcher is not None:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        try:
            await self._shut_down("vLLM was stopped")
            await self._server.stop()
        finally:
            if self._fetched is not None:
                self._fetched.close()

    # ---- for requests ---------------------------------------------------------------------------

    async def client(self) -> VllmClient:
        """The client, once a version is served. Raises SamplerError if none will be."""
        while self._client is None or not self._serving.is_set():
            if self.failure is not None:
                raise SamplerError("vLLM is down", received=str(self.failure)) from self.failure
            if self._served is None:
                raise SamplerError("no weights yet", field="version", fix="stage and activate a version")
            await self._serving.wait()
        return self._client

    async def wait_until_settled(self, client: VllmClient) -> None:
        """Waits for the end of a weight swap, after which the progress of requests at the swap is known.

        Raises SamplerError if the server of `client` has been shut down meanwhile: its last tokens may have
        been sampled from a mixture of weights.
        """
        await self._settled.wait()
        if self._client is not client:
            raise SamplerError("vLLM ended while it sampled", fix="sample again")

    async def score(self, client: VllmClient, tokens: NDArray[np.int32], name: str = "") -> Part:
        """See `score_tokens`."""
        assert self.abilities is not None
        return await score_tokens(client, tokens, name, self.abilities.adapters, self._load_timeout_s)

    # ---- updates --------------------------------------------------------------------------------

    async def _stage(self, manifest: WeightManifest) -> None:
        async with self._lock:
            self._staged = None
            open_it = open_snapshot if self._fetched is None else self._fetched.open
            snapshot = await asyncio.to_thread(open_it, manifest)
            if self._served is not None:
                check_same_shapes(self._served.manifest, snapshot.manifest)
            if self._client is None and self.failure is None:
                await self._start_first(snapshot)
            self._staged = snapshot

    async def _activate(self, version: PolicyVersion, kv: KvPolicy) -> None:
        async with self._lock:
            staged = check_staged(version, self._staged)
            error = await self._try_activate(staged, kv)
            if isinstance(error, SamplerError) and self._client is not None:
                # The server failed, not the weights: it has restarted with the old ones.
                error = await self._try_activate(staged, kv)
            if error is not None:
                raise WeightUpdateError(
                    f"the update failed; the version in service is {self.current()}",
                    field="version",
                    received=str(version),
                    fix=str(error),
                ) from error
            self._staged = None

    async def _try_activate(self, staged: Snapshot, kv: KvPolicy) -> EtudeError | None:
        """One attempt to activate; returns the error, if any, after rolling back to the old version."""
        if self._client is None:
            return WeightUpdateError("vLLM is down", field="vllm", received=str(self.failure))
        activation = self.history.create(staged.version, kv)
        try:
            if self._loaded is not staged or self._served is not None:
                await self._swap_weights(self._client, staged, activation)
            else:
                await self._client.set_weight_version(activation.label)
            await self._verify(self._client, staged, activation)
        except EtudeError as error:
            self.history.refuse_pending()
            with contextlib.suppress(EtudeError):  # kept in `failure`
                await self._roll_back(f"the update failed: {error}")
            return error
        self._put_into_service(staged, activation)
        return None

    async def _swap_weights(self, client: VllmClient, snapshot: Snapshot, activation: Activation) -> None:
        """Swaps weights between two steps. On failure the server's weights are unknown.

        It is one call of the worker, which continues stepping as soon as the weights are loaded.
        """
        self._settled.clear()  # until it is done, or the server is shut down
        held, self._loaded = self._loaded, None
        activation.progress = await self._load(
            client, snapshot, held, recomputing=activation.kv == "recompute"
        )
        # Before any further request is sent: vLLM may report new labels late, but never old ones.
        await client.set_weight_version(activation.label)
        self.history.record(activation)
        self._settled.set()

    async def _load(
        self, client: VllmClient, snapshot: Snapshot, held: Snapshot | None = None, *, recomputing: bool
    ) -> dict[str, int]:
        """Loads a snapshot; returns the progress of each request. `held`: the snapshot in the server, if
        known: loading another digest must change its parameters. `recomputing`: running requests must
        recompute their keys, and vLLM is paused meanwhile, since no step may run in between. Raises
        WeightUpdateError and SamplerError."""
        directory, timeout_s = str(snapshot.directory), self._load_timeout_s
        if recomputing:
            await client.pause()
        requests = sorted(self.requests)
        answer = await client.call_workers("etude_load", directory, *requests, timeout_s=timeout_s)
        if not isinstance(answer, dict) or answer.get("loaded") != directory:
            raise WeightUpdateError("vLLM cannot load the weights", field="vllm", received=answer)
        if held is not None and answer.get("changed") is False and self._must_change(held, snapshot):
            raise WeightUpdateError(
                "vLLM reports success, but its parameters are unchanged",
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
        """Whether two snapshots must also differ after conversion to vLLM's number format."""
        formats = {entry.dtype for entry in snapshot.manifest.tensors}
        is_exact = self.abilities is not None and formats == {self.abilities.dtype}
        return is_exact and held.version.digest != snapshot.version.digest

    async def _verify(self, client: VllmClient, snapshot: Snapshot, activation: Activation) -> None:
        """Scores the probe. Raises WeightUpdateError unless vLLM agrees with a freshly loaded model."""
        assert self.abilities is not None
        began = time.perf_counter()
        part = await self.score(client, snapshot.probe.tokens)
        self.times.probe_s = time.perf_counter() - began
        if self.requests:
            gap = await client.call_workers("etude_gap") or {}
            self.times.pause_s = float(gap.get("gap_s") or 0.0)
            self.times.step_s = float(gap.get("step_s") or 0.0)
        if part.spans and {span.label for span in part.spans} != {activation.label}:
            raise WeightUpdateError("vLLM reports other weights", field="probe", received=part.spans)
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

    # ---- starting and stopping ------------------------------------------------------------------

    async def _start_first(self, snapshot: Snapshot) -> None:
        """The first start, whose failure the user must fix. Raises ResourceError."""
        try:
            await self._start(snapshot)
        except SamplerError as error:
            raise ResourceError(
                error.message, field=error.field or "engine.vllm", received=error.received, fix=error.fix
            ) from error

    async def _start(self, snapshot: Snapshot) -> None:
        """Starts the server with a snapshot's weights, without serving it yet. Raises SamplerError."""
        url = await self._server.start(snapshot.directory)
        client = VllmClient(url, self._server.key)
        try:
            self.abilities = await prepare_workers(client, capture_routes=self._capture)
            if not self._server.loads_at_start:
                await self._load(client, snapshot, recomputing=True)
            if self.failure is not None:
                raise SamplerError("vLLM was stopped while it started")
        except BaseException:
            await client.close()
            await self._server.stop()
            raise
        self._client, self._loaded = client, snapshot
        self._watcher = asyncio.create_task(self._watch())

    async def _roll_back(self, reason: str) -> None:
        """After a refused update: restarts the server with the version served before."""
        await self._shut_down(reason)
        if self._served is not None and self.failure is None:  # else it was closed meanwhile
            await self._restart(self._served, reason)

    async def _shut_down(self, reason: str) -> None:
        if self._watcher is not None and self._watcher is not asyncio.current_task():
            self._watcher.cancel()
            self._watcher = None
        self._serving.clear()
        self._settled.set()
        client, self._client, self._loaded = self._client, None, None
        if client is not None:
            _LOG.log(logging.INFO if self.failure else logging.WARNING, "stopping vLLM: %s", reason)
            await client.close()
        self.history.refuse_pending()
        if self.failure is not None:
            self._serving.set()  # wakes waiting callers, who then find the failure

    async def _restart(self, snapshot: Snapshot, reason: str) -> None:
        """Restarts the server. After too many failures raises the last one; the replica is then stopped."""
        failure: EtudeError = SamplerError("vLLM went down", received=reason)
        for _ in range(self._most_restarts):
            if self.failure is not None:  # it was closed meanwhile
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
        self.failure = self.failure or failure
        self._serving.set()
        raise failure

    async def _watch(self) -> None:
        try:
            await self._restart_when_ended()
        except Exception as error:  # any exception: callers must not wait forever
            failure = SamplerError("vLLM cannot be monitored", received=repr(error))
            self.failure = self.failure or failure
            await self._shut_down(str(failure))

    async def _restart_when_ended(self) -> None:
        """Restarts the server after it has ended by itself."""
        client = self._client
        reason = await self._server.wait_for_end()
        if client is not None:
            # Fails calls in progress at once, such as those of an update that holds the lock.
            self._serving.clear()
            await client.close()
        async with self._lock:
            if self._client is None or self._client is not client:
                return
            await self._shut_down(reason)
            if self._served is not None:
                with contextlib.suppress(EtudeError):  # kept in `failure`
                    await self._restart(self._served, reason)
