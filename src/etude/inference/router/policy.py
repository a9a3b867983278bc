"""The routing policy: session affinity by prefix cache, else the least outstanding work.

    new session      -> least predicted work of its requests in flight + a share of that of its sessions
    known session    -> its replica, unless that has `spill_factor` times the work of the best other one
                        plus the cost of computing the prefix there
    lone request     -> least predicted work of its requests in flight

The remaining work of a request or session is predicted from its work so far (`ResidualMean`), so that long
sessions are spread over the replicas while they run, and not only counted. The class does no I/O: the
simulation runs the same code as production.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from etude.errors import ConfigError
from etude.inference.router.types import NoReplicaError, Replica, ReplicaState, RouteRequest, RoutingConfig

_Load = Callable[[Replica], float]
_MOST_SLOWNESS = 8.0
_RANGE = float(1 << 64)
"""Range of the 64-bit hash."""
_NUM_AGES = 24
_WEIGHT_AT_MOST = 512.0
"""Cap of a mean's weight in samples, so that it follows a changing load."""


@dataclass(slots=True, eq=False)
class _Flight:
    """One request between `begin` and `end`."""

    request: RouteRequest
    replica: Replica
    """The object, not its name: another replica may join under the name of a removed one."""
    began_s: float
    work: int = 0
    """Its contribution to its replica's `work`."""

    def set_work(self, work: int) -> None:
        """Replaces the contribution. Integers, so that exactly what was added is subtracted."""
        self.replica.work += work - self.work
        self.work = work


@dataclass(slots=True, eq=False)
class _Session:
    """The router's record of a session."""

    replica: Replica | None = None
    held_tokens: int = 0
    """Tokens of its prefix that its replica caches."""
    done: float = 0.0
    """Work so far, in sampled tokens."""
    resident: int = 0
    """Its contribution to its replica's `resident`."""
    seen_s: float = 0.0

    def set_resident(self, resident: int) -> None:
        """Replaces the contribution: see `_Flight.set_work`."""
        if self.replica is not None:
            self.replica.resident += resident - self.resident
            self.resident = resident


