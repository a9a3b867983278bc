"""A replica in virtual time: continuous batching, chunked prefill, a prefix cache of bounded size.

It steps as the engine does: each step decodes one token of every running sequence and computes up to
`prefill_tokens` of the pending inputs; the step that completes an input samples its first token.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.load.workload import LoadTurn
from benchmarks.simulation.flows import VirtualClock
from benchmarks.simulation.router.step_cost import StepCost


@dataclass(slots=True, eq=False)
class Job:
    """One request."""

    id: str
    session: str
    turn: LoadTurn
    prompt_tokens: int
    sent_s: float
    attempts: int = 0
    missing: int = 0
    """Input tokens still to be computed on its replica."""
    generated: int = 0
    first_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """Properties shared by all simulated replicas."""

    cost: StepCost
    max_running: int = 64
    prefill_tokens: int = 2048
    """Most input tokens of one step."""
    cache_tokens: int = 400_000
    """Size of the prefix cache; the least recently used prefixes are evicted first."""


@dataclass(slots=True, eq=False)
class SimulatedReplica:
    """A replica, or with `ways` > 1 that many replicas in lockstep with one queue, one cache, and the work of
    each step divided evenly. No routing can do better: this is the ideal for comparing policies."""

    name: str
    spec: ReplicaSpec
    clock: VirtualClock
    on_token: Callable[[Job], None]
    on_done: Callable[[Job, int], None]
    """(job, tokens now cached of its session)"""
    ways: int = 1
    slowness: float = 1.0
    """Factor by which its steps take longer."""
    alive: bool = True
    busy_s: float = 0.0
    computed_tokens: int = 0
    """Input tokens computed."""
    reused_tokens: int = 0
    """Input tokens found in the cache."""
    _waiting: deque[Job] = field(default_factory=deque)
    _running: list[Job] = field(default_factory=list)
    _cache: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _cached: int = 0
    _stepping: bool = False
    _incarnation: int = 0
    """Incremented by `kill`; scheduled steps of an earlier incarnation are ignored."""

    def submit(self, job: Job) -> None:
        """Queues a request; it starts with the next step."""
        self._waiting.append(job)
        if not self._stepping:
            self._step()

    def kill(self) -> list[Job]:
        """Drops all state; returns the lost requests."""
        lost = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._cache.clear()
        self._cached, self._stepping, self.alive = 0, False, False
        self._incarnation += 1
        return lost

    def evict(self, session: str) -> None:
        """Frees the cached prefix of a session, if there is one."""
        self._cached -= self._cache.pop(session, 0)

    def _step(self) -> None:
        while self._waiting and len(self._running) < self.spec.max_running * self.ways:
            self._admit(self._waiting.popleft())
        self._stepping = bool(self._running)
        if not self._running:
            return
        decoding = sum(job.missing == 0 for job in self._running)
        left = budget = self.spec.prefill_tokens * self.ways
        for job in self._running:
            if job.missing and left:
                part = min(job.missing, left)
                job.missing -= part
                left -= part
                # Its first token comes with this step; before that, -1 keeps it from counting as decoding.
                job.generated = -1 if job.missing else 0
        prefilled = budget - left
        elapsed_s = self.slowness * self._step_s(decoding, prefilled)
        self.busy_s += elapsed_s
        incarnation = self._incarnation
        self.clock.after(elapsed_s, lambda: self._finish_step(incarnation))

    def _step_s(self, decoding: int, prefilled: int) -> float:
        """Duration of a step; inputs are concentrated on as few of the `ways` replicas as possible."""
        cost, ways = self.spec.cost, self.ways
        at_prefill = min(ways, -(-prefilled // self.spec.prefill_tokens))
        tokens_s = cost.decode_token_s * decoding + cost.prefill_token_s * prefilled
        return cost.fixed_s + (tokens_s + cost.prefill_fixed_s * at_prefill) / ways

    def _admit(self, job: Job) -> None:
        held = min(self._cache.get(job.session, 0), job.prompt_tokens - 1)
        if job.session in self._cache:
            self._cache.move_to_end(job.session)
        job.missing, job.generated = job.prompt_tokens - held, -1
        self.computed_tokens += job.missing
        self.reused_tokens += held
        self._running.append(job)

    def _finish_step(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            return
        done: list[Job] = []
        for job in self._running:
            if job.missing:
                continue
            job.generated = max(job.generated, 0) + 1
            if job.generated == 1:
                job.first_s = self.clock.now_s
            self.on_token(job)
            if job.generated >= job.turn.output_tokens:
                done.append(job)
        if done:
            over = set(map(id, done))
            self._running = [job for job in self._running if id(job) not in over]
        for job in done:
            # The last sampled token is computed with the next request.
            self.on_done(job, self._cache_prefix(job.session, job.prompt_tokens + job.generated - 1))
        self._step()

    def _cache_prefix(self, session: str, tokens: int) -> int:
        self.evict(session)
        self._cache[session] = tokens
        self._cached += tokens
        while self._cached > self.spec.cache_tokens * self.ways and len(self._cache) > 1:
            _, freed = self._cache.popitem(last=False)
            self._cached -= freed
        return tokens
