"""The routing policy: a session stays where its prefix is, work goes where little is left to do.

    new session      -> least of: rest of the requests in flight + a share of the rest of the sessions there
    known session    -> its replica, unless that has `spill_factor` times the work of the best other one
                        plus the price of computing the prefix there
    request alone    -> least rest of the requests in flight

The rest of a request or session is predicted from how long it has gone on (`ResidualMean`), so that long
sessions are spread over the replicas while they run, not only counted. The class holds tables and
arithmetic and nothing else: the simulation runs the very code that production runs.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import xxhash

from etude.inference.router.types import Ask, NoReplicaError, Replica, ReplicaState, RoutingConfig

_Load = Callable[[Replica], float]
_MOST_SLOWNESS = 8.0
_RANGE = float(1 << 64)
"""Of a hash."""
_WEIGHT_AT_MOST = 512.0
"""Samples that an old mean counts for: beyond that it forgets, so that it follows a changing load."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One request between `begin` and `end`."""

    ask: Ask
    replica: Replica
    """The object, not its name: another may join under the name of one that has left."""
    began_s: float
    work: int = 0
    """What it counts for in its replica's `work`."""

    def set_work(self, work: int) -> None:
        """Whole numbers, so that exactly what was added is taken away."""
        self.replica.work += work - self.work
        self.work = work


@dataclass(slots=True, eq=False)
class _Session:
    """What is known of a session."""

    replica: Replica | None = None
    held_tokens: int = 0
    """Prefix that its replica holds."""
    done: float = 0.0
    """Work so far."""
    resident: int = 0
    """What it counts for in its replica's `resident`."""
    seen_s: float = 0.0

    def set_resident(self, resident: int) -> None:
        """As `_Flight.set_work`."""
        if self.replica is not None:
            self.replica.resident += resident - self.resident
            self.resident = resident


