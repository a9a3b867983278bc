"""Replicas join, are ejected, return after growing delays, and drain before they leave."""

from __future__ import annotations

from typing import Any

import pytest

from etude.config.routing import HealthCheckConfig, LendingConfig
from etude.errors import ConfigError
from etude.inference.router import Members, NoReplicaError, ReplicaState, Router, RouteRequest
from etude.inference.router.pools import Lender, Move
from etude.inference.router.types import Replica


def members_of(*names: str, **options: float) -> Members:
    members = Members(Router(), HealthCheckConfig(**options))  # type: ignore[arg-type]
    for name in names:
        members.join(name)
        members.record_probe(name, 0.0, "run@1")
    return members


def is_ready(members: Members, name: str) -> bool:
    return members.router.replicas[name].ready


def test_a_replica_serves_nothing_before_it_names_a_version() -> None:
    members = Members(Router())
    members.join("a")
    with pytest.raises(NoReplicaError):
        members.router.begin(RouteRequest("q", 1, 1), 0.0)
    members.record_probe("a", 0.0, None)
    assert not is_ready(members, "a")
    members.record_probe("a", 1.0, "run@3")
    assert is_ready(members, "a")
    assert members.router.replicas["a"].version == "run@3"


def test_failures_in_a_row_eject_and_one_does_not() -> None:
    members = members_of("a", eject_after=2)
    members.record_failure("a", 1.0, "timeout")
    assert is_ready(members, "a")
    members.record_probe("a", 2.0, "run@1")
    members.record_failure("a", 3.0, "timeout")
    assert is_ready(members, "a")
    members.record_failure("a", 4.0, "timeout")
    assert members.router.replicas["a"].state is ReplicaState.EJECTED
    assert not is_ready(members, "a")


def test_a_replica_where_nobody_listens_is_ejected_at_once_and_its_prefixes_are_lost() -> None:
    members = members_of("a", "b")
    home = members.router.begin(RouteRequest("q", 10, 10, "s"), 0.0)
    members.router.end("q", 0.0, 5, 15)
    members.record_failure(home, 1.0, "refused", fatal=True)
    assert members.router.replicas[home].state is ReplicaState.EJECTED
    assert not any(replica.sessions for replica in members.router.replicas.values())


def test_waits_double_until_the_replica_serves_again() -> None:
    members = members_of("a", backoff_s=1.0, most_backoff_s=5.0)
    waits: list[float] = []
    now_s = 0.0
    for _ in range(5):
        members.record_failure("a", now_s, "refused", fatal=True)
        waits.append(members.router.replicas["a"].next_probe_s - now_s)
        now_s = members.router.replicas["a"].next_probe_s
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert members.due_probes(now_s - 0.1) == []
    assert members.due_probes(now_s) == ["a"]
    members.record_probe("a", now_s, "run@1")
    assert is_ready(members, "a")
    members.record_success("a")
    members.record_failure("a", now_s, "refused", fatal=True)
    assert members.router.replicas["a"].next_probe_s - now_s == 1.0


def test_late_failures_of_an_ejected_replica_do_not_lengthen_its_wait() -> None:
    members = members_of("a")
    members.record_failure("a", 0.0, "refused", fatal=True)
    due_s = members.router.replicas["a"].next_probe_s
    for _ in range(20):
        members.record_failure("a", 0.1, "reset")
    assert members.router.replicas["a"].next_probe_s == due_s


def test_a_replica_leaves_when_its_last_request_has_ended() -> None:
    members = members_of("a", "b")
    name = members.router.begin(RouteRequest("q", 10, 10), 0.0)
    assert members.drain(name)
    assert members.remove_drained() == []
    members.record_probe(name, 1.0, "run@1")
    members.record_failure(name, 1.0, "reset", fatal=True)
    assert not is_ready(members, name)
    members.router.end("q", 1.0, 5, 15)
    assert members.remove_drained() == [name]
    assert name not in members.router.replicas
    assert not members.drain(name)
    members.join(name)


def test_a_name_cannot_join_twice() -> None:
    members = members_of("a")
    with pytest.raises(ConfigError, match="already exists"):
        members.join("a")


# ---- pools --------------------------------------------------------------------------------------


def replicas(serve: int, rollout: int, serve_work: int = 0, rollout_work: int = 0) -> list[Replica]:
    return [
        *(Replica(f"s{n}", "serve", "serve", work=serve_work) for n in range(serve)),
        *(Replica(f"r{n}", "rollout", "rollout", work=rollout_work) for n in range(rollout)),
    ]


POOLS = {"lender": "serve", "borrower": "rollout"}
BY_LOAD = {**POOLS, "busy_tokens": 1000.0, "idle_tokens": 100.0}


def lender_of(**lending: Any) -> Lender:
    return Lender(LendingConfig(**lending))


def apply(moves: list[Move], every: list[Replica]) -> None:
    for move in moves:
        next(r for r in every if r.name == move.replica).pool = move.pool


def test_a_schedule_lends_at_night_and_takes_back_in_the_morning() -> None:
    lender = lender_of(windows=[{**POOLS, "count": 2, "start": "22:00", "end": "06:00"}])
    every = replicas(4, 1)
    assert lender.moves(every, 0.0, 12 * 3600.0) == []
    apply(lender.moves(every, 1.0, 23 * 3600.0), every)
    assert sum(r.pool == "rollout" for r in every) == 3
    assert lender.moves(every, 2.0, 3 * 3600.0) == []
    apply(lender.moves(every, 3.0, 7 * 3600.0), every)
    assert all(r.pool == r.home for r in every)


def test_a_schedule_never_empties_a_pool() -> None:
    lender = lender_of(windows=[{**POOLS, "count": 9, "start": "00:00", "end": "01:00"}])
    every = replicas(3, 0)
    apply(lender.moves(every, 0.0, 10.0), every)
    assert sum(r.pool == "serve" for r in every) == 1


def test_load_lends_one_at_a_time_and_takes_it_back() -> None:
    lender = lender_of(by_load=[{**BY_LOAD, "most": 2}], hold_s=10.0)
    every = replicas(3, 1, serve_work=10, rollout_work=5000)
    first = lender.moves(every, 0.0, 0.0)
    assert [move.pool for move in first] == ["rollout"]
    apply(first, every)
    assert lender.moves(every, 5.0, 0.0) == [], "not before hold_s is over"
    for replica in every:
        if replica.pool == "serve":
            replica.work = 5000
    apply(lender.moves(every, 20.0, 0.0), every)
    assert all(r.pool == r.home for r in every)


def test_between_the_thresholds_nothing_moves() -> None:
    lender = lender_of(by_load=[BY_LOAD])
    assert lender.moves(replicas(3, 1, serve_work=500, rollout_work=5000), 0.0, 0.0) == []
