"""The routing policy: sessions stay with their prefix, work goes to idle replicas, accounts balance."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.inference.router import NoReplicaError, ReplicaState, Router, RouteRequest, RoutingConfig
from etude.inference.router.policy import choose_arm


def router_of(*names: str, **options: float) -> Router:
    router = Router(RoutingConfig(**options))  # type: ignore[arg-type]
    for name in names:
        router.join(name)
    return router


def ask(number: int | str, session: str | None = None, prompt: int = 100, **options: object) -> RouteRequest:
    return RouteRequest(f"q{number}", prompt, 1000, session, **options)  # type: ignore[arg-type]


def turn(router: Router, number: int, session: str, prompt: int = 100, generated: int = 20) -> str:
    """One whole request of a session."""
    name = router.begin(ask(number, session, prompt), float(number))
    router.end(f"q{number}", number + 0.5, generated, prompt + generated)
    return name


def home_of(router: Router, session: str) -> str | None:
    """The replica that holds the session's prefix, if any."""
    return next((name for name, replica in router.replicas.items() if session in replica.sessions), None)


def test_a_session_stays_on_its_replica() -> None:
    router = router_of("a", "b", "c")
    homes = {session: turn(router, n, session) for n, session in enumerate("stuvwxyz")}
    for n, session in enumerate("zyxwvuts" * 3, start=100):
        assert turn(router, n, session, prompt=300) == homes[session]


def test_new_sessions_are_spread() -> None:
    router = router_of("a", "b", "c", "d")
    homes = Counter(turn(router, n, f"s{n}") for n in range(40))
    assert set(homes.values()) == {10}


def test_sessions_that_left_another_one_begin_where_its_prefix_is() -> None:
    router = router_of("a", "b", "c")
    home = turn(router, 0, "forked", prompt=500)
    for n in range(3):
        assert router.place(f"sibling{n}", 1.0, sibling="forked") == home
        assert turn(router, 1 + n, f"sibling{n}", prompt=500) == home
    router.replicas[home].state = ReplicaState.EJECTED
    assert router.place("late", 2.0, sibling="forked") != home
    assert router.place("other", 2.0, sibling="unknown") != home


def test_siblings_leave_a_replica_that_has_too_much_to_do() -> None:
    router = router_of("a", "b", spill_floor_tokens=10.0)
    home = turn(router, 0, "forked", prompt=10)
    router.place("sibling", 0.5, sibling="forked")
    for n in range(1, 10):
        router.begin(ask(n, session=f"s{n}"), 1.0)
    router.replicas[home].work += 10_000
    assert router.begin(ask(99, "sibling", 10), 1.0) != home
    assert router.spills == 1


def test_a_request_alone_goes_where_least_is_left() -> None:
    router = router_of("a", "b")
    first = router.begin(ask(1, prompt=10_000), 0.0)
    assert all(router.begin(ask(n, prompt=10), 0.0) != first for n in range(2, 5))


def test_a_session_leaves_an_overloaded_replica() -> None:
    router = router_of("a", "b", spill_floor_tokens=10.0)
    home = turn(router, 0, "s")
    other = "b" if home == "a" else "a"
    router.replicas[other].state = ReplicaState.EJECTED
    for n in range(1, 10):
        router.begin(ask(n), 1.0)
    router.replicas[other].state = ReplicaState.READY
    assert turn(router, 50, "s", prompt=200) == other
    assert router.spills == 1
    assert home_of(router, "s") == other


def test_a_long_prefix_keeps_a_session_where_a_short_one_leaves() -> None:
    homes: list[bool] = []
    for held in (100, 100_000):
        router = router_of("a", "b", prefill_weight=0.1, spill_floor_tokens=1.0)
        home = turn(router, 0, "s", prompt=held)
        router.replicas["b" if home == "a" else "a"].state = ReplicaState.EJECTED
        for n in range(1, 8):
            router.begin(ask(n), 1.0)
        router.replicas["a"].state = ReplicaState.READY
        router.replicas["b"].state = ReplicaState.READY
        homes.append(turn(router, 50, "s", prompt=held + 100) == home)
    assert homes == [False, True]


