"""Sessions on simulated replicas in virtual time, routed by the production code.

    session: sent -> policy.begin -> replica: queue, prefill, decode -> policy.end -> tools -> next turn

Two load models. `arrivals_per_s` (open): sessions arrive at random, independent of the replicas; it measures
latency. `concurrency` (closed): a constant number of sessions, each followed by a new one, as in rollouts; it
measures throughput, until the last session has started, so that the tail does not dilute it. The outcome is a
function of the scenario.
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
"""Interval of progress reports to the policy."""


@dataclass(frozen=True, slots=True)
class Kill:
    """A replica dies and restarts with an empty cache."""

    at_s: float
    replica: str
    back_s: float
    noticed_s: float = 0.0
    """Time until the death is detected; requests sent there until then fail and are retried on others."""


@dataclass(frozen=True, slots=True)
class RouterScenario:
    """Inputs of the simulation. Exactly one of `arrivals_per_s` and `concurrency` is set."""

    sessions: Sequence[LoadSession]
    spec: ReplicaSpec
    num_replicas: int = 4
    arrivals_per_s: float | None = None
    """Sessions per second."""
    concurrency: int | None = None
    slowness: Sequence[float] = ()
    """Slowness of each replica; missing ones: 1."""
    kills: Sequence[Kill] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.arrivals_per_s is None) == (self.concurrency is None):
            raise ConfigError("give arrivals_per_s or concurrency, one of them", field="RouterScenario")

    @property
    def names(self) -> list[str]:
        """Names of the replicas."""
        return [f"replica-{n}" for n in range(self.num_replicas)]


@dataclass(slots=True)
class RouterOutcome:
    """Results: latencies, throughput, cache hits."""

    latencies_s: list[float] = field(default_factory=list)
    """Per request: time from sending to the last token."""
    first_token_s: list[float] = field(default_factory=list)
    session_s: list[float] = field(default_factory=list)
    output_tokens: int = 0
    output_tokens_per_s: float = 0.0
    cache_hit_rate: float = 0.0
    """Share of input tokens found in a cache."""
    retries: int = 0
    answered: int = 0
    unanswered: int = 0
    busy_share: float = 0.0
    """Share of time spent stepping, mean over replicas."""

    def latency_s(self, percentile: float) -> float:
        """A percentile of request latency."""
        return float(np.percentile(self.latencies_s, percentile))


PolicyMaker = Callable[[Sequence[str]], Routing]


def simulate(scenario: RouterScenario, make_policy: PolicyMaker | None) -> RouterOutcome:
    """Simulates the scenario to its end. `make_policy` None: the ideal, replicas that share everything."""
    return _Simulation(scenario, make_policy).run()


@dataclass(slots=True, eq=False)
class _SessionState:
    """State of a running session."""

    session: LoadSession
    began_s: float
    turn: int = 0
    tokens: int = 0
    """Length so far."""


class _Simulation:
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
        self.live: dict[str, _SessionState] = {}
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
        self.live[session.id] = _SessionState(session, self.clock.now_s)
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
            # The client's max_tokens, not the length that will be sampled, which a policy cannot know.
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

    def _end(self, name: str, live: _SessionState) -> None:
        del self.live[name]
        self.outcome.session_s.append(self.clock.now_s - live.began_s)
        for replica in self.replicas.values():
            replica.evict(name)
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
        """Fails a request; the client sends the turn again."""
        assert self.policy is not None
        self.policy.end(job.id, self.clock.now_s, 0, None)
        self.outcome.retries += 1
        self.outcome.output_tokens -= max(0, job.generated)
        again = Job(job.id, job.session, job.turn, job.prompt_tokens, job.sent_s, job.attempts + 1)
        self._send(again)
