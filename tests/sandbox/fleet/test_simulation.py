"""The simulation: its parts by themselves, and small bursts against what can be computed."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from benchmarks.simulation.fleet.scenario import Latencies, Latency, Scenario
from benchmarks.simulation.fleet.simulated_host import ImageCache
from benchmarks.simulation.fleet.simulation import simulate
from benchmarks.simulation.flows import Endpoint, Flow, Transfers, VirtualClock
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.errors import CapacityError
from etude.sandbox.fleet.hosts import Capacity, Demand, Policy

GB = 1_000_000_000
SMALL = Scenario(
    num_sandboxes=1000,
    num_hosts=10,
    capacity=Capacity(16, 64 << 30, 1 << 40, 2 * GB),
    demand=Demand(1.0, 256 << 20, 64 << 20),
    num_images=100,
    image_bytes=1 * GB,
)


def run_all(clock: VirtualClock) -> None:
    clock.run(lambda: False)


def test_transfers_share_an_endpoint_fairly_and_speed_up_when_one_ends():
    clock = VirtualClock()
    transfers = Transfers(clock)
    store, host = Endpoint(math.inf), Endpoint(10.0)
    ends: dict[str, float] = {}
    transfers.start(store, host, 10.0, lambda: ends.update(small=clock.now_s))
    transfers.start(store, host, 30.0, lambda: ends.update(large=clock.now_s))
    run_all(clock)
    assert ends == {"small": pytest.approx(2.0), "large": pytest.approx(4.0)}


def test_background_transfers_wait_for_the_foreground():
    clock = VirtualClock()
    transfers = Transfers(clock)
    store, host = Endpoint(math.inf), Endpoint(10.0)
    ends: dict[str, float] = {}
    transfers.start(store, host, 20.0, lambda: ends.update(rest=clock.now_s), is_background=True)
    clock.at(
        1.0, lambda: transfers.start(store, host, 10.0, lambda: ends.update(urgent=clock.now_s)) and None
    )
    run_all(clock)
    assert ends == {"urgent": pytest.approx(2.0), "rest": pytest.approx(3.0)}


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.floats(1, 100), st.floats(0, 20), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_every_transfer_ends_and_no_endpoint_is_overused(rows: list[tuple[int, int, float, float, bool]]):
    clock = VirtualClock()
    transfers = Transfers(clock)
    sources, sinks = [Endpoint(7.0) for _ in range(3)], [Endpoint(5.0) for _ in range(4)]
    flows: list[Flow] = []
    ended: list[int] = []

    def begin(number: int, source: int, sink: int, size: float, background: bool) -> None:
        flow = transfers.start(sources[source], sinks[sink], size, lambda: ended.append(number), background)
        flows.append(flow)
        for end in (*sources, *sinks):
            used = sum(flow.rate for flow in (*end.foreground, *end.background))
            assert used <= end.bytes_per_s + 1e-9

    for number, (source, sink, size, at_s, background) in enumerate(rows):
        clock.at(at_s, lambda n=number, a=source, b=sink, s=size, g=background: begin(n, a, b, s, g))
    run_all(clock)
    assert sorted(ended) == list(range(len(rows)))
    total = sum(row[2] for row in rows)
    assert clock.now_s >= total / (3 * 7.0) - 1e-6


def test_a_cache_drops_the_longest_unused_and_nothing_in_use():
    cache = ImageCache(3)
    for image in ("a", "b", "c"):
        assert cache.add(image, 1) == []
    cache.use("a")
    cache.release("a")
    cache.use("b")
    assert cache.add("d", 1) == ["c"]
    assert cache.add("e", 1) == ["a"]
    assert "b" in cache and cache.used_bytes == 3


def test_latencies_have_the_quantiles_that_were_measured():
    latency = Latency(0.0044, 0.0078)
    source = random.Random(0)
    samples = [latency.sample(source) for _ in range(20_000)]
    assert statistics.median(samples) == pytest.approx(0.0044, rel=0.02)
    assert statistics.quantiles(samples, n=10)[-1] == pytest.approx(0.0078, rel=0.03)
    assert statistics.fmean(samples) == pytest.approx(latency.mean_s, rel=0.02)


@pytest.mark.slow
def test_the_same_scenario_has_the_same_outcome():
    first, again = simulate(SMALL), simulate(SMALL)
    assert replace(first, scheduler_s=0.0) == replace(again, scheduler_s=0.0)
    assert simulate(replace(SMALL, seed=1)).burst_s != first.burst_s


def test_no_burst_is_faster_than_its_bounds_and_locality_brings_it_near():
    outcome = simulate(SMALL)
    assert outcome.bound[0] == "host networks"
    assert outcome.bound[1] == pytest.approx(outcome.distinct_images * GB / (10 * 2 * GB))
    assert outcome.bound[1] <= outcome.burst_s < 2 * outcome.bound[1]
    blind = replace(SMALL, policy=Policy(holder_choices=0, miss_weight=0.0, wait_weight=0.0))
    far = simulate(blind)
    assert far.fetches > 3 * outcome.fetches
    assert far.burst_s > 2 * outcome.burst_s


def test_a_warm_fleet_is_bound_by_the_control_plane():
    outcome = simulate(replace(SMALL, warm=True, latencies=Latencies(dispatch_s=1e-3)))
    assert outcome.fetches == 0
    assert outcome.bound == ("control plane", pytest.approx(1.0))
    assert 1.0 <= outcome.burst_s < 1.2


def test_a_narrow_store_binds_and_peers_take_all_but_the_first_copy_from_each_other():
    narrow = replace(SMALL, store_bytes_per_s=2.0 * GB, store_slots=16)
    alone = simulate(narrow)
    assert alone.bound[0] == "image store"
    assert alone.burst_s >= alone.fetches * GB / (2 * GB) * 0.99
    shared = simulate(replace(narrow, peers=True))
    assert shared.fetches - shared.fetches_from_peers == shared.distinct_images
    assert shared.burst_s <= alone.burst_s


def test_lazy_loading_starts_sooner_and_still_fetches_everything():
    whole = simulate(SMALL)
    lazy = simulate(replace(SMALL, needed_fraction=0.1))
    assert lazy.burst_s < whole.burst_s / 3
    assert lazy.whole_s > lazy.burst_s
    peers = simulate(replace(SMALL, needed_fraction=0.1, peers=True, store_bytes_per_s=4.0 * GB))
    assert peers.burst_s < peers.whole_s


def test_a_cache_too_small_for_all_images_evicts_and_ends():
    outcome = simulate(replace(SMALL, warm=True, cache_bytes=20 * GB))
    assert outcome.fetches > 0


@pytest.mark.slow
@pytest.mark.parametrize(("peers", "needed_fraction"), [(False, 1.0), (True, 0.1)])
def test_deaths_lose_sandboxes_which_are_all_started_again(peers: bool, needed_fraction: float):
    scenario = replace(
        SMALL,
        peers=peers,
        store_bytes_per_s=4.0 * GB if peers else math.inf,
        needed_fraction=needed_fraction,
    )
    healthy = simulate(scenario)
    dying = replace(scenario, death_fraction=0.2, death_at_s=healthy.burst_s / 2)
    outcome = simulate(dying)
    assert 100 < outcome.lost < 350
    assert outcome.num_placements >= 1000 + outcome.lost
    latencies = scenario.latencies
    noticed_s = latencies.missed_heartbeats * latencies.heartbeat_s
    assert outcome.recover_s > noticed_s
    assert outcome.burst_s >= dying.death_at_s + noticed_s


def test_a_death_after_the_burst_is_lived_through_too():
    outcome = simulate(replace(SMALL, death_fraction=0.1, death_at_s=60.0))
    assert outcome.lost > 50
    assert outcome.burst_s > 60.0


def test_more_choices_balance_better():
    def spread(choices: int) -> float:
        policy = Policy(choices=choices, holder_choices=0)
        return simulate(replace(SMALL, num_hosts=30, warm=True, policy=policy)).promised_spread

    assert spread(4) < spread(1) / 2


def test_a_burst_that_does_not_fit_says_so():
    with pytest.raises(CapacityError, match="does not end"):
        simulate(replace(SMALL, num_hosts=2, limit_s=200.0))