def test_progress_takes_work_off() -> None:
    router = router_of("a")
    router.begin(ask(1, prompt=10_000), 0.0)
    before = router.replicas["a"].work
    router.progress("q1", 1)
    assert router.replicas["a"].work < before
    router.end("q1", 1.0, 5, 10_005)
    assert router.replicas["a"].work == 0


def test_long_answers_count_for_more_the_longer_they_run() -> None:
    router = router_of("a", "b")
    for n in range(200):
        turn(router, n, f"s{n}", generated=10 if n % 10 else 1000)
    router.begin(ask("long"), 0.0)
    young = max(r.work for r in router.replicas.values())
    router.progress("qlong", 128)
    assert max(r.work for r in router.replicas.values()) > young


def test_a_slow_replica_gets_fewer_sessions() -> None:
    router = router_of("fast", "slow")
    for n in range(40):
        name = router.begin(ask(n, f"s{n}"), 0.0)
        router.end(f"q{n}", 1.0 if name == "fast" else 4.0, 20, 120)
    homes = Counter(router.begin(ask(n, f"t{n}"), 10.0) for n in range(100, 150))
    assert homes["slow"] < homes["fast"] / 2


def test_pools_are_kept_apart_and_replicas_can_be_lent() -> None:
    router = router_of("a")
    router.join("b", "rollout")
    assert router.begin(ask(1, pool="rollout"), 0.0) == "b"
    with pytest.raises(NoReplicaError, match="pool"):
        router.begin(ask(2, pool="other"), 0.0)
    router.lend("b", "serve")
    with pytest.raises(NoReplicaError):
        router.begin(ask(3, pool="rollout"), 0.0)
    assert {router.begin(ask(n), 0.0) for n in range(4, 8)} == {"a", "b"}


def test_a_pinned_request_gets_its_version_only() -> None:
    router = router_of()
    router.join("a", version="run@1")
    router.join("b", version="run@2")
    for n in range(6):
        assert router.begin(ask(n, versions=frozenset({"run@2"})), 0.0) == "b"
    with pytest.raises(NoReplicaError, match="version"):
        router.begin(ask(9, versions=frozenset({"run@3"})), 0.0)


@pytest.mark.slow
def test_arms_get_their_shares_and_sessions_keep_their_arm() -> None:
    router = Router(arms={"run@1": 0.9, "run@2": 0.1})
    for name, version in (("a", "run@1"), ("b", "run@1"), ("c", "run@2")):
        router.join(name, version=version)
    versions: dict[str, str | None] = {}
    for n in range(2000):
        versions[f"s{n}"] = router.replicas[turn(router, n, f"s{n}")].version
    share = sum(version == "run@2" for version in versions.values()) / 2000
    assert share == pytest.approx(0.1, abs=0.03)
    for n in range(0, 2000, 7):
        assert router.replicas[turn(router, 5000 + n, f"s{n}")].version == versions[f"s{n}"]


def test_an_arm_that_comes_moves_only_the_sessions_it_wins() -> None:
    before = {f"s{n}": choose_arm(f"s{n}", {"x": 1.0, "y": 1.0}) for n in range(500)}
    after = {f"s{n}": choose_arm(f"s{n}", {"x": 1.0, "y": 1.0, "z": 1.0}) for n in range(500)}
    moved = [name for name in before if before[name] != after[name]]
    assert all(after[name] == "z" for name in moved)
    assert 100 < len(moved) < 240
    assert choose_arm("s", {}) is None
    assert choose_arm("s", {"x": 0.0}) is None


def test_a_replica_that_rejoins_under_its_name_owes_nothing() -> None:
    router = router_of("a")
    router.begin(ask(1, "s"), 0.0)
    router.remove("a")
    router.join("a")
    router.end("q1", 1.0, 5, 105)
    assert (router.replicas["a"].running, router.replicas["a"].work) == (0, 0)
    assert home_of(router, "s") is None