class Router:
    """Session affinity, least outstanding work, spilling, pools and A/B shares. See the module docstring."""

    def __init__(self, config: RoutingConfig | None = None, arms: Mapping[str, float] | None = None) -> None:
        """`arms`: version name -> its target share of the sessions. None: versions are ignored."""
        self.config = config or RoutingConfig()
        self.arms = dict(arms or {})
        self.replicas: dict[str, Replica] = {}
        self.spills = 0
        """Times that a session left a ready replica because of its load."""
        self._flights: dict[str, _Flight] = {}
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._outputs = ResidualMean(self.config.expected_output_tokens)
        self._lengths = ResidualMean(self.config.expected_session_tokens, first_age=64.0)
        self._turn = 0

    # ---- replicas -------------------------------------------------------------------------------

    def join(self, name: str, pool: str = "serve", version: str | None = None, *, ready: bool = True) -> None:
        """Adds a replica, which may get requests from now on if `ready`. Raises ConfigError for a name that
        is in use."""
        if name in self.replicas:
            raise ConfigError("already exists", field="replica", received=name, fix="remove it first")
        state = ReplicaState.READY if ready else ReplicaState.JOINING
        self.replicas[name] = Replica(name, pool, pool, version, state=state)

    def remove(self, name: str) -> None:
        """Removes a replica. Its requests in flight are still to be ended one by one; its sessions move."""
        self.drop_prefixes(name)
        self.replicas.pop(name, None)

    def lend(self, name: str, pool: str) -> None:
        """Lets the replica work for that pool from now on; it finishes its requests in flight."""
        self.replicas[name].pool = pool

    def move(self, name: str, pool: str) -> None:
        """Makes that pool the replica's home from now on."""
        replica = self.replicas[name]
        replica.home = replica.pool = pool

    def drop_prefixes(self, name: str) -> None:
        """Detaches all sessions of a replica that has lost its cache: they may continue anywhere."""
        for session in tuple(self.replicas[name].sessions if name in self.replicas else ()):
            self._detach(session, self._sessions[session])

    @property
    def num_in_flight(self) -> int:
        """Requests between `begin` and `end`."""
        return len(self._flights)

    # ---- requests -------------------------------------------------------------------------------

    def place(self, session: str, now_s: float, pool: str = "serve", sibling: str | None = None) -> str:
        """Assigns a session to a replica before its first request, which will probably go there.

        `sibling`: a session with which it shares a prefix; it is assigned to the same replica. Raises
        NoReplicaError.
        """
        known = self._session(session, now_s)
        candidates = self._candidates(RouteRequest("", 0, 0, session, pool), ())
        other = self._sessions.get(sibling or "")
        if known is not None and other is not None and other.replica in candidates:
            self._attach(session, known, other.replica)
            known.held_tokens = other.held_tokens
            return other.replica.name
        chosen = self._choose(candidates, known)
        if known is not None and known.replica is not chosen:
            self._attach(session, known, chosen)
        return chosen.name

    def begin(self, request: RouteRequest, now_s: float, exclude: Collection[str] = ()) -> str:
        """Chooses a replica for the request and returns its name; its work counts there until `end`, which
        must be called once for each id. Times are seconds of any one clock.

        `exclude`: replicas that have already failed this request. Raises NoReplicaError.
        """
        if request.id in self._flights:
            raise ValueError(f"Router.begin: request {request.id!r} is in flight already")
        candidates = self._candidates(request, exclude)
        session = self._session(request.session, now_s)
        chosen = self._choose(candidates, session)
        missing = request.prompt_tokens
        if session is not None and request.session is not None:
            if session.replica is not chosen:
                self._attach(request.session, session, chosen)
            missing -= min(session.held_tokens, missing)
        flight = self._flights[request.id] = _Flight(request, chosen, now_s)
        chosen.running += 1
        flight.set_work(self._prefill(missing) + self._remaining_output(request, 0))
        return chosen.name

    def progress(self, request_id: str, generated_tokens: int) -> None:
        """Updates the remaining work of a request, whose input is computed. Unknown ids are ignored."""
        flight = self._flights.get(request_id)
        if flight is not None:
            flight.set_work(self._remaining_output(flight.request, generated_tokens))

    def end(
        self, request_id: str, now_s: float, generated_tokens: int, held_tokens: int | None = None
    ) -> None:
        """Ends a request. `held_tokens`: tokens of the session that the replica caches now; None if the
        request failed. Unknown ids are ignored."""
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        flight.set_work(0)
        flight.replica.running -= 1
        if held_tokens is not None:
            self._outputs.observe(float(generated_tokens))
            if self.config.learn_rates:
                flight.replica.record_rate(generated_tokens, now_s - flight.began_s)
        session = self._sessions.get(flight.request.session or "")
        if session is None or session.replica is not flight.replica:
            return
        computed = max(0, flight.request.prompt_tokens - session.held_tokens)
        session.done += generated_tokens + self.config.prefill_weight * computed
        session.held_tokens = held_tokens or 0
        session.seen_s = now_s
        self._sessions.move_to_end(flight.request.session or "")
        session.set_resident(round(self._lengths.predict(session.done)))

    def close_session(self, session: str) -> None:
        """Removes a session that has ended. Unknown ones are ignored."""
        known = self._sessions.pop(session, None)
        if known is not None:
            self._detach(session, known)
            self._lengths.observe(known.done)

    def expire(self, now_s: float) -> int:
        """Closes the sessions that have been idle for `session_idle_s`; returns how many."""
        limit_s = now_s - self.config.session_idle_s
        old: list[str] = []
        for name, session in self._sessions.items():  # in the order of their last requests
            if session.seen_s >= limit_s:
                break
            old.append(name)
        busy = {flight.request.session for flight in self._flights.values()} if old else set()
        expired = [name for name in old if name not in busy]
        for name in expired:
            self.close_session(name)
        return len(expired)

    # ---- the choice -----------------------------------------------------------------------------

    def _candidates(self, request: RouteRequest, exclude: Collection[str]) -> list[Replica]:
        """Replicas that may take the request. Raises NoReplicaError."""
        able = [r for r in self.replicas.values() if r.ready and r.pool == request.pool]
        found = [r for r in able if r.name not in exclude]
        if request.versions is not None:
            found = [r for r in found if r.version in request.versions]
        elif self.arms:
            served = {r.version: self.arms[r.version] for r in found if r.version in self.arms}
            arm = choose_arm(request.session or request.id, served)
            found = [r for r in found if r.version == arm] if arm is not None else []
        if found:
            return found
        wanted = sorted(request.versions) if request.versions is not None else sorted(self.arms) or None
        raise NoReplicaError(
            "no replica can take the request",
            field="pool" if not able else "version",
            received=request.pool if not able else wanted,
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
        own_cost, other_cost = sticky.work * slowness[sticky.name], (best.work + price) * slowness[best.name]
        if own_cost <= self.config.spill_factor * other_cost:
            return sticky
        self.spills += 1
        return best

    def _slowness(self, candidates: list[Replica]) -> dict[str, float]:
        """Time per token relative to the fastest candidate, by which the work of stragglers is multiplied."""
        fastest = max((r.rate for r in candidates if r.rate is not None), default=1.0)
        return {r.name: min(fastest / (r.rate or fastest), _MOST_SLOWNESS) for r in candidates}

    def _least(self, candidates: list[Replica], load: _Load) -> Replica:
        """The least loaded replica; ties are broken by number of requests, then round-robin."""
        self._turn += 1
        count = len(candidates)
        order = ((load(r), r.running, (n + self._turn) % count, n) for n, r in enumerate(candidates))
        return candidates[min(order)[3]]

    # ---- bookkeeping ----------------------------------------------------------------------------

    def _prefill(self, tokens: int) -> int:
        return round(self.config.prefill_weight * tokens)

    def _remaining_output(self, request: RouteRequest, generated: int) -> int:
        return round(min(self._outputs.predict(float(generated)), max(0, request.max_tokens - generated)))

    def _session(self, name: str | None, now_s: float) -> _Session | None:
        if name is None:
            return None
        session = self._sessions.setdefault(name, _Session())
        session.seen_s = now_s
        self._sessions.move_to_end(name)
        while len(self._sessions) > self.config.max_sessions:
            oldest, dropped = self._sessions.popitem(last=False)
            self._detach(oldest, dropped)
        return session

    def _attach(self, name: str, session: _Session, replica: Replica) -> None:
        self._detach(name, session)
        session.replica = replica
        replica.sessions.add(name)
        session.set_resident(round(self._lengths.predict(session.done)))

    def _detach(self, name: str, session: _Session) -> None:
        """Removes the session from its replica."""
        session.set_resident(0)
        if session.replica is not None:
            session.replica.sessions.discard(name)
        session.replica, session.held_tokens = None, 0


def choose_arm(key: str, shares: Mapping[str, float]) -> str | None:
    """The policy version that a session gets in an A/B test: by share, sticky, without a table.

    Weighted rendezvous hashing (Schindelhauer and Schomaker, 2005): every arm draws an exponential number
    from the hash of (session, arm), divided by its share; the least wins. All routers decide alike,
    and when an arm is added or removed, only the sessions that it gains or loses move. Arms of share 0 get
    nothing. None without any arm.
    """
    drawn = {
        arm: -math.log((xxhash.xxh3_64_intdigest(f"{arm}\0{key}".encode()) + 0.5) / _RANGE) / share
        for arm, share in shares.items()
        if share > 0.0
    }
    return min(drawn, key=lambda arm: (drawn[arm], arm), default=None)


class ResidualMean:
    """Mean residual life by age, learned from finished lengths at ages of which each is double the last.

    The longer an agent's session (or an answer) has run, the longer it will probably continue: with lognormal
    or Pareto lengths the expected remaining length *grows* with the age. So the remaining length is predicted
    from the age alone, as the mean over earlier samples that reached that age.

    Before any sample has reached an age, the prediction is `prior` or the age itself, whichever is more (the
    residual life under a Pareto tail of exponent 2).
    """

    def __init__(self, prior: float, first_age: float = 1.0) -> None:
        """`prior`: expected mean length before any sample; it has the weight of four samples."""
        assert prior > 0.0 and first_age > 0.0, "both must be positive"
        self._ages = np.array([0.0, *(first_age * 2.0**n for n in range(_NUM_AGES - 1))])
        self._means = np.maximum(prior, self._ages)
        """Mean rest of the samples that reached each age."""
        self._weights = np.full(_NUM_AGES, 4.0)
        """Number of these samples, capped."""

    def observe(self, length: float) -> None:
        """Adds one finished length at all ages that it reached."""
        reached = slice(int(np.searchsorted(self._ages, length, side="right")))
        self._weights[reached] = np.minimum(self._weights[reached] + 1.0, _WEIGHT_AT_MOST)
        rests = length - self._ages[reached]
        self._means[reached] += (rests - self._means[reached]) / self._weights[reached]

    def predict(self, age: float) -> float:
        """Expected remaining length at this age, interpolated between ages; never negative."""
        return max(float(np.interp(age, self._ages, self._means)), 0.0)