class Router:
    """Session affinity, least outstanding work, spill, pools and shares of versions. See the module."""

    def __init__(self, config: RoutingConfig | None = None, arms: Mapping[str, float] | None = None) -> None:
        """`arms`: version name -> share of the sessions that it shall get. None: all versions alike."""
        self.config = config or RoutingConfig()
        self.arms = dict(arms or {})
        self.replicas: dict[str, Replica] = {}
        self.spills = 0
        """Sessions that left a ready replica because it had too much to do."""
        self._flights: dict[str, _Flight] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._outputs = ResidualMean(self.config.expected_output_tokens)
        self._lengths = ResidualMean(self.config.expected_session_tokens, first_age=64.0)
        self._turn = 0

    # ---- replicas -------------------------------------------------------------------------------

    def join(self, name: str, pool: str = "serve", version: str | None = None, *, ready: bool = True) -> None:
        """A replica that may get requests from now on. Raises ValueError for a name that is taken."""
        if name in self.replicas:
            raise ValueError(f"Router.join: {name!r} is there already")
        state = ReplicaState.READY if ready else ReplicaState.JOINING
        self.replicas[name] = Replica(name, pool, pool, version, ready=ready, state=state)

    def leave(self, name: str) -> None:
        """Forgets a replica. Its requests in flight are still ended one by one; its sessions move."""
        self.lose_prefixes(name)
        self.replicas.pop(name, None)

    def lend(self, name: str, pool: str) -> None:
        """The replica works for that pool from now on; what it has in flight it finishes."""
        self.replicas[name].pool = pool

    def move(self, name: str, pool: str) -> None:
        """The replica belongs to that pool from now on."""
        replica = self.replicas[name]
        replica.home = replica.pool = pool

    def lose_prefixes(self, name: str) -> None:
        """What the replica held is gone, as after a crash: its sessions may start anywhere."""
        for session in tuple(self.replicas[name].sessions if name in self.replicas else ()):
            self._detach(session, self._sessions[session])

    @property
    def num_in_flight(self) -> int:
        """Requests between `begin` and `end`."""
        return len(self._flights)

    # ---- requests -------------------------------------------------------------------------------

    def place(self, session: str, now_s: float, pool: str = "serve", beside: str | None = None) -> str:
        """Settles a session before its first request, where that request will probably go.

        `beside`: a session with tokens of which it begins; it is settled where these are held. Raises
        NoReplicaError.
        """
        known = self._session(session, now_s)
        candidates = self._candidates(Ask("", 0, 0, session, pool), ())
        other = self._sessions.get(beside or "")
        if known is not None and other is not None and other.replica in candidates:
            self._attach(session, known, other.replica)
            known.held_tokens = other.held_tokens
            return other.replica.name
        chosen = self._choose(candidates, known)
        if known is not None and known.replica is not chosen:
            self._attach(session, known, chosen)
        return chosen.name

    def begin(self, ask: Ask, now_s: float, exclude: Collection[str] = ()) -> str:
        """The name of the replica that gets the request; it counts there from now on. Times are seconds of
        any one clock. `begin` and `end` come in pairs for each request id.

        `exclude`: replicas that have failed this request already. Raises NoReplicaError.
        """
        if ask.id in self._flights:
            raise ValueError(f"Router.begin: request {ask.id!r} is in flight already")
        candidates = self._candidates(ask, exclude)
        session = self._session(ask.session, now_s)
        chosen = self._choose(candidates, session)
        missing = ask.prompt_tokens
        if session is not None and ask.session is not None:
            if session.replica is not chosen:
                self._attach(ask.session, session, chosen)
            missing -= min(session.held_tokens, missing)
        flight = self._flights[ask.id] = _Flight(ask, chosen, now_s)
        chosen.running += 1
        flight.set_work(self._prefill(missing) + self._rest_of_output(ask, 0))
        return chosen.name

    def progress(self, ask_id: str, generated_tokens: int) -> None:
        """A request in flight has its input computed and so many tokens sampled. Unknown ids are ignored."""
        flight = self._flights.get(ask_id)
        if flight is not None:
            flight.set_work(self._rest_of_output(flight.ask, generated_tokens))

    def end(self, ask_id: str, now_s: float, generated_tokens: int, held_tokens: int | None = None) -> None:
        """A request is over. `held_tokens`: what the replica holds of the session now; None if it failed.
        Unknown ids are ignored."""
        flight = self._flights.pop(ask_id, None)
        if flight is None:
            return
        flight.set_work(0)
        flight.replica.running -= 1
        if held_tokens is not None:
            self._outputs.learn(float(generated_tokens))
            if self.config.learn_rates:
                flight.replica.note_rate(generated_tokens, now_s - flight.began_s)
        session = self._sessions.get(flight.ask.session or "")
        if session is None or session.replica is not flight.replica:
            return
        computed = max(0, flight.ask.prompt_tokens - session.held_tokens)
        session.done += generated_tokens + self.config.prefill_weight * computed
        session.held_tokens = held_tokens or 0
        session.seen_s = now_s
        self._sessions.move_to_end(flight.ask.session or "")
        session.set_resident(round(self._lengths.rest(session.done)))

    def close_session(self, session: str) -> None:
        """The session has ended. Unknown ones are ignored."""
        known = self._sessions.pop(session, None)
        if known is not None:
            self._detach(session, known)
            self._lengths.learn(known.done)

    def expire(self, now_s: float) -> int:
        """Ends the sessions that have been silent for `session_idle_s`; returns how many."""
        limit_s = now_s - self.config.session_idle_s
        old: list[str] = []
        for name, session in self._sessions.items():  # in the order of their last requests
            if session.seen_s >= limit_s:
                break
            old.append(name)
        busy = {flight.ask.session for flight in self._flights.values()} if old else set()
        gone = [name for name in old if name not in busy]
        for name in gone:
            self.close_session(name)
        return len(gone)

    # ---- the choice -----------------------------------------------------------------------------

    def _candidates(self, ask: Ask, exclude: Collection[str]) -> list[Replica]:
        """Replicas that may take the request. Raises NoReplicaError."""
        able = [r for r in self.replicas.values() if r.ready and r.pool == ask.pool]
        found = [r for r in able if r.name not in exclude]
        if ask.versions is not None:
            found = [r for r in found if r.version in ask.versions]
        elif self.arms:
            served = {r.version: self.arms[r.version] for r in found if r.version in self.arms}
            arm = choose_arm(ask.session or ask.id, served)
            found = [r for r in found if r.version == arm] if arm is not None else []
        if found:
            return found
        wanted = sorted(ask.versions) if ask.versions is not None else sorted(self.arms) or None
        raise NoReplicaError(
            "no replica can take the request",
            field="pool" if not able else "version",
            received=ask.pool if not able else wanted,
            fix="wait until one is ready" if not able else "name a version that a replica serves",
        )

    def _choose(self, candidates: list[Replica], session: _Session | None) -> Replica:
        slowness = self._slowness(candidates)
        if session is None:
            return self._least(candidates, lambda r: r.work * slowness[r.name])
        sticky = next((r for r in candidates if r is session.replica), None)
        if sticky is None:
            weight = self.config.resident_weight
            return self._least(candidates, lambda r: (r.work + weight * r.resident) * slowness[r.name])
        others = [r for r in candidates if r is not sticky]
        if not others:
            return sticky
        best = self._least(others, lambda r: r.work * slowness[r.name])
        price = self._prefill(session.held_tokens) + self.config.spill_floor_tokens
        there, elsewhere = sticky.work * slowness[sticky.name], (best.work + price) * slowness[best.name]
        if there <= self.config.spill_factor * elsewhere:
            return sticky
        self.spills += 1
        return best

    def _slowness(self, candidates: list[Replica]) -> dict[str, float]:
        """How much longer each takes for a token than the fastest: stragglers count for their work more."""
        fastest = max((r.rate for r in candidates if r.rate is not None), default=1.0)
        return {r.name: min(fastest / (r.rate or fastest), _MOST_SLOWNESS) for r in candidates}

    def _least(self, candidates: list[Replica], load: _Load) -> Replica:
        """The least loaded; of equals each in its turn."""
        self._turn += 1
        count = len(candidates)
        order = ((load(r), r.running, (n + self._turn) % count, n) for n, r in enumerate(candidates))
        return candidates[min(order)[3]]

    # ---- the books ------------------------------------------------------------------------------

    def _prefill(self, tokens: int) -> int:
        return round(self.config.prefill_weight * tokens)

    def _rest_of_output(self, ask: Ask, generated: int) -> int:
        return round(min(self._outputs.rest(float(generated)), max(0, ask.max_tokens - generated)))

    def _session(self, name: str | None, now_s: float) -> _Session | None:
        if name is None:
            return None
        session = self._sessions.setdefault(name, _Session())
        session.seen_s = now_s
        self._sessions.move_to_end(name)
        while len(self._sessions) > self.config.max_sessions:
            oldest, gone = self._sessions.popitem(last=False)
            self._detach(oldest, gone)
        return session

    def _attach(self, name: str, session: _Session, replica: Replica) -> None:
        self._detach(name, session)
        session.replica = replica
        replica.sessions.add(name)
        session.set_resident(round(self._lengths.rest(session.done)))

    def _detach(self, name: str, session: _Session) -> None:
        """The session lives nowhere."""
        session.set_resident(0)
        if session.replica is not None:
            session.replica.sessions.discard(name)
        session.replica, session.held_tokens = None, 0