def test_silent_sessions_end() -> None:
    router = router_of("a", session_idle_s=10.0)
    turn(router, 1, "s")
    assert router.expire(5.0) == 0
    assert router.expire(100.0) == 1
    assert home_of(router, "s") is None
    assert router.replicas["a"].resident == 0


def test_a_request_id_cannot_be_in_flight_twice() -> None:
    router = router_of("a")
    router.begin(ask(1), 0.0)
    with pytest.raises(ValueError, match="in flight"):
        router.begin(ask(1), 0.0)


NAMES = st.sampled_from("abcd")
SESSIONS = st.one_of(st.none(), st.sampled_from([f"s{n}" for n in range(6)]))


class Books(RuleBasedStateMachine):
    """Random lives of replicas, sessions and requests: nothing is lost, nothing counted wrongly."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RoutingConfig(max_sessions=4, session_idle_s=50.0))
        self.sent: dict[str, str] = {}
        self.number = 0

    @rule(name=NAMES)
    def join(self, name: str) -> None:
        if name not in self.router.replicas:
            self.router.join(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        self.router.remove(name)

    @rule(name=NAMES, ready=st.booleans())
    def eject_or_return(self, name: str, ready: bool) -> None:
        if name in self.router.replicas:
            self.router.replicas[name].state = ReplicaState.READY if ready else ReplicaState.EJECTED
        if not ready:
            self.router.drop_prefixes(name)

    @rule(session=SESSIONS, prompt=st.integers(0, 10_000), exclude=st.sets(NAMES, max_size=2))
    def send(self, session: str | None, prompt: int, exclude: set[str]) -> None:
        self.number += 1
        open_ones = {r.name for r in self.router.replicas.values() if r.ready} - exclude
        home = home_of(self.router, session) if session is not None else None
        idle = all(replica.work == 0 for replica in self.router.replicas.values())
        try:
            name = self.router.begin(ask(self.number, session, prompt), float(self.number), exclude)
        except NoReplicaError:
            assert not open_ones
            return
        assert name in open_ones, "nothing goes to a replica that is ejected, gone or excluded"
        if home in open_ones and idle:
            assert name == home, "a session stays where its prefix is"
        self.sent[f"q{self.number}"] = name

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), generated=st.integers(0, 500))
    def advance(self, data: st.DataObject, generated: int) -> None:
        self.router.progress(data.draw(st.sampled_from(sorted(self.sent))), generated)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), generated=st.integers(0, 500), failed=st.booleans())
    def finish(self, data: st.DataObject, generated: int, failed: bool) -> None:
        request = data.draw(st.sampled_from(sorted(self.sent)))
        del self.sent[request]
        self.number += 1
        self.router.end(request, float(self.number), generated, None if failed else 100 + generated)

    @rule(session=st.sampled_from([f"s{n}" for n in range(6)]))
    def close(self, session: str) -> None:
        self.router.close_session(session)

    @rule()
    def expire(self) -> None:
        self.router.expire(float(self.number))

    @invariant()
    def nothing_is_negative_or_lost(self) -> None:
        assert self.router.num_in_flight == len(self.sent)
        for replica in self.router.replicas.values():
            assert replica.running >= 0
            assert replica.work >= 0
            assert replica.resident >= 0
            assert all(self.router._sessions[session].replica is replica for session in replica.sessions)

    def teardown(self) -> None:
        for request in self.sent:
            self.router.end(request, 1e6, 1, 1)
        for session in range(6):
            self.router.close_session(f"s{session}")
        for replica in self.router.replicas.values():
            assert (replica.running, replica.work, replica.resident, len(replica.sessions)) == (0, 0, 0, 0)


Books.TestCase.settings = settings(stateful_step_count=40)
test_the_books_balance = Books.TestCase
