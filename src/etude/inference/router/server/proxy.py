"""Sends each request to a replica, to another one if that fails before it answers, and tells of the rest.

    client ──> open(): Router.begin ──> replica ──first bytes──> relay() ──> client
                 ^                         |                        |
                 └── not begun: next one ──┘      cut later: an error event, never silence

An answer has begun when its first byte goes to the client: of a stream with its first event, of anything else
when it is there whole. Until then a failed attempt is repeated elsewhere; sampling has no side effects.
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
from etude.inference.router.types import Ask, NoReplicaError, RoutingConfig
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
_MAX_PLACES = 20_000
_NOT_HERE = (503, 409)
"""Others may be better off: not ready, or no longer at the version that the request is pinned to."""
_DROPPED = frozenset(
    (b"host", b"content-length", b"connection", b"transfer-encoding", b"accept-encoding", b"keep-alive")
) | {b"expect"}


class ReplicaLostError(SamplerError):
    """Every replica that was tried for a request failed before it answered."""


class ReplicaSlowError(SamplerError):
    """A replica sent nothing for longer than `answer_s`."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """Where a replica is. `pool` None: it says so itself with its first answer to a probe."""

    url: str
    pool: str | None = None

    def __post_init__(self) -> None:
        check_address(self.url, "replica")

    @property
    def name(self) -> str:
        """Host and port."""
        return urlsplit(self.url).netloc.rpartition("@")[2].lower()


@dataclass(slots=True, eq=False)
class Opened:
    """An answer that has begun: of a stream the first event, of anything else the whole body."""

    ask: Ask
    replica: str
    answer: Answer
    first: bytes
    rest: AsyncIterator[bytes] | None
    guard: EventGuard = field(default_factory=EventGuard)


class Proxy:
    """The router's state in one process: policy, health, connections, counters."""

    def __init__(
        self,
        config: RouterConfig | None = None,
        replica_token: str = "",
        day: Callable[[], float] = lambda: time.time() % DAY_S,
    ) -> None:
        """`replica_token`: the replicas' administrators'; without it none is lent to a run. `day`: second of
        the day, UTC, for lending by schedule."""
        self.config = config = config or RouterConfig()
        self.router = Router(RoutingConfig(spill_factor=config.spill_factor), config.arms)
        self.members = Members(self.router, config.health)
        self.lender, self.day = Lender(config.lending), day
        self.addresses: dict[str, ReplicaAddress] = {}
        self.metrics = Metrics("etude_router")
        self.draining = False
        self.http = Client("", within_s=self.config.limits.answer_s, connect_s=_CONNECT_S, refusal=None)
        """Asks any replica, by its whole address."""
        self.loans = LoanKeeper(self, replica_token) if replica_token else None
        self._places: OrderedDict[str, str] = OrderedDict()
        """Path of an answer's side channel -> the replica that has it."""

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

    async def open(self, asked: Ask, method: str, target: str, headers: RawHeaders, body: bytes) -> Opened:
        """Asks replicas until one begins to answer. The ids of attempts begin with that of `asked`.

        Raises NoReplicaError before anything was tried, ReplicaLostError after failures, ReplicaSlowError,
        UserError for headers that cannot be sent on.
        """
        sending = _Sending(method, target, _sendable(headers), body)
        failed: dict[str, str] = {}
        refusal: Opened | None = None
        for attempt in range(self.config.limits.attempts):
            try:
                opened = await self._hedged(asked, attempt, sending, failed)
            except NoReplicaError:
                if refusal is not None:
                    return refusal
                if failed:
                    break
                raise
            if opened is None:
                self.metrics.count("etude_router_retries")
            elif opened.answer.status_code in _NOT_HERE:
                if opened.answer.status_code == 503:  # about to end, or without weights
                    self.members.answered(opened.replica, time.monotonic(), None)
                failed[opened.replica], refusal = f"answered {opened.answer.status_code}", opened
            else:
                return opened
        if refusal is not None:
            return refusal
        raise ReplicaLostError(
            "the replicas failed before they answered", received=failed, fix="send the request again"
        )

    async def _hedged(
        self, asked: Ask, attempt: int, sending: _Sending, failed: dict[str, str]
    ) -> Opened | None:
        """One attempt, or two at once where the first is slow and hedging is on."""
        ask = replace(asked, id=f"{asked.id}.{2 * attempt}")
        name = self.router.begin(ask, time.monotonic(), failed)
        first = asyncio.create_task(self._attempt(ask, name, sending, failed))
        tasks = {first}
        try:
            if self.config.limits.hedge_after_s:
                await asyncio.wait(tasks, timeout=self.config.limits.hedge_after_s)
                if not first.done():
                    tasks |= self._second(asked, attempt, name, sending, failed)
            chosen = await _first_opened(tasks)
            await self._end_attempts(tasks, chosen)
        except BaseException:  # a client that leaves at this moment reads what was chosen as little
            await self._end_attempts(tasks, None)
            raise
        return chosen

    async def _end_attempts(self, tasks: set[asyncio.Task[Opened | None]], chosen: Opened | None) -> None:
        """Ends attempts, and what they have begun but for the chosen answer."""
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Opened) and result is not chosen:
                await self.discard(result)

    def _second(
        self, asked: Ask, attempt: int, busy: str, sending: _Sending, failed: dict[str, str]
    ) -> set[asyncio.Task[Opened | None]]:
        # Not the session's: it stays where its prefix is, whichever wins.
        ask = replace(asked, id=f"{asked.id}.{2 * attempt + 1}", session=None)
        with suppress(NoReplicaError):
            name = self.router.begin(ask, time.monotonic(), {busy, *failed})
            self.metrics.count("etude_router_hedges")
            return {asyncio.create_task(self._attempt(ask, name, sending, failed))}
        return set()

    async def _attempt(self, ask: Ask, name: str, sending: _Sending, failed: dict[str, str]) -> Opened | None:
        """One replica's answer; None if it failed before it began. The policy's books are kept either way."""
        url = self.addresses[name].url.rstrip("/") + sending.target
        answer: Answer | None = None
        opened: Opened | None = None
        try:
            answer = await self.http.open(sending.method, url, headers=sending.headers, content=sending.body)
            opened = await self._begin(ask, name, answer)
        except SilentServerError as error:
            self._fail(name, error)
            raise ReplicaSlowError(
                "the replica sent nothing in time", field="answer_s", received=self.config.limits.answer_s
            ) from error
        except NoAnswerError as error:
            self._fail(name, error)
            failed[name] = error.message
        finally:
            if opened is None:
                self.router.end(ask.id, time.monotonic(), 0)
                if answer is not None:
                    await answer.aclose()
        return opened

    async def _begin(self, ask: Ask, name: str, answer: Answer) -> Opened:
        """Waits for the first event of a stream, or for the whole of anything else."""
        place = answer.headers.get(SIDE_CHANNEL_HEADER)
        if place is not None:
            self._places[place] = name
            while len(self._places) > _MAX_PLACES:
                self._places.popitem(last=False)
        if not answer.headers.get("content-type", "").startswith("text/event-stream"):
            body = b"".join([piece async for piece in self.http.pieces(answer)])
            self._end(ask, name, usage_in(body) if answer.status_code == 200 else None, 0)
            return Opened(ask, name, answer, body, None)
        rest = self.http.pieces(answer)
        opened = Opened(ask, name, answer, b"", rest)
        async for data in rest:
            opened.first += opened.guard.feed(data)
            if opened.first:
                return opened
        raise NoAnswerError("the stream ended before its first event")

    # ---- streams --------------------------------------------------------------------------------

    async def relay(self, opened: Opened) -> AsyncIterator[bytes]:
        """The stream's bytes, whole events each time; an error event where the replica's end is missing."""
        assert opened.rest is not None
        guard, cut = opened.guard, ""
        served = False
        try:
            yield opened.first
            try:
                async for data in opened.rest:
                    whole = guard.feed(data)
                    if whole:
                        self.router.progress(opened.ask.id, guard.num_events)
                        yield whole
                cut = "" if guard.ended else "the stream ended without its last event"
            except NoAnswerError as error:
                cut = "" if guard.ended else error.message
            if cut:
                self._fail(opened.replica, cut)
                self.metrics.count("etude_router_cut_streams")
                yield error_event(f"the answer was cut: the replica failed ({cut})", "replica_lost")
            served = not cut
        finally:
            if served:
                self._end(opened.ask, opened.replica, guard.usage, guard.num_events)
            else:
                self.router.end(opened.ask.id, time.monotonic(), guard.num_events)
            await opened.answer.aclose()

    async def discard(self, opened: Opened) -> None:
        """Lets go of an answer that nobody reads on. Idempotent; does nothing to one that was read."""
        if opened.rest is not None:
            self.router.end(opened.ask.id, time.monotonic(), opened.guard.num_events)
            await opened.answer.aclose()

    def place_of(self, target: str) -> str | None:
        """The replica whose answer's side channel this path is."""
        name = self._places.get(target)
        return name if name in self.addresses else None

    async def fetch_from(self, name: str, target: str, headers: RawHeaders) -> Answer:
        """A GET that only this replica can answer. Raises ReplicaLostError."""
        url = self.addresses[name].url.rstrip("/") + target
        try:
            return await self.http.request("GET", url, headers=_sendable(headers))
        except NoAnswerError as error:
            self._fail(name, error)
            raise ReplicaLostError(
                "the replica that has this answer is gone", received=name, fix="send the request again"
            ) from error

    # ---- the books ------------------------------------------------------------------------------

    def _end(self, ask: Ask, name: str, usage: Mapping[str, object] | None, num_events: int) -> None:
        """An answer is whole: `usage` says exactly how long it was, its events about."""
        self.members.served(name)
        prompt, generated = (usage or {}).get("prompt_tokens"), (usage or {}).get("completion_tokens")
        tokens = generated if isinstance(generated, int) else num_events
        held = (prompt if isinstance(prompt, int) else ask.prompt_tokens) + tokens
        self.router.end(ask.id, time.monotonic(), tokens, held if tokens else None)

    def _fail(self, name: str, error: NoAnswerError | str) -> None:
        # Nobody listens: no need for a second sign.
        fatal = isinstance(error, NobodyListensError)
        cause = error if isinstance(error, str) else error.message
        self.members.failed(name, time.monotonic(), cause, fatal=fatal)
        self.metrics.count("etude_router_failures", replica=name)


@dataclass(frozen=True, slots=True)
class _Sending:
    """A request as it is sent, to whichever replica."""

    method: str
    target: str
    headers: RawHeaders
    body: bytes


def _sendable(headers: RawHeaders) -> RawHeaders:
    return [*((k, v) for k, v in headers if k not in _DROPPED), (b"accept-encoding", b"identity")]


async def _first_opened(tasks: set[asyncio.Task[Opened | None]]) -> Opened | None:
    """The first attempt that begins an answer; None if all failed. Raises what the last one raised."""
    left, error = set(tasks), None
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception() or error
            if task.exception() is None and task.result() is not None:
                return task.result()
    if error is not None:
        raise error
    return None
