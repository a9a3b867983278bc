"""Placement: bounds that always hold, forks, retiring, death."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from etude.errors import ConfigError
from etude.sandbox.errors import SandboxMissingError
from etude.sandbox.fleet.hosts import Capacity, Policy, Pressure, Request
from etude.sandbox.fleet.scheduler import Scheduler
from etude.sandbox.types import Resources

GB = 1 << 30
CAPACITY = Capacity(4, 8 * GB, 64 * GB)


def wanted(cpus: float, memory_bytes: int, disk_bytes: int) -> Resources:
    return Resources(cpus=cpus, memory_bytes=memory_bytes, disk_bytes=disk_bytes)


SMALL = wanted(1.0, GB, GB)


def build(num_hosts: int = 4, policy: Policy | None = None, seed: int = 0) -> Scheduler:
    return Scheduler({f"h{n}": CAPACITY for n in range(num_hosts)}, policy, seed)


def fill(scheduler: Scheduler, count: int, demand: Resources = SMALL) -> list[str]:
    """Places and confirms sandboxes s0, s1, ...; the host of each."""
    hosts: list[str] = []
    for number in range(count):
        placement = scheduler.place(Request(demand), 0.0)
        assert placement is not None
        scheduler.confirm(placement.ticket, f"s{number}", 0.0)
        hosts.append(placement.host)
    return hosts


def test_sandboxes_spread_evenly():
    hosts = fill(build(4), 16)
    assert {hosts.count(name) for name in ("h0", "h1", "h2", "h3")} == {4}


def test_a_full_fleet_takes_nothing_and_every_place_before_that_is_used():
    scheduler = build(40)
    fill(scheduler, 40 * 8)
    assert scheduler.place(Request(SMALL), 0.0) is None
    scheduler.release("s7")
    assert scheduler.place(Request(SMALL), 0.0) is not None


def test_each_resource_bounds_by_itself():
    policy = Policy(cpu_overcommit=1.0)
    for demand, count in ((wanted(2.0, 1, 1), 2), (wanted(0.1, 4 * GB, 1), 2), (wanted(0.1, 1, 64 * GB), 1)):
        scheduler = build(1, policy)
        fill(scheduler, count, demand)
        assert scheduler.place(Request(demand), 0.0) is None


def test_measured_pressure_steers_placements():
    scheduler = build(2)
    scheduler.report("h0", Pressure(0.1, 0.8, 0.1), 0.0)
    scheduler.report("h1", Pressure(0.1, 0.1, 0.1), 0.0)
    assert set(fill(scheduler, 4)) == {"h1"}


def test_an_overloaded_host_takes_nothing_whatever_it_promised():
    scheduler = build(1)
    scheduler.report("h0", Pressure(1.2, 0.0, 0.0), 0.0)
    assert scheduler.place(Request(SMALL), 0.0) is None


def test_a_reservation_counts_on_top_of_a_report_until_one_has_seen_it():
    scheduler = build(1, Policy(floor=0.0))
    host = scheduler.hosts["h0"]
    early = scheduler.place(Request(SMALL), 0.0)
    late = scheduler.place(Request(SMALL), 0.0)
    flying = scheduler.place(Request(SMALL), 0.0)
    assert early and late and flying
    scheduler.confirm(early.ticket, "early", 1.0)
    scheduler.confirm(late.ticket, "late", 3.0)
    scheduler.report("h0", Pressure(0.0, 0.25, 0.0), 2.0)
    assert set(host.fresh) == {late.ticket, flying.ticket}
    assert host.pressure_with(SMALL) == pytest.approx(0.25 + 3 / 8)
    scheduler.report("h0", Pressure(0.0, 0.25, 0.0), 4.0)
    assert set(host.fresh) == {flying.ticket}


def test_just_started_sandboxes_do_not_make_a_host_look_empty():
    scheduler = build(2, Policy(floor=0.5))
    scheduler.adopt("h0", "old-1", wanted(1.0, 4 * GB, GB), 0.0)
    for name in ("h0", "h1"):
        scheduler.report(name, Pressure(0.0, 0.0, 0.0), 1.0)
    placement = scheduler.place(Request(SMALL), 1.0)
    assert placement is not None and placement.host == "h1"


def test_promises_weigh_what_sandboxes_use_on_average():
    scheduler = build(2)
    for number in range(2):
        scheduler.adopt(f"h{number}", f"old-{number}", wanted(1.0, 4 * GB, GB), 0.0)
    for round_s in range(1, 200):
        for name in ("h0", "h1"):
            scheduler.report(name, Pressure(0.0, 0.1, 0.0), float(round_s))
    assert scheduler.utilization[1] == pytest.approx(0.2, rel=0.05)
    # A start on h1 that no report has seen adds a fifth of its promise, so h0 with more measured is fuller.
    scheduler.adopt("h1", "new", SMALL, 300.0)
    scheduler.report("h0", Pressure(0.0, 0.15, 0.0), 250.0)
    placement = scheduler.place(Request(SMALL), 300.0)
    assert placement is not None and placement.host == "h1"


def test_a_dead_host_names_what_was_lost_and_gets_nothing():
    scheduler = build(2)
    hosts = fill(scheduler, 6)
    flying = scheduler.place(Request(SMALL, only="h0"), 0.0)
    assert flying is not None
    lost = scheduler.mark_dead("h0")
    assert set(lost) == {f"s{n}" for n, host in enumerate(hosts) if host == "h0"}
    with pytest.raises(SandboxMissingError):
        scheduler.confirm(flying.ticket, "late", 1.0)
    placement = scheduler.place(Request(SMALL), 0.0)
    assert placement is not None and placement.host == "h1"
    assert scheduler.mark_dead("h0") == []


def test_a_host_comes_back_empty_and_retired_if_it_was():
    scheduler = build(2)
    fill(scheduler, 6)
    scheduler.retire("h1")
    for name in ("h0", "h1"):
        scheduler.mark_dead(name)
        scheduler.add_host(name, CAPACITY)
    assert scheduler.hosts["h0"].promised[1] == 0
    assert set(fill(scheduler, 8)) == {"h0"}
    with pytest.raises(ConfigError):
        scheduler.add_host("h0", CAPACITY)


def test_forks_stay_on_their_host_first():
    scheduler = build(2)
    home = fill(scheduler, 1)[0]
    places = scheduler.place_fork("s0", 10, 0.0)
    names = [place.host for place in places if place is not None]
    assert names[:7] == [home] * 7
    assert home not in names[7:] and len(names) == 10
    assert scheduler.place_fork("s0", 6, 0.0)[-1] is None
    with pytest.raises(SandboxMissingError):
        scheduler.place_fork("nobody", 1, 0.0)


def test_a_suspected_host_is_the_last_to_be_asked_for_a_while():
    scheduler = build(2)
    scheduler.hosts["h0"].suspected_until_s = 10.0
    assert set(fill(scheduler, 4)) == {"h1"}
    placement = scheduler.place(Request(SMALL), 11.0)
    assert placement is not None and placement.host == "h0"


def test_the_same_seed_places_the_same():
    def run(seed: int) -> list[str]:
        return fill(build(40, seed=seed), 100)

    assert run(1) == run(1)
    assert run(1) != run(2)


class Books(RuleBasedStateMachine):
    """Whatever happens, the sums agree with the reservations and no host promises more than it has."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = build(3, Policy(cpu_overcommit=2.0))
        self.flying: list[int] = []
        self.running: set[str] = set()
        self.now_s = 0.0

    @rule(cpus=st.floats(0.1, 4), memory=st.integers(1, 3 * GB))
    def place(self, cpus: float, memory: int) -> None:
        request = Request(wanted(cpus, memory, GB))
        placement = self.scheduler.place(request, self.now_s)
        if placement is not None:
            assert self.scheduler.hosts[placement.host].alive
            assert not self.scheduler.hosts[placement.host].retiring
            self.flying.append(placement.ticket)

    @precondition(lambda self: self.flying)
    @rule(number=st.integers(0), fails=st.booleans())
    def end_of_start(self, number: int, fails: bool) -> None:
        ticket = self.flying.pop(number % len(self.flying))
        if fails:
            self.scheduler.cancel(ticket)
            return
        self.scheduler.confirm(ticket, f"t{ticket}", self.now_s)
        self.running.add(f"t{ticket}")

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0))
    def release(self, number: int) -> None:
        sandbox = sorted(self.running)[number % len(self.running)]
        self.running.remove(sandbox)
        self.scheduler.release(sandbox)
        self.scheduler.release(sandbox)

    @rule(host=st.sampled_from(["h0", "h1", "h2"]), use=st.floats(0, 1), ago_s=st.floats(0, 2))
    def report(self, host: str, use: float, ago_s: float) -> None:
        self.now_s += 1.0
        self.scheduler.report(host, Pressure(use, use, use), self.now_s - ago_s)

    @rule(host=st.sampled_from(["h0", "h1", "h2"]))
    def die_and_return(self, host: str) -> None:
        there = self.scheduler.hosts[host].reservations
        self.flying = [ticket for ticket in self.flying if ticket not in there]
        self.running -= set(self.scheduler.mark_dead(host))
        self.scheduler.add_host(host, CAPACITY)

    @rule(host=st.sampled_from(["h0", "h1", "h2"]), back=st.booleans())
    def retire(self, host: str, back: bool) -> None:
        self.scheduler.retire(host)
        if back:
            self.scheduler.reopen(host)

    @invariant()
    def the_books_are_right(self) -> None:
        for host in self.scheduler.hosts.values():
            rows = list(host.reservations.values())
            assert host.promised[1] == sum(row.demand.memory_bytes for row in rows)
            assert math.isclose(host.promised[0], sum(row.demand.cpus for row in rows), abs_tol=1e-6)
            assert host.promised_fresh[1] == sum(r.demand.memory_bytes for r in host.fresh.values())
            assert set(host.fresh) <= set(host.reservations)
            assert host.promised[1] <= CAPACITY.memory_bytes
            assert host.promised[0] <= CAPACITY.cpus * 2 + 1e-6
            assert host.promised[2] <= CAPACITY.disk_bytes
        held = [row for host in self.scheduler.hosts.values() for row in host.reservations.values()]
        assert {row.sandbox for row in held if row.sandbox} == self.running
        assert {row.ticket for row in held if row.sandbox is None} == set(self.flying)


TestBooks = Books.TestCase
TestBooks.settings = settings(stateful_step_count=40)


def test_a_processor_without_bound_refuses_nothing_and_still_says_where_there_is_more_of_it():
    busy, idle = Pressure(9.0, 0.1, 0.1), Pressure(0.1, 0.1, 0.1)
    demand = wanted(64.0, 1 << 20, 1 << 20)
    for bound, expected in ((1.0, 0), (math.inf, 40)):
        scheduler = Scheduler({"a": Capacity(2, 1 << 40, 1 << 40)}, Policy(max_cpu_pressure=bound))
        scheduler.report("a", busy, 0.0)
        assert sum(scheduler.place(Request(demand), 1.0) is not None for _ in range(40)) == expected
        scheduler.add_host("b", Capacity(2, 1 << 40, 1 << 40))
        scheduler.report("b", idle, 0.0)
        placement = scheduler.place(Request(wanted(1.0, 1 << 20, 1 << 20)), 1.0)
        assert placement is not None
        assert placement.host == "b"
