"""Sessions on simulated replicas in virtual time, routed by the code that routes in production.

    session: sent -> policy.begin -> replica: queue, prefill, decode -> policy.end -> tools -> next turn

Two ways of loading. `arrivals_per_s` (open): sessions come by chance whatever the replicas do; it shows
latency. `concurrency` (closed): so many sessions live at any moment, a new one for each that ends, as in
rollouts; it shows throughput, measured until the last session has started, so that no tail dilutes it.
Given the same scenario the outcome is the same.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from benchmarks.load.workload import LoadSession
from benchmarks.simulation.flows import VirtualClock
from benchmarks.simulation.router.simple import Routing
from benchmarks.simulation.router.simulated_replica import Job, ReplicaSpec, SimulatedReplica

from etude.errors import ConfigError
from etude.inference.router.types import NoReplicaError, RouteRequest

_PROGRESS_TOKENS = 8
"""How often the policy hears of a request's progress."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica dies and comes back empty."""

    at_s: float
    replica: str
    back_s: float
    noticed_s: float = 0.0
    """How long requests go on being sent there; they fail, and are sent again elsewhere."""


@dataclass(frozen=True, slots=True)
class RouterScenario:
    """What is simulated. Exactly one of `arrivals_per_s` and `concurrency` is given."""

    sessions: Sequence[LoadSession]
    spec: ReplicaSpec
    num_replicas: int = 4
    arrivals_per_s: float | None = None
    """Sessions per second."""
    concurrency: int | None = None
    slowness: Sequence[float] = ()
    """By replica, where some are slower than others."""
    kills: Sequence[Kill] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.arrivals_per_s is None) == (self.concurrency is None):
            raise ConfigError("give arrivals_per_s or concurrency, one of them", field="RouterScenario")

    @property
    def names(self) -> list[str]:
        """Of the replicas."""
        return [f"replica-{n}" for n in range(self.num_replicas)]


@dataclass(slots=True)
class RouterOutcome:
    """What the requests saw."""

    latencies_s: list[float] = field(default_factory=list)
    """Of each request, from sending to the last token."""
    first_token_s: list[float] = field(default_factory=list)
    session_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    output_tokens_per_s: float = 0.0
    cache_hit_rate: float = 0.0
    """Input tokens that were found in a cache, of all."""
    retries: int = 0
    answered: int = 0
    unanswered: int = 0
    busy_share: float = 0.0
    """Mean over the replicas of the share of the time in which they stepped."""

    def latency_s(self, percentile: float) -> float:
        """A percentile of the requests' latency."""
        return float(np.percentile(self.latencies_s, percentile))


PolicyMaker = Callable[[Sequence[str]], Routing]


def simulate(scenario: RouterScenario, make_policy: PolicyMaker | None) -> RouterOutcome:
    """Plays the scenario to its end. `make_policy` None: the ideal, replicas that share everything."""
    return _Play(scenario, make_policy).run()


@dataclass(slots=True, eq=False)
class _Live:
    """A session on its way."""

    session: LoadSession
    began_s: float
    turn: int = 0
    tokens: int = 0
    """Its whole length so far."""


