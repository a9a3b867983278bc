"""Forwards each request to a replica, retries on others until one answers, and reports later failures.

    client ──> open(): Router.begin ──> replica ──first bytes──> relay() ──> client
                 ^                         |                        |
                 └── not begun: retry ─────┘      cut later: an error event, never silence

A stream has begun once its first event has arrived, any other answer once it is complete. Until then a failed
attempt is retried on another replica, which is safe since sampling has no side effects.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from etude.config import RouterConfig
from etude.errors import SamplerError
from etude.inference.headers import SIDE_CHANNEL_HEADER
from etude.inference.router.members import Members
from etude.inference.router.policy import Router
from etude.inference.router.pools import DAY_S, Lender
from etude.inference.router.server.events import EventGuard, error_event, usage_in
from etude.inference.router.server.loans import LoanKeeper
from etude.inference.router.types import NoReplicaError, RouteRequest, RoutingConfig
from etude.serving.client import (
    Answer,
    Client,
    NoAnswerError,
    NobodyListensError,
    RawHeaders,
    SilentServerError,
    check_address,
)
from etude.serving.metrics import Metrics

_CONNECT_S = 2.0
_MAX_SIDE_CHANNELS = 20_000
_TRY_ANOTHER = (503, 409)
"""Statuses after which another replica is tried: not ready, or not at the version that the request pins."""
_DROPPED = frozenset(
    (b"host", b"content-length", b"connection", b"transfer-encoding", b"accept-encoding", b"keep-alive")
) | {b"expect"}


class ReplicaLostError(SamplerError):
    """Every replica that was tried for a request failed before it answered."""


class ReplicaSlowError(SamplerError):
    """A replica sent nothing for longer than `answer_s`."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Address of a replica. `pool` None: taken from its first answer to a probe."""

    url: str
    pool: str | None = None

    def __post_init__(self) -> None:
        check_address(self.url, "replica")

    @property
    def name(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc.rpartition("@")[2].lower()


@dataclass(slots=True, eq=False)
class OpenAnswer:
    """An answer that has begun: `first` is the first event of a stream, or else the whole body."""

    request: RouteRequest
    replica: str
    answer: Answer
    first: bytes
    rest: AsyncIterator[bytes] | None
    guard: EventGuard = field(default_factory=EventGuard)


_Attempts = set[asyncio.Task[OpenAnswer | None]]


class Proxy:
    """The router's state in one process: policy, health, connections, counters."""

    def __init__(
        self,
        config: RouterConfig | None = None,
        replica_token: str = "",
        day: Callable[[], float] = lambda: time.time() % DAY_S,
    ) -> None:
        """`replica_token`: admin token of the replicas; without it none is lent to a run. `day`: clock that
        returns the second of the day, UTC, for lending by schedule."""
        self.config = config = config or RouterConfig()
        self.router = Router(RoutingConfig(spill_factor=config.spill_factor), config.arms)
        self.members = Members(self.router, config.health)
        self.lender, self.day = Lender(config.lending), day
        self.addresses: dict[str, ReplicaAddress] = {}
        self.metrics = Metrics("etude_router")
        self.draining = False
        self.http = Client("", within_s=self.config.limits.answer_s, connect_s=_CONNECT_S, refusal=None)
        """Client for all replicas, by full URL."""
        self.loans = LoanKeeper(self, replica_token) if replica_token else None
        self._side_channels: OrderedDict[str, str] = OrderedDict()
        """Path of an answer's side channel -> its replica."""

    def join(self, address: ReplicaAddress) -> str:
        """Adds a replica, and returns its name. It gets requests after its first good probe."""
        self.members.join(address.name, address.pool or self.config.pool)
        self.addresses[address.name] = address
        return address.name

    async def close(self) -> None:
        """Closes the connections."""
        if self.loans is not None:
            await self.loans.close()
        await self.http.close()

    # ---- attempts -------------------------------------------------------------------------------

    async def open(
        self, request: RouteRequest, method: str, target: str, headers: RawHeaders, body: bytes
    ) -> OpenAnswer:
        """Tries replicas until one begins to answer. The ids of attempts begin with that of `request`.

        Raises NoReplicaError if none could be tried, ReplicaLostError after failures, ReplicaSlowError,
        UserError for headers that cannot be forwarded.
        """
        call = _Call(method, target, _sendable(headers), body)
        refusal: OpenAnswer | None = None
        for attempt in range(self.config.limits.attempts):
            try:
                opened = await self._attempt_hedged(request, attempt, call)
            except NoReplicaError:
                if refusal is not None:
                    return refusal
                if call.failed:
                    break
                raise
            if opened is None:
                self.metrics.count("etude_router_retries")
            elif opened.answer.status_code in _TRY_ANOTHER:
                if opened.answer.status_code == 503:  # about to end, or without weights
                    self.members.record_probe(opened.replica, time.monotonic(), None)
                call.failed[opened.replica], refusal = f"answered {opened.answer.status_code}", opened
            else:
                return opened
        if refusal is not None:
            return refusal
        raise ReplicaLostError(
            "the replicas failed before they answered", received=call.failed, fix="send the request again"
        )

    async def _attempt_hedged(self, request: RouteRequest, attempt: int, call: _Call) -> OpenAnswer | None:
        """One attempt; if it is slow and hedging is enabled, a second one in parallel."""
        attempted = replace(request, id=f"{request.id}.{2 * attempt}")
        name = self.router.begin(attempted, time.monotonic(), call.failed)
        first = asyncio.create_task(self._attempt(attempted, name, call))
        tasks = {first}
        try:
            if self.config.limits.hedge_after_s:
                await asyncio.wait(tasks, timeout=self.config.limits.hedge_after_s)
                if not first.done():
                    tasks |= self._hedge(request, attempt, name, call)
            chosen = await _first_opened(tasks)
            await self._end_attempts(tasks, chosen)
        except BaseException:  # the client has left: the chosen answer is discarded too
            await self._end_attempts(tasks, None)
            raise
        return chosen

    async def _end_attempts(self, tasks: _Attempts, chosen: OpenAnswer | None) -> None:
        """Cancels attempts, and discards the answers that they have opened, except `chosen`."""
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, OpenAnswer) and result is not chosen:
                await self.discard(result)

    def _hedge(self, request: RouteRequest, attempt: int, busy: str, call: _Call) -> _Attempts:
        # Without the session, which stays where its prefix is cached, whichever attempt wins.
        attempted = replace(request, id=f"{request.id}.{2 * attempt + 1}", session=None)
        with suppress(NoReplicaError):
            name = self.router.begin(attempted, time.monotonic(), {busy, *call.failed})
            self.metrics.count("etude_router_hedges")
            return {asyncio.create_task(self._attempt(attempted, name, call))}
        return set()

    async def _attempt(self, request: RouteRequest, name: str, call: _Call) -> OpenAnswer | None:
        """Opens one replica's answer; None if it failed before it began, which is then recorded."""
        url = self.addresses[name].url.rstrip("/") + call.target
        answer: Answer | None = None
        opened: OpenAnswer | None = None
        try:
            answer = await self.http.open(call.method, url, headers=call.headers, content=call.body)
            opened = await self._begin(request, name, answer)
        except SilentServerError as error:
            self._fail(name, error)
            raise ReplicaSlowError(
                "the replica sent nothing in time", field="answer_s", received=self.config.limits.answer_s
            ) from error
        except NoAnswerError as error:
            self._fail(name, error)
            call.failed[name] = error.message
        finally:
            if opened is None:
                self.router.end(request.id, time.monotonic(), 0)
                if answer is not None:
                    await answer.aclose()
        return opened

    async def _begin(self, request: RouteRequest, name: str, answer: Answer) -> OpenAnswer:
        """Waits for the first event of a stream, or for any other answer as a whole."""
        place = answer.headers.get(SIDE_CHANNEL_HEADER)
        if place is not None:
            self._side_channels[place] = name
            while len(self._side_channels) > _MAX_SIDE_CHANNELS:
                self._side_channels.popitem(last=False)
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            body = b"".join([piece async for piece in self.http.pieces(answer)])
            self._end(request, name, usage_in(body) if answer.status_code == 200 else None, 0)
            return OpenAnswer(request, name, answer, body, None)
        rest = self.http.pieces(answer)
        opened = OpenAnswer(request, name, answer, b"", rest)
        async for data in rest:
            opened.first += opened.guard.feed(data)
            if opened.first:
                return opened
        raise NoAnswerError("the stream ended before its first event")

    # ---- streams --------------------------------------------------------------------------------

    async def relay(self, opened: OpenAnswer) -> AsyncIterator[bytes]:
        """Yields the stream's bytes in whole events, and an error event if it ends without its last event."""
        assert opened.rest is not None
        guard, cause = opened.guard, "the stream ended without its last event"
        try:
            yield opened.first
            try:
                async for data in opened.rest:
                    whole = guard.feed(data)
                    if whole:
                        self.router.progress(opened.request.id, guard.num_events)
                        yield whole
            except NoAnswerError as error:
                cause = error.message
            if guard.ended:
                self._end(opened.request, opened.replica, guard.usage, guard.num_events)
            else:
                self._fail(opened.replica, cause)
                self.metrics.count("etude_router_cut_streams")
                yield error_event(f"the answer was cut: the replica failed ({cause})", "replica_lost")
        finally:
            await self.discard(opened)

    async def discard(self, opened: OpenAnswer) -> None:
        """Closes an answer that is not read to its end. Idempotent; does nothing after a complete `relay`."""
        if opened.rest is not None:
            self.router.end(opened.request.id, time.monotonic(), opened.guard.num_events)
            await opened.answer.aclose()

    def owner_of(self, target: str) -> str | None:
        """The replica that serves this side channel path, if it is one."""
        name = self._side_channels.get(target)
        return name if name in self.addresses else None

    async def fetch_from(self, name: str, target: str, headers: RawHeaders) -> Answer:
        """GETs a path from one replica, the only one that can answer. Raises ReplicaLostError."""
        url = self.addresses[name].url.rstrip("/") + target
        try:
            return await self.http.request("GET", url, headers=_sendable(headers))
        except NoAnswerError as error:
            self._fail(name, error)
            raise ReplicaLostError(
                "the replica that holds this answer has ended", received=name, fix="send the request again"
            ) from error

    # ---- bookkeeping ----------------------------------------------------------------------------

    def _end(
        self, request: RouteRequest, name: str, usage: Mapping[str, object] | None, num_events: int
    ) -> None:
        """Records a complete answer. Its length comes from `usage`, else approximately from `num_events`."""
        self.members.record_success(name)
        prompt, generated = (usage or {}).get("prompt_tokens"), (usage or {}).get("completion_tokens")
        tokens = generated if isinstance(generated, int) else num_events
        held = (prompt if isinstance(prompt, int) else request.prompt_tokens) + tokens
        self.router.end(request.id, time.monotonic(), tokens, held if tokens else None)

    def _fail(self, name: str, error: NoAnswerError | str) -> None:
        # Nothing listens there: one failure is enough.
        fatal = isinstance(error, NobodyListensError)
        cause = error if isinstance(error, str) else error.message
        self.members.record_failure(name, time.monotonic(), cause, fatal=fatal)
        self.metrics.count("etude_router_failures", replica=name)


@dataclass(frozen=True, slots=True)
class _Call:
    """The HTTP request that is forwarded to a replica."""

    method: str
    target: str
    headers: RawHeaders
    body: bytes
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Replicas that have failed it, and why."""


def _sendable(headers: RawHeaders) -> RawHeaders:
    return [*((k, v) for k, v in headers if k not in _DROPPED), (b"accept-encoding", b"identity")]


async def _first_opened(tasks: _Attempts) -> OpenAnswer | None:
    """The first attempt that opens an answer; None if all failed. Raises the last attempt's exception."""
    pending, error = set(tasks), None
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception() or error
            if task.exception() is None and task.result() is not None:
                return task.result()
    if error is not None:
        raise error
    return None