def choose_arm(key: str, shares: Mapping[str, float]) -> str | None:
    """Which policy version a session gets in an A/B test: by share, sticky, without a table.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): every arm draws an exponential number
    from the hash of (session, arm), divided by its share; the least wins. Another router decides alike, and
    when an arm comes or goes, only the sessions that it wins or loses move. Arms of share 0 get nothing; None
    where no arm is left.
    """
    drawn = {
        arm: -math.log((xxhash.xxh3_64_intdigest(f"{arm}\0{key}".encode()) + 0.5) / _RANGE) / share
        for arm, share in shares.items()
        if share > 0.0
    }
    return min(drawn, key=lambda arm: (drawn[arm], arm), default=None)


@dataclass(slots=True)
class _Bucket:
    """Those that reached one age."""

    mean_rest: float
    weight: float


class ResidualMean:
    """Expected rest by age, learnt from finished lengths. Ages double from bucket to bucket.

    The longer an agent's session (or an answer) has run, the longer it will probably go on: with lognormal or
    Pareto lengths the expected rest *grows* with the age. So a session's rest is predicted from its age
    alone, by the mean rest of those that reached that age before (the mean residual life).

    Before anything has been learnt at an age, the rest is `prior` or the age itself, whichever is more: what
    has lasted long lasts as long again (the rule of a Pareto tail of exponent 2).
    """

    def __init__(self, prior: float, first_age: float = 1.0, num_buckets: int = 24) -> None:
        """`prior`: mean length expected at the start; it counts for four samples, not more."""
        assert prior > 0.0 and first_age > 0.0 and num_buckets > 0, "all must be positive"
        self._ages = [0.0, *(first_age * 2.0**n for n in range(num_buckets - 1))]
        self._buckets = [_Bucket(max(prior, age), 4.0) for age in self._ages]

    def learn(self, length: float) -> None:
        """Counts one finished length in, at every age that it reached."""
        for age, bucket in zip(self._ages, self._buckets, strict=True):
            if age > length:
                break
            bucket.weight = min(bucket.weight + 1.0, _WEIGHT_AT_MOST)
            bucket.mean_rest += (length - age - bucket.mean_rest) / bucket.weight

    def rest(self, age: float) -> float:
        """Expected rest of what has this age; never negative."""
        upper = next((n for n, start in enumerate(self._ages) if start > age), None)
        if upper is None:
            return max(self._buckets[-1].mean_rest, 0.0)
        low, high = self._ages[upper - 1], self._ages[upper]
        share = (age - low) / (high - low)
        before, after = self._buckets[upper - 1].mean_rest, self._buckets[upper].mean_rest
        return max((1.0 - share) * before + share * after, 0.0)