class _Play:
    """State of one simulation."""

    def __init__(self, scenario: RouterScenario, make_policy: PolicyMaker | None) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.random = random.Random(scenario.seed)
        ideal = make_policy is None
        names = ["all"] if ideal else scenario.names
        ways = scenario.num_replicas if ideal else 1
        slowness = dict(zip(scenario.names, scenario.slowness, strict=False))
        self.replicas = {
            name: SimulatedReplica(
                name, scenario.spec, self.clock, self._token, self._done, ways, slowness.get(name, 1.0)
            )
            for name in names
        }
        self.policy = make_policy(names) if make_policy is not None else None
        self.pending = deque(scenario.sessions)
        self.live: dict[str, _Live] = {}
        self.down: set[str] = set()
        """Replicas that the policy knows to be dead."""
        self.outcome = RouterOutcome()
        self.full_tokens = 0
        self.full_s = 0.0

    def run(self) -> RouterOutcome:
        scenario = self.scenario
        if scenario.concurrency is not None:
            for _ in range(min(scenario.concurrency, len(self.pending))):
                self._start()
        else:
            self._arrive()
        for kill in () if self.policy is None else scenario.kills:
            self.clock.at(kill.at_s, lambda kill=kill: self._kill(kill))
        self.clock.run(lambda: not self.pending and not self.live)
        return self._summary()

    def _summary(self) -> RouterOutcome:
        outcome, now_s = self.outcome, max(self.clock.now_s, 1e-12)
        outcome.unanswered = sum(len(one.session.turns) - one.turn for one in self.live.values())
        outcome.output_tokens_per_s = (
            self.full_tokens / self.full_s if self.full_s else outcome.output_tokens / now_s
        )
        computed = sum(replica.computed_tokens for replica in self.replicas.values())
        reused = sum(replica.reused_tokens for replica in self.replicas.values())
        outcome.cache_hit_rate = reused / max(1, reused + computed)
        outcome.busy_share = sum(r.busy_s for r in self.replicas.values()) / len(self.replicas) / now_s
        return outcome

    # ---- sessions -------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if self.pending:
            self._start()
            assert self.scenario.arrivals_per_s is not None
            self.clock.after(self.random.expovariate(self.scenario.arrivals_per_s), self._arrive)

    def _start(self) -> None:
        session = self.pending.popleft()
        self.live[session.id] = _Live(session, self.clock.now_s)
        if not self.pending:
            self.full_tokens, self.full_s = self.outcome.output_tokens, self.clock.now_s
        self._next_turn(session.id)

    def _next_turn(self, name: str) -> None:
        live = self.live[name]
        turn = live.session.turns[live.turn]
        live.tokens += turn.input_tokens
        self._send(Job(f"{name}:{live.turn}", name, turn, live.tokens, self.clock.now_s))

    def _send(self, job: Job) -> None:
        target = next(iter(self.replicas.values()))
        if self.policy is not None:
            # What a client would allow, not what will be sampled: the policy cannot know that.
            request = RouteRequest(job.id, job.prompt_tokens, 4096, job.session)
            try:
                target = self.replicas[self.policy.begin(request, self.clock.now_s, self.down)]
            except NoReplicaError:
                self.clock.after(0.1, lambda: self._send(job))
                return
        if target.alive:
            target.submit(job)
        else:
            self.clock.after(0.01, lambda: self._retry(job))

    def _token(self, job: Job) -> None:
        self.outcome.output_tokens += 1
        if self.policy is not None and job.generated % _PROGRESS_TOKENS == 1:
            self.policy.progress(job.id, job.generated)

    def _done(self, job: Job, held_tokens: int) -> None:
        now_s = self.clock.now_s
        self.outcome.answered += 1
        self.outcome.latencies_s.append(now_s - job.sent_s)
        self.outcome.first_token_s.append(job.first_s - job.sent_s)
        if self.policy is not None:
            self.policy.end(job.id, now_s, job.generated, held_tokens)
        live = self.live[job.session]
        live.tokens += job.generated
        live.turn += 1
        if live.turn < len(live.session.turns):
            self.clock.after(job.turn.tool_s, lambda: self._next_turn(job.session))
            return
        self._end(job.session, live)

    def _end(self, name: str, live: _Live) -> None:
        del self.live[name]
        self.outcome.session_s.append(self.clock.now_s - live.began_s)
        for replica in self.replicas.values():
            replica.forget(name)
        if self.policy is not None:
            self.policy.close_session(name)
        if self.scenario.concurrency is not None and self.pending:
            self._start()

    # ---- failures -------------------------------------------------------------------------------

    def _kill(self, kill: Kill) -> None:
        def notice() -> None:
            self.down.add(kill.replica)

        def back() -> None:
            self.replicas[kill.replica].alive = True
            self.down.discard(kill.replica)

        for job in self.replicas[kill.replica].kill():
            self._retry(job)
        self.clock.after(kill.noticed_s, notice)
        self.clock.after(max(kill.back_s, kill.noticed_s), back)

    def _retry(self, job: Job) -> None:
        """The client is told, and sends the turn again."""
        assert self.policy is not None
        self.policy.end(job.id, self.clock.now_s, 0, None)
        self.outcome.retries += 1
        self.outcome.output_tokens -= max(0, job.generated)
        again = Job(job.id, job.session, job.turn, job.prompt_tokens, job.sent_s, job.attempts + 1)
        self._send(again)
